"""The ledger of training groups: who may generate, what is in the buffer, what makes a batch, and what was trained.
Pure, time passed in. Here are the rules, each of which writes records; what the records change is in ledger_state.py.

    prompts (endless) ──► PromptPool ──► buffer ──► batch of step s ──► kept until no trainer can come back before s
                          leases         │  ▲                                          │
                                         │  └──────── a trainer resumed elsewhere ◄────┘
                                         ├── no_signal: filtered before it gets here
                                         └── lag: dropped when it has become too old

One ledger lives as long as the run, through lives of the orchestrator and of the trainer. A trainer that resumes
at an earlier step gets the batches of the steps that it repeats again, group by group, as its predecessor got
them; only then do new ones follow. So what survives has trained each group once, and in the same way.

Admission, counted in groups. Every group that was ever asked for and may still be trained has a slot:

    slots in use = batches handed out x batch_groups + buffered + outstanding
    a worker that serves version v gets a lease only while
        slots in use < (step_of(v) + max_lag + 1) x batch_groups

The next slot is trained, at the latest, in step  slot // batch_groups <= step_of(v) + max_lag,  if groups
are trained in the order of their slots. A group that is filtered, given up or dropped gives its slot back,
which only moves the others forward. Groups do finish out of order: then the oldest leave first, a full
batch is held for a straggler for a moment, and what is too old in spite of all is dropped, so that lag >
max_lag is never trained. What can only be dropped any more is stopped before it is done (early.py).

No deadlock: as soon as the newest version v has step_of(v) + max_lag >= the next step, the limit is at
least one batch above the batches handed out; so either a batch is buffered, or there is a free slot, or
groups are outstanding whose leases end by themselves. What is buffered is never too old, because it is
swept whenever the step moves.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import msgspec

from async_rl.algo.staleness import Node
from async_rl.errors import Corrupt, Malformed
from async_rl.log import get_logger
from async_rl.wire import Group, LeaseProgress
from orchestrator.config import MOST_BATCH_BYTES, OrchestratorConfig
from orchestrator.formed import Delivery, Formed, Readiness
from orchestrator.leases import Held
from orchestrator.ledger_state import NEVER, LedgerState, Stored
from orchestrator.pool import Failure
from orchestrator.records import (
    Arrived,
    Assigned,
    Dropped,
    Leased,
    Opened,
    Quarantined,
    Released,
    Resumable,
    Returned,
    Settled,
    Took,
    Version,
    encode_group,
    rewards_of,
)
from orchestrator.spool import Journal, Place
from orchestrator.versions import Versions

__all__ = ["Delivery", "Formed", "GroupLedger", "Readiness", "hash_of"]

log = get_logger(__name__)

FAILURES_IN_A_ROW = 8
"""So many reported failures without one success between them look like a broken environment, not a bad
prompt: leasing then slows down, or a broken reward function would eat thousands of prompts a second."""
SLOWEST_S = 5.0


class GroupLedger(LedgerState):
    """`versions` is set by whoever knows the trainer, before anything is leased."""

    def __init__(self, config: OrchestratorConfig, journal: Journal, ids: Iterator[int]) -> None:
        super().__init__(config, journal, ids)
        self.versions: Versions | None = None
        # What steps within the lag can't train for its size would only be dropped.
        self._room = min(config.buffer_bytes, (config.max_lag + 1) * config.batch_bytes)
        self._swept = -1  # the step for which the buffer was looked through
        self._failures_in_a_row = 0
        self._slow_until = float("-inf")

    # ---------------------------------------------------------------- admission, and when a batch leaves

    @property
    def slots_in_use(self) -> int:
        handed_out = self.next_step + len(self._replay)  # what is repeated follows without a gap
        return handed_out * self._config.batch_groups + len(self._buffer) + self._pool.outstanding

    def admitted_limit(self, version: int) -> int:
        """Slots that may be in use before a worker serving `version` gets no more leases; 0 if it is
        unknown."""
        step = self._step_of(version)
        return 0 if step is None else self._admitted(step)

    def readiness(self, now: float) -> Readiness:
        """Whether the next batch may leave, and what it waits for if not."""
        size = self._config.batch_groups
        if self.next_step in self._replay:
            return Readiness(True, "a batch that an earlier trainer had")
        if self._full_since is None:
            return Readiness(False, f"{self.buffered} of {size} groups")
        if self._catching_up(now):
            return Readiness(False, f"the version of step {self._level_at}, that is published again")
        until = self._full_since + self._config.straggler_hold_s
        # A lease begun under a policy that just makes this step: after it, its group would only be dropped.
        stragglers = sum(
            self._step_of(held.version) == self.next_step - self._config.max_lag for held in self._pool.held
        )
        if stragglers and now < until:
            return Readiness(False, f"{stragglers} stragglers, for {until - now:.1f} s more")
        return Readiness(True, f"{self.buffered} of {size} groups")

    # ---------------------------------------------------------------- the trainer

    def open(self, run: str, fingerprint: str) -> None:
        self._write(Opened(run, fingerprint))

    def take(self, took: Took) -> list[Held]:
        """A trainer takes the run at a step, from a checkpoint, or anew. The leases that have become useless."""
        held = list(self._pool.held)
        self._write(took)
        self._swept = -1
        return [each for each in held if each.key not in self._pool]

    def publish(self, version: Version) -> None:
        """Told twice, it is written once."""
        known = self.tree.get(version.version)
        if known != Node(version.parent, version.step, version.digest):
            self._write(version)

    def keep_from(self, step: int) -> None:
        """No trainer will resume before `step`."""
        if step > self.resumable:
            self._write(Resumable(step))
            segments = [stored.place.segment for stored in self._stored.values()]
            self._journal.keep_from(min(segments, default=NEVER))

    # ---------------------------------------------------------------- leasing

    def lease(self, worker: str, version: int, now: float) -> Held | None:
        """The next prompt for a worker that serves `version`; None while admission says no."""
        if not self.may_lease(version, now):
            return None
        waiting, lease = next(self._pool.waiting, None), self._pool.next_lease()
        ordinal = waiting.ordinal if waiting is not None else self.frontier
        self._write(Leased(lease, ordinal, worker, version), now)
        return self._pool.get(lease, worker)

    def may_lease(self, version: int, now: float) -> bool:
        """Whether a worker that serves `version` would get a lease now. Asked for every lease, so without the words
        of `leasing_waits_for`."""
        if now < self._slow_until or self._buffered_bytes >= self._room or self.versions is None:
            return False
        step = self.versions.step_of(version)
        return step is not None and self.slots_in_use < self._admitted(step)

    def leasing_waits_for(self, version: int, now: float) -> str:
        """Why `may_lease` says no; empty where it says yes."""
        limit = self.admitted_limit(version)
        if now < self._slow_until:
            return f"{self._failures_in_a_row} failures in a row: leasing is slowed down"
        if self.slots_in_use >= limit and self._replay:
            return f"the trainer: it repeats {len(self._replay)} steps first, whose groups are there"
        if self.slots_in_use >= limit:
            return f"the trainer: {self.slots_in_use} of {limit} groups are admitted"
        if self.buffered_bytes >= self._room:
            return f"room in the buffer: it holds {self.buffered_bytes} bytes"
        return ""

    def progress(self, report: LeaseProgress, worker: str, now: float) -> None:
        self._pool.progress(report, worker, now)

    def fail(
        self, lease: int, worker: str, reason: str, now: float, *, counted: bool = True
    ) -> list[Failure]:
        held = self._pool.get(lease, worker)
        if held is None:
            return []
        if counted:
            self._failures_in_a_row += 1
            excess = self._failures_in_a_row - FAILURES_IN_A_ROW
            if excess >= 0:
                self._slow_until = now + min(SLOWEST_S, 0.1 * 2.0 ** min(excess, 16))
        return [self._return(held, reason, counted=counted, final=True)]

    def expire(self, now: float) -> list[Failure]:
        return [
            self._return(held, f"no progress on {held.worker} until the lease expired", counted=True)
            for held in self._pool.expired(now)
        ]

    def worker_left(self, worker: str, reason: str, *, counted: bool) -> list[Failure]:
        return [self._return(held, reason, counted=counted) for held in self._pool.of_worker(worker)]

    def lose(self, held: Held, reason: str) -> Failure:
        """Its worker does not have it. Nobody's failure."""
        return self._return(held, reason, counted=False)

    def stale(self, held: Held, now: float) -> bool:
        """Whether its group would be dropped for its lag whenever it comes. While steps are repeated, policies look
        further away than they are."""
        if held.begun < 0 or self._replay or self._catching_up(now):
            return False
        step = self._step_of(held.begun)
        return step is not None and self.next_step - step > self._config.max_lag

    def give_up_stale(self, held: Held, reason: str) -> Failure:
        """It counts as a failure: the same samples come again, and may take as long again."""
        return self._return(held, reason, counted=True, final=True, dropped="stale")

    def stand_down(self) -> list[Held]:
        """Nothing more is needed: all leases go back, and are to be cancelled. What arrives for them all the same is
        stored: the run may go on another day."""
        held = list(self._pool.held)
        for each in held:
            self._write(Returned(each.lease, counted=False, final=False))
        return held

    # ---------------------------------------------------------------- workers whose numbers do not fit
    def put_in_quarantine(self, worker: str, reason: str, now: float) -> list[Failure]:
        """What it holds goes back, what it has delivered and no step has is generated again. The leases it had."""
        self._write(Quarantined(worker, reason), now)
        self.drop_quarantined(now)
        return self.worker_left(worker, "its worker is in quarantine", counted=False)

    def drop_quarantined(self, now: float) -> None:
        """Again after a trainer took the run: what steps it has not may be back in the buffer."""
        for stored in [each for each in self._buffer.values() if each.worker in self.quarantine]:
            self._write(Dropped(stored.key.ordinal, "quarantined"), now)

    def release(self, worker: str) -> None:
        self._write(Released(worker))

    # ---------------------------------------------------------------- groups

    def deliver(
        self,
        lease: int,
        worker: str,
        group: Group,
        versions: tuple[tuple[int, ...], ...],
        now: float,
    ) -> Delivery:
        """Take an examined group whose lease the pool expects. `versions`: of each sample."""
        key = group.key
        if not self._pool.expects(lease, key, worker):
            raise ValueError(f"lease {lease} of {worker} is not expected for {key}")
        held = self._pool.held_for(key)
        obsolete = held if held is not None and held.lease != lease else None
        self._failures_in_a_row, self._slow_until = 0, float("-inf")
        # Made anew: what a worker's bytes say besides (fields of another release, or worse) is not kept.
        body = encode_group(group)
        digest = hash_of(body)
        if self._config.drop_no_signal and len({sample.reward for sample in group.samples}) == 1:
            self._write(Settled(key.ordinal, "no_signal", hash=digest))
            return Delivery("no_signal", obsolete)
        if self._too_old(Stored(key, versions, Place(0, 0, 0), digest)):
            self._write(Settled(key.ordinal, "lag", hash=digest))
            return Delivery("lag", obsolete)
        self._write(Arrived(lease, key.ordinal, versions, digest, msgspec.Raw(body), worker), now)
        return Delivery("stored", obsolete)

    def sweep(self, now: float) -> None:
        """Drop what has become too old for the next step: once per step, and not while steps are repeated (see
        `_catching_up`). Before every look whether a batch is ready."""
        if self._swept == self.next_step or self._replay or self._catching_up(now):
            return
        self._swept = self.next_step
        for stored in [stored for stored in self._buffer.values() if self._too_old(stored)]:
            self._write(Settled(stored.key.ordinal, "lag", hash=stored.hash), now)

    def form_batch(self, now: float) -> Formed:
        """The groups of the next step: those of an earlier life of the trainer, or batch_groups new ones, the oldest
        first. Only when `readiness` says so."""
        step = self.next_step
        again = self._replay.get(step)
        if again is not None:
            assigned = Assigned(
                self.incarnation, step, again.ordinals, again.frontier, again.open, replayed=True
            )
        else:
            if not self.full:
                raise ValueError(f"{self.buffered} groups are no batch of {self._config.batch_groups}")
            oldest_first = sorted(
                self._buffer.values(), key=lambda each: (min(self._steps(each)), each.key.ordinal)
            )
            ordinals = self._fitting(step, oldest_first)
            left = {key.ordinal for key in self._buffer} | {key.ordinal for key in self._pool}
            assigned = Assigned(
                self.incarnation, step, ordinals, self.frontier, tuple(sorted(left - set(ordinals)))
            )
        self._write(assigned, now)
        formed = self._formed(assigned)
        self.sweep(now)
        return formed

    def formed(self, step: int) -> Formed | None:
        """The batch of a step that this trainer has had before; None where it had none."""
        assigned = self._branches.own(self.incarnation, step)
        return None if assigned is None else self._formed(assigned)

    # ---------------------------------------------------------------- inside

    def _admitted(self, step: int) -> int:
        return max(0, (step + self._config.max_lag + 1) * self._config.batch_groups)

    def _catching_up(self, now: float) -> bool:
        """Groups in the buffer may be of policies that the repeated steps have made again, but that are not published
        again yet: until then they look further away than they are."""
        return (
            self.versions is not None
            and self.versions.newest_step < self._level_at
            and now < self._level_by
        )

    def _fitting(self, step: int, oldest_first: list[Stored]) -> tuple[int, ...]:
        """Of these, the ordinals of those that a batch has room for; more than one in any case."""
        batch = oldest_first[: self._config.batch_groups]
        sizes = itertools.accumulate(stored.place.size for stored in batch)
        fit = sum(size <= self._config.batch_bytes for size in sizes)
        if fit < min(len(batch), self._config.batch_groups) or len(batch) < self._config.batch_groups:
            log.warning(
                "a step gets fewer groups: they are too large for one batch, or for the buffer",
                step=step,
                groups=fit,
                of=self._config.batch_groups,
                bytes=sum(stored.place.size for stored in batch[:fit]),
                hint="raise orchestrator.batch_bytes or buffer_bytes, or lower batch_groups",
            )
        return tuple(stored.key.ordinal for stored in batch[:fit])

    def _formed(self, assigned: Assigned) -> Formed:
        bodies, lags = [], []
        rewards: list[float] = []
        room = MOST_BATCH_BYTES  # not the config's: what a step had, it has again
        for ordinal in assigned.ordinals:
            if ordinal in self._left_out:
                continue  # as when this step was first without it
            stored = self._stored.get(ordinal)
            size = stored.place.size if stored is not None else 0
            room -= size
            if stored is not None and room < 0:  # formed by a release without a limit
                room += size
                log.error("a group of a batch has no room in it", step=assigned.step, ordinal=ordinal)
                self._write(Settled(ordinal, "too_large", "no room in its batch", stored.hash))
                continue
            try:
                if stored is None:
                    raise Corrupt(f"the group of train/{ordinal} is not in the spool")
                record = self._journal.read(stored.place)
                assert isinstance(record, Arrived), "a place is that of a group"
                rewards += rewards_of(record.group)
            except (Corrupt, Malformed) as error:
                log.error("a group of a batch can't be read", step=assigned.step, reason=error.message)
                digest = stored.hash if stored is not None else b""
                self._write(Settled(ordinal, "damaged", error.message, digest))
                continue
            steps = self._steps_then(stored, assigned.step) if assigned.replayed else self._steps(stored)
            bodies.append(record.group)
            lags.append(tuple(assigned.step - step for step in steps))
        return Formed(assigned, tuple(bodies), tuple(lags), tuple(rewards))

    def _step_of(self, version: int) -> int | None:
        return None if self.versions is None else self.versions.step_of(version)

    def _steps(self, stored: Stored) -> tuple[int, ...]:
        assert self.versions is not None, "a trainer has attached"
        steps = self.versions.oldest_steps(stored.versions)
        return (-NEVER,) if steps is None else steps

    def _steps_then(self, stored: Stored, step: int) -> tuple[int, ...]:
        """For a step that is repeated: as counted on the branch that had it first, whose policies come again. (A
        version whose record was damaged does not count; the trainer looks it up in the store.)"""
        known = (
            [self.tree[each].step for each in sample if each in self.tree] for sample in stored.versions
        )
        return tuple(min(steps, default=step) for steps in known)

    def _too_old(self, stored: Stored) -> bool:
        return self.next_step - min(self._steps(stored)) > self._config.max_lag

    def _return(
        self, held: Held, reason: str, *, counted: bool, final: bool = False, dropped: str = ""
    ) -> Failure:
        self._write(Returned(held.lease, counted, final, dropped))
        given_up = self._pool.failures(held.key) >= self._config.max_attempts
        if given_up:
            self._write(Settled(held.key.ordinal, "failed", reason))
        return Failure(held.key, held.worker, reason, given_up)


def hash_of(body: bytes | memoryview) -> bytes:
    """Of a group's encoding. SHA-256, because processors have instructions for it."""
    return hashlib.sha256(body).digest()[:16]
