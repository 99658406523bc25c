"""Leases: who generates which group, until when.

A lease ends in exactly one way: its result arrives, it fails, it expires, or its worker leaves. Only growth
in generated tokens extends it: a worker that was stopped (SIGSTOP, a dead network) keeps nothing by having
been busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import msgspec

from async_rl.wire import Key

__all__ = ["Held", "LeaseTable", "name_of"]


class Held(msgspec.Struct, gc=False):
    """One group in one worker's hands."""

    lease: int
    key: Key
    worker: str
    version: int  # that the worker served when it got the lease: no token will be of an older one
    deadline: float
    tokens: int = 0
    begun: int = -1  # its first token is of this version, or of an older one; -1: nothing was heard of one
    missing: int = 0  # heartbeats in a row that did not name it
    missed: float = float("-inf")  # when the last of these came, or it was granted


class LeaseTable:
    """`ids` is shared by all tables of one orchestrator, so a number names one lease only."""

    def __init__(self, ids: Iterator[int], lease_s: float) -> None:
        self._ids = ids
        self._lease_s = lease_s
        self._held: dict[int, Held] = {}
        self._of_worker: dict[str, set[int]] = defaultdict(set)
        self.by_worker: Mapping[str, Collection[int]] = self._of_worker
        """To look at, some times for each group. Who holds none is not in it."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def count(self, worker: str) -> int:
        return len(self._of_worker.get(worker, ()))

    def next_id(self) -> int:
        return next(self._ids)

    def grant(self, lease: int, key: Key, worker: str, version: int, now: float) -> Held:
        held = Held(lease, key, worker, version, now + self._lease_s, missed=now)
        self._held[held.lease] = held
        self._of_worker[worker].add(held.lease)
        return held

    def get(self, lease: int, worker: str) -> Held | None:
        """The lease, if it is this worker's."""
        held = self._held.get(lease)
        return held if held is not None and held.worker == worker else None

    def progress(self, lease: int, worker: str, tokens: int, now: float) -> None:
        held = self.get(lease, worker)
        if held is not None and tokens > held.tokens:
            held.tokens = tokens
            held.deadline = now + self._lease_s

    def end(self, held: Held) -> None:
        del self._held[held.lease]
        mine = self._of_worker[held.worker]
        mine.discard(held.lease)
        if not mine:
            del self._of_worker[held.worker]

    def expired(self, now: float) -> list[Held]:
        return [held for held in self._held.values() if held.deadline <= now]

    def of_worker(self, worker: str) -> list[Held]:
        return [self._held[lease] for lease in sorted(self._of_worker.get(worker, ()))]


def name_of(key: Key) -> str:
    """A key for people: train/17, eval/3@12 (prompt 3, version 12)."""
    return f"{key.split}/{key.ordinal}" + (f"@{key.group}" if key.split == "eval" else "")
