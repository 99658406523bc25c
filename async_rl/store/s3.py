"""The object store over S3: AWS, MinIO, SeaweedFS, Ceph, R2 …, through boto3.

botocore makes one attempt per request; repeating is ours (retry.py), so that one limit holds for
everything that can pass: 5xx, throttling, refused or broken connections, bodies that end early. Its
errors become ours in s3_errors.py. Checksums that only AWS knows are off: older servers refuse them, and
a pack has its own hash.
"""

from __future__ import annotations

import io
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from async_rl.errors import AlreadyExists, ConfigError, NotFound, StoreError
from async_rl.log import get_logger
from async_rl.store.base import BLOCK_BYTES, Capabilities, ObjectInfo, StoreConfig
from async_rl.store.keys import (
    check_key,
    check_prefix,
    check_range,
    in_byte_order,
    past_the_end,
    start_of_listing,
)
from async_rl.store.retry import retrying
from async_rl.store.s3_errors import (
    FOREIGN,
    NotSupported,
    Place,
    ShortBody,
    bucket_missing,
    code_of,
    translate,
)
from async_rl.store.s3_upload import S3Upload

__all__ = ["S3Store"]

T = TypeVar("T")
log = get_logger(__name__)

BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
DEFAULT_REGION = "us-east-1"
PAGE_KEYS = 1000
"""Keys per page of a listing; S3 gives no more."""
SPARE_CONNECTIONS = 8
"""Above `parallel`, for the small requests (manifests, listings, heartbeats) of other threads."""
EXPECT_FROM_BYTES = 8 << 20
"""botocore asks the server before it sends any body (`Expect: 100-continue`), which costs a round trip: half the time
of a small put over a wide area. Bodies below this go out at once; an error then has cost so many bytes in vain."""


class S3Store:
    """`s3://bucket/prefix`. Nothing is asked of the server before the first operation."""

    def __init__(self, url: str, config: StoreConfig) -> None:
        self.bucket, self.prefix = parse_url(url)
        self._config = config
        self._client, self._place = make_client(self.bucket, config)
        self._conditional = True
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, key: str, data: bytes | memoryview) -> None:
        if len(data) > 2 * self._config.part_bytes:  # in parts, each of which can be repeated by itself
            with self.upload(key) as upload:
                upload.write(data)
                upload.commit()
            return
        self._call(f"write {self._name(key)}", lambda: self._put(key, data))

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        doing = f"create {self._name(key)}"
        if self._conditional:
            try:
                self._call(doing, lambda: self._put(key, data, IfNoneMatch="*"))
                return
            except NotSupported:
                self._not_enforced()
        try:
            self.head(key)
        except NotFound:
            self._call(doing, lambda: self._put(key, data))
        else:
            raise AlreadyExists(f"can't {doing}: there is an object already")

    def _put(self, key: str, data: bytes | memoryview, **conditions: str) -> None:
        # boto3 takes no memoryview; a file is sent in blocks, each with the socket's timeout to itself.
        self._client.put_object(**self._at(key), Body=io.BytesIO(data), **conditions)

    def _not_enforced(self) -> None:
        self._conditional = False
        log.warning(
            "this store does not enforce conditional puts: two trainers on one run may both succeed",
            url=self.url,
        )

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        name = self._name(key)
        data = None if length == 0 else self._call(f"read {name}", lambda: self._get(key, start, length))
        if data is None:  # nothing to fetch there: it is empty, or past the end
            size = self.head(key).size
            if start > size or (start == size and length):
                raise past_the_end(name, size, start, length)
            data = b""
        return data

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        check_range(start, length)
        name = self._name(key)
        reading = _Reading(lambda at: self._open(key, at, start + length - at), start, start + length)
        try:
            while reading.at < reading.end:
                block = self._call(f"read {name}", reading.block)
                if not block:
                    raise past_the_end(name, self.head(key).size, start, length)
                yield block
        finally:
            reading.close()

    def _get(self, key: str, start: int, length: int | None) -> bytes | None:
        """One attempt; None where the range starts at the object's end or after it."""
        opened = self._open(key, start, length)
        if opened is None:
            return None
        body, expected = opened
        try:
            data: bytes = body.read()
        finally:
            body.close()
        if len(data) != expected:
            raise ShortBody(f"{len(data)} bytes came of {expected}")
        return data

    def _open(self, key: str, start: int, length: int | None) -> tuple[Any, int] | None:
        """The answer's body and how many bytes it should have; None where the range starts at the object's end or
        after it."""
        end = "" if length is None else start + length - 1
        ranged = {"Range": f"bytes={start}-{end}"} if start or length is not None else {}
        try:
            answer = self._client.get_object(**self._at(key), **ranged)
        except ClientError as error:
            if code_of(error) in ("InvalidRange", "416"):
                return None
            raise
        body = answer["Body"]
        try:
            begin, size = position(answer)
            if begin != start and start < size:
                raise StoreError(
                    f"reading {self._name(key)}: bytes from {begin} came instead of those from {start}",
                    hint="the server, or a proxy before it, does not honour Range",
                )
            expected = size - start if length is None else length
            if start + expected > size:
                raise past_the_end(self._name(key), size, start, length)
        except BaseException:
            body.close()
            raise
        return body, expected

    def head(self, key: str) -> ObjectInfo:
        doing = f"look at {self._name(key)}"
        try:
            answer = self._call(doing, lambda: self._client.head_object(**self._at(key)))
        except NotFound:
            self._require_bucket(doing)  # a HEAD's 404 does not say what is missing
            raise
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def _require_bucket(self, doing: str) -> None:
        try:
            self._call(doing, lambda: self._client.head_bucket(Bucket=self.bucket))
        except NotFound as error:
            raise bucket_missing(doing, self._place) from error

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return in_byte_order(self._pages(prefix, start_of_listing(prefix, after)), prefix, after)

    def _pages(self, prefix: str, start: str) -> Iterator[ObjectInfo]:
        """In the server's order, which may not be the byte order: see keys.py."""
        root = f"{self.prefix}/" if self.prefix else ""
        request: dict[str, Any] = {"Bucket": self.bucket, "Prefix": root + prefix, "MaxKeys": PAGE_KEYS}
        if start:
            request["StartAfter"] = root + start
        while True:
            page = self._call(f"list {self.url}/{prefix}", lambda: self._client.list_objects_v2(**request))
            if "IsTruncated" not in page:  # a proxy's page: it must not pass for an empty store
                raise StoreError(
                    f"can't list {self.url}/{prefix}: the answer is no listing",
                    hint=f"is there an S3 server at {self._place.endpoint}, or a proxy that answers itself?",
                )
            for item in page.get("Contents", ()):
                yield ObjectInfo(item["Key"][len(root) :], item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        with suppress(NotFound):  # S3 says success; some servers say this
            self._call(f"delete {self._name(key)}", lambda: self._client.delete_object(**self._at(key)))

    def upload(self, key: str) -> S3Upload:
        return S3Upload(
            self._client,
            self._at(key),
            self._name(key),
            self._call,
            part_bytes=self._config.part_bytes,
            parallel=self._config.parallel,
        )

    def probe(self) -> Capabilities:
        """Two creations of one fresh key: the second must fail."""
        key = f".probe/{uuid.uuid4().hex}"
        try:
            # AlreadyExists may come from the first one too: its answer was lost, and its retry met it.
            self.put_if_absent(key, b"async-rl: may this be created twice?")
            if self._conditional:
                self.put_if_absent(key, b"it may")
                if self._conditional:
                    self._not_enforced()
        except AlreadyExists:
            pass
        finally:
            self.delete(key)
        return Capabilities(conditional_put=self._conditional)

    def make_bucket(self) -> None:
        """Create the bucket; one that is ours already is fine."""

        def create() -> None:
            region = self._place.region
            # AWS takes no location for us-east-1, and requires it elsewhere.
            where = {} if region == DEFAULT_REGION else {"LocationConstraint": region}
            options = {"CreateBucketConfiguration": where} if where else {}
            try:
                self._client.create_bucket(Bucket=self.bucket, **options)
            except ClientError as error:
                if code_of(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
                self._client.head_bucket(Bucket=self.bucket)  # somebody else's: access denied

        self._call(f"create the bucket {self.bucket}", create)

    def close(self) -> None:
        """Ends the waiting of operations that are being repeated; they raise what they met."""
        self._closed.set()
        self._client.close()

    def _call(self, doing: str, operation: Callable[[], T]) -> T:
        return retrying(
            operation,
            foreign=FOREIGN,
            translate=lambda error: translate(error, doing, self._place),
            limit_s=self._config.retry_limit_s,
            pause=self._closed.wait,
        )

    def _at(self, key: str) -> dict[str, str]:
        full = f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)
        return {"Bucket": self.bucket, "Key": check_key(full)}

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"


class _Reading:
    """A range of an object, block by block. After a failure the next block comes over a new connection."""

    def __init__(self, open_at: Callable[[int], tuple[Any, int] | None], start: int, end: int) -> None:
        """`open_at`: byte in the object -> the body from there to `end`."""
        self._open_at, self.at, self.end = open_at, start, end
        self._body: Any = None

    def block(self) -> bytes:
        """The next one; empty where the object ends before the range does."""
        try:
            if self._body is None:
                opened = self._open_at(self.at)
                if opened is None:
                    return b""
                self._body = opened[0]
            data: bytes = self._body.read(min(BLOCK_BYTES, self.end - self.at))
            if not data:
                raise ShortBody(f"the answer ended {self.end - self.at} bytes before the range")
        except BaseException:
            self.close()
            raise
        self.at += len(data)
        return data

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None


def parse_url(url: str) -> tuple[str, str]:
    """(bucket, prefix without a slash at its end). Raises ConfigError."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not BUCKET_NAME.fullmatch(bucket):
        raise ConfigError(
            f"{url!r} names no bucket",
            hint="s3://bucket/prefix; a bucket's name has 3 to 63 letters, digits, - or .",
        )
    prefix = prefix.rstrip("/")
    try:
        return bucket, check_key(prefix) if prefix else ""
    except StoreError as error:
        raise ConfigError(f"{url!r} is no store URL: {error.message}", hint=error.hint) from error


def position(answer: dict[str, Any]) -> tuple[int, int]:
    """Where the body of a get begins in the object, and the object's size."""
    if match := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange") or ""):
        return int(match[1]), int(match[2])
    return 0, int(answer["ContentLength"])


def make_client(bucket: str, config: StoreConfig) -> tuple[Any, Place]:
    """A boto3 client (thread-safe) and what errors need to know. Raises ConfigError."""
    env = os.environ
    endpoint = config.endpoint_url or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    # A server of one's own has no DNS name per bucket.
    addressing = ("path" if endpoint else "auto") if config.addressing == "auto" else config.addressing
    if addressing not in ("path", "virtual", "auto"):
        raise ConfigError(f"store.addressing is {config.addressing!r}", hint="path, virtual or auto")
    loopback = endpoint is not None and urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1")
    try:
        session = boto3.session.Session(profile_name=config.profile or None)
        region = config.region or env.get("AWS_REGION") or session.region_name or DEFAULT_REGION
        client = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=region,
            verify=config.ca_bundle or None,
            config=Config(
                connect_timeout=min(config.connect_timeout_s, config.retry_limit_s),
                read_timeout=min(config.read_timeout_s, config.retry_limit_s),
                max_pool_connections=config.parallel + SPARE_CONNECTIONS,
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
                tcp_keepalive=True,
                proxies={} if loopback else None,
                user_agent_extra="async-rl",
            ),
        )
        client.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
        credentials = session.get_credentials()
        access_key = credentials.access_key if credentials else ""
    except (BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(
            f"can't set up the S3 client for bucket {bucket!r}: {error}",
            hint="check [store] (endpoint_url is http://host:port, profile) and the AWS_* variables",
        ) from error
    return client, Place(bucket, client.meta.endpoint_url, region, access_key or "")


def _send_small_bodies_at_once(params: dict[str, Any], **_: Any) -> None:
    body = params.get("body")
    if isinstance(body, io.BytesIO) and body.getbuffer().nbytes < EXPECT_FROM_BYTES:
        params["headers"].pop("Expect", None)
