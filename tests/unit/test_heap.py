"""The collector goes over what a loop makes, not over what was there before it."""

from __future__ import annotations

import gc

from async_rl.heap import settle_heap


def test_what_is_there_when_the_heap_is_settled_is_not_looked_through_again() -> None:
    before = [["made at the start"]]
    try:
        settle_heap()
        after = [["made in the loop"]]
        known = {id(each) for each in gc.get_objects()}
        assert id(after) in known
        assert id(before) not in known
    finally:
        gc.unfreeze()
