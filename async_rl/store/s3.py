"""The object store over S3: AWS, MinIO, SeaweedFS, Ceph, R2 …, through boto3.

botocore makes one attempt per request; repeating is ours (retry.py), so that one limit holds for
everything that can pass: 5xx, throttling, refused or broken connections, bodies that end early. Its
errors become ours in s3_errors.py. Checksums that only AWS knows are off: older servers refuse them, and
a pack has its own hash.
"""

from __future__ import annotations

import io
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from async_rl.errors import AlreadyExists, NotFound, StoreError
from async_rl.log import get_logger
from async_rl.store.base import BLOCK_BYTES, Capabilities, ObjectInfo, StoreConfig
from async_rl.store.candidates import RECORD, candidate_key, first_of, merged, plain_key
from async_rl.store.keys import (
    check_key,
    check_prefix,
    check_range,
    in_byte_order,
    is_past,
    past_the_end,
    start_of_listing,
)
from async_rl.store.retry import retrying
from async_rl.store.s3_client import DEFAULT_REGION, make_client, parse_url
from async_rl.store.s3_errors import (
    FOREIGN,
    NotSupported,
    ShortBody,
    bucket_missing,
    code_of,
    translate,
)
from async_rl.store.s3_upload import S3Upload

__all__ = ["S3Store"]

T = TypeVar("T")
log = get_logger(__name__)

PAGE_KEYS = 1000
"""Keys per page of a listing; S3 gives no more."""


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
            except AlreadyExists:
                if not self._took_the_place_of_nothing(key, data):
                    raise
                return
        if not key.endswith(RECORD):
            raise StoreError(
                f"can't {doing}: this store does not enforce conditional puts, and only records (*{RECORD}) "
                "have another way",
                hint="use a store that enforces If-None-Match",
            )
        if self._first(key) is None:
            ours = candidate_key(key, uuid.uuid4().hex)
            self._call(doing, lambda: self._put(ours, data))
            first = self._first(key)
            if first is not None and first.key == ours:
                return
        raise AlreadyExists(f"can't {doing}: there is an object already")

    def _took_the_place_of_nothing(self, key: str, data: bytes | memoryview) -> bool:
        """Some servers (SeaweedFS) keep an empty object where a writer was killed between the headers and the body of
        its put. No record is empty: one that is counts as absent, for readers too, and whoever creates it replaces
        just this one (If-Match)."""
        if not key.endswith(RECORD):
            return False
        doing = f"create {self._name(key)}"
        try:
            found = self._call(doing, lambda: self._client.head_object(**self._at(key)))
            if found["ContentLength"] or not found.get("ETag"):
                return False
            self._call(doing, lambda: self._put(key, data, IfMatch=found["ETag"]))
        except (AlreadyExists, NotFound, NotSupported):  # somebody was faster
            return False
        return True

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        if self._conditional:
            return True
        self._closed.wait(self._config.settle_s)
        return self.get(key) == bytes(data)

    def _first(self, key: str) -> ObjectInfo | None:
        """The object that counts as `key`, and may be a candidate (candidates.py)."""
        return first_of(key, in_byte_order(self._pages(key, ""), key, ""))

    def _candidate(self, key: str) -> str:
        """The key of the candidate that counts as `key`, "" for none."""
        first = self._first(key) if key.endswith(RECORD) else None
        return first.key if first is not None and first.key != key else ""

    def _put(self, key: str, data: bytes | memoryview, **conditions: str) -> None:
        # boto3 takes no memoryview; a file is sent in blocks, each with the socket's timeout to itself.
        self._client.put_object(**self._at(key), Body=io.BytesIO(data), **conditions)

    def _not_enforced(self) -> None:
        self._conditional = False
        log.warning(
            "this store does not enforce conditional puts: what is created once goes by the stamps of the store, and "
            "two trainers are told apart only if a put arrives within settle_s of being sent and the clocks of the "
            "store's servers agree",
            url=self.url,
            settle_s=self._config.settle_s,
        )

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self._read(key, start, length)
        except NotFound:
            candidate = self._candidate(key)
            if not candidate:
                raise
        return self._read(candidate, start, length)

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        check_range(start, length)
        name = self._name(key)
        data = None if length == 0 else self._call(f"read {name}", lambda: self._get(key, start, length))
        if data is None:  # nothing to fetch there: it is empty, or past the end
            size = self.head(key).size
            if start > size or (start == size and length):
                raise past_the_end(name, size, start, length)
            data = b""
        if not data and length != 0 and plain_key(key).endswith(RECORD):
            raise NotFound(f"{name} is empty, as of a put that broke off")
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
            first = self._first(key) if key.endswith(RECORD) else None
            if first is None:
                raise
            return ObjectInfo(key, first.size, first.modified)
        if not answer["ContentLength"] and plain_key(key).endswith(RECORD):
            raise NotFound(f"{self._name(key)} is empty, as of a put that broke off")
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def _require_bucket(self, doing: str) -> None:
        try:
            self._call(doing, lambda: self._client.head_bucket(Bucket=self.bucket))
        except NotFound as error:
            raise bucket_missing(doing, self._place) from error

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if is_past(prefix, after):
            return iter(())
        # Candidates of `after` itself come after it: `merged` leaves them out.
        return merged(
            in_byte_order(self._pages(prefix, start_of_listing(prefix, after)), prefix, after), after
        )

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
                if not item["Size"] and plain_key(item["Key"]).endswith(RECORD):
                    continue  # a put that broke off
                yield ObjectInfo(item["Key"][len(root) :], item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        if key.endswith(RECORD) and not self._conditional:
            check_key(key)
            for info in list(self._pages(key, "")):
                if plain_key(info.key) == key:
                    self._delete(info.key)
        self._delete(key)

    def _delete(self, key: str) -> None:
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
        doing = f"create {self._name(key)}"
        try:
            for body in (b"async-rl: may this be created twice?", b"it may"):
                # AlreadyExists may come from the first one too: its answer was lost, and its retry met it.
                self._call(doing, lambda body=body: self._put(key, body, IfNoneMatch="*"))  # type: ignore[misc]
            if self._conditional:
                self._not_enforced()
        except AlreadyExists:
            pass
        except NotSupported:
            if self._conditional:
                self._not_enforced()
        finally:
            self._delete(key)
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


def position(answer: dict[str, Any]) -> tuple[int, int]:
    """Where the body of a get begins in the object, and the object's size."""
    if match := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange") or ""):
        return int(match[1]), int(match[2])
    return 0, int(answer["ContentLength"])
