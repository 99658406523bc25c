"""Every error of boto3 in our terms, with what to do about it: the one place that knows them."""

from __future__ import annotations

import http.client
from typing import Any, NamedTuple

import urllib3.exceptions
from botocore import exceptions as boto

from async_rl.errors import (
    AccessDenied,
    AlreadyExists,
    BucketMissing,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from async_rl.store.retry import Fault

__all__ = ["FOREIGN", "NotSupported", "Place", "ShortBody", "bucket_missing", "code_of", "translate"]


class ShortBody(Exception):
    """The connection gave fewer or more bytes than the answer had announced."""


class NotSupported(StoreError):
    """The server does not know this operation or header (501)."""


FOREIGN: tuple[type[Exception], ...] = (
    boto.BotoCoreError,
    boto.ClientError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    ShortBody,
)
"""What a call of boto3, and reading its body, can raise."""


class Place(NamedTuple):
    """What a hint needs to know."""

    bucket: str
    endpoint: str
    region: str
    access_key: str
    """The key's id (no secret), "" if there is none."""

    @property
    def key_in_use(self) -> str:
        return (
            f"the access key in use is {self.access_key!r}"
            if self.access_key
            else "no access key was found"
        )


# S3's codes, as AWS, MinIO, SeaweedFS and Ceph send them; a HEAD has no body, its code is the status.
MISSING = {"NoSuchKey", "NoSuchVersion", "NoSuchUpload", "404"}
PRESENT = {"PreconditionFailed", "412"}
UNKNOWN_KEY = {"InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"}
WRONG_SECRET = {"SignatureDoesNotMatch", "InvalidSignatureException", "IncompleteSignature"}
EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "RequestExpired",
    "TokenRefreshRequired",
}
SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
BAD_NAME = {"InvalidBucketName", "InvalidBucket.Name"}
ELSEWHERE = {
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "IncorrectEndpoint",
    "InvalidRegion",
    "PermanentRedirect",
    "TemporaryRedirect",
}
PASSING = {
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",  # 409: another conditional put of this key is under way
    "IncompleteBody",  # 400, but of a connection that broke
    "InternalError",
    "OperationAborted",  # 409, likewise
    "RequestThrottled",
    "RequestTimeout",  # 400, but of a socket that idled
    "ServiceUnavailable",
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "XMinioServerNotInitialized",
}
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "doesn't match", "Hostname mismatch")
CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN where they are temporary), "
    "or name an AWS profile"
)
ACTIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
    "CreateBucket": "s3:CreateBucket",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
"""What a policy must allow for an operation; all others (PutObject, the parts of an upload): s3:PutObject."""


def code_of(error: Exception) -> str:
    """S3's error code, "" for an error that is no answer of the server."""
    return (
        str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""
    )


def translate(error: Exception, doing: str, place: Place) -> Fault:
    """`doing` reads like "read s3://bucket/run/run.json"."""
    if isinstance(error, boto.ClientError):
        return _answered(error, doing, place)
    return _unanswered(error, doing, place)


def _answered(error: boto.ClientError, doing: str, place: Place) -> Fault:
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{code}, {error.response.get('Error', {}).get('Message') or 'no reason given'}"

    def final(kind: type[StoreError], what: str, hint: str = "") -> Fault:
        return Fault(kind(f"can't {doing}: {what}", hint=hint), passing=False)

    if code in MISSING:
        return final(NotFound, "there is no such object")
    if code in PRESENT:
        return final(AlreadyExists, "there is an object already")
    if code == "NoSuchBucket":
        return Fault(bucket_missing(doing, place), passing=False)
    if code in BAD_NAME:
        hint = "3 to 63 characters: lower-case letters, digits, '-' and '.'"
        return final(BucketMissing, f"{place.bucket!r} can't be a bucket's name", hint)
    if code in UNKNOWN_KEY:
        hint = f"{place.key_in_use}: check AWS_ACCESS_KEY_ID, or the profile, and the endpoint"
        return final(AccessDenied, f"{place.endpoint} does not know the access key", hint)
    if code in WRONG_SECRET:
        hint = f"{place.key_in_use}: check AWS_SECRET_ACCESS_KEY, or the profile"
        return final(AccessDenied, "the secret key does not fit the access key (signature refused)", hint)
    if code in EXPIRED:
        return final(AccessDenied, f"the credentials have expired ({said})", f"get new ones; {CREDENTIALS}")
    if code in SKEWED:
        hint = "set this machine's clock (NTP); S3 allows a difference of 15 minutes"
        return final(AccessDenied, "this machine's clock differs from the server's", hint)
    if code in ELSEWHERE or status in (301, 307):
        return final(StoreError, *_wrong_region(error, place))
    if code in PASSING or status in (408, 429) or (status >= 500 and status != 501):
        hint = f"the server at {place.endpoint} is overloaded or in trouble; its own log says why"
        return Fault(StoreUnavailable(f"can't {doing}: {said} (status {status})", hint=hint), passing=True)
    if status == 501 or code == "NotImplemented":
        return final(
            NotSupported, said, f"the server at {place.endpoint} lacks a part of S3 that is needed here"
        )
    if status in (401, 403):
        hint = (
            f"{place.key_in_use}; here it needs {_action(error)} on {place.bucket!r}: docs/security.md has the "
            "policies of trainer, worker and viewer (without s3:ListBucket a missing object reads as forbidden, too)"
        )
        return final(AccessDenied, f"access denied ({said})", hint)
    return final(StoreError, f"{said} (status {status})")


def _trust_hint(said: str) -> str:
    if "match" in said:
        return "the certificate is another server's: name in endpoint_url the host that it was made for"
    return (
        "set ca_bundle in [store] (or AWS_CA_BUNDLE) to the PEM file of the authority that signed the server's "
        "certificate"
    )


def _action(error: boto.ClientError) -> str:
    return ACTIONS.get(str(error.operation_name), "s3:PutObject")


def bucket_missing(doing: str, place: Place) -> BucketMissing:
    return BucketMissing(
        f"can't {doing}: there is no bucket {place.bucket!r} at {place.endpoint}",
        hint=f"create it: async-rl store mb s3://{place.bucket}; "
        f"or start a local server that has it: async-rl store up --bucket {place.bucket}",
    )


def _wrong_region(error: boto.ClientError, place: Place) -> tuple[str, str]:
    """What happened, and the hint. The answer often tells where the bucket is."""
    headers: dict[str, Any] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    asked = f"it was asked for in {place.region} at {place.endpoint}"
    if region:
        return f"the bucket is in {region}, {asked}", f'set region = "{region}" in [store], or AWS_REGION'
    return f"the bucket is elsewhere, {asked}", "set region or endpoint_url in [store]"


def _unanswered(error: Exception, doing: str, place: Place) -> Fault:
    """No credentials, no connection, a broken one, or something there that is not S3."""
    said = str(error) or type(error).__name__

    def fault(kind: type[StoreError], what: str, hint: str, passing: bool = False) -> Fault:
        return Fault(kind(f"can't {doing}: {what}", hint=hint), passing)

    if isinstance(
        error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError
    ):
        return fault(AccessDenied, f"no usable credentials, {said}", CREDENTIALS)
    if isinstance(error, boto.SSOError | boto.TokenRetrievalError):
        return fault(AccessDenied, said, "log in again: aws sso login")
    if isinstance(error, boto.SSLError) and any(part in said for part in UNTRUSTED):
        return fault(StoreUnavailable, f"{place.endpoint} can't be trusted, {said}", _trust_hint(said))
    if isinstance(error, boto.SSLError) and "WRONG_VERSION_NUMBER" in said:
        hint = "endpoint_url in [store], or AWS_ENDPOINT_URL, says https: is it a server of plain http?"
        return fault(StoreUnavailable, f"what listens at {place.endpoint} speaks no TLS", hint)
    if isinstance(
        error, boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ProxyConnectionError
    ):
        hint = (
            "is it running, and reachable from here? endpoint_url in [store] or AWS_ENDPOINT_URL names it"
        )
        return fault(StoreUnavailable, f"{place.endpoint} can't be reached", hint, passing=True)
    broken = (boto.HTTPClientError, boto.ResponseStreamingError, boto.IncompleteReadError)
    if isinstance(
        error, (*broken, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ShortBody)
    ):
        hint = f"the network or the server at {place.endpoint} is slow or failing"
        return fault(StoreUnavailable, f"the connection failed, {said}", hint, passing=True)
    return fault(
        StoreError,
        said,
        f"is there an S3 server at {place.endpoint}? check [store] and the AWS_* variables",
    )
