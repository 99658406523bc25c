"""Repeating operations on the store, with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import NotFound, StoreUnavailable
from async_rl.store.retry import FIRST_S, LONGEST_S, Fault, backoff_s, retrying


class Passing(Exception):
    pass


class Final(Exception):
    pass


def translate(error: Exception) -> Fault:
    if isinstance(error, Passing):
        return Fault(StoreUnavailable("can't read x: overloaded", hint="wait"), passing=True)
    return Fault(NotFound("can't read x: there is no such object"), passing=False)


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.closed = False

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return self.closed

    def run(self, operation: Callable[[], str], limit_s: float = 60.0) -> str:
        return retrying(
            operation,
            foreign=(Passing, Final),
            translate=translate,
            limit_s=limit_s,
            pause=self.pause,
            clock=lambda: self.now,
            jitter=lambda: 0.5,
        )


def failing(times: int, error: type[Exception] = Passing) -> Callable[[], str]:
    left = [times]

    def operation() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return operation


def test_an_operation_that_succeeds_is_not_delayed() -> None:
    time = Time()
    assert time.run(failing(0)) == "done"
    assert time.pauses == []


def test_a_passing_error_is_waited_out_with_growing_pauses() -> None:
    time = Time()
    assert time.run(failing(5)) == "done"
    assert time.pauses == sorted(time.pauses)
    assert len(time.pauses) == 5


def test_a_final_error_is_raised_at_once() -> None:
    time = Time()
    with pytest.raises(NotFound):
        time.run(failing(1, Final))
    assert time.pauses == []


def test_at_the_limit_the_error_says_what_was_tried_and_how_often() -> None:
    time = Time()
    with pytest.raises(
        StoreUnavailable, match=r"can't read x: overloaded; tried \d+ times in \d+\.\d s \(wait\)"
    ):
        time.run(failing(10**9), limit_s=10.0)
    assert 5.0 < time.now - 100.0 <= 10.0


def test_a_final_error_after_passing_ones_is_the_one_raised() -> None:
    errors = iter([Passing(), Passing(), Final()])

    def operation() -> str:
        raise next(errors)

    with pytest.raises(NotFound):
        Time().run(operation)


def test_an_error_that_is_not_foreign_goes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        Time().run(failing(1, ZeroDivisionError))


def test_closing_ends_the_waiting() -> None:
    time = Time()
    time.closed = True
    with pytest.raises(StoreUnavailable):
        time.run(failing(10))
    assert len(time.pauses) == 1


@given(attempt=st.integers(0, 10_000), jitter=st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_and_bounded(attempt: int, jitter: float) -> None:
    full = min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 16))
    assert full / 2 <= backoff_s(attempt, jitter) <= full
