"""When a new anchor is due."""

from __future__ import annotations

import pytest

from async_rl.weights.anchors import Spent, due
from async_rl.weights.config import WeightsConfig

FULL = 1000
CONFIG = WeightsConfig(anchor_every=100, anchor_cost=0.2)


def never() -> int:
    raise AssertionError("the path's cost was asked for, which takes requests")


def test_an_anchor_is_due_when_it_is_earned_and_the_path_is_long():
    assert due(10, Spent(900, 2000, 1), lambda: FULL + 201, FULL, CONFIG)
    assert not due(10, Spent(900, 2000, 1), lambda: FULL + 199, FULL, CONFIG)


@pytest.mark.parametrize(
    "spent",
    [Spent(since=600, total=9000, fulls=1), Spent(since=900, total=900, fulls=1)],
    ids=["too little since the last one", "too little for the full states there are"],
)
def test_an_anchor_that_the_deltas_have_not_earned_is_not_written(spent):
    assert not due(10, spent, never, FULL, CONFIG)


def test_after_anchor_every_versions_an_anchor_is_due_whatever_it_costs():
    assert due(100, Spent(0, 0, 5), never, FULL, CONFIG)
