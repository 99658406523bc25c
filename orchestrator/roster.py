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

from collections.abc import Iterator

import msgspec

from async_rl.wire import Heartbeat, Hello

__all__ = ["FIRST_LEASES", "MISSED_HEARTBEATS", "Roster", "Worker"]

MISSED_HEARTBEATS = 5
"""With the default of 2 s, ten seconds: a worker that is loading a large version may be that quiet,
once."""
SHOWN_GONE_S = 60.0
"""How long a worker that is gone stays in Status, so that somebody who watches sees which one it was."""

FIRST_LEASES = 8
"""Of a worker that has finished nothing yet, while others wait: enough for an engine to batch, and few enough to wait
for in vain."""
FIRST_REST_S, LONGEST_REST_S = 10.0, 600.0
"""Of a worker whose leases all came to nothing, while others are here; doubled each time until it finishes a group.
Where every step waits for every lease (max_lag = 0), a step waits for such a worker once in ten minutes."""


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
    shown: int = FIRST_LEASES  # leases that it has shown to be able to finish; 0: it rests
    rest_until: float = 0.0
    rests: int = 0  # since it finished something

    @property
    def good_for(self) -> int:
        """Leases that it may have while others wait for some (fair.py)."""
        return min(self.capacity, self.shown)

    def finished(self, held: int) -> None:
        """One of the `held` leases has brought a group that was accepted: it may have one more. Not without end: what
        it holds is what it shows."""
        self.groups_done += 1
        self.shown = max(self.shown, min(self.shown + 1, self.capacity, 2 * held))

        self.rests = 0

    def failed(self, now: float, times: int = 1) -> None:
        """Leases that it held came to nothing: one less for each. Where nothing is left it rests."""
        if self.shown:
            self.shown = max(0, self.shown - times)
            if not self.shown:
                self.rest_until = now + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(self.rests, 32))
                self.rests += 1

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
                worker.groups_done, worker.shown = before.groups_done, before.shown
                worker.rest_until, worker.rests = before.rest_until, before.rests
            self._workers[worker.name] = self._by_peer[peer] = worker
        worker.version, worker.last_seen = hello.version, now
        return worker

    def beat(self, worker: Worker, beat: Heartbeat) -> None:
        """What it was last seen at, `last_seen`, is set before."""
        worker.beat, worker.version, worker.state = beat, beat.version, beat.state
        if worker.served_since is None and beat.state in ("serving", "updating"):
            worker.served_since = worker.last_seen

    def rested(self, now: float) -> list[Worker]:
        """Workers whose rest is over: each may show again what it can, with one lease."""
        over = [worker for worker in self.here if not worker.shown and now >= worker.rest_until]
        for worker in over:
            worker.shown = 1
        return over

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
