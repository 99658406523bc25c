"""The orchestrator's disk: records in the order in which they happened, in files of some size.

    spool/lock            held by the one orchestrator that may write here
    spool/00000007.log    records 0..: header (magic, length, checksums), body; the first one is a Snapshot
    spool/00000008.log    the newest is appended to

`append` only remembers; what was appended is sealed, and written with one write and one fsync (group commit), in a
thread while the next records are appended (commits.py). What must not be lost is written before anybody is told. A
file is deleted when no group in it can be asked for again.

A record cut short at the very end was never committed, and is cut off. A damaged one in the middle (its checksum
says so) is passed over, loudly and counted: its prompt is simply leased again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from async_rl.errors import ConfigError, Corrupt, Malformed, StoreUnavailable
from async_rl.log import get_logger
from orchestrator.framing import HEADER, Part, head_of, left_of, next_record
from orchestrator.locking import locked
from orchestrator.records import DURABLE, Record, Snapshot, decode_record, encode_record, parts_of

__all__ = ["Journal", "MemoryJournal", "Place", "Spool"]

log = get_logger(__name__)

SEGMENT_BYTES = 64 << 20
MOST_PARTS = 1024
"""Of one write: IOV_MAX of Linux."""
_SECTORS_BYTES = 64 << 10
"""Read at once: what is lost with a sector that can't be read."""
LOCK_LIMIT_S = 20.0
"""An orchestrator that was asked to stop may take some seconds to let go."""


class Place(NamedTuple):
    """Where a record's body lies."""

    segment: int
    offset: int
    size: int


class Journal(Protocol):
    where: str
    """For people."""

    def append(self, record: Record) -> Place: ...

    def read(self, place: Place) -> Record:
        """Raises Corrupt where the bytes are not those that were written."""
        ...

    @property
    def pending(self) -> bool:
        """Whether something waits for the disk before it may be acted on."""
        ...

    @property
    def unwritten(self) -> int:
        """Bytes that wait for the disk, in memory."""
        ...

    def seal(self) -> bool:
        """What was appended so far is for the next `write`, what comes now for the one after it. Whether it must be
        on the disk before it is acted on."""
        ...

    def write(self) -> None:
        """What was sealed is on the disk. In any thread, while another one appends and reads. Raises StoreUnavailable
        where the disk is full (and can be called again: nothing is lost), OSError where it fails otherwise: then what
        is on it is not known."""
        ...

    def commit(self) -> None:
        """Both."""
        ...

    def due(self) -> bool:
        """Whether a new file should be begun, with a Snapshot."""
        ...

    def begin(self, snapshot: Snapshot) -> None:
        """Commit, and begin it. Raises StoreUnavailable where the disk is full; to be tried again."""
        ...

    def keep_from(self, segment: int) -> None:
        """No record in an older file is needed any more."""
        ...


class MemoryJournal:
    """The twin without a disk, for tests: what is written can be read again, and replayed."""

    where = "memory"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._bodies: list[bytes] = []

    def append(self, record: Record) -> Place:
        self._bodies.append(encode_record(record))
        self.records.append(record)
        return Place(0, len(self._bodies) - 1, len(self._bodies[-1]))

    def read(self, place: Place) -> Record:
        return decode_record(self._bodies[place.offset])

    @property
    def pending(self) -> bool:
        return False

    @property
    def unwritten(self) -> int:
        return 0

    def seal(self) -> bool:
        return False

    def write(self) -> None:
        pass

    def commit(self) -> None:
        self.seal()
        self.write()

    def due(self) -> bool:
        return False

    def begin(self, snapshot: Snapshot) -> None:
        raise NotImplementedError("a journal in memory is one file")

    def keep_from(self, segment: int) -> None:
        pass

    def replay(self) -> Iterator[tuple[Record, Place]]:
        for offset, body in enumerate(list(self._bodies)):
            yield decode_record(body), Place(0, offset, len(body))


class Spool:
    """Not thread-safe but for `write`: it may run in a thread while another one appends, reads and deletes old files,
    until a new file is begun.

    Raises ConfigError where the folder can't be used or another orchestrator holds it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fsync: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        lock_limit_s: float = LOCK_LIMIT_S,
    ) -> None:
        self._folder = folder
        self.where = str(folder)
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self.damaged = 0
        """Records that were passed over."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = locked(folder / "lock", lock_limit_s)
        except OSError as error:
            raise ConfigError(
                f"the spool {folder} can't be used: {error.strerror}",
                hint="set orchestrator.spool to a folder on a local disk that this user may write",
            ) from error
        self._segments = sorted(int(path.stem) for path in folder.glob("*.log") if path.stem.isdigit())
        self._file = -1
        self._segment = 0
        self._readers: dict[int, int] = {}  # open files of older segments
        self._size = 0  # of the newest file, what is pending included
        self._pending: list[Part] = []
        self._bodies: dict[int, tuple[Part, ...]] = {}  # of the pending records, by offset
        self._dirty = False  # something durable is among them
        self._sealed: list[Part] = []  # these three likewise of what is being written
        self._sealed_bodies: dict[int, tuple[Part, ...]] = {}
        self._sealed_dirty = False
        self._written = 0  # of the newest file
        self._ends: dict[int, int] = {}  # of each file that was replayed, where its last record ends

    # ---------------------------------------------------------------- at the start

    def replay(self) -> Iterator[tuple[Record, Place]]:
        """Every record, oldest first; and then the newest of them are on the disk. To be read to its end before
        anything is appended. Raises StoreUnavailable where the disk is full, OSError where it fails."""
        for segment in list(self._segments):
            yield from self._replay_file(segment, last=segment == self._segments[-1])
        if self._segments and not self._path(self._segments[-1]).stat().st_size:
            # The end came while it was begun. Without a Snapshot in front nothing may be appended to it.
            self._path(self._segments.pop()).unlink()
        if self._segments:
            self._open(self._segments[-1])
            self._settle(self._ends[self._segment])

    def _settle(self, end: int) -> None:
        """What an earlier life wrote to the newest file, and had not synced when it ended, may stand in the page
        cache only, and after an fsync that failed it is not even on its way to the disk. It is acknowledged again as
        soon as somebody asks, so it is written once more and synced first. Older files were synced before the next
        one was begun. What follows the last record (the newest file can be one whose successor was never whole) is
        cut off: the next record would be taken for its rest."""
        os.ftruncate(self._file, end)
        self._size = self._written = end
        if not self._fsync:
            return
        content = memoryview(self._content(self._path(self._segment)))
        at = 0
        while at < end:
            with self._full_disk():
                at += os.pwrite(self._file, content[at:], at)
        os.fsync(self._file)
        self._sync_folder()

    def _replay_file(self, segment: int, last: bool) -> Iterator[tuple[Record, Place]]:
        path = self._path(segment)
        data = self._content(path)
        at = 0
        while at < len(data):
            found = next_record(data, at)
            if found is None:
                break
            start, size, whole = found
            if start > at:
                self._damage(path, at, f"{start - at} bytes are no record")
            end = start + HEADER.size + size
            if end > len(data):
                at = start
                break
            body = memoryview(data)[start + HEADER.size : end]
            at = end
            try:
                if not whole:
                    raise Malformed("its checksum differs")
                record = decode_record(body)
            except Malformed as error:
                self._damage(path, start, error.message)
                continue
            yield record, Place(segment, start + HEADER.size, size)
        self._ends[segment] = at
        if at < len(data):
            if last:
                log.info("the last write before the end was not complete: cut off", file=path.name, at=at)
                os.truncate(path, at)
            else:
                self._damage(path, at, f"{len(data) - at} bytes at the end are no record")

    def _content(self, path: Path) -> bytes:
        """All of a file; zeros where the disk can't give it back: of records that they hit, the checksums differ."""
        with path.open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            for at in range(0, len(content), _SECTORS_BYTES):
                try:
                    piece = os.pread(file.fileno(), _SECTORS_BYTES, at)
                except OSError as error:
                    self._damage(path, at, f"it can't be read: {error.strerror}")
                    continue
                content[at : at + len(piece)] = piece
        return bytes(content)

    def _damage(self, path: Path, at: int, what: str) -> None:
        self.damaged += 1
        log.error("a damaged record in the spool is passed over", file=str(path), byte=at, reason=what)

    # ---------------------------------------------------------------- writing

    def append(self, record: Record) -> Place:
        body = parts_of(record)
        size, head = head_of(body)
        place = Place(self._segment, self._size + HEADER.size, size)
        self._pending.append(head)
        self._pending += body
        self._bodies[place.offset] = body
        self._size += HEADER.size + size
        self._dirty = self._dirty or isinstance(record, DURABLE)
        return place

    @property
    def pending(self) -> bool:
        return self._dirty or self._sealed_dirty

    @property
    def unwritten(self) -> int:
        return self._size - self._written

    def commit(self) -> None:
        self.seal()
        self.write()

    def seal(self) -> bool:
        if self._sealed:  # of a write that failed
            self._sealed += self._pending
            self._sealed_bodies.update(self._bodies)
        else:
            self._sealed, self._sealed_bodies = self._pending, self._bodies
        self._pending, self._bodies = [], {}
        self._sealed_dirty, self._dirty = self._sealed_dirty or self._dirty, False
        return self._sealed_dirty

    def write(self) -> None:
        self._write_sealed()
        if self._sealed_dirty and self._fsync:
            os.fdatasync(self._file)
        self._sealed_dirty = False

    def _write_sealed(self) -> None:
        while self._sealed:
            some = self._sealed[:MOST_PARTS]
            with self._full_disk():
                wrote = os.pwritev(self._file, some, self._written)
            self._written += wrote
            self._sealed[:MOST_PARTS] = left_of(some, wrote)
        self._sealed_bodies = {}  # from here on they are read from the file

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreUnavailable(
                f"the disk of the spool {self._folder} is full",
                hint="make room: until then nothing is acknowledged, and nothing is lost",
            ) from error

    def read(self, place: Place) -> Record:
        if place.segment == self._segment:
            waiting = self._bodies.get(place.offset) or self._sealed_bodies.get(place.offset)
            if waiting is not None:
                return decode_record(b"".join(waiting))
        size, start = HEADER.size + place.size, place.offset - HEADER.size
        try:
            data = memoryview(os.pread(self._reader(place.segment), size, start))
        except OSError as error:
            log.error("the spool can't be read", file=str(self._path(place.segment)), reason=error.strerror)
            data = memoryview(b"")
        head, body = data[: HEADER.size], data[HEADER.size :]
        if len(head) < HEADER.size or head[8:12] != zlib.crc32(body).to_bytes(4, "little"):
            raise Corrupt(
                f"a record of {place.size} bytes at {place.offset} in {self._path(place.segment)} is damaged",
                hint="check the disk; the group is lost, its prompt is asked again if it still counts",
            )
        return decode_record(body)

    # ---------------------------------------------------------------- files

    def due(self) -> bool:
        return self._size == 0 or self._size >= self._segment_bytes

    def begin(self, snapshot: Snapshot) -> None:
        """A new file, that begins with `snapshot`. It takes the place of the one that is appended to when it is on
        the disk, whole. Raises StoreUnavailable where the disk is full: then nothing has changed.

        First the old one is on the disk, with all that was appended to it: the Snapshot holds what follows from that,
        and is not played where the old file is."""
        self._dirty = self._file >= 0
        self.commit()
        segment = self._segment + 1
        path = self._path(segment)
        try:
            with self._full_disk():
                body = encode_record(snapshot)
                self._write_file(path, head_of([body])[1] + body)
        except StoreUnavailable:
            path.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._segments.append(segment)
        self._open(segment)

    def keep_from(self, segment: int) -> None:
        gone = [each for each in self._segments if each < min(segment, self._segment)]
        for each in gone:
            if each in self._readers:
                os.close(self._readers.pop(each))
            self._path(each).unlink(missing_ok=True)
            self._segments.remove(each)

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.commit()
            except StoreUnavailable as error:
                log.error("the last records were not written", reason=error.message)
            finally:
                os.close(self._file)
                self._file = -1
        for reader in self._readers.values():
            os.close(reader)
        self._readers.clear()
        os.close(self._lock)

    def _reader(self, segment: int) -> int:
        if segment == self._segment:
            return self._file
        if segment not in self._readers:
            self._readers[segment] = os.open(self._path(segment), os.O_RDONLY)
        return self._readers[segment]

    def _open(self, segment: int) -> None:
        self._file = os.open(self._path(segment), os.O_RDWR)
        self._segment = segment
        self._size = self._written = os.fstat(self._file).st_size

    def _write_file(self, path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if self._fsync:
                os.fsync(file.fileno())
        self._sync_folder()

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08}.log"

    def _sync_folder(self) -> None:
        if self._fsync:
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
