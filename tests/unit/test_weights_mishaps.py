"""What goes wrong around the versions: records that nobody wrote, disks that are full, commands that are killed or
interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from async_rl.cli.weights import command
from async_rl.errors import ConfigError, Corrupt, WeightsError
from async_rl.store.file import FileStore
from async_rl.weights import check, lineage
from async_rl.weights.check import verify, verify_all
from async_rl.weights.config import WeightsConfig
from async_rl.weights.fetch import Fetcher
from async_rl.weights.files import FolderLock, disk_errors, reserve, temporary_folder
from async_rl.weights.gc import collect, tombstone_key
from async_rl.weights.lineage import Claim, claim_key, read_claims, sealed
from async_rl.weights.parallel import side_by_side
from async_rl.weights.readers import live_readers
from async_rl.weights.replay import FlatState
from async_rl.weights.run import RUN_KEY, open_run
from async_rl.weights.shadow import shards_in
from async_rl.weights.statefiles import StateFiles
from async_rl.weights.subscriber import export
from async_rl.weights.ways import list_edges, read_way
from tests.weights_support import History, MemoryStore, same_state, state_of

LIMIT_S = 30.0
NESTED = b'{"x":' * 100_000


def run_of(folder: Path, store: FileStore | None = None) -> History:
    history = History(folder, store)
    history.full(history.random())
    for number in range(1, 4):
        history.delta(history.changed(0.1, seed=number))
    return history


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("key", "read"),
    [
        (RUN_KEY, lambda history: open_run(history.store)),
        (claim_key(0), lambda history: read_claims(history.store)),
        (lineage.version_key(3), lambda history: lineage.wanted_version(history.store, 3)),
        ("ways/0000000003-full-10-00000000.json", lambda h: read_way(h.store, next(list_edges(h.store)))),
        ("checkpoints/00000000-0000000001.json", lambda history: collect(history.store, WeightsConfig())),
    ],
)
def test_a_record_nested_without_end_is_named_and_ends_no_process(
    tmp_path: Path, key: str, read: Callable[[History], object]
) -> None:
    history = run_of(tmp_path)
    history.store.put(key, NESTED)
    with pytest.raises(Corrupt, match=key):
        read(history)


@pytest.mark.parametrize("key", ["workers/w.json", tombstone_key(0)])
def test_a_beat_or_tombstone_nested_without_end_is_left_out(tmp_path: Path, key: str) -> None:
    history = run_of(tmp_path)
    history.store.put(key, NESTED)
    assert live_readers(history.store) == []
    assert not collect(history.store, WeightsConfig()).doomed


def test_a_checkpoint_nested_without_end_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(NESTED).to_bytes(8, "little") + NESTED)
    with pytest.raises(Corrupt, match="broken safetensors header"):
        StateFiles(tmp_path)


def test_a_checkpoint_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "never downloaded")
    with pytest.raises(ConfigError, match=r"can't read .*model\.safetensors: No such file"):
        StateFiles(tmp_path)


def test_a_claim_under_another_ones_number_is_refused(tmp_path: Path) -> None:
    """With the newer claim gone, what a zombie wrote after it would count."""
    history = run_of(tmp_path)
    newer = sealed(Claim(1, "newer", 2, 0.0))
    history.store.put(claim_key(1), msgspec.json.encode(newer))
    assert lineage.wanted_version(history.store, None).version == 1
    history.store.put(claim_key(1), history.store.get(claim_key(0)))
    with pytest.raises(Corrupt, match=r"incarnations/00000001.json .* says it is incarnation 0"):
        lineage.wanted_version(history.store, None)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [(b'"vocab_size": 9', b'"vocab_size": 8'), (b'"name": "config.json"', b'"name": "confug.json"')],
)
def test_a_flipped_bit_in_run_json_is_refused_also_where_it_still_can_be_read(
    tmp_path: Path, was: bytes, becomes: bytes
) -> None:
    history = run_of(tmp_path)
    data = history.store.get(RUN_KEY)
    assert was in data
    history.store.put(RUN_KEY, data.replace(was, becomes))
    with pytest.raises(Corrupt, match="differ from its seal"):
        open_run(history.store)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_verify_all_finds_a_model_file_that_workers_could_not_use(tmp_path: Path, damage: str) -> None:
    history = run_of(tmp_path)
    file = history.run.model_files[0]
    if damage == "missing":
        history.store.delete(file.key)
    else:
        history.store.put(file.key, b"x" * file.size)
    found = verify_all(history.store, history.run, tmp_path / "scratch")
    assert not found.wrong
    (reason,) = found.files
    assert file.key in reason


# ---------------------------------------------------------------- disks


def test_the_memory_that_a_state_is_built_in_has_its_place_on_the_disk(tmp_path: Path) -> None:
    """A hole that is written through a mapping ends the process where the disk is full."""
    store = MemoryStore()
    history = History(tmp_path, store, {"a": (300, 1000)}, pack_bytes=1 << 20)
    state = FlatState(history.store, history.run, tmp_path / "state")
    status = (tmp_path / "state" / "state").stat()
    assert status.st_size == 2 * 300_000
    assert status.st_blocks * 512 >= status.st_size
    assert not state.values.any()


def test_room_that_is_not_there_is_told_before_anything_is_mapped(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="can't write"), disk_errors(tmp_path, 1 << 62):
        reserve(tmp_path / "state", 1 << 62)


def test_a_full_disk_is_told_as_such_and_not_as_a_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = run_of(tmp_path)

    def full(*_: object) -> None:
        with disk_errors(tmp_path, 10):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(check.FlatState, "go", full)
    with pytest.raises(WeightsError, match="No space left"):
        verify(history.store, history.run, history.manifests[3], tmp_path / "scratch")


def test_a_killed_commands_folder_is_removed_by_the_next_command(tmp_path: Path) -> None:
    history = run_of(tmp_path, FileStore(f"file://{tmp_path}/run"))
    scratch = tmp_path / "scratch"
    dead = scratch / "async-rl-weights-dead"
    FolderLock(dead).release()
    (dead / "state").write_bytes(b"many bytes")
    os.utime(dead, (0, 0))
    done = CliRunner().invoke(
        command, ["verify", "--all", "--store", history.store.url, "--scratch", str(scratch)]
    )
    assert done.exit_code == 0, done.output
    assert list(scratch.iterdir()) == []


def test_a_scratch_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{tmp_path}/nowhere"), temporary_folder(tmp_path / "nowhere"):
        pass


# ---------------------------------------------------------------- commands


def test_a_grace_that_is_no_number_is_refused(tmp_path: Path) -> None:
    history = run_of(tmp_path, FileStore(f"file://{tmp_path}/run"))
    done = CliRunner().invoke(command, ["gc", "--store", history.store.url, "--grace-s", "nan"])
    assert done.exit_code == 2
    assert "nan is no number of seconds" in done.output


@contextmanager
def in_a_thread(work: Callable[[], None]):
    """Fails where `work` has not ended when the block does, and after a while."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("to_the_end", [False, True])
def test_an_interrupt_waits_only_for_what_must_not_be_left_half_done(to_the_end: bool) -> None:
    begun, hangs, raised, ended = (threading.Event() for _ in range(4))

    def get(item: int) -> int:
        if item:
            begun.set()
            hangs.wait(LIMIT_S)
        return item

    def interrupt(*_: object) -> None:
        begun.wait(LIMIT_S)
        raised.set()
        raise KeyboardInterrupt

    def work() -> None:
        try:
            side_by_side(get, range(2), report=interrupt, to_the_end=to_the_end)
        except KeyboardInterrupt:
            ended.set()

    with in_a_thread(work):
        assert raised.wait(LIMIT_S)
        assert ended.wait(0.2 if to_the_end else LIMIT_S / 2) != to_the_end
        hangs.set()
    assert ended.is_set()


def test_an_interrupted_fetch_does_not_wait_for_a_get_that_hangs(tmp_path: Path) -> None:
    hangs, ended = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
            if key.endswith("-1"):
                hangs.wait(LIMIT_S)
            yield self.get(key, start, length)

    history = History(tmp_path, Hanging())
    packs = history.full(history.random()).way.packs

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        try:
            wanted = [(pack, tmp_path / "incoming" / pack.sha256) for pack in packs]
            Fetcher(history.store, WeightsConfig()).whole(wanted, interrupt)
        except KeyboardInterrupt:
            ended.set()

    assert len(packs) > 1
    with in_a_thread(work):
        assert ended.wait(LIMIT_S / 2)
        hangs.set()
    assert not list((tmp_path / "incoming").glob(".*.part"))


def test_ctrl_c_ends_the_process_though_a_get_hangs() -> None:
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
from async_rl.cli import main
def hang(**_):
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    print("cleaned up")
    raise KeyboardInterrupt
main.cli.main = hang
main.main([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (130, "cleaned up\n")


# ---------------------------------------------------------------- folders


def test_an_export_through_a_link_fills_the_folder_behind_it(tmp_path: Path) -> None:
    history = run_of(tmp_path)
    (tmp_path / "large disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large disk")
    (tmp_path / "dangling").symlink_to(tmp_path / "not there yet")
    for name in ("link", "dangling"):
        export(history.store, 3, tmp_path / name)
        assert same_state(state_of(history.run, shards_in(tmp_path / name)), history.states[3])
        assert (tmp_path / name).is_symlink()


def test_an_export_does_not_replace_the_folder_we_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = run_of(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(WeightsError, match="we stand in it"):
        export(history.store, 3, Path())
    assert list(tmp_path.glob("here*")) == [tmp_path / "here"]


def test_an_export_touches_no_files_of_ones_own_where_its_parts_would_be(tmp_path: Path) -> None:
    history = run_of(tmp_path)
    own = tmp_path / "out.partial" / "model.safetensors"
    own.parent.mkdir()
    own.write_bytes(b"somebody's")
    with pytest.raises(WeightsError, match=r"out\.partial is not an empty folder"):
        export(history.store, 3, tmp_path / "out")
    assert own.read_bytes() == b"somebody's"
