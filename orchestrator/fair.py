"""Whose turn is it to get a lease? Pure.

A worker says how many leases it can hold. That is its word: one that says a million, and finishes none, must not keep
the others waiting. So it is good for as many as it has shown to finish: a few at first, one more with each group that
was accepted (up to twice what it then held), one less with each lease that it held until it expired, was too old, or
was lost.

    1  the relatively emptiest of those that hold less than they are good for; among equals, who waited longest
    2  where none of these can take a lease: likewise one that holds as many, but is good for what a newcomer is; up
       to its capacity, and not of what is left to the others: to each an equal share of all leases that there may be,
       or twice its capacity, if that is less
    3  one whose leases all came to nothing rests (roster.py), if others are here that do not; where none of these
       serves a version that gets leases, it may try one

A worker that is alone may have them all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from orchestrator.roster import FIRST_LEASES, Roster, Worker

__all__ = ["Emptiest"]

MOST_OUTDATED = 64
"""Entries of Emptiest more than twice the workers in it, before they are looked through: a millisecond for a thousand
workers."""


class Emptiest:
    """Workers that can take a lease, in the order above.

    Kept from message to message, by the version they serve: a fleet is a thousand workers, few of them change with
    each message, and whether there is a lease for a worker depends on its version alone. What is in a heap is what
    was true when the worker was last touched; it is looked at again when its turn comes. An entry whose turn never
    comes (of a version that gets no leases any more, or of a worker that became emptier) goes when there are as many
    of them as of the others."""

    def __init__(self, roster: Roster, leases: Callable[[str], int]) -> None:
        """`leases`: how many a worker holds."""
        self._roster, self._leases = roster, leases
        self._heaps: dict[int, list[_Entry]] = {}  # by version
        self._newest: dict[str, _Entry] = {}  # of each worker's entries the one that counts
        self._entries = 0  # in all heaps
        self._most: Callable[[], float] = lambda: math.inf
        self._kept: tuple[float, float] | None = None  # an equal share; what is left to all that don't rest

    def __len__(self) -> int:
        """Entries that are kept, whether they count or not."""
        return self._entries

    def touch(self, worker: Worker) -> None:
        """Something about it may have changed."""
        self._touch(worker)
        if self._entries > 2 * len(self._newest) + MOST_OUTDATED:
            self._make_again()

    def touch_all(self, names: Iterable[str]) -> None:
        """Those of them that are known."""
        for name in names:
            worker = self._roster.get(name)
            if worker is not None:
                self.touch(worker)

    def turn(self, most: Callable[[], float]) -> None:
        """What follows are the grants of one turn. `most`: leases that there may be, those that run included; asked
        only where shares matter. Who is here, and what it can hold, does not change meanwhile."""
        self._most, self._kept = most, None

    def pop(self, wanted: Callable[[int], bool]) -> Worker | None:
        """The first of those whose version is `wanted`, out of its heap until it is touched."""
        passed_over: list[_Entry] = []
        try:
            while True:
                first: _Entry | None = None
                for version in list(self._heaps):
                    if wanted(version) and (top := self._top(version)) and (first is None or top < first):
                        first = top
                if first is None:
                    return None
                if self._heaps[first.version][0] is not first:
                    continue  # while other versions were looked at, one was seen to have come to this one
                worker = self._roster.get(first.name)
                self._drop_first(self._heaps[first.version])
                if worker is not None and first.beyond and not self._within_share(worker, wanted):
                    passed_over.append(first)  # in this turn; in the next one it may be alone
                    continue
                del self._newest[first.name]
                return worker
        finally:
            for entry in passed_over:
                self._push(entry)

    def _touch(self, worker: Worker) -> None:
        entry = self._entry(worker)
        if entry is None:
            self._newest.pop(worker.name, None)
        elif self._newest.get(worker.name) != entry:
            self._newest[worker.name] = entry
            self._push(entry)

    def _within_share(self, worker: Worker, wanted: Callable[[int], bool]) -> bool:
        """Whether one more lease leaves as many to each of the others."""
        if self._kept is None:
            takers = [each for each in self._roster.here if each.takes_leases and each.shown]
            equal = self._most() / max(1, len(takers))
            self._kept = equal, sum(_kept_for(each, equal) for each in takers)
        equal, kept = self._kept
        others = kept - (_kept_for(worker, equal) if worker.shown else 0.0)
        if not others:
            return True
        if not worker.shown and not self._leases(worker.name):
            return not any(
                each.takes_leases and each.shown and wanted(each.version) for each in self._roster.here
            )
        return worker.shown >= FIRST_LEASES and self._leases(worker.name) < self._most() - others

    def _make_again(self) -> None:
        self._heaps, names, self._newest = {}, list(self._newest), {}
        self._entries = 0
        for worker in map(self._roster.get, names):
            if worker is not None:
                self._touch(worker)

    def _push(self, entry: _Entry) -> None:
        heapq.heappush(self._heaps.setdefault(entry.version, []), entry)
        self._entries += 1

    def _drop_first(self, heap: list[_Entry]) -> None:
        heapq.heappop(heap)
        self._entries -= 1

    def _top(self, version: int) -> _Entry | None:
        """The first entry that is still true."""
        heap = self._heaps[version]
        while heap:
            entry = heap[0]
            if self._newest.get(entry.name) is entry:
                worker = self._roster.get(entry.name)
                now = None if worker is None else self._entry(worker)
                if now == entry:
                    return entry
                del self._newest[entry.name]
                if worker is not None:
                    self._touch(worker)  # its leases have ended meanwhile, or it can take none now
            if heap[0] is entry:
                self._drop_first(heap)
        del self._heaps[version]
        return None

    def _entry(self, worker: Worker) -> _Entry | None:
        capacity = worker.capacity
        if not capacity or not worker.takes_leases or (leases := self._leases(worker.name)) >= capacity:
            return None
        good_for = min(capacity, worker.shown)  # its `good_for`
        beyond = leases >= good_for
        load = leases / (capacity if beyond else good_for)
        return _Entry(beyond, load, worker.served, worker.name, worker.version)


def _kept_for(worker: Worker, equal: float) -> float:
    """Twice: groups that it has finished and that no step has yet keep their slots."""
    return min(equal, 2.0 * worker.capacity)


class _Entry(NamedTuple):
    beyond: bool  # it holds what it is good for
    load: float
    served: int
    name: str
    version: int
