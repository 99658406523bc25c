"""Prompts that still need a group: each one waits to be leased, or is leased.

        add                grant                deliver
    ─────────► waiting ─────────────► leased ─────────────► (out of the pool: somebody else's now)
                  ▲                     │
                  └─────────────────────┘ ──────────────► given up, after max_attempts failures
                   fail, expire, worker left

A prompt that comes back is the next to be leased, under the same key and so with the same seeds. Its old
leases are remembered: their results still count if they arrive before anybody else's. Pure: the time is
passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from async_rl.log import get_logger
from async_rl.wire import Key, LeaseProgress
from orchestrator.leases import Held, LeaseTable, name_of
from orchestrator.records import LeasedPrompt

__all__ = ["Failure", "PromptPool", "log_failures"]

log = get_logger(__name__)

REMEMBERED_GRANTS = 8
"""Ended leases of one prompt whose late result is still accepted. Only leases given back without counting
as an attempt can make more than max_attempts of them; the bound is for those."""


class Failure(msgspec.Struct, frozen=True):
    """A lease that ended without a result. `given_up`: its prompt will not be leased again."""

    key: Key
    worker: str
    reason: str
    given_up: bool


def log_failures(failures: Iterable[Failure]) -> None:
    for failure in failures:
        write = log.warning if failure.given_up else log.debug
        event = "prompt given up" if failure.given_up else "lease given back"
        write(event, key=name_of(failure.key), worker=failure.worker, reason=failure.reason)


class _Open(msgspec.Struct, gc=False):
    held: Held | None = None
    grants: dict[int, str] = {}  # lease -> worker, of every lease whose result may still come
    failures: int = 0


class PromptPool:
    def __init__(self, leases: LeaseTable, max_attempts: int) -> None:
        self._leases = leases
        self.by_worker = leases.by_worker
        """The leases that each worker holds."""
        self._max_attempts = max_attempts
        self._open: dict[Key, _Open] = {}
        self._waiting: dict[Key, None] = {}  # an ordered set
        self._key_of: dict[int, Key] = {}  # of every remembered grant

    # ---------------------------------------------------------------- looking

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[Key]:
        return iter(self._open)

    @property
    def waiting(self) -> Iterator[Key]:
        return iter(self._waiting)

    @property
    def held(self) -> Iterator[Held]:
        return iter(self._leases)

    @property
    def outstanding(self) -> int:
        return len(self._leases)

    def count(self, worker: str) -> int:
        """Leases that this worker holds."""
        return self._leases.count(worker)

    def get(self, lease: int, worker: str) -> Held | None:
        """The lease, if it runs and is this worker's."""
        return self._leases.get(lease, worker)

    def held_for(self, key: Key) -> Held | None:
        return self._open[key].held

    def failures(self, key: Key) -> int:
        """Leases for this key that ended without a group and counted."""
        return self._open[key].failures

    def grants(self, key: Key) -> dict[int, str]:
        return dict(self._open[key].grants)

    def expired(self, now: float) -> list[Held]:
        return self._leases.expired(now)

    def of_worker(self, worker: str) -> list[Held]:
        return self._leases.of_worker(worker)

    def next_lease(self) -> int:
        """A number for a lease that is about to be granted."""
        return self._leases.next_id()

    def expects(self, lease: int, key: Key, worker: str) -> bool:
        """Whether this worker got this lease for this key, and the key still needs a group."""
        open_ = self._open.get(key)
        return open_ is not None and open_.grants.get(lease) == worker

    def wants(self, lease: int, worker: str) -> bool:
        """Whether anybody still has a use for what the worker does under this lease."""
        key = self._key_of.get(lease)
        return key is not None and self.expects(lease, key, worker)

    # ---------------------------------------------------------------- moving on

    def add(self, key: Key) -> None:
        self._open[key] = _Open()
        self._waiting[key] = None

    def grant(self, key: Key, worker: str, version: int, now: float, lease: int | None = None) -> Held:
        """Lease a waiting prompt to a worker that serves `version`, under a new number unless one is given."""
        if key not in self._open:
            self.add(key)
        open_ = self._open[key]
        if open_.held is not None:
            self._leases.end(open_.held)
        self._waiting.pop(key, None)
        number = self._leases.next_id() if lease is None else lease
        held = open_.held = self._leases.grant(number, key, worker, version, now)
        if len(open_.grants) >= REMEMBERED_GRANTS:
            self._forget(open_, min(open_.grants))
        open_.grants[held.lease] = worker
        self._key_of[held.lease] = key
        return held

    def progress(self, report: LeaseProgress, worker: str, now: float) -> None:
        self._leases.progress(report.lease, worker, report.tokens, now)

    def deliver(self, lease: int, key: Key, worker: str) -> Held | None:
        """A group for `key` is here; the prompt leaves the pool. Returns the lease that now works for
        nothing."""
        if not self.expects(lease, key, worker):
            raise ValueError(f"lease {lease} of {worker} is not expected for {key}")
        held = self._close(key)
        return held if held is not None and held.lease != lease else None

    def fail(self, lease: int, worker: str, reason: str, *, counted: bool = True) -> Failure | None:
        """The worker says that a lease of its own will not be fulfilled. None: it is not a lease that
        runs."""
        held = self._leases.get(lease, worker)
        if held is None:
            return None
        self._forget(self._open[held.key], lease)  # it said so itself: no result will come
        return self._end(held, reason, counted)

    def expire(self, now: float) -> list[Failure]:
        expired = self._leases.expired(now)
        return [
            self._end(held, f"no progress on {held.worker} until the lease expired", True)
            for held in expired
        ]

    def lose(self, held: Held, reason: str) -> Failure:
        """Its worker does not have it. Nobody's failure, and a result still counts."""
        return self._end(held, reason, False)

    def worker_left(self, worker: str, reason: str, *, counted: bool) -> list[Failure]:
        """All of its leases go back. `counted`: as failures (a prompt that kills workers must come to an
        end)."""
        return [self._end(held, reason, counted) for held in self._leases.of_worker(worker)]

    def drop(self, key: Key) -> Held | None:
        """The prompt is not needed any more; returns the lease that now works for nothing."""
        return self._close(key)

    def discard(self, key: Key) -> None:
        """The same for a prompt that may have left before."""
        if key in self._open:
            self._close(key)

    def end(self, lease: int, *, counted: bool, final: bool) -> None:
        """A lease ended without a group and its prompt waits again. `final`: no late result will come."""
        key = self._key_of.get(lease)
        if key is None:
            return
        open_ = self._open[key]
        if open_.held is not None and open_.held.lease == lease:
            self._leases.end(open_.held)
            open_.held = None
            self._waiting[key] = None
            open_.failures += counted
        if final:
            self._forget(open_, lease)

    def restore(self, key: Key, prompt: LeasedPrompt, now: float) -> None:
        """As it was written down; a lease that ran gets its whole time again."""
        self._open[key] = open_ = _Open(None, {}, prompt.failures)
        for lease, worker in prompt.grants.items():
            open_.grants[lease] = worker
            self._key_of[lease] = key
        worker = prompt.grants.get(prompt.held, "")
        if worker:
            open_.held = self._leases.grant(prompt.held, key, worker, prompt.version, now)
        else:
            self._waiting[key] = None

    def clear(self) -> list[Held]:
        return [held for key in list(self._open) if (held := self._close(key)) is not None]

    # ---------------------------------------------------------------- inside

    def _end(self, held: Held, reason: str, counted: bool) -> Failure:
        self._leases.end(held)
        open_ = self._open[held.key]
        open_.held = None
        open_.failures += counted
        given_up = open_.failures >= self._max_attempts
        if given_up:
            self._close(held.key)
        else:
            self._waiting[held.key] = None
        return Failure(held.key, held.worker, reason, given_up)

    def _close(self, key: Key) -> Held | None:
        open_ = self._open.pop(key)
        self._waiting.pop(key, None)
        for lease in list(open_.grants):
            self._forget(open_, lease)
        if open_.held is not None:
            self._leases.end(open_.held)
        return open_.held

    def _forget(self, open_: _Open, lease: int) -> None:
        del open_.grants[lease]
        del self._key_of[lease]
