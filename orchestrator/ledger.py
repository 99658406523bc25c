"""The ledger of training groups: who may generate, what is in the buffer, what makes a batch. Pure, time
passed in.

    prompts (endless) ──► PromptPool ──► buffer ──► batch of step s
                          leases         │  ▲
                                         │  └ no_signal: filtered before it gets here
                                         └── lag: dropped when it has become too old

Admission, counted in groups. Every group that was ever asked for and may still be trained has a slot:

    slots in use = batches handed out x batch_groups + buffered + outstanding
    a worker that serves version v gets a lease only while
        slots in use < (step_of(v) + max_lag + 1) x batch_groups

The next slot is trained, at the latest, in step  slot // batch_groups <= step_of(v) + max_lag,  if groups
are trained in the order of their slots. A group that is filtered, given up or dropped gives its slot back,
which only moves the others forward. Groups do finish out of order: then the oldest leave first, a full
batch is held for a straggler for a moment, and what is too old in spite of all is dropped, so that lag >
max_lag is never trained.

No deadlock: as soon as the newest version v has step_of(v) + max_lag >= the next step, the limit is at
least one batch above the batches handed out; so either a batch is buffered, or there is a free slot, or
groups are outstanding whose leases end by themselves. What is buffered is never too old, because it is
swept whenever the step moves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec

from async_rl.wire import Group, Key, LeaseProgress
from orchestrator.config import OrchestratorConfig
from orchestrator.leases import Held, LeaseTable, name_of
from orchestrator.pool import Failure, PromptPool
from orchestrator.versions import Versions

__all__ = ["Delivery", "GroupLedger", "Readiness", "Stored"]

FAILURES_IN_A_ROW = 8
"""So many reported failures without one success between them look like a broken environment, not a bad
prompt: leasing then slows down, or a broken reward function would eat thousands of prompts a second."""
SLOWEST_S = 5.0
DEAD_LETTERS_KEPT = 100


class Stored(msgspec.Struct, frozen=True):
    """An accepted group. `steps`: the optimizer step of the oldest policy of each sample."""

    group: Group
    steps: tuple[int, ...]

    def lags(self, step: int) -> tuple[int, ...]:
        """Of each sample, if it is trained as part of step `step` (`step` optimizer steps are done)."""
        return tuple(step - oldest for oldest in self.steps)


class Delivery(msgspec.Struct, frozen=True):
    outcome: str  # stored, no_signal, lag
    obsolete: Held | None  # somebody else's lease for the same group


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str


class GroupLedger:
    """One incarnation of the trainer's. `dropped` counts groups by reason and outlives it."""

    def __init__(
        self,
        config: OrchestratorConfig,
        versions: Versions,
        ids: Iterator[int],
        *,
        step: int,
        frontier: int,
        dropped: Counter[str] | None = None,
        dead_letters: deque[tuple[str, str]] | None = None,
    ) -> None:
        self.next_step = step  # of the next batch that will be formed
        self.frontier = frontier  # the next prompt ordinal that was never leased
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self.dead_letters = deque(maxlen=DEAD_LETTERS_KEPT) if dead_letters is None else dead_letters
        self._first = frontier
        self._config = config
        self._versions = versions
        self._pool = PromptPool(LeaseTable(ids, config.lease_s), config.max_attempts)
        self._buffer: dict[Key, Stored] = {}
        self._given_up: deque[Key] = deque(
            maxlen=1000
        )  # late results for these are refused with the reason
        self._full_since: float | None = None  # since when a whole batch is buffered
        self._failures_in_a_row = 0
        self._slow_until = float("-inf")

    # ---------------------------------------------------------------- looking

    @property
    def pool(self) -> PromptPool:
        return self._pool

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def outstanding(self) -> int:
        return self._pool.outstanding

    @property
    def slots_in_use(self) -> int:
        return self.next_step * self._config.batch_groups + self.buffered + self.outstanding

    def admitted_limit(self, version: int) -> int:
        """Slots that may be in use before a worker serving `version` gets no more leases; 0 if it is
        unknown."""
        step = self._versions.step_of(version)
        return 0 if step is None else (step + self._config.max_lag + 1) * self._config.batch_groups

    def settled(self, key: Key) -> bool:
        """Whether the group of this key has been delivered before (stored, trained, dropped or
        filtered)."""
        issued = key.split == "train" and key.group == 0 and self._first <= key.ordinal < self.frontier
        return issued and key not in self._pool and key not in self._given_up

    def readiness(self, now: float) -> Readiness:
        """Whether the next batch may leave, and what it waits for if not."""
        size = self._config.batch_groups
        if self._full_since is None:
            return Readiness(False, f"{self.buffered} of {size} groups")
        until = self._full_since + self._config.straggler_hold_s
        # A lease begun under a policy that just makes this step: after it, its group would only be dropped.
        stragglers = sum(held.step + self._config.max_lag == self.next_step for held in self._pool.held)
        if stragglers and now < until:
            return Readiness(False, f"{stragglers} stragglers, for {until - now:.1f} s more")
        return Readiness(True, f"{self.buffered} of {size} groups")

    # ---------------------------------------------------------------- leasing

    def lease(self, worker: str, version: int, now: float) -> Held | None:
        """The next prompt for a worker that serves `version`; None while admission says no."""
        if now < self._slow_until or self.slots_in_use >= self.admitted_limit(version):
            return None
        step = self._versions.step_of(version)
        assert step is not None, "an unknown version admits nothing"
        key = next(self._pool.waiting, None)
        if key is None:
            key = Key("train", self.frontier)
            self.frontier += 1
            self._pool.add(key)
        return self._pool.grant(key, worker, step, now)

    def progress(self, report: LeaseProgress, worker: str, now: float) -> None:
        self._pool.progress(report, worker, now)

    def fail(
        self, lease: int, worker: str, reason: str, now: float, *, counted: bool = True
    ) -> list[Failure]:
        failure = self._pool.fail(lease, worker, reason, counted=counted)
        if failure is not None and counted:
            self._failures_in_a_row += 1
            excess = self._failures_in_a_row - FAILURES_IN_A_ROW
            if excess >= 0:
                self._slow_until = now + min(SLOWEST_S, 0.1 * 2.0 ** min(excess, 16))
        return self._note([failure] if failure is not None else [])

    def expire(self, now: float) -> list[Failure]:
        return self._note(self._pool.expire(now))

    def worker_left(self, worker: str, reason: str, *, counted: bool) -> list[Failure]:
        return self._note(self._pool.worker_left(worker, reason, counted=counted))

    def close(self) -> list[Held]:
        """Nothing more is needed; the leases to cancel."""
        return self._pool.clear()

    # ---------------------------------------------------------------- groups

    def deliver(
        self, lease: int, worker: str, group: Group, steps: tuple[int, ...], now: float
    ) -> Delivery:
        """Take an examined group whose lease the pool expects."""
        obsolete = self._pool.deliver(lease, group.key, worker)
        self._failures_in_a_row, self._slow_until = 0, float("-inf")
        stored = Stored(group, steps)
        if self._config.drop_no_signal and len({sample.reward for sample in group.samples}) == 1:
            self.dropped["no_signal"] += 1
            return Delivery("no_signal", obsolete)
        if self._too_old(stored):
            self.dropped["lag"] += 1
            return Delivery("lag", obsolete)
        self._buffer[group.key] = stored
        self._note_full(now)
        return Delivery("stored", obsolete)

    def form_batch(self, now: float) -> list[Stored]:
        """Exactly batch_groups groups, the oldest first. Only when `readiness` says so."""
        order = sorted(self._buffer.values(), key=lambda stored: (min(stored.steps), stored.group.key))
        batch = order[: self._config.batch_groups]
        if len(batch) < self._config.batch_groups:
            raise ValueError(f"{len(batch)} groups are no batch of {self._config.batch_groups}")
        for stored in batch:
            del self._buffer[stored.group.key]
        self.next_step += 1
        for stored in [stored for stored in self._buffer.values() if self._too_old(stored)]:
            del self._buffer[stored.group.key]
            self.dropped["lag"] += 1
        self._full_since = None
        self._note_full(now)
        return batch

    # ---------------------------------------------------------------- inside

    def _too_old(self, stored: Stored) -> bool:
        return max(stored.lags(self.next_step)) > self._config.max_lag

    def _note_full(self, now: float) -> None:
        if self._full_since is None and self.buffered >= self._config.batch_groups:
            self._full_since = now

    def _note(self, failures: Iterable[Failure]) -> list[Failure]:
        failures = list(failures)
        for failure in failures:
            if failure.given_up:
                self.dropped["failed"] += 1
                self.dead_letters.append((name_of(failure.key), failure.reason))
                self._given_up.append(failure.key)
        return failures
