"""Questions asked beside a loop."""

from __future__ import annotations

import threading

import pytest

from async_rl.errors import StoreUnavailable
from async_rl.threads import Lookout

LIMIT_S = 10.0


def test_an_answer_is_given_once_and_then_asked_for_again():
    asked: list[int] = []
    lookout = Lookout(lambda: asked.append(0) or len(asked), 0.0)
    assert lookout.answer() is None  # asked
    joined(lookout)
    assert lookout.answer() == 1
    assert lookout.answer() is None
    joined(lookout)
    assert lookout.answer() == 2


def test_whoever_asks_never_waits_and_asks_one_question_at_a_time():
    gate, asked = threading.Event(), []
    lookout = Lookout(lambda: (asked.append(0), gate.wait(LIMIT_S)), 0.0)
    for _ in range(5):
        assert lookout.answer() is None
    gate.set()
    joined(lookout)
    assert lookout.answer() is not None and len(asked) == 1


def test_what_the_question_raises_the_next_answer_raises_and_then_it_is_asked_again():
    outcomes = iter([StoreUnavailable("away")])
    lookout = Lookout(lambda: raise_or(next(outcomes, None)), 0.0)
    lookout.answer()
    joined(lookout)
    with pytest.raises(StoreUnavailable):
        lookout.answer()
    lookout.answer()
    joined(lookout)
    assert lookout.answer() == "well"


def test_nothing_is_asked_before_its_time():
    lookout = Lookout(lambda: pytest.fail("asked too early"), 3600.0)
    assert lookout.answer() is None and lookout._thread is None


def raise_or(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "well"


def joined(lookout: Lookout) -> None:
    thread = lookout._thread
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
