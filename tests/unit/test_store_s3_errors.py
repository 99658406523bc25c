"""Errors of boto3 in our terms: those that real servers are not made to give in the contract suite."""

from __future__ import annotations

import pytest
from botocore import exceptions as boto

from async_rl.errors import AccessDenied, StoreError, StoreUnavailable
from async_rl.store.s3_errors import FOREIGN, NotSupported, Place, translate

PLACE = Place("bucket", "http://s3.example:9000", "us-east-1", "AKIA1")


def answer(code: str, status: int, **headers: str) -> boto.ClientError:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return boto.ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": metadata}, "GetObject"
    )  # type: ignore[arg-type,typeddict-item]


@pytest.mark.parametrize(
    ("error", "kind", "passing", "says"),
    [
        (answer("XMinioStorageFull", 507), StoreUnavailable, True, "its own log"),
        (answer("Unheard", 599), StoreUnavailable, True, "599"),
        (answer("NotImplemented", 501), NotSupported, False, "lacks a part"),
        (answer("403", 403), AccessDenied, False, "'AKIA1'"),
        (answer("Unheard", 418), StoreError, False, "418"),
        (
            answer("301", 301, **{"x-amz-bucket-region": "eu-west-1"}),
            StoreError,
            False,
            'region = "eu-west-1"',
        ),
        (boto.ReadTimeoutError(endpoint_url="x"), StoreUnavailable, True, "slow or failing"),
        (
            boto.ConnectTimeoutError(endpoint_url="x"),
            StoreUnavailable,
            True,
            "s3.example:9000 can't be reached",
        ),
        (boto.ConnectionClosedError(endpoint_url="x"), StoreUnavailable, True, "connection failed"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), StoreUnavailable, True, "1"),
        (
            boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"),
            StoreUnavailable,
            False,
            "ca_bundle",
        ),
        (boto.SSLError(endpoint_url="x", error="EOF"), StoreUnavailable, True, "connection failed"),
        (boto.TokenRetrievalError(provider="sso", error_msg="e"), AccessDenied, False, "aws sso login"),
        (boto.ParamValidationError(report="r"), StoreError, False, "is there an S3 server"),
        (ConnectionResetError(104, "reset"), StoreUnavailable, True, "reset"),
    ],
)
def test_each_error_has_a_kind_and_says_what_to_do(
    error: Exception, kind: type[StoreError], passing: bool, says: str
) -> None:
    assert isinstance(error, FOREIGN)
    fault = translate(error, "read s3://bucket/k", PLACE)
    assert type(fault.error) is kind
    assert fault.passing is passing
    assert "can't read s3://bucket/k" in str(fault.error)
    assert says in str(fault.error)


def test_no_error_shows_a_secret_or_hides_that_there_is_no_key() -> None:
    nobody = PLACE._replace(access_key="")
    assert "no access key was found" in str(translate(answer("InvalidAccessKeyId", 403), "x", nobody).error)
