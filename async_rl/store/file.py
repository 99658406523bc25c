"""The object store in a folder: for tests, for one machine, and for clusters that do share a file system.

An object is a file under the root. A write goes to a file of its own under `.tmp/`, is flushed to the disk,
and is then given its name in one step (rename, or a hard link where the name must be new): a crash at any
moment leaves the old object, the new one, or a forgotten temporary that no listing shows and a later probe
removes.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

from async_rl.errors import AccessDenied, AlreadyExists, ConfigError, NotFound, StoreError, StoreUnavailable
from async_rl.store.base import BLOCK_BYTES, Capabilities, ObjectInfo
from async_rl.store.keys import check_key, check_prefix, check_range, past_the_end

__all__ = ["FileStore"]

TEMPORARIES = ".tmp"
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}
"""What os.link says on a file system that has none (FAT, some FUSE ones); a folder's mode gives EACCES."""
FORGOTTEN_S = 24 * 3600.0
"""A temporary that nobody has written to for a day belongs to a process that is gone."""


class FileStore:
    """`file:///path`. The root is made by the first write; a root that is not there reads as empty."""

    def __init__(self, url: str) -> None:
        self.root = parse_url(url)

    @property
    def url(self) -> str:
        return f"file://{quote(str(self.root))}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self.upload(key) as upload:
            upload.write(data)
            upload.commit()

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        with FileUpload(self, key, create_only=True) as upload:
            upload.write(data)
            upload.commit()

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        return True  # a hard link is created once or not at all

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._opened(key, start, length) as (file, wanted):
            file.seek(start)
            return _read_exactly(file.fileno(), wanted, self.path(key))

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        with self._opened(key, start, length) as (file, wanted):
            file.seek(start)
            for done in range(0, wanted, BLOCK_BYTES):
                yield _read_exactly(file.fileno(), min(BLOCK_BYTES, wanted - done), self.path(key))

    @contextmanager
    def _opened(self, key: str, start: int, length: int | None) -> Iterator[tuple[io.FileIO, int]]:
        """The object's file, and how many bytes are wanted of it."""
        check_range(start, length)
        path = self.path(key)
        with mapped(f"read {path}"), path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(f"can't read {path}: there is no such object")
            wanted = status.st_size - start if length is None else length
            if start + wanted > status.st_size or wanted < 0:
                raise past_the_end(str(path), status.st_size, start, length)
            yield file, wanted

    def head(self, key: str) -> ObjectInfo:
        path = self.path(key)
        with mapped(f"look at {path}"):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"can't look at {path}: there is no such object")
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._walk("", os.fsencode(prefix), os.fsencode(after))

    def _walk(self, folder: str, prefix: bytes, after: bytes) -> Iterator[ObjectInfo]:
        """`folder` is "" or ends with "/". Folders sorted with their slash give the order of whole keys."""
        here = self.root / folder
        with mapped(f"list {here}"):
            try:
                with os.scandir(here) as entries:
                    found = [(entry.name, entry.is_dir()) for entry in entries]
            except FileNotFoundError:  # never made, or removed since
                return
        names = sorted(
            (os.fsencode(name + "/" if is_folder else name), is_folder) for name, is_folder in found
        )
        for name, is_folder in names:
            key = folder + os.fsdecode(name)
            raw = os.fsencode(key)
            if is_folder:
                may_match = raw.startswith(prefix) or prefix.startswith(raw)
                if may_match and (raw > after or after.startswith(raw)) and key != f"{TEMPORARIES}/":
                    yield from self._walk(key, prefix, after)
            elif raw.startswith(prefix) and raw > after:
                try:
                    yield self.head(key)
                except NotFound:  # deleted since
                    continue

    def delete(self, key: str) -> None:
        path = self.path(key)
        with mapped(f"delete {path}"):
            try:
                path.unlink()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return
            sync_folder(path.parent)

    def upload(self, key: str) -> FileUpload:
        return FileUpload(self, key)

    def probe(self) -> Capabilities:
        """Tries a create-only put (some file systems lack hard links), and clears forgotten temporaries."""
        key = f".probe/{uuid.uuid4().hex}"
        self.put_if_absent(key, b"")
        try:
            self.put_if_absent(key, b"")
        except AlreadyExists:
            return Capabilities(conditional_put=True)
        finally:
            self.delete(key)
            self._clear_forgotten()
        return Capabilities(conditional_put=False)

    def _clear_forgotten(self) -> None:
        folder = self.root / TEMPORARIES
        with mapped(f"clear {folder}"):
            for path in folder.iterdir():
                try:
                    if time.time() - path.stat().st_mtime > FORGOTTEN_S:
                        path.unlink()
                except FileNotFoundError:
                    continue

    def close(self) -> None:
        """Holds nothing open."""

    def path(self, key: str) -> Path:
        check_key(key)
        if key.split("/", 1)[0] == TEMPORARIES:
            raise StoreError(f"{key!r} can't be an object's key: {TEMPORARIES}/ holds unfinished writes")
        return self.root / key


class FileUpload:
    """A file under `.tmp/` that gets its name at `commit`."""

    def __init__(self, store: FileStore, key: str, *, create_only: bool = False) -> None:
        self._target = store.path(key)
        self._create_only = create_only
        self._temporary = store.root / TEMPORARIES / uuid.uuid4().hex
        with mapped(f"write {self._target}"):
            make_folders(self._temporary.parent)
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._require_open()
        view = memoryview(data).cast("B")
        with mapped(f"write {self._target}"):
            while len(view):
                view = view[os.write(self._fd, view) :]

    def commit(self) -> None:
        self._require_open()
        with mapped(f"write {self._target}"):
            os.fsync(self._fd)
            make_folders(self._target.parent)
            if self._create_only:
                self._link()
            else:
                self._temporary.replace(self._target)
            sync_folder(self._target.parent)
        self._end()

    def _link(self) -> None:
        try:
            os.link(self._temporary, self._target)
        except FileExistsError:
            raise AlreadyExists(f"can't create {self._target}: there is an object already") from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise StoreError(
                f"can't create {self._target}: its file system has no hard links, without which two trainers could "
                "both create it",
                hint="use a run.store on another file system (a local disk, NFS), or an S3 server",
            ) from error

    def __enter__(self) -> FileUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _require_open(self) -> None:
        if self._fd < 0:
            raise StoreError(f"the upload of {self._target} has ended already")

    def _end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with mapped(f"clean up after {self._target}"):
                self._temporary.unlink(missing_ok=True)


def parse_url(url: str) -> Path:
    """`file:///path`, percent-encoded where needed. Raises ConfigError."""
    path = unquote(url.removeprefix("file://").removeprefix("localhost"))
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{url!r} is no store URL", hint="file:///absolute/path, with three slashes")
    return Path(os.path.normpath(path))


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Every error of the operating system in our terms."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"can't {doing}: there is no such object") from error
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        if doing.startswith("write"):
            hint = "a file stands where a folder is needed, or a folder where a file is"
            raise StoreError(f"can't {doing}: {error.strerror}", hint=hint) from error
        raise NotFound(f"can't {doing}: there is no such object") from error
    except PermissionError as error:
        hint = "check the owner and the mode of the folder"
        raise AccessDenied(f"can't {doing}: {error.strerror}", hint=hint) from error
    except OSError as error:
        hint = "check the disk: its space, its quota, and that it is mounted for writing"
        raise StoreUnavailable(f"can't {doing}: {error.strerror or error}", hint=hint) from error


def make_folders(folder: Path) -> None:
    """Like mkdir -p, and on the disk when it returns."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_exactly(fd: int, length: int, path: Path) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    got = 0
    while got < length:
        count = os.readv(fd, [view[got:]])
        if not count:
            raise StoreUnavailable(
                f"can't read {path}: it ended after {got} of {length} bytes", hint="was it truncated?"
            )
        got += count
    view.release()
    return bytes(data)
