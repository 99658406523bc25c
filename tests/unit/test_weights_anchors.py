"""When a new anchor is due."""

from __future__ import annotations

import msgspec

from async_rl.weights.anchors import Anchors, Spent, due
from async_rl.weights.config import WeightsConfig
from async_rl.weights.garbage import Tombstone
from async_rl.weights.gc import GC
from async_rl.weights.lineage import read_manifest
from tests.weights_support import History

FULL = 1000
CONFIG = WeightsConfig(anchor_every=100, anchor_cost=0.2)


def never() -> int:
    raise AssertionError("the path's cost was asked for, which takes requests")


def test_an_anchor_is_due_when_it_is_earned_and_the_path_is_long():
    assert due(10, Spent(deltas=1400, fulls=1), lambda: FULL + 201, FULL, CONFIG)
    assert not due(10, Spent(deltas=1400, fulls=1), lambda: FULL + 199, FULL, CONFIG)


def test_an_anchor_that_the_deltas_have_not_earned_is_not_written():
    assert not due(10, Spent(deltas=1399, fulls=1), never, FULL, CONFIG)


def test_after_anchor_every_versions_an_anchor_is_due_whatever_it_costs():
    assert due(100, Spent(0, 5), never, FULL, CONFIG)


def test_what_garbage_collection_has_announced_is_on_no_path_that_is_reckoned_with(tmp_path):
    """A worker that joins can't go that way, so the trainer must not think it could."""
    history = History(tmp_path)
    history.full(history.random())
    for _ in range(4):
        newest = history.delta(history.changed(0.5))
    history.anchor(2)
    config = WeightsConfig(skip_spans=(5,), anchor_cost=1e-9)
    anchors = Anchors(history.store, config, full_bytes=1)
    for version in range(newest.version + 1):
        anchors.committed(read_manifest(history.store, version))
    short = anchors.due(newest)
    tombstone = Tombstone(0, edges=((2, 3),))
    history.store.put(f"{GC}{0:08}.json", msgspec.json.encode(tombstone))
    assert short and not anchors.due(newest)  # no path is left that could be too long
