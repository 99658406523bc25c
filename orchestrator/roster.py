"""The workers: who is there, what they serve, what they can take. Pure, time passed in.

    Hello ──► here ── silent for five heartbeats ──► gone ── a while later ──► forgotten
               │ ▲                                    │
               │ └──────────── Hello again ───────────┘
               └ Bye ──► forgotten at once

A worker is known by its id, and reached by its peer identity, which holds a nonce of its process. The same
peer may say Hello again at any time (it reconnected, its leases stand). Another peer with the id of a
worker that is here is refused until that one is gone: two processes with one id would take each other's
leases away for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from async_rl.wire import Heartbeat, Hello

__all__ = ["MISSED_HEARTBEATS", "Emptiest", "Roster", "Worker"]

MISSED_HEARTBEATS = 5
"""With the default of 2 s, ten seconds: a worker that is loading a large version may be that quiet,
once."""
SHOWN_GONE_S = 60.0
"""How long a worker that is gone stays in Status, so that somebody who watches sees which one it was."""

MOST_OUTDATED = 64
"""Entries of Emptiest more than there are workers in it, before they are looked through: a millisecond for a thousand
workers, once in a thousand messages."""


class Worker(msgspec.Struct):
    name: str
    cluster: str
    peer: bytes
    version: int
    last_seen: float
    capacity: int = 0
    state: str = "starting"
    beat: Heartbeat | None = None
    groups_done: int = 0
    served: int = 0  # number of the last lease it was given, for the order among equals
    gone_since: float | None = None
    served_since: float | None = None  # when it was first seen to serve

    @property
    def takes_leases(self) -> bool:
        return self.gone_since is None and self.state in ("serving", "updating") and self.version >= 0


class Roster:
    def __init__(self, heartbeat_s: float) -> None:
        self._limit_s = MISSED_HEARTBEATS * heartbeat_s
        self._workers: dict[str, Worker] = {}
        self._by_peer: dict[bytes, Worker] = {}
        self._grants = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def here(self) -> list[Worker]:
        return list(self._by_peer.values())

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def at(self, peer: bytes) -> Worker | None:
        """The worker behind a peer; None for a stranger, or one that was given up and must say Hello
        again."""
        return self._by_peer.get(peer)

    def holder(self, name: str, peer: bytes) -> Worker | None:
        """Another process that is here under this name."""
        worker = self._workers.get(name)
        return worker if worker is not None and worker.gone_since is None and worker.peer != peer else None

    def join(self, hello: Hello, peer: bytes, now: float) -> Worker:
        """Only when nobody else is the `holder` of the name."""
        worker = self._by_peer.get(peer)
        if worker is None or worker.name != hello.worker:
            if worker is not None:
                self.remove(worker)
            before = self._workers.get(hello.worker)
            worker = Worker(hello.worker, hello.cluster, peer, hello.version, now)
            if before is not None and before.peer == peer:  # it was only silent: the same process
                worker.groups_done = before.groups_done
            self._workers[worker.name] = self._by_peer[peer] = worker
        worker.version, worker.last_seen = hello.version, now
        return worker

    def beat(self, worker: Worker, beat: Heartbeat) -> None:
        """What it was last seen at, `last_seen`, is set before."""
        worker.beat, worker.version, worker.state = beat, beat.version, beat.state
        if worker.served_since is None and beat.state in ("serving", "updating"):
            worker.served_since = worker.last_seen

    def silent(self, now: float) -> list[Worker]:
        """Workers that have just become gone. Forgets those that have been gone for long."""
        for worker in list(self._workers.values()):
            if worker.gone_since is not None and now - worker.gone_since >= SHOWN_GONE_S:
                del self._workers[worker.name]
        lost = [worker for worker in self.here if now - worker.last_seen >= self._limit_s]
        for worker in lost:
            worker.gone_since, worker.state = now, "gone"
            del self._by_peer[worker.peer]
        return lost

    def remove(self, worker: Worker) -> None:
        self._by_peer.pop(worker.peer, None)
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]

    def granted(self, worker: Worker) -> None:
        self._grants += 1
        worker.served = self._grants


class Emptiest:
    """Workers that can take a lease, the relatively emptiest first; among equals, the one that has waited longest.

    Kept from message to message, by the version they serve: a fleet is a thousand workers, few of them change with
    each message, and whether there is a lease for a worker depends on its version alone. What is in a heap is what
    was true when the worker was last touched; it is looked at again when its turn comes. An entry whose turn never
    comes (of a version that gets no leases any more, or of a worker that became emptier) goes when as many again
    were added."""

    def __init__(self, roster: Roster, leases: Callable[[str], int]) -> None:
        """`leases`: how many a worker holds."""
        self._roster, self._leases = roster, leases
        self._heaps: dict[int, list[_Entry]] = {}  # by version
        self._newest: dict[str, _Entry] = {}  # of each worker's entries the one that counts
        self._added = 0  # since the heaps were made

    def __len__(self) -> int:
        """Entries that are kept, whether they count or not."""
        return sum(map(len, self._heaps.values()))

    def touch(self, worker: Worker) -> None:
        """Something about it may have changed."""
        entry = self._entry(worker)
        if entry is None:
            self._newest.pop(worker.name, None)
        elif self._newest.get(worker.name) != entry:
            self._newest[worker.name] = entry
            heapq.heappush(self._heaps.setdefault(entry.version, []), entry)
            self._added += 1

    def touch_all(self, names: Iterable[str]) -> None:
        """Those of them that are known."""
        for name in names:
            worker = self._roster.get(name)
            if worker is not None:
                self.touch(worker)

    def pop(self, wanted: Callable[[int], bool]) -> Worker | None:
        """The emptiest of those whose version is `wanted`, out of its heap until it is touched."""
        if self._added > len(self._newest) + MOST_OUTDATED:
            self._make_again()
        tops = [self._top(version) for version in list(self._heaps) if wanted(version)]
        first = min((top for top in tops if top is not None), default=None)
        if first is None:
            return None
        heapq.heappop(self._heaps[first.version])
        del self._newest[first.name]
        return self._roster.get(first.name)

    def _make_again(self) -> None:
        self._heaps, names, self._newest = {}, list(self._newest), {}
        for worker in map(self._roster.get, names):
            if worker is not None:
                self.touch(worker)
        self._added = 0

    def _top(self, version: int) -> _Entry | None:
        """The first entry that is still true."""
        heap = self._heaps[version]
        while heap:
            entry = heap[0]
            if self._newest.get(entry.name) == entry:
                worker = self._roster.get(entry.name)
                now = None if worker is None else self._entry(worker)
                if now == entry:
                    return entry
                del self._newest[entry.name]
                if worker is not None:
                    self.touch(worker)  # its leases have ended meanwhile, or it can take none now
            if heap[0] is entry:
                heapq.heappop(heap)
        del self._heaps[version]
        return None

    def _entry(self, worker: Worker) -> _Entry | None:
        leases = self._leases(worker.name)
        if not worker.takes_leases or leases >= worker.capacity:
            return None
        return _Entry(leases / worker.capacity, worker.served, worker.name, worker.version)


class _Entry(NamedTuple):
    load: float
    served: int
    name: str
    version: int
