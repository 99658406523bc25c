"""A run from its bucket alone: what lies there is shown, by the store's clock, and nothing is made up."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from async_rl.cli.lag_view import render_view
from async_rl.errors import AccessDenied
from async_rl.store.file import FileStore
from async_rl.view.bucket import BucketWatch
from async_rl.weights.lineage import claim
from async_rl.weights.readers import ReaderBeat, write_beat
from tests.weights_support import History, MemoryStore, ScriptedStore, raises

HERE_S = 5_000_000.0
"""This machine's clock, far from the store's."""


class World:
    """A run in a store whose clock the test moves; a version every ten seconds."""

    def __init__(self, tmp_path, versions=4):
        self.memory = MemoryStore()
        self.memory.now = 1000.0
        self.store = ScriptedStore(self.memory)
        self.history = History(tmp_path, self.store)
        self.clock = HERE_S
        state = self.history.random()
        self.history.full(state)
        for seed in range(1, versions):
            self.pass_s(10.0)
            state = self.history.changed(0.01, seed)
            self.history.delta(state)
        self.watch = BucketWatch(self.store, self.history.run, lambda: self.clock)

    def pass_s(self, seconds):
        self.memory.now += seconds
        self.clock += seconds

    def beat(self, name="w1", version=0, **fields):
        write_beat(self.store, ReaderBeat(name, (version,), 300.0, version=version, **fields))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_worker_is_behind_in_steps_versions_and_seconds(world):
    world.beat(version=1, cluster="a", state="serving", fetching=3, fetched_fraction=0.5, sync_bytes=7)
    world.pass_s(2.0)
    view = world.watch.look()
    assert (view.newest_version, view.newest_version_age_s) == (3, 2.0)
    assert view.step == view.newest_version_step == 30
    (seen,) = view.workers
    assert (seen.version, seen.lag_versions, seen.lag_s, seen.age_s) == (1, 2, 12.0, 22.0)
    assert seen.lag == 20 and seen.why == "fetching" and seen.last_seen_s == 2.0
    assert (seen.fetching_version, seen.fetched_fraction, seen.sync_bytes) == (3, 0.5, 7)
    assert (view.trainer, view.lag_counts, view.dropped, seen.leases, seen.running) == (None,) * 5
    assert [each.cluster for each in view.clusters] == ["a"]


def test_old_beats_are_read_and_what_they_lack_is_unknown(world):
    world.store.put("workers/old.json", b'{"worker":"old","versions":[2],"expires_s":300.0}')
    (seen,) = world.watch.look().workers
    assert (seen.worker, seen.version, seen.lag, seen.lag_versions, seen.why) == (
        "old", None, None, None, "unknown",
    )  # fmt: skip


def test_a_worker_whose_word_has_expired_is_gone_by_the_stores_clock(world):
    world.beat(version=3, state="serving", tokens_per_s=9.0)
    world.clock += 10_000.0  # ours alone: it is set, or wrong
    assert [each.state for each in world.watch.look().workers] == ["serving"]
    world.pass_s(300.0)
    (seen,) = world.watch.look().workers
    assert (seen.state, seen.why, seen.tokens_per_s) == ("gone", "gone", 0.0)


def test_a_worker_on_the_branch_of_the_trainer_before_lags_along_the_lineage(world):
    world.beat(version=3)
    history = world.history
    claimed = claim(world.store)
    manifest = history.delta(
        history.changed(0.01, 77),
        base=1,
        parent=1,
        step=12,
        incarnation=claimed.incarnation,
        nonce=claimed.nonce,
    )
    view = world.watch.look()
    assert (view.newest_version, view.incarnation) == (manifest.version, claimed.incarnation)
    (seen,) = view.workers
    assert seen.lag == 22, "20 steps back to version 1, which both have in common, and 2 forward"


def test_a_zombies_version_is_not_the_newest(world):
    before = world.watch.look().newest_version
    claimed = claim(world.store)
    world.history.delta(world.history.changed(0.01, 78))  # by the old incarnation, past the new one's first
    assert claimed.first_version == before + 1
    assert world.watch.look().newest_version == before


def test_a_second_look_reads_only_what_is_new(world):
    world.beat(version=3)
    world.pass_s(5.0)
    world.beat("w2", version=3)
    world.watch.look()
    world.pass_s(5.0)
    del world.store.calls[:]
    world.watch.look()
    gets = [key for operation, key in world.store.calls if operation == "get"]
    assert gets == ["workers/w2.json"], "it may have been replaced within the second that it was read in"
    assert ("put", "clock/") not in [(operation, key[:6]) for operation, key in world.store.calls]


def test_who_may_only_read_sees_everything_with_a_note_about_the_ages(world):
    world.store.on("put", "clock/", raises(AccessDenied("no")))
    view = world.watch.look()
    assert view.newest_version == 3 and "this machine's clock" in view.note


def test_the_newest_checkpoint_is_the_one_that_is_committed(world):
    assert world.watch.look().checkpoint_step is None
    world.store.put("checkpoints/00000000-0000000004/rank-00000.json", b"")
    world.store.put("checkpoints/00000000-0000000004.json", b"{}")
    world.store.put("checkpoints/00000000-0000000009/rank-00000.json", b"")
    world.pass_s(7.0)
    view = world.watch.look()
    assert (view.checkpoint_step, view.checkpoint_age_s) == (4, 7.0)


def test_a_run_without_a_version_is_shown_as_one(tmp_path):
    store = FileStore(f"file://{tmp_path}/store")
    run = World(tmp_path / "w").history.run
    view = BucketWatch(store, run).look()
    assert (view.newest_version, view.workers, view.step) == (None, (), None)
    assert msgspec.json.decode(msgspec.json.encode(view))["schema"] == 1


def test_what_strangers_write_into_the_bucket_is_left_out_or_shown_and_breaks_no_view(world):
    world.beat()
    world.store.put("checkpoints/00000000-0000000004.json", b"{}")
    for name in ("5-", "5", "-5", "³-4", "5-6-7"):
        world.store.put(f"checkpoints/{name}.json", b"")
    world.store.put("workers/half.json", b'{"worker":"half","versions":[')
    world.store.put("workers/deep.json", b"[" * 100_000)
    world.store.put(
        "workers/large.json", b'{"worker":"large","versions":[],"expires_s":9e9}' + b" " * (1 << 20)
    )
    world.store.put(
        "workers/absurd.json",
        b'{"worker":"[/]","versions":[],"expires_s":1e308,"version":99999999999999999999,"fetching":-7,'
        b'"fetched_fraction":-1e308,"tokens_per_s":-1e308,"sync_bytes":-1,"state":"\\u001b[2J","lacks":-9}',
    )
    view = world.watch.look()
    assert view.checkpoint_step == 4
    assert [each.worker for each in view.workers] == ["[/]", "w1"]
    out = io.StringIO()
    Console(file=out).print(render_view(view))
    assert "\x1b" not in out.getvalue()
