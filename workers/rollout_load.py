"""How many leases a worker holds at once: found from what its engine says of itself, not set.

    looks at the engine, a few a second ──► a span of them ──► level (leases) ──► Credit, where it has changed

    what the span showed                                           what follows
    sequences were put out of a full KV cache                      as many seats as now run; the level falls to fit
    more than a group's sequences waited, at every look            the level falls by the groups that waited
    seats stayed empty although we held what we may                the level grows by the groups that fill them
    nothing of this                                                the level stays; seats come back one by one

A seat is a place for a sequence in the engine. Rewards, the way to the orchestrator and back, and the last long
sample of a group all keep leases without a sequence in a seat; how many more leases that takes is not computed, it
shows as empty seats. What waits in the engine's own queue only grows old there, so it is kept to about one group:
enough that no seat is empty while the next lease is on its way.

A standing queue is the least that waited at any look of the span (a burst is none), as in CoDel (RFC 8289). One
change a span, and no span is shorter than a change takes to show.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["LOOK_S", "LoadControl", "Look"]

LOOK_S = 0.25
"""Between two looks. An engine's numbers cost microseconds; four make the shortest span."""
SPAN_S = 1.0
"""The shortest span between two changes: some steps even of a large model."""
TURNAROUNDS = 2.0
"""And so many times as long as a lease takes to come back: a change has shown by then."""
FULL = 0.9
"""Share of the KV cache, on average, from which on nothing is added: what runs still grows into the rest. Sequences
that are put out of it cost a prefill, and say so themselves."""
EMPTY = 1 / 16
"""Share of the seats that may be empty, on average: less is not worth a waiting group."""


class Look(Struct, frozen=True):
    """The worker at one moment."""

    held: int  # leases in its hands, or finished and not acknowledged
    running: int  # sequences that the engine generates
    queued: int  # and that wait in it
    cache_used: float = 0.0  # share of its KV cache
    preempted: int = 0  # sequences put out of the cache, since the start
    rewards_wait: bool = False  # rewards wait for their turn: more groups would wait there, too
    turnaround_s: float = 0.0  # from a finished group to its Ack, with which the next lease comes


class _Span:
    """What the looks since the last decision have in common."""

    def __init__(self, since: float, preempted: int) -> None:
        self.since = since
        self.preempted = preempted  # when it began
        self.looks = 0
        self.least_queued = 1 << 60
        self.used = 0.0  # of the cache, summed over the looks
        self.empty = 0  # seats, summed over the looks
        self.held_all = 0  # looks at which we held as many leases as we may
        self.rewards_wait = False


class LoadControl:
    """`level`: leases to hold, what the next Credit says. Pure: the time is passed in."""

    def __init__(
        self,
        *,
        group_size: int,
        sequences: int,
        max_groups: int = 0,
        cache_tokens: int = 0,
        tokens: int = 0,
    ) -> None:
        """`sequences`: that the engine generates at once, at most. `max_groups`: a limit on the level; 0: one group
        per seat. `cache_tokens`, `tokens`: size of the KV cache, and what one sequence may need of it; 0: unknown."""
        self._size = group_size
        self._most_seats = max(1, sequences)
        self._most = max_groups or self._most_seats
        fit = cache_tokens // tokens if cache_tokens and tokens else self._most_seats
        self.seats = min(self._most_seats, max(fit, group_size))
        self.level = max(1, min(self._most, self.seats // group_size))
        self._span: _Span | None = None

    def look(self, look: Look, now: float) -> int:
        """The level, after this look."""
        span = self._span = self._span or _Span(now, look.preempted)
        span.looks += 1
        span.least_queued = min(span.least_queued, look.queued)
        span.used += look.cache_used
        span.empty += 0 if look.queued else max(0, self.seats - look.running)
        # Within an eighth: a lease that was lost on its way must not stop the growth.
        span.held_all += look.held >= self.level - self.level // 8
        span.rewards_wait |= look.rewards_wait
        if span.looks > 1 and now - span.since >= max(SPAN_S, TURNAROUNDS * look.turnaround_s):
            self._decide(span, look)
            self._span = _Span(now, look.preempted)
        return self.level

    def _decide(self, span: _Span, look: Look) -> None:
        if look.preempted > span.preempted:
            self.seats = max(1, min(self.seats, look.running))
            too_many = max(0, look.running + look.queued - self.seats)
            self._lower(look.held - too_many // self._size)
        elif span.least_queued > self._size:
            self._lower(look.held - span.least_queued // self._size)
        elif span.used < FULL * span.looks:
            self.seats = min(self._most_seats, self.seats + max(1, self.seats // 16))
            self._raise(span)

    def _raise(self, span: _Span) -> None:
        if span.rewards_wait or 2 * span.held_all <= span.looks:
            return  # more leases would wait for rewards, or we are given fewer than we may hold
        empty = span.empty / span.looks
        if empty >= max(1.0, min(self._size / 2, EMPTY * self.seats)):
            more = max(1, min(self.level, int(empty) // self._size))
            self.level = min(self._most, self.level + more)

    def _lower(self, level: int) -> None:
        self.level = max(1, min(self.level, level))
