"""The object store as everything else sees it: a few operations with exact meanings.

Weights, manifests, checkpoints and claims are immutable objects in one flat namespace. One contract suite
(tests/contract/test_store.py) holds every implementation to what stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Annotated, Protocol

from msgspec import Meta, Struct

__all__ = ["BLOCK_BYTES", "Capabilities", "ObjectInfo", "ObjectStore", "StoreConfig", "Upload"]

BLOCK_BYTES = 256 << 10
"""Of `stream`: half of a core's second-level cache, and some hundred system calls per second at full speed."""

Positive = Annotated[float, Meta(gt=0)]


class StoreConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[store]`: how to reach the store. Credentials come from the environment or an AWS profile, never from here."""

    endpoint_url: str = ""
    """Of an S3-compatible server; empty: AWS_ENDPOINT_URL, else AWS itself."""
    region: str = ""
    """Empty: AWS_REGION / AWS_DEFAULT_REGION, else us-east-1 (which MinIO and SeaweedFS accept)."""
    profile: str = ""
    addressing: str = "auto"
    """path, virtual or auto (path where an endpoint_url is given: MinIO and SeaweedFS need it)."""
    ca_bundle: str = ""
    """A PEM file for a private certificate authority."""
    connect_timeout_s: Positive = 5.0
    read_timeout_s: Positive = 30.0
    retry_limit_s: Positive = 60.0
    """An operation that keeps failing with a passing error (5xx, throttling, a broken connection) is repeated
    with jittered backoff for this long, then StoreUnavailable is raised."""
    part_bytes: Annotated[int, Meta(ge=5 << 20)] = 16 << 20
    """Multipart part size; S3 allows 10,000 parts of at least 5 MiB, so 16 MiB reaches 156 GiB per object."""
    parallel: Annotated[int, Meta(ge=1, le=256)] = 8
    """Connections used for one large object."""
    settle_s: Annotated[float, Meta(ge=2)] = 10.0
    """Only where the store does not enforce conditional puts (candidates.py): how long who takes a run waits before
    that counts. It must be longer than a small put can be under way, plus the difference between the clocks of the
    store's servers; S3's stamps have a resolution of one second. Ten leave room for a server that pauses."""


class ObjectInfo(Struct, frozen=True):
    key: str
    size: int  # bytes
    modified: float  # seconds since the epoch, by the store's clock


class Capabilities(Struct, frozen=True):
    conditional_put: bool
    """Whether put_if_absent is enforced by the store. Where it is not, two writers can both succeed at first:
    `ObjectStore.settled`."""


class Upload(Protocol):
    """A streaming upload: nothing is visible until `commit`; leaving the context without it aborts."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """What is behind a read-only view must not change before the upload has ended: it need not be copied."""
        ...

    def commit(self) -> None: ...

    def __enter__(self) -> Upload: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ObjectStore(Protocol):
    """Keys are relative to the run's prefix, `/`-separated. All methods are blocking and thread-safe.

    Every method may raise BucketMissing, AccessDenied or StoreUnavailable.
    """

    @property
    def url(self) -> str:
        """`s3://bucket/prefix` or `file:///path`, as a user would type it."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace an object; readers see the old bytes or the new, never a mixture."""
        ...

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        """Create an object. Raises AlreadyExists where there is one (also after a retry of our own put whose
        answer was lost: the caller compares contents). Where the store does not enforce that, two that create at the
        same time can both succeed at first: `settled` tells whose object stands. A record (*.json) is never empty: a
        store may take an empty one for a put that broke off, and for absent."""
        ...

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        """Whether `data`, with which put_if_absent has just created `key`, stands for good. True at once where the
        store enforces conditional puts; elsewhere waits out settle_s of StoreConfig, and looks."""
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start`, or all that follow. Raises NotFound. A short answer is an error."""
        ...

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        """The same bytes, block by block and each once: what breaks off goes on where it broke. The blocks are small
        enough that who hashes and writes them finds them in the processor's cache. Raises what `get` raises, at the
        block where it shows."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Raises NotFound."""
        ...

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix` and are greater than `after`, in ascending byte order."""
        ...

    def delete(self, key: str) -> None:
        """Deleting what is not there succeeds."""
        ...

    def upload(self, key: str) -> Upload:
        """A streaming (multipart) write of an object of any size with bounded memory."""
        ...

    def probe(self) -> Capabilities:
        """Find out what the store enforces, with a small object of its own that is deleted again. Also the way to
        learn early that the bucket is missing or the credentials are wrong."""
        ...

    def close(self) -> None: ...
