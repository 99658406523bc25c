"""What the folder store promises beyond the contract: crashes, permissions, URLs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from async_rl.errors import AccessDenied, ConfigError, NotFound, StoreError, StoreUnavailable
from async_rl.store import open_store
from async_rl.store.file import FORGOTTEN_S, FileStore


def test_a_url_names_the_folder_percent_encoded(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20#?ü"
    store = open_store(folder.as_uri())
    store.put("k", b"1")
    assert (folder / "k").read_bytes() == b"1"
    assert store.url == folder.as_uri()
    assert FileStore("file:///a/b/../c/").url == "file:///a/c"
    assert FileStore("file://localhost/a").url == "file:///a"


@pytest.mark.parametrize("url", ["file://", "file://host/x", "file://relative", "file:/x"])
def test_a_url_without_an_absolute_path_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no store URL"):
        open_store(url)


def test_opening_and_reading_make_no_folder(tmp_path: Path) -> None:
    store = open_store((tmp_path / "run").as_uri())
    assert list(store.list_after("")) == []
    with pytest.raises(NotFound):
        store.get("k")
    store.delete("k")
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_leaves_is_never_listed_and_later_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path.as_uri())
    crashed = store.upload("k")
    crashed.write(b"half")  # and then the process is gone
    (temporary,) = (tmp_path / ".tmp").iterdir()
    assert list(store.list_after("")) == []
    store.probe()
    assert temporary.exists(), "it may still be written to"
    os.utime(temporary, (0, temporary.stat().st_mtime - FORGOTTEN_S - 10))
    store.probe()
    assert not temporary.exists()


def test_the_temporaries_can_not_be_reached_by_a_key(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("k", b"")
    for operation in (store.get, store.delete, store.upload):
        with pytest.raises(StoreError, match="unfinished"):
            operation(".tmp/x")
    store.put("a/.tmp/x", b"only the top one is special")


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    target = tmp_path / "versions" / "1.json"

    def fsync(fd: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        synced.append(f"{kind} {'after' if target.exists() else 'before'} the name")

    monkeypatch.setattr(os, "fsync", fsync)
    open_store(tmp_path.as_uri()).put_if_absent("versions/1.json", b"x")
    assert "file before the name" in synced
    assert synced[-1] == "folder after the name"


def test_a_write_that_fails_leaves_the_old_object_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("k", b"old")

    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailable, match=r"No space left.*check the disk"):
        store.put("k", b"new")
    monkeypatch.undo()
    assert store.get("k") == b"old"
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_an_object_where_a_folder_is_needed_is_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put("a", b"1")
    with pytest.raises(StoreError, match="a file stands where a folder is needed"):
        store.put("a/b", b"2")
    with pytest.raises(NotFound):
        store.get("a/b")
    assert store.get("a") == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_one_may_not_write_to_is_access_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessDenied, match="owner and the mode"):
        open_store((tmp_path / "run").as_uri()).put("k", b"1")


def test_permission_errors_of_the_system_are_access_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDenied, match=r"Permission denied.*owner and the mode"):
        open_store(tmp_path.as_uri()).put("k", b"1")


def test_a_file_system_without_hard_links_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    with pytest.raises(StoreError, match=r"no hard links.*two trainers.*or an S3 server"):
        FileStore(tmp_path.as_uri()).probe()
