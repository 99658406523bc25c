"""The cheapest way to a version, from few requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import WeightsError
from async_rl.weights import lineage, plan
from async_rl.weights.lineage import Manifest, Pack, TableRef, Way
from async_rl.weights.plan import NOTHING, Path, find_path
from async_rl.weights.ways import FurtherWay, write_way
from tests.weights_support import MemoryStore, ScriptedStore

FULL = 1000


def a_way(base: int, nbytes: int, **changes: Any) -> Way:
    table = TableRef(0, 1, "") if base >= 0 else None
    packs = (Pack(f"packs/{base}-{nbytes}", nbytes, "", table),) if nbytes else ()
    return Way(base, packs, nbytes, **changes)


class Run:
    def __init__(self) -> None:
        self.store = ScriptedStore(MemoryStore())

    def version(self, number: int, base: int, nbytes: int, **changes: Any) -> Manifest:
        manifest = Manifest(
            version=number,
            step=number,
            incarnation=0,
            nonce="n",
            parent=base,
            dtype="bfloat16",
            way=a_way(base, nbytes, **changes),
            digest="",
            created=0.0,
        )
        self.store.put(lineage.version_key(number), msgspec.json.encode(manifest))
        return manifest

    def further(self, number: int, base: int, nbytes: int, **changes: Any) -> str:
        return write_way(self.store, FurtherWay(number, 0, a_way(base, nbytes, **changes), 0.0))

    def chain(self, last: int, nbytes: int = 10, spans: dict[int, int] | None = None) -> Manifest:
        """Version 0 full, deltas to `last`, and skips of the given bytes at multiples of their span."""
        newest = self.version(0, -1, FULL)
        for number in range(1, last + 1):
            newest = self.version(number, number - 1, nbytes)
            for span, size in (spans or {}).items():
                if number % span == 0:
                    self.further(number, number - span, size)
        return newest

    def reads(self, prefix: str) -> int:
        return sum(operation == "get" and key.startswith(prefix) for operation, key in self.store.calls)


def shape(path: Path) -> list[int]:
    return [path.start, *(hop.version for hop in path.hops)]


def test_a_reader_one_version_behind_reads_one_delta_and_asks_the_store_nothing() -> None:
    run = Run()
    newest = run.chain(40)
    run.store.calls.clear()
    path = find_path(run.store, newest, 39)
    assert shape(path) == [39, 40]
    assert path.nbytes == 10
    assert not run.store.calls, (
        "over a wide area every request is a round trip more before the version serves"
    )


def test_a_reader_one_version_behind_goes_around_a_delta_that_it_must_avoid() -> None:
    run = Run()
    newest = run.chain(40)
    run.further(40, 38, 15)
    assert shape(find_path(run.store, newest, 39, avoid=frozenset({(39, 40)}))) != [39, 40]


def test_a_reader_that_is_there_reads_nothing() -> None:
    run = Run()
    newest = run.chain(3)
    assert find_path(run.store, newest, 3) == Path(3, ())


def test_a_reader_without_a_version_begins_with_the_oldest_where_there_is_no_anchor() -> None:
    run = Run()
    newest = run.chain(5)
    path = find_path(run.store, newest, None)
    assert shape(path) == [NOTHING, 0, 1, 2, 3, 4, 5]
    assert path.nbytes == FULL + 50


def test_a_reader_without_a_version_begins_with_the_newest_anchor() -> None:
    run = Run()
    newest = run.chain(50)
    run.further(20, -1, FULL)
    run.further(40, -1, FULL)
    assert shape(find_path(run.store, newest, None)) == [NOTHING, *range(40, 51)]


def test_skips_make_a_late_joiner_read_a_handful_of_objects() -> None:
    run = Run()
    newest = run.chain(257, spans={4: 30, 16: 90, 64: 250, 256: 600})
    run.store.calls.clear()
    path = find_path(run.store, newest, 0)
    assert shape(path) == [0, 256, 257]
    assert run.reads("versions/") + run.reads("ways/") <= 6
    assert "from version 0: 256 (+256)" in path.describe()


def test_a_join_after_a_long_chain_reads_the_objects_of_its_path_and_no_more() -> None:
    run = Run()
    newest = run.chain(2050, spans={16: 90, 64: 250, 256: 600})
    run.store.calls.clear()
    path = find_path(run.store, newest, None)
    assert shape(path) == [NOTHING, 0, *range(256, 2049, 256), 2049, 2050]
    assert run.reads("versions/") + run.reads("ways/") <= len(path.hops) + 2


def test_a_full_version_after_a_resume_costs_a_joiner_only_what_follows_it() -> None:
    run = Run()
    run.chain(900)
    newest = run.version(901, -1, FULL)
    for number in range(902, 1001):
        newest = run.version(number, number - 1, 10)
    run.store.calls.clear()
    assert shape(find_path(run.store, newest, None)) == [NOTHING, *range(901, 1001)]
    assert run.reads("versions/") <= 100 + 32


def test_a_planner_that_asks_again_reads_only_what_is_new() -> None:
    run = Run()
    newest = run.chain(70)
    run.store.delete(lineage.version_key(0))
    known: dict[int, Way] = {}
    with pytest.raises(WeightsError):
        find_path(run.store, newest, None, known=known)
    run.store.calls.clear()
    with pytest.raises(WeightsError):
        find_path(run.store, newest, None, known=known)
    assert run.reads("versions/") == 0
    newest = run.version(71, 70, 10)
    with pytest.raises(WeightsError):
        find_path(run.store, newest, None, known=known)
    assert run.reads("versions/") == 1, "version 70's; the newest one's is at hand"
    run.version(0, -1, FULL)
    assert shape(find_path(run.store, newest, None, known=known)) == [NOTHING, *range(72)]


def test_what_a_planner_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_KNOWN_MOST", 20)
    run = Run()
    newest = run.chain(70)
    known: dict[int, Way] = {}
    assert shape(find_path(run.store, newest, None, known=known)) == [NOTHING, *range(71)]
    assert len(known) == 20


def test_an_anchor_is_taken_where_it_is_cheaper_than_the_path_from_what_is_held() -> None:
    run = Run()
    newest = run.chain(300)
    run.further(299, -1, FULL)
    assert shape(find_path(run.store, newest, 10)) == [NOTHING, 299, 300]
    assert shape(find_path(run.store, newest, 290)) == [290, *range(291, 301)]


def test_an_edge_to_avoid_is_gone_around() -> None:
    run = Run()
    newest = run.chain(8, spans={4: 30})
    assert shape(find_path(run.store, newest, 4)) == [4, 8]
    assert shape(find_path(run.store, newest, 4, avoid=frozenset({(4, 8)}))) == [4, 5, 6, 7, 8]
    assert shape(find_path(run.store, newest, 6, avoid=frozenset({(6, 7)})))[:3] == [NOTHING, 0, 4]


def test_where_every_way_is_to_be_avoided_the_error_says_so() -> None:
    run = Run()
    newest = run.chain(2)
    with pytest.raises(WeightsError, match=r"no way leads to version 2 .* from version 1 or from nothing"):
        find_path(run.store, newest, 1, avoid=frozenset({(1, 2)}))


def test_an_older_version_than_the_held_one_is_reached_from_nothing() -> None:
    run = Run()
    run.chain(9)
    assert shape(find_path(run.store, lineage.read_manifest(run.store, 2), 9)) == [NOTHING, 0, 1, 2]


def test_a_full_version_in_the_middle_is_found_when_nothing_else_leads_there() -> None:
    run = Run()
    run.version(0, -1, FULL)
    run.store.delete(lineage.version_key(0))
    run.version(3, -1, FULL)
    for number in range(4, 80):
        run.version(number, number - 1, 10)
    newest = run.version(80, 79, 10)
    avoided = frozenset({(-1, 3)})
    assert shape(find_path(run.store, newest, None)) == [NOTHING, *range(3, 81)]
    with pytest.raises(WeightsError):
        find_path(run.store, newest, None, avoid=avoided)
    run.version(50, -1, FULL)  # a resume whose weights were not those of its parent
    assert shape(find_path(run.store, newest, None, avoid=avoided)) == [NOTHING, *range(50, 81)]


def test_a_version_that_begins_a_new_branch_is_reached_over_its_own_base() -> None:
    run = Run()
    run.chain(10)
    run.version(11, 5, 0)  # resumed from version 5's checkpoint
    newest = run.version(12, 11, 10)
    assert shape(find_path(run.store, newest, 5)) == [5, 11, 12]
    assert shape(find_path(run.store, newest, 10))[0] == NOTHING


def test_a_further_way_that_disappears_between_listing_and_reading_is_gone_around() -> None:
    run = Run()
    newest = run.chain(8, spans={4: 30})
    key = run.further(8, 0, 35)
    run.store.on("get", key, lambda: run.store.delete(key))
    assert shape(find_path(run.store, newest, 0)) == [0, 4, 8]


def test_a_further_way_that_says_something_else_than_its_key_is_gone_around() -> None:
    run = Run()
    newest = run.chain(8, spans={4: 30})
    run.store.put(f"ways/{8:010}-{0:010}-5-{0:08}.json", run.store.get(run.further(8, 0, 35)))
    assert shape(find_path(run.store, newest, 0)) == [0, 8]
    assert find_path(run.store, newest, 0).nbytes == 35


def test_foreign_objects_among_the_ways_are_ignored() -> None:
    run = Run()
    newest = run.chain(2)
    for key in ("ways/readme", "ways/1-2.json", "ways/x-full-1-0.json", "ways/1-2-3-4"):
        run.store.put(key, b"")
    assert shape(find_path(run.store, newest, 0)) == [0, 1, 2]


def test_without_context_small_deltas_are_gone_around() -> None:
    run = Run()
    run.version(0, -1, FULL)
    run.version(1, 0, 5, small=True)
    newest = run.version(2, 1, 5)
    run.further(2, 0, 30)
    assert shape(find_path(run.store, newest, 0)) == [0, 1, 2]
    assert shape(find_path(run.store, newest, 0, context_free=True)) == [0, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 40), st.integers(1, 400)), max_size=30),
    st.integers(-1, 40),
)
def test_every_path_is_whole_and_never_dearer_than_reading_everything_in_order(
    last: int, extra: list[tuple[int, int, int]], held: int
) -> None:
    run = Run()
    newest = run.chain(last)
    for version, base, nbytes in extra:
        if base < version <= last:
            run.further(version, base, nbytes)
    path = find_path(run.store, newest, held if 0 <= held <= last else None)
    at = path.start
    assert at in (held, NOTHING)
    for hop in path.hops:
        assert hop.way.base == at
        at = hop.version
    assert at == last
    assert path.nbytes <= (10 * (last - held) if 0 <= held <= last else FULL + 10 * last)
