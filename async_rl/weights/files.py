"""Local files that are there whole or not at all, folders of one process, and a clear word when the disk is full."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from async_rl.errors import WeightsError
from async_rl.log import get_logger

__all__ = [
    "FolderLock",
    "disk_errors",
    "part_file",
    "reserve",
    "scratch_folder",
    "sha256_of",
    "temporary_folder",
    "write_at",
    "write_whole",
]

log = get_logger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_SCRATCH = "async-rl-weights-"
_LEFT_BEHIND_S = 60.0  # a scratch folder that nobody has locked after this long is a killed process's
_NEVER_LOCKED_S = 3600.0


@contextmanager
def disk_errors(folder: Path, needed: int) -> Iterator[None]:
    """Map the operating system's errors of writing `needed` bytes below `folder` to WeightsError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise WeightsError(
            f"can't write {f'{needed / 1e6:.1f} MB ' if needed else ''}to {folder}: {error.strerror or error}",
            hint="free some space there or choose another cache folder"
            if full
            else "check the folder and its permissions",
        ) from error


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; renamed to `path` when the block ends well, removed when it
    doesn't."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    with disk_errors(path.parent, len(data)), part_file(path) as part:
        part.write_bytes(data)


def write_at(path: Path, start: int, data: bytes | memoryview) -> None:
    """Put `data` at byte `start` of an existing file; others may write elsewhere in it."""
    file = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(file, view, start)
            view, start = view[written:], start + written
    finally:
        os.close(file)


def sha256_of(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(
            file, "sha256"
        ).hexdigest()  # in small blocks, one buffer: they stay in the cache


def reserve(path: Path, nbytes: int) -> None:
    """Make a file of zeros that has its place on the disk. One that is mapped into memory without it ends the process
    (SIGBUS) where the disk turns out full. Raises OSError."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


class FolderLock:
    """One process, and in it one user, per folder: `<folder>/lock` is locked until `release` or the process's end.

    A POSIX lock: child processes don't inherit it, so an engine that outlives its worker is in nobody's way.
    """

    _ours: ClassVar[set[Path]] = set()  # such a lock does not keep this process from taking it twice
    _guard = threading.Lock()

    def __init__(self, folder: Path) -> None:
        """Raises WeightsError where the folder is in use."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder.resolve() / "lock"
        with self._guard:
            if self.path in self._ours:
                raise self._in_use(os.getpid())
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(self._file, 32).decode(errors="replace").strip()
                os.close(self._file)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise self._in_use(holder) from error
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
            self._ours.add(self.path)

    def release(self) -> None:
        """The file stays: removing it would let two processes lock two files of this name."""
        with self._guard:
            if self.path in self._ours:
                self._ours.discard(self.path)
                os.close(self._file)

    def _in_use(self, holder: object) -> WeightsError:
        return WeightsError(
            f"{self.path.parent} is in use by another reader (process {holder or 'unknown'})",
            hint="give every process a cache folder of its own, or stop the other one",
        )


@contextmanager
def scratch_folder(nbytes: int) -> Iterator[Path]:
    """A temporary folder with room for `nbytes`: in shared memory where that has it, so that nothing is written to
    a disk; else where temporary files go. Removed at the end; a killed process's is removed by the next one."""
    parent = Path(tempfile.gettempdir())
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        _remove_left_behind(_SHARED_MEMORY)
        if shutil.disk_usage(_SHARED_MEMORY).free >= nbytes:
            parent = _SHARED_MEMORY
    with temporary_folder(parent) as folder:
        log.info("temporary cache folder", folder=str(folder), wanted_mb=nbytes / 1e6)
        yield folder


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """In `parent`, or where temporary files go. Removed at the end; what a killed process left is removed by the next
    one there. Raises WeightsError."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_left_behind(parent)
    with disk_errors(parent, 0):
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        lock = FolderLock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob(f"{_SCRATCH}*/"):
        with suppress(OSError, WeightsError):
            status = folder.stat()
            limit = _LEFT_BEHIND_S if (folder / "lock").exists() else _NEVER_LOCKED_S
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < limit:
                continue
            lock = FolderLock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
            log.info("a killed process's temporary folder was removed", folder=str(folder))
