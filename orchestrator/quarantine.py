"""Workers that get nothing for a while, and why. Part of the ledger: it changes by records, live and when a journal
is played. Pure, time passed in.

        numbers that do not fit                    quarantine_s, doubled each time
    ───────────────────────────────► quarantined ───────────────────────────────► may try again

A worker is known by its name. With keys a name can't be chosen freely; without them a restarted process may come
under another one, and is then found anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from orchestrator.records import Kept

__all__ = ["Quarantine"]

LONGEST_S = 86_400.0
REMEMBERED = 1000
"""Released workers whose number of times is remembered."""


class _Entry(msgspec.Struct):
    reason: str
    times: int
    until: float | None  # None: it was released


class Quarantine:
    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, worker: str) -> bool:
        entry = self._entries.get(worker)
        return entry is not None and entry.until is not None

    def __iter__(self) -> Iterator[str]:
        return (worker for worker in self._entries if worker in self)

    def reason(self, worker: str) -> str:
        return self._entries[worker].reason

    def left_s(self, worker: str, now: float) -> float:
        until = self._entries[worker].until
        return max(0.0, until - now) if until is not None else 0.0

    def over(self, now: float) -> list[str]:
        """Whose time is over."""
        return [worker for worker in self if self.left_s(worker, now) <= 0]

    # ---------------------------------------------------------------- by records only

    def add(self, worker: str, reason: str, now: float) -> None:
        before = self._entries.pop(worker, None)
        times = before.times + 1 if before is not None else 1
        self._entries[worker] = _Entry(reason, times, now + self._length_s(times))

    def release(self, worker: str) -> None:
        if worker in self:
            self._entries[worker].until = None
        released = [each for each in self._entries if each not in self]
        for each in released[: max(0, len(released) - REMEMBERED)]:
            del self._entries[each]

    def kept(self) -> tuple[Kept, ...]:
        return tuple(
            Kept(worker, entry.reason, entry.times, entry.until is not None)
            for worker, entry in self._entries.items()
        )

    def restore(self, kept: Iterable[Kept], now: float) -> None:
        for each in kept:
            until = now + self._length_s(each.times) if each.now else None
            self._entries[each.worker] = _Entry(each.reason, each.times, until)

    def _length_s(self, times: int) -> float:
        return max(self._quarantine_s, min(LONGEST_S, self._quarantine_s * 2.0 ** min(times - 1, 40)))
