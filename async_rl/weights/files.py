"""Local files that are there whole or not at all, and a clear word when the disk is full."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.errors import WeightsError

__all__ = ["disk_errors", "part_file", "write_whole"]


@contextmanager
def disk_errors(folder: Path, needed: int) -> Iterator[None]:
    """Map the operating system's errors of writing `needed` bytes below `folder` to WeightsError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise WeightsError(
            f"can't write {needed / 1e6:.1f} MB to {folder}: {error.strerror or error}",
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
