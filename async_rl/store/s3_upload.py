"""A streaming upload to S3 in bounded memory: parts travel in parallel while later ones are written.

Copying costs as much as sending (fresh memory is touched page by page), so what can't change is not copied: a part
is a list of views, sent one after another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

from botocore.exceptions import ClientError

from async_rl.errors import NotFound, StoreError
from async_rl.log import get_logger
from async_rl.store.s3_errors import code_of

__all__ = ["S3Upload"]

log = get_logger(__name__)

MAX_PARTS = 10_000
"""S3's limit."""
MOST_IN_FLIGHT = 4
"""Parts held in memory while they travel; with four of them a connection's pauses are well covered."""

BLOCK_BYTES = 256 << 10
"""What one read of a body gives, so what one send takes: each has the socket's timeout to itself."""


class S3Upload:
    """Not to be shared between threads. An object smaller than a part is one plain put at `commit`.

    call: (doing, operation) -> result, which repeats what may pass and raises our errors.
    """

    def __init__(
        self,
        client: Any,
        target: dict[str, str],
        name: str,
        call: Callable[[str, Callable[[], Any]], Any],
        *,
        part_bytes: int,
        parallel: int,
    ) -> None:
        self._client = client
        self._target = target
        self._name = name
        self._call = call
        self._part_bytes = part_bytes
        self._in_flight = min(parallel, MOST_IN_FLIGHT)
        self._pieces: list[memoryview] = []  # of the part that fills
        self._filled = 0
        self._size = 0
        self._id = ""
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: set[Future[None]] = set()
        self._etags: dict[int, str] = {}
        self._parts = 0
        self._given_up = threading.Event()
        self._done = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Takes a copy, except of bytes and of read-only views: who passes such a view promises that what is behind
        it does not change before the upload has ended. Waits for: room among the parts in flight. Raises what one
        of them met."""
        self._require_open()
        view = memoryview(data).cast("B")
        self._size += len(view)
        while len(view):
            room = self._part_bytes - self._filled
            piece, view = view[:room], view[room:]
            self._pieces.append(piece if piece.readonly else memoryview(bytes(piece)))
            self._filled += len(piece)
            if self._filled == self._part_bytes:
                self._send()

    def commit(self) -> None:
        """Waits for: every part to be stored. Then the object is visible, whole."""
        self._require_open()
        if not self._id:
            pieces = self._pieces
            self._call(
                f"write {self._name}",
                lambda: self._client.put_object(**self._target, Body=PartBody(pieces)),
            )
        else:
            if self._pieces:
                self._send()
            while self._waiting:
                self._wait_for_one()
            self._complete()
        self._done = True
        self._shut()

    def __enter__(self) -> S3Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self._abort()

    def _require_open(self) -> None:
        if self._done:
            raise StoreError(f"the upload of {self._name} has ended already")

    def _send(self) -> None:
        if self._parts == MAX_PARTS:
            raise StoreError(
                f"{self._name} would have more than {MAX_PARTS} parts of {self._part_bytes} bytes",
                hint="raise part_bytes in [store]",
            )
        if not self._id:
            answer = self._call(
                f"start the upload of {self._name}",
                lambda: self._client.create_multipart_upload(**self._target),
            )
            self._id = answer["UploadId"]
            self._pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="s3-upload")
        assert self._pool is not None
        while len(self._waiting) >= self._in_flight:
            self._wait_for_one()
        self._parts += 1
        self._waiting.add(self._pool.submit(self._send_part, self._parts, self._pieces))
        self._pieces, self._filled = [], 0

    def _send_part(self, number: int, pieces: list[memoryview]) -> None:
        def attempt() -> Any:
            if self._given_up.is_set():
                raise StoreError(f"the upload of {self._name} was given up")
            body = PartBody(pieces)
            return self._client.upload_part(**self._target, UploadId=self._id, PartNumber=number, Body=body)

        self._etags[number] = self._call(f"write part {number} of {self._name}", attempt)["ETag"]

    def _wait_for_one(self) -> None:
        """Bounded: each part has the store's own limits. Raises the error of a part that failed."""
        done, self._waiting = wait(self._waiting, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._etags[number]} for number in sorted(self._etags)]
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            try:
                self._client.complete_multipart_upload(
                    **self._target, UploadId=self._id, MultipartUpload={"Parts": parts}
                )
            except ClientError as error:
                # The answer of an earlier attempt was lost, and that one had succeeded.
                if code_of(error) != "NoSuchUpload" or attempts == 1 or not self._is_there():
                    raise

        self._call(f"finish the upload of {self._name}", attempt)

    def _is_there(self) -> bool:
        """Whether the object has the size, and by its tag the number of parts, of this upload. A server that gives no
        tags (JuiceFS) leaves the size: what is uploaded has a key of its own."""
        answer = self._client.head_object(**self._target)
        tag = str(answer.get("ETag") or "").strip('"')
        in_as_many = not tag or tag.endswith(f"-{self._parts}")
        return in_as_many and int(answer["ContentLength"]) == self._size

    def _abort(self) -> None:
        """Best effort: what an abort can't reach, the bucket's own rule for incomplete uploads removes."""
        self._done = True
        self._given_up.set()
        self._shut()
        if not self._id:
            return
        try:
            self._call(
                f"abort the upload of {self._name}",
                lambda: self._client.abort_multipart_upload(**self._target, UploadId=self._id),
            )
        except NotFound:
            pass
        except StoreError as error:
            log.warning("an unfinished upload stays in the store", name=self._name, error=str(error))

    def _shut(self) -> None:
        self._pieces, self._filled = [], 0
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class PartBody:
    """Views one after another, as the file that boto3 reads: to sign it, to know its size, and to send it."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._size = sum(len(piece) for piece in pieces)
        self._index = 0  # of the piece that is read next
        self._at = 0  # byte in it
        self._place = 0  # byte in all

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next block, of at most BLOCK_BYTES: b"" at the end. It may be longer than `size`: http.client asks for
        16 KiB at a time and sends what it gets; as many system calls as that would cost more than the bytes."""
        while self._index < len(self._pieces):
            block = self._pieces[self._index][self._at : self._at + BLOCK_BYTES]
            if len(block):
                self._at += len(block)
                self._place += len(block)
                return block
            self._index, self._at = self._index + 1, 0
        return b""

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = min(max(0, start + offset), self._size)
        self._index, self._at = 0, self._place
        while self._index < len(self._pieces) and self._at >= len(self._pieces[self._index]):
            self._at -= len(self._pieces[self._index])
            self._index += 1
        return self._place
