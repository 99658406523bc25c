"""Repeat an operation on the store while what goes wrong may pass, inside a limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from async_rl.errors import StoreError, StoreUnavailable
from async_rl.log import get_logger

__all__ = ["Fault", "backoff_s", "retrying"]

T = TypeVar("T")
log = get_logger(__name__)

FIRST_S = 0.1
LONGEST_S = 5.0
"""The first pause is about a round trip to another region; the longest lets a store that comes back be
noticed well inside the default limit of 60 s."""


class Fault(NamedTuple):
    """A foreign error in our terms, and whether trying again can help."""

    error: StoreError
    passing: bool


def backoff_s(attempt: int, jitter: float) -> float:
    """The pause after attempt 0, 1, …: doubling, of which at least half is waited; `jitter` in [0, 1)."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 16)) * (0.5 + jitter / 2)


def retrying(
    operation: Callable[[], T],
    *,
    foreign: tuple[type[Exception], ...],
    translate: Callable[[Exception], Fault],
    limit_s: float,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
) -> T:
    """`operation()`, repeated while it raises a `foreign` error that `translate` calls passing.

    Raises the translated error; where a passing one outlives the limit, StoreUnavailable. `pause` may
    return a true value to say that there is no use in waiting (the store is being closed).
    """
    began = clock()
    attempt = 0
    while True:
        try:
            return operation()
        except foreign as error:
            fault = translate(error)
            if not fault.passing:
                raise fault.error from error
            delay = backoff_s(attempt, jitter())
            attempt += 1
            if clock() + delay > began + limit_s or pause(delay):
                tried = f"{attempt} time{'s' * (attempt > 1)} in {clock() - began:.1f} s"
                raise StoreUnavailable(
                    f"{fault.error.message}; tried {tried}",
                    hint=fault.error.hint,
                ) from error
            log.debug("store operation repeated", attempt=attempt, error=fault.error.message)
