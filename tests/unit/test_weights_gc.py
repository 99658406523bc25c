"""Garbage collection keeps every path that somebody may need, and deletes only what was announced long ago."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from async_rl.errors import AlreadyExists, Corrupt, NotFound
from async_rl.store.base import ObjectInfo
from async_rl.weights import gc, lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.garbage import (
    Facts,
    Plan,
    Reachable,
    StoredTombstone,
    Tombstone,
    fold,
    pack_group,
    plan,
)
from async_rl.weights.gc import collect, dead_edges
from async_rl.weights.plan import find_path
from async_rl.weights.readers import ReaderBeat, drop_beat, write_beat
from async_rl.weights.subscriber import Subscriber
from async_rl.weights.ways import list_edges
from tests.weights_support import History, MemoryStore, ScriptedStore, raises, same_state, state_of

CONFIG = WeightsConfig(keep_versions=3, gc_grace_s=100.0)


def way(base: int, version: int, nbytes: int = 10, *, key: str = "", counts: bool = True) -> Reachable:
    packs = (f"packs/{version:010}-00000000-{key or 0}-0",) if nbytes else ()
    return Reachable(base, version, nbytes, packs, modified=0.0, key=key, counts=counts)


def facts(*ways: Reachable, **fields: object) -> Facts:
    infos = {key: ObjectInfo(key, each.nbytes, 0.0) for each in ways for key in each.packs}
    newest = max((each.version for each in ways if each.counts), default=-1)
    values: dict[str, object] = {"now": 1000.0, "newest": newest, "ways": ways, "packs": infos, **fields}
    return Facts(**values)  # type: ignore[arg-type]


def chain(count: int) -> list[Reachable]:
    """An anchor and a delta to every version after it."""
    return [way(-1, 0, 100), *(way(n - 1, n) for n in range(1, count))]


def dropped(planned: Plan) -> set[tuple[int, int]]:
    return {each.way.edge for each in planned.drop}


def run_of(tmp_path, versions: int = 20, **fields: object) -> History:
    """Versions 0 to `versions` - 1, skips over 4 and an anchor at 8; all written at 0 by the store's clock."""
    history = History(tmp_path, shapes={"embed.weight": (100, 20), "norm.weight": (7,)}, **fields)
    history.full(history.random())
    for number in range(1, versions):
        history.delta(history.changed(0.01, seed=number))
    for number in range(4, versions, 4):
        history.skip(number - 4, number)
    history.anchor(8)
    history.store.now = 1000.0  # type: ignore[attr-defined]
    return history


def later(history: History, seconds: float) -> None:
    history.store.now += seconds  # type: ignore[attr-defined]


def packs(history: History) -> set[str]:
    return {info.key for info in history.store.list_after("packs/")}


def reachable(history: History, version: int, held: int | None = None) -> bool:
    """Whether the planned path leads over packs that are all there."""
    path = find_path(history.store, history.manifests[version], held, avoid=dead_edges(history.store))
    return all(pack.key in packs(history) for hop in path.hops for pack in hop.way.packs)


# ---------------------------------------------------------------- the plan


def test_a_chain_without_skips_is_kept_whole_up_to_the_newest():
    planned = plan(facts(*chain(10)), keep_versions=2, grace_s=10)
    assert not planned.drop
    assert not planned.doomed


def test_single_deltas_go_where_a_skip_is_cheaper():
    planned = plan(facts(*chain(10), way(0, 8, 20, key="ways/a")), keep_versions=2, grace_s=10)
    assert dropped(planned) == {(n - 1, n) for n in range(1, 9)}
    assert {each.key for each in planned.doomed} == {f"packs/{n:010}-00000000-0-0" for n in range(1, 9)}


def test_a_skip_that_no_path_needs_goes():
    planned = plan(facts(*chain(10), way(0, 8, 200, key="ways/a")), keep_versions=2, grace_s=10)
    assert dropped(planned) == {(0, 8)}
    assert planned.tombstone(0, 0.0).ways == ("ways/a",)


def test_every_kept_version_keeps_its_own_cheapest_path():
    planned = plan(facts(*chain(10), way(0, 8, 20, key="ways/a")), keep_versions=4, grace_s=10)
    assert dropped(planned) == {(7, 8)}, "6 and 7 still need the single deltas"


def test_deltas_before_a_newer_anchor_go():
    planned = plan(facts(*chain(10), way(-1, 5, 100, key="ways/a")), keep_versions=2, grace_s=10)
    assert dropped(planned) == {(n - 1, n) for n in range(1, 6)}


@pytest.mark.parametrize(
    "keep, left", [(None, {0, 3, 6, 9}), (1, {0, 9}), (2, {0, 6, 9}), (9, {0, 3, 6, 9})]
)
def test_so_many_anchors_are_kept_and_always_the_first(keep, left):
    anchors = [way(-1, n, 100, key=f"ways/{n}") for n in (3, 6, 9)]
    planned = plan(facts(*chain(10), *anchors), keep_versions=1, grace_s=10, keep_anchors=keep)
    assert {each.way.version for each in planned.keep if each.way.base < 0} == left


def test_an_anchor_that_a_kept_path_needs_is_kept_whatever_the_number():
    ways = [way(-1, 0, 100), way(-1, 3, 100), way(3, 4), way(-1, 5, 100)]
    planned = plan(facts(*ways), keep_versions=2, grace_s=10, keep_anchors=1)
    assert not planned.drop


def test_a_live_reader_keeps_its_way_to_the_newest_version_and_to_the_one_it_fetches():
    ways = [*chain(20), way(-1, 16, 100, key="ways/a")]
    without = plan(facts(*ways), keep_versions=2, grace_s=10)
    planned = plan(facts(*ways, readers=((12, 14),)), keep_versions=2, grace_s=10)
    assert dropped(without) - dropped(planned) >= {(12, 13), (13, 14), (14, 15), (15, 16)}


def test_what_a_checkpoint_names_stays_reachable():
    ways = [*chain(20), way(-1, 16, 100, key="ways/a")]
    planned = plan(facts(*ways, checkpoints=(5,)), keep_versions=2, grace_s=10)
    assert dropped(planned) == {(n - 1, n) for n in range(6, 17)}


def test_what_is_young_stays():
    ways = [*chain(8), way(0, 4, 500, key="ways/a")]
    young = [msgspec.structs.replace(each, modified=995.0) if each.key else each for each in ways]
    assert dropped(plan(facts(*ways), keep_versions=1, grace_s=10)) == {(0, 4)}
    assert dropped(plan(facts(*young), keep_versions=1, grace_s=10)) == set()


def test_a_young_version_keeps_its_whole_path():
    ways = [*chain(12), way(-1, 10, 100, key="ways/a")]
    ways[7] = msgspec.structs.replace(ways[7], modified=995.0)
    planned = plan(facts(*ways), keep_versions=1, grace_s=10)
    assert dropped(planned) == {(7, 8), (8, 9), (9, 10)}


def test_packs_of_a_publish_on_its_way_are_not_touched():
    on_the_way = "packs/0000000009-00000000-0-0"
    old = "packs/0000000005-00000000-7-0"
    known = facts(*chain(9))
    infos = {**known.packs, **{key: ObjectInfo(key, 5, 0.0) for key in (on_the_way, old)}}
    planned = plan(msgspec.structs.replace(known, packs=infos), keep_versions=1, grace_s=10)
    assert [each.key for each in planned.doomed] == [old]
    assert planned.doomed[0].reason == "of no version"


def test_packs_that_still_arrive_keep_their_older_brothers():
    first, last = "packs/0000000005-00000000-anchor-0", "packs/0000000005-00000000-anchor-1"
    known = facts(*chain(9))
    infos = {**known.packs, first: ObjectInfo(first, 5, 0.0), last: ObjectInfo(last, 5, 999.0)}
    assert not plan(msgspec.structs.replace(known, packs=infos), keep_versions=1, grace_s=10).doomed


def test_keys_that_are_nobodys_are_left_alone():
    known = facts(*chain(9))
    infos = {**known.packs, "packs/readme.txt": ObjectInfo("packs/readme.txt", 5, 0.0)}
    assert not plan(msgspec.structs.replace(known, packs=infos), keep_versions=1, grace_s=10).doomed


def test_a_zombies_version_goes():
    planned = plan(facts(*chain(5), way(1, 2, key="z", counts=False)), keep_versions=9, grace_s=10)
    assert [(each.way.edge, each.reason) for each in planned.drop] == [((1, 2), "a replaced trainer's")]
    assert planned.tombstone(0, 0.0).edges == (), "the version's other way goes on"


def test_nothing_is_given_up_while_a_newest_version_can_not_be_reached():
    ways = [each for each in chain(10) if each.version != 4]  # its manifest can't be read, say
    planned = plan(
        facts(*ways, way(0, 3, 1, key="ways/a"), unreadable=frozenset({4})), keep_versions=2, grace_s=10
    )
    assert not planned.drop
    assert "can't be reached" in planned.notes[0]


def test_packs_of_an_unreadable_record_stay():
    known = facts(*chain(10), unreadable=frozenset({4}))
    key = "packs/0000000004-00000000-9-0"
    infos = {**known.packs, key: ObjectInfo(key, 5, 0.0)}
    assert not plan(msgspec.structs.replace(known, packs=infos), keep_versions=2, grace_s=10).doomed


def announced(*versions: int, modified: float = 900.0) -> StoredTombstone:
    tombstone = Tombstone(
        0,
        keys=tuple(f"packs/{n:010}-00000000-0-0" for n in versions),
        edges=tuple((n - 1, n) for n in versions),
        versions=versions,
    )
    return StoredTombstone(tombstone, modified)


def test_what_was_announced_is_swept_after_the_grace_and_not_before():
    ways = [*chain(10), way(0, 8, 20, key="ways/a")]
    for grace_s, swept in ((99.0, True), (101.0, False)):
        planned = plan(facts(*ways, tombstones=(announced(2, 3),)), keep_versions=2, grace_s=grace_s)
        first, second = (planned.sweep, planned.waiting) if swept else (planned.waiting, planned.sweep)
        assert [pack_group(each.key)[0] for each in first] == [2, 3]
        assert not second
        assert (1, 2) not in dropped(planned), "it is not announced twice"


def test_a_reader_that_came_alive_rescues_its_way():
    ways = [*chain(10), way(0, 8, 20, key="ways/a")]
    known = facts(*ways, tombstones=(announced(2, 3, 4, 5, 6, 7, 8),), readers=((5,),))
    planned = plan(known, keep_versions=2, grace_s=10)
    assert {each.way.edge for each in planned.rescued} >= {(5, 6), (6, 7), (7, 8)}
    assert "packs/0000000007-00000000-0-0" not in {each.key for each in planned.sweep}
    after = fold([*known.tombstones, StoredTombstone(planned.tombstone(1, 0.0), 1000.0)])
    assert (6, 7) not in after.edges
    assert "packs/0000000007-00000000-0-0" not in after.keys


# ---------------------------------------------------------------- in a store


def test_two_phases_leave_every_kept_version_reachable(tmp_path):
    history = run_of(tmp_path)
    before = packs(history)
    first = collect(history.store, CONFIG)
    assert first.doomed
    assert packs(history) == before, "the first gc only announces"
    assert {edge.key for edge in list_edges(history.store)}.isdisjoint(first.tombstone(0, 0.0).ways)
    later(history, 50)
    assert not collect(history.store, CONFIG).sweep
    later(history, 51)
    last = collect(history.store, CONFIG)
    assert (
        before - packs(history) == {each.key for each in first.doomed} == {each.key for each in last.sweep}
    )
    for version in (0, 17, 18, 19):
        assert reachable(history, version), version
    assert not collect(history.store, CONFIG).sweep
    assert not collect(history.store, CONFIG).doomed


def test_a_dry_run_plans_the_same_and_changes_nothing(tmp_path):
    history = run_of(tmp_path)
    store = history.store
    assert isinstance(store, MemoryStore)
    before = dict(store.objects)
    dry = collect(store, CONFIG, dry_run=True)
    assert store.objects == before
    assert collect(store, CONFIG) == dry


def test_a_live_readers_way_outlives_gc_and_goes_when_it_left(tmp_path):
    history = run_of(tmp_path)
    write_beat(history.store, ReaderBeat("w", (2,), 1e9))
    for _ in range(2):
        collect(history.store, CONFIG)
        later(history, 101)
    assert reachable(history, 19, held=2)
    assert find_path(history.store, history.manifests[19], 2, avoid=dead_edges(history.store)).start == 2
    drop_beat(history.store, "w")
    for _ in range(2):
        collect(history.store, CONFIG)
        later(history, 101)
    assert (2, 3) in dead_edges(history.store)
    assert reachable(history, 19, held=2), "by way of an anchor"


def test_a_reader_that_comes_between_the_phases_finds_its_way(tmp_path):
    history = run_of(tmp_path)
    collect(history.store, CONFIG)
    assert (2, 3) in dead_edges(history.store)
    write_beat(history.store, ReaderBeat("w", (2,), 1e9))
    later(history, 101)
    assert collect(history.store, CONFIG).rescued
    assert (2, 3) not in dead_edges(history.store)
    later(history, 101)
    collect(history.store, CONFIG)
    assert find_path(history.store, history.manifests[19], 2, avoid=dead_edges(history.store)).start == 2
    assert reachable(history, 19, held=2)


def test_a_reader_that_was_away_goes_around_what_is_gone(tmp_path, caplog):
    """It holds version 2; the chain from there was collected, the way by the anchor is left."""
    history = run_of(tmp_path)
    reader = Subscriber(history.store, history.run, tmp_path / "cache", CONFIG)
    reader.fetch(history.manifests[2])
    for _ in range(2):
        collect(history.store, CONFIG)
        later(history, 101)
    local = reader.fetch(history.manifests[19])
    assert same_state(state_of(history.run, local.shards), history.states[19])
    assert len([each for each in caplog.records if "a way is of no use" in each.message]) == 1


def test_a_checkpoints_version_can_still_be_the_base_of_an_empty_delta(tmp_path):
    history = run_of(tmp_path)
    history.store.put("checkpoints/00000000-0000000050.json", b'{"progress": {"version": 5, "step": 50}}')
    for _ in range(2):
        collect(history.store, CONFIG)
        later(history, 101)
    assert reachable(history, 5)


def test_a_checkpoint_that_can_not_be_read_stops_gc_before_anything_is_deleted(tmp_path):
    history = run_of(tmp_path)
    history.store.put("checkpoints/00000000-0000000050.json", b"{}")
    before = packs(history)
    with pytest.raises(Corrupt, match="00000000-0000000050.json"):
        collect(history.store, CONFIG)
    assert packs(history) == before


def test_old_versions_are_not_read_again_once_they_are_gone(tmp_path):
    history = run_of(tmp_path)
    for _ in range(2):
        collect(history.store, CONFIG)
        later(history, 101)
    store = ScriptedStore(history.store)
    collect(store, CONFIG)
    assert ("get", lineage.version_key(5)) not in store.calls
    assert ("get", lineage.version_key(19)) in store.calls


@pytest.mark.parametrize("operation", ["put_if_absent", "delete", "get", "list_after"])
def test_a_gc_that_fails_anywhere_is_completed_by_the_next(tmp_path, operation):
    """It is stopped at its 1st, 2nd, 3rd … operation of a kind, in both phases; kept versions stay reachable."""
    clean = run_of(tmp_path / "clean", 13)
    for _ in range(2):
        collect(clean.store, CONFIG)
        later(clean, 101)
    for nth in (0, 1, 2, 3, 5, 8):
        history = run_of(tmp_path / str(nth), 13)
        for _ in range(3):
            store = Failing(history.store, operation, nth)
            with contextlib.suppress(Crash):
                collect(store, CONFIG)
            for version in (0, 10, 11, 12):
                assert reachable(history, version), (nth, version)
            later(history, 101)
        for _ in range(2):
            collect(history.store, CONFIG)
            later(history, 101)
        assert packs(history) == packs(clean)


class Crash(Exception):
    pass


class Failing(ScriptedStore):
    """The `nth` operation of a kind ends the process, so to speak."""

    def __init__(self, inner, operation: str, nth: int) -> None:
        super().__init__(inner)
        self._operation, self._left = operation, nth

    def _count(self, operation: str) -> None:
        if operation == self._operation:
            self._left -= 1
            if self._left < 0:
                raise Crash

    def put_if_absent(self, key, data) -> None:
        self._count("put_if_absent")
        self.inner.put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._count("delete")
        self.inner.delete(key)

    def get(self, key, start=0, length=None) -> bytes:
        self._count("get")
        return self.inner.get(key, start, length)

    def list_after(self, prefix, after=""):
        self._count("list_after")
        return self.inner.list_after(prefix, after)


def test_of_two_collectors_the_second_sees_what_the_first_announced(tmp_path):
    history = run_of(tmp_path)
    store = ScriptedStore(history.store)
    store.on("put_if_absent", "gc/", lambda: collect(history.store, CONFIG))
    planned = collect(store, CONFIG)
    assert not planned.doomed
    assert len(gc.read_tombstones(history.store)) == 1


def test_our_own_retried_announcement_is_carried_out(tmp_path):
    history = run_of(tmp_path)
    store = ScriptedStore(history.store)
    store.on("put_if_absent", "gc/", raises(AlreadyExists("retried")), lost_answer=True)
    assert collect(store, CONFIG).doomed
    assert len(gc.read_tombstones(history.store)) == 1


def test_a_tombstone_that_can_not_be_read_costs_space_and_nothing_else(tmp_path):
    history = run_of(tmp_path)
    collect(history.store, CONFIG)
    history.store.put(gc.tombstone_key(0), b"{")
    later(history, 101)
    collect(history.store, CONFIG)
    for version in (0, 17, 18, 19):
        assert reachable(history, version)


def test_a_run_without_versions_has_no_garbage():
    store = MemoryStore()
    planned = collect(store, CONFIG)
    assert not planned.keep
    assert list(store.list_after("gc/")) == []
    with pytest.raises(NotFound):
        store.get(gc.tombstone_key(0))
