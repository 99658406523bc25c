"""Compaction, garbage collection and verification against a real S3 server, with its own clock and listings."""

from __future__ import annotations

from pathlib import Path

from async_rl.store import open_store
from async_rl.weights.check import verify_all
from async_rl.weights.compactor import Compactor
from async_rl.weights.config import WeightsConfig
from async_rl.weights.gc import collect, dead_edges
from async_rl.weights.readers import ReaderBeat, write_beat
from async_rl.weights.report import list_rows, usage
from async_rl.weights.subscriber import Subscriber
from tests.weights_support import History, same_state, state_of

CONFIG = WeightsConfig(skip_spans=(4, 16), keep_versions=2, gc_grace_s=0.0)
SHAPES = {"embed.weight": (100, 20), "norm.weight": (7,)}


def test_a_run_is_compacted_collected_and_still_right(s3_url: str, tmp_path: Path):
    store = open_store(s3_url)
    history = History(tmp_path, store, SHAPES)
    history.full(history.random())
    for number in range(1, 22):
        history.delta(history.changed(0.01, seed=number))
    written = Compactor(store, history.run, CONFIG, tmp_path / "scratch").run()
    assert [(each.base, each.version) for each in written if each.kept] == [
        *((n, n + 4) for n in range(0, 20, 4)),
        (0, 16),
    ]
    write_beat(store, ReaderBeat("w", (9,), 3600.0))
    reader = Subscriber(store, history.run, tmp_path / "cache", CONFIG)
    reader.fetch(history.manifests[9])
    late = Subscriber(store, history.run, tmp_path / "late", CONFIG)
    late.fetch(history.manifests[6])

    first = collect(store, CONFIG)
    assert first.doomed
    assert {each.key for each in first.doomed} <= {info.key for info in store.list_after("packs/")}
    second = collect(store, CONFIG)
    assert {each.key for each in second.sweep} == {each.key for each in first.doomed}
    assert {info.key for info in store.list_after("packs/")}.isdisjoint(each.key for each in second.sweep)

    assert (9, 10) not in dead_edges(store), "a live reader holds version 9"
    assert (6, 7) in dead_edges(store)
    for each, start in ((reader, "from version 9"), (late, "from nothing")):
        local = each.fetch(history.manifests[21])
        assert same_state(state_of(history.run, local.shards), history.states[21])
        assert local.path.startswith(start)
        each.close()
    found = verify_all(store, history.run, tmp_path / "verify")
    assert not found.wrong
    assert len(list_rows(store, history.run)) == 22
    used = {part.kind: part.nbytes for part in usage(store, history.run).parts}
    assert used.keys().isdisjoint({"of no version", "announced as garbage"})
