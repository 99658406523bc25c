"""Upkeep follows the newest version, survives whatever fails, and never makes anybody wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import StoreUnavailable
from async_rl.weights import gc
from async_rl.weights.config import WeightsConfig
from async_rl.weights.upkeep import Upkeep
from async_rl.weights.ways import list_edges
from tests.weights_support import History, ScriptedStore, raises

CONFIG = WeightsConfig(skip_spans=(4,), gc_every=0)
LIMIT_S = 30.0


def run_of(tmp_path: Path, versions: int) -> History:
    history = History(tmp_path, shapes={"embed.weight": (60, 20), "norm.weight": (7,)})
    history.full(history.random())
    for number in range(1, versions):
        history.delta(history.changed(0.05, seed=number))
    return history


@contextmanager
def upkeep(
    history: History, store=None, config: WeightsConfig = CONFIG
) -> Iterator[tuple[Upkeep, queue.Queue[int]]]:
    done: queue.Queue[int] = queue.Queue()
    with Upkeep(store or history.store, history.run, config, on_done=done.put) as keeper:
        yield keeper, done


def skips(history: History) -> set[tuple[int, int]]:
    return {(edge.base, edge.version) for edge in list_edges(history.store)}


def wait_for(event: threading.Event, begun: threading.Event) -> None:
    begun.set()
    event.wait(LIMIT_S)


def test_skips_are_made_after_a_commit(tmp_path):
    history = run_of(tmp_path, 9)
    with upkeep(history) as (keeper, done):
        keeper.committed(history.manifests[8])
        assert done.get(timeout=LIMIT_S) == 8
    assert skips(history) == {(0, 4), (4, 8)}


def test_only_the_newest_of_several_versions_is_looked_after(tmp_path):
    history = run_of(tmp_path, 9)
    store = ScriptedStore(history.store)
    begun, go_on = threading.Event(), threading.Event()
    store.on("list_after", "versions/", lambda: wait_for(go_on, begun))
    with upkeep(history, store) as (keeper, done):
        keeper.committed(history.manifests[4])
        assert begun.wait(LIMIT_S)
        for version in (5, 6, 7, 8):
            keeper.committed(history.manifests[version])
        go_on.set()
        assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [4, 8]
    assert skips(history) == {(0, 4), (4, 8)}


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), OSError("disk"), ZeroDivisionError()], ids=repr
)
def test_what_failed_is_done_after_the_next_version(tmp_path, error):
    history = run_of(tmp_path, 6)
    store = ScriptedStore(history.store)
    store.on("upload", "packs/", raises(error))
    with upkeep(history, store) as (keeper, done):
        keeper.committed(history.manifests[4])
        assert done.get(timeout=LIMIT_S) == 4
        assert skips(history) == set()
        keeper.committed(history.manifests[5])
        assert done.get(timeout=LIMIT_S) == 5
    assert skips(history) == {(0, 4)}


def test_a_new_trainer_makes_what_the_one_before_left_undone(tmp_path):
    history = run_of(tmp_path, 6)
    with upkeep(history) as (keeper, done):
        keeper.committed(history.manifests[5])
        done.get(timeout=LIMIT_S)
    assert skips(history) == {(0, 4)}


def test_garbage_is_collected_every_so_many_versions(tmp_path):
    history = run_of(tmp_path, 13)
    history.anchor(8)
    history.store.now = 5000.0
    config = msgspec.structs.replace(CONFIG, gc_every=5, keep_versions=1, gc_grace_s=100.0)
    with upkeep(history, config=config) as (keeper, done):
        for version, tombstones in ((8, 0), (9, 0), (10, 1), (11, 1)):
            keeper.committed(history.manifests[version])
            done.get(timeout=LIMIT_S)
            assert len(gc.read_tombstones(history.store)) == tombstones, version


def test_garbage_is_collected_even_where_compaction_fails(tmp_path):
    history = run_of(tmp_path, 13)
    history.anchor(8)
    history.store.now = 5000.0
    config = msgspec.structs.replace(CONFIG, gc_every=5, keep_versions=1, gc_grace_s=100.0)
    store = ScriptedStore(history.store)
    store.on("upload", "packs/", raises(StoreUnavailable("away")), times=99)
    with upkeep(history, store, config) as (keeper, done):
        for version in (9, 12):
            keeper.committed(history.manifests[version])
            done.get(timeout=LIMIT_S)
    assert len(gc.read_tombstones(history.store)) == 1


def test_a_stop_ends_the_thread_and_removes_its_folder(tmp_path):
    history = run_of(tmp_path, 9)
    with upkeep(history) as (keeper, _):
        thread, scratch = keeper._thread, keeper._scratch
        assert scratch.is_dir()
    assert not thread.is_alive()
    assert not scratch.exists()


def test_a_stop_does_not_wait_for_a_store_that_hangs(tmp_path):
    history = run_of(tmp_path, 9)
    store = ScriptedStore(history.store)
    begun, release = threading.Event(), threading.Event()
    store.on("list_after", "versions/", lambda: wait_for(release, begun))
    keeper = Upkeep(store, history.run, CONFIG)
    keeper.committed(history.manifests[8])
    assert begun.wait(LIMIT_S)
    keeper.stop(timeout_s=0.01)
    assert keeper._thread.is_alive(), "left behind, a daemon"
    assert keeper._thread.daemon
    release.set()
    keeper.stop(LIMIT_S)
    assert not keeper._thread.is_alive()
    assert skips(history) == set()
