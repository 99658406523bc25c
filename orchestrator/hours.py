"""The orchestrator's clock: it stands still while nobody could be heard.

A full disk is waited for, a process is stopped, a machine sleeps: for minutes no heartbeat and no group was taken,
however punctual they were. By the clock on the wall every worker would be silent and every lease expired the moment
we are back, and each prompt a failure nearer to being given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from async_rl.log import get_logger

__all__ = ["AWAY_S", "TURN_S", "Hours"]

log = get_logger(__name__)

AWAY_S = 1.0
"""Between two turns. A turn waits a tenth of a second, and handles a few hundred messages in another."""
TURN_S = 0.1
"""What a turn after an absence counts for."""


class Hours:
    """`clock` without the absences, as far as `turn` has seen them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._away_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self._away_s

    def turn(self) -> float:
        """The time of the turn that begins now; the last one began at the call before."""
        now = self._clock()
        gap_s, self._last = now - self._last, now
        if gap_s > AWAY_S:
            self._away_s += gap_s - TURN_S
            log.warning("away for a while; nobody's silence in it counts", away_s=round(gap_s, 1))
        return now - self._away_s
