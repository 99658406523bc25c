"""The ledger of training groups: who may generate, what is in the buffer, what makes a batch, and what was trained.
Pure, time passed in; what happens is written to a journal first, and a journal that is played again gives the same
ledger.

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
from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw

from async_rl.algo.staleness import Node, Tree
from async_rl.errors import Corrupt, Malformed, StoreUnavailable
from async_rl.log import get_logger
from async_rl.wire import Group, Key, LeaseProgress
from orchestrator.branches import Branches
from orchestrator.config import OrchestratorConfig
from orchestrator.leases import Held, LeaseTable, name_of
from orchestrator.pool import Failure, PromptPool
from orchestrator.quarantine import Quarantine
from orchestrator.records import (
    Arrived,
    Assigned,
    Dropped,
    Leased,
    LeasedPrompt,
    Opened,
    Quarantined,
    Record,
    Released,
    Resumable,
    Returned,
    Settled,
    Snapshot,
    Took,
    Version,
    decode_group,
    encode_group,
    rewards_of,
)
from orchestrator.spool import Journal, Place
from orchestrator.versions import Versions

__all__ = ["Delivery", "Formed", "GroupLedger", "Readiness", "Stored", "hash_of"]

log = get_logger(__name__)

FAILURES_IN_A_ROW = 8
"""So many reported failures without one success between them look like a broken environment, not a bad
prompt: leasing then slows down, or a broken reward function would eat thousands of prompts a second."""
SLOWEST_S = 5.0
DEAD_LETTERS_KEPT = 100
HASHES_KEPT = 10_000
"""Of groups that are not in the spool any more: a late duplicate of one is told from other bytes."""
NEVER = 1 << 60
"""The ledger itself gives prompts up, and writes it down; its pool does not."""


class Stored(msgspec.Struct, frozen=True):
    """An accepted group, in the journal. `versions`: of each sample, the policies that sampled it."""

    key: Key
    versions: tuple[tuple[int, ...], ...]
    place: Place
    hash: bytes
    worker: str = ""  # that delivered it


class Formed(msgspec.Struct, frozen=True):
    """A batch that may leave once the journal is committed. `bodies`: its groups, as they lie in the journal; they
    leave as they came, for the trainer to decode."""

    assigned: Assigned
    bodies: tuple[Raw, ...]
    lags: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]  # of all samples

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(map(decode_group, self.bodies))


class Delivery(msgspec.Struct, frozen=True):
    outcome: str  # stored, no_signal, lag
    obsolete: Held | None  # somebody else's lease for the same group


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str


class GroupLedger:
    """`dropped` counts groups by reason; under `stale`, work that was stopped, whose prompts were leased again.
    `versions` is set by whoever knows the trainer, before anything is leased."""

    def __init__(self, config: OrchestratorConfig, journal: Journal, ids: Iterator[int]) -> None:
        self.opened: Opened | None = None
        self.incarnation = -1  # of the trainer that took the run last
        self.next_step = 0  # of the next batch that will be formed
        self.frontier = 0  # the next prompt ordinal that was never leased
        self.resumable = 0
        self.dropped: Counter[str] = Counter()
        self.dead_letters: deque[tuple[str, str]] = deque(maxlen=DEAD_LETTERS_KEPT)
        self.tree = Tree()
        self.quarantine = Quarantine(config.verify.quarantine_s)
        self.versions: Versions | None = None
        self._config = config
        self._journal = journal
        self._pool = PromptPool(LeaseTable(ids, config.lease_s), NEVER)
        self._branches = Branches()
        self._replay: dict[int, Assigned] = {}  # by step: what comes before anything new
        self._swept = -1  # the step for which the buffer was looked through
        self._level_at = 0  # step of the last version of the branch that is being repeated
        self._level_by = float("-inf")  # when it is not waited for any longer
        self._stored: dict[int, Stored] = {}  # by ordinal: every group that may still be asked for
        self._buffer: dict[Key, Stored] = {}  # those of them that no step of this branch has
        self._buffered_bytes = 0
        self._hashes: dict[int, bytes] = {}  # of settled groups
        self._given_up: deque[int] = deque(
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
    def buffered_bytes(self) -> int:
        """On the disk."""
        return self._buffered_bytes

    @property
    def outstanding(self) -> int:
        return self._pool.outstanding

    @property
    def replaying(self) -> int:
        """Steps that an earlier life of the trainer has done, and this one has not."""
        return len(self._replay)

    @property
    def slots_in_use(self) -> int:
        handed_out = self.next_step + len(self._replay)  # what is repeated follows without a gap
        return handed_out * self._config.batch_groups + self.buffered + self.outstanding

    def admitted_limit(self, version: int) -> int:
        """Slots that may be in use before a worker serving `version` gets no more leases; 0 if it is
        unknown."""
        step = self._step_of(version)
        return 0 if step is None else max(0, (step + self._config.max_lag + 1) * self._config.batch_groups)

    def settled(self, key: Key) -> bool:
        """Whether the group of this key has been delivered before (stored, trained, dropped or
        filtered)."""
        issued = key.split == "train" and key.group == 0 and 0 <= key.ordinal < self.frontier
        return issued and key not in self._pool and key.ordinal not in self._given_up

    def hash_of(self, key: Key) -> bytes | None:
        """Of the group that was delivered for a settled key; None where it is not known any more."""
        stored = self._stored.get(key.ordinal)
        return stored.hash if stored is not None else self._hashes.get(key.ordinal)

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
        key = next(self._pool.waiting, Key("train", self.frontier))
        lease = self._pool.next_lease()
        self._write(Leased(lease, key.ordinal, worker, version), now)
        return self._pool.get(lease, worker)

    def may_lease(self, version: int, now: float) -> bool:
        """Whether a worker that serves `version` would get a lease now."""
        return (
            now >= self._slow_until
            and self.slots_in_use < self.admitted_limit(version)
            and self.buffered_bytes < self._config.buffer_bytes
        )

    def leasing_waits_for(self, version: int, now: float) -> str:
        """Why `may_lease` says no; empty where it says yes."""
        limit = self.admitted_limit(version)
        if now < self._slow_until:
            return f"{self._failures_in_a_row} failures in a row: leasing is slowed down"
        if self.slots_in_use >= limit:
            return f"the trainer: {self.slots_in_use} of {limit} groups are admitted"
        if self.buffered_bytes >= self._config.buffer_bytes:
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

    def deliverer(self, key: Key) -> str:
        """Who delivered a group that may still be asked for, by its lease and not by its own word; else ""."""
        stored = self._stored.get(key.ordinal) if key.split == "train" else None
        return stored.worker if stored is not None else ""

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
        self, lease: int, worker: str, group: Group, versions: tuple[tuple[int, ...], ...], now: float
    ) -> Delivery:
        """Take an examined group whose lease the pool expects. `versions`: of each sample, as Stored has them."""
        key = group.key
        if not self._pool.expects(lease, key, worker):
            raise ValueError(f"lease {lease} of {worker} is not expected for {key}")
        held = self._pool.held_for(key)
        obsolete = held if held is not None and held.lease != lease else None
        self._failures_in_a_row, self._slow_until = 0, float("-inf")
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
            batch = sorted(self._buffer.values(), key=lambda each: (min(self._steps(each)), each.key))
            if len(batch) < self._config.batch_groups:
                raise ValueError(f"{len(batch)} groups are no batch of {self._config.batch_groups}")
            ordinals = tuple(stored.key.ordinal for stored in batch[: self._config.batch_groups])
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

    # ---------------------------------------------------------------- the journal

    def restore(self, records: Iterable[tuple[Record, Place]], now: float) -> int:
        """Play a journal; how many records it had. Leases that ran get their whole time again. Raises StoreUnavailable
        where a first file is to be begun and the disk is full."""
        count = 0
        for record, place in records:
            self._apply(record, place, now)
            count += 1
        try:
            self.rotate()
        except StoreUnavailable:
            if not count:
                raise  # else the newest file goes on, and a new one is begun when there is room
        return count

    def rotate(self) -> None:
        """Begin a new file of the journal where it is time for one, with all that is known. Raises StoreUnavailable
        where the disk is full: the old file goes on, and this can be tried again."""
        if self._journal.due():
            self._journal.begin(self.snapshot())

    def snapshot(self) -> Snapshot:
        opened = self.opened or Opened("", "")
        prompts = []
        for key in self._pool:
            held = self._pool.held_for(key)
            prompts.append(
                LeasedPrompt(
                    key.ordinal,
                    self._pool.failures(key),
                    self._pool.grants(key),
                    held.lease if held else -1,
                    held.version if held else -1,
                )
            )
        return Snapshot(
            run=opened.run,
            fingerprint=opened.fingerprint,
            incarnation=self.incarnation,
            next_step=self.next_step,
            frontier=self.frontier,
            resumable=self.resumable,
            level_at=self._level_at,
            sources=dict(self._branches.sources),
            assigned=tuple(self._branches.all()),
            replay=tuple(self._replay.values()),
            prompts=tuple(prompts),
            versions=tuple(
                Version(v, node.parent, node.step, node.digest) for v, node in self.tree.items()
            ),
            dropped=dict(self.dropped),
            given_up=tuple(self._given_up),
            dead_letters=tuple(self.dead_letters),
            quarantine=self.quarantine.kept(),
        )

    def _write(self, record: Record, now: float = 0.0) -> None:
        self._apply(record, self._journal.append(record), now)

    def _apply(self, record: Record, place: Place, now: float) -> None:
        """The one way in which the ledger changes, now and when a journal is played."""
        match record:
            case Opened():
                self.opened = record
            case Took():
                self._apply_took(record)
            case Version(version, parent, step, digest):
                self.tree.add(version, Node(parent, step, digest))
            case Leased(lease, ordinal, worker, version):
                key = Key("train", ordinal)
                if ordinal >= self.frontier:
                    self.frontier = ordinal + 1
                    self._pool.add(key)
                self._pool.grant(key, worker, version, now, lease=lease)
            case Returned(lease, counted, final, dropped):
                self._pool.end(lease, counted=counted, final=final)
                if dropped:
                    self.dropped[dropped] += 1
            case Arrived(lease, ordinal, versions, digest, worker=worker):
                key = Key("train", ordinal)
                self._pool.discard(key)
                self._unbuffer(key)
                self._stored[ordinal] = self._buffer[key] = Stored(key, versions, place, digest, worker)
                self._buffered_bytes += place.size
                self._note_full(now)
            case Settled():
                self._apply_settled(record, now)
            case Assigned(_, step, ordinals):
                for ordinal in ordinals:
                    self._unbuffer(Key("train", ordinal))
                self._branches.assign(record)
                self._replay.pop(step, None)
                self.next_step = step + 1
                if record.replayed:
                    self._level_by = now + self._config.lease_s
                self._full_since = None
                self._note_full(now)
            case Dropped(ordinal, reason):
                self._unbuffer(Key("train", ordinal))
                self._stored.pop(ordinal, None)
                self._pool.add(Key("train", ordinal))
                self.dropped[reason] += 1
                self._note_full(now)
            case Quarantined(worker, reason):
                self.quarantine.add(worker, reason, now)
            case Released(worker):
                self.quarantine.release(worker)
            case Resumable(step):
                self.resumable = step
                self._branches.forget_before(step)
                self._forget_unneeded()
            case Snapshot():
                self._apply_snapshot(record, now)

    def _apply_took(self, took: Took) -> None:
        if took.anew or took.step < self.resumable:  # what would have to be repeated is not there any more
            self._pool.clear()
            self._branches = Branches()
            self._stored.clear()
            self._buffer.clear()
            self._hashes.clear()
            self._given_up.clear()
            self.frontier = self.resumable = 0
        self._replay = self._branches.take(took.incarnation, took.origin, took.step)
        end = took.step + len(self._replay)
        self._level_at = max((node.step for node in self.tree.values() if node.step <= end), default=0)
        used = self._branches.before(took.incarnation, took.step)
        used |= {ordinal for assigned in self._replay.values() for ordinal in assigned.ordinals}
        # What the checkpoint says about the steps before it counts, whatever became of our disk.
        open_ = set(took.open)

        def consumed(ordinal: int) -> bool:
            return ordinal in used or (ordinal < took.frontier and ordinal not in open_)

        for key in [key for key in self._pool if consumed(key.ordinal)]:
            self._pool.discard(key)
        for ordinal in sorted(open_):
            if ordinal >= self.frontier:
                self._pool.add(Key("train", ordinal))
        self._buffer = {
            stored.key: stored for ordinal, stored in self._stored.items() if not consumed(ordinal)
        }
        self._buffered_bytes = sum(stored.place.size for stored in self._buffer.values())
        self.frontier = max(self.frontier, took.frontier)
        self.incarnation, self.next_step = took.incarnation, took.step
        self._full_since, self._swept = None, -1
        self._note_full(0.0)

    def _apply_settled(self, settled: Settled, now: float) -> None:
        key = Key("train", settled.ordinal)
        self._pool.discard(key)
        self._unbuffer(key)
        self._stored.pop(settled.ordinal, None)
        self._note_full(now)
        self.dropped[settled.reason] += 1
        if settled.hash:
            self._remember(settled.ordinal, settled.hash)
        if settled.reason == "failed":
            self.dead_letters.append((name_of(key), settled.detail))
            self._given_up.append(settled.ordinal)

    def _apply_snapshot(self, snapshot: Snapshot, now: float) -> None:
        if self.opened is not None:
            return  # what came before it has been read
        self.opened = Opened(snapshot.run, snapshot.fingerprint) if snapshot.run else None
        self.incarnation, self.next_step = snapshot.incarnation, snapshot.next_step
        self.frontier, self.resumable = snapshot.frontier, snapshot.resumable
        self._level_at, self._level_by = snapshot.level_at, now + self._config.lease_s
        self._branches = Branches(snapshot.sources, snapshot.assigned)
        self._replay = {assigned.step: assigned for assigned in snapshot.replay}
        self.tree = Tree({v.version: Node(v.parent, v.step, v.digest) for v in snapshot.versions})
        self.dropped.update(snapshot.dropped)
        self.dead_letters.extend(snapshot.dead_letters)
        self._given_up.extend(snapshot.given_up)
        self.quarantine.restore(snapshot.quarantine, now)
        for prompt in snapshot.prompts:
            self._pool.restore(Key("train", prompt.ordinal), prompt, now)

    # ---------------------------------------------------------------- inside

    def _catching_up(self, now: float) -> bool:
        """Groups in the buffer may be of policies that the repeated steps have made again, but that are not published
        again yet: until then they look further away than they are."""
        return (
            self.versions is not None
            and self.versions.newest_step < self._level_at
            and now < self._level_by
        )

    def _formed(self, assigned: Assigned) -> Formed:
        bodies, lags = [], []
        rewards: list[float] = []
        for ordinal in assigned.ordinals:
            stored = self._stored.get(ordinal)
            try:
                if stored is None:
                    raise Corrupt(f"the group of train/{ordinal} is not in the spool")
                record = self._journal.read(stored.place)
                assert isinstance(record, Arrived), "a place is that of a group"
                rewards += rewards_of(record.group)
            except (Corrupt, Malformed) as error:
                self.dropped["damaged"] += 1
                log.error("a group of a batch can't be read", step=assigned.step, reason=error.message)
                continue
            steps = self._steps_then(stored) if assigned.replayed else self._steps(stored)
            bodies.append(record.group)
            lags.append(tuple(assigned.step - step for step in steps))
        return Formed(assigned, tuple(bodies), tuple(lags), tuple(rewards))

    def _step_of(self, version: int) -> int | None:
        return None if self.versions is None else self.versions.step_of(version)

    def _steps(self, stored: Stored) -> tuple[int, ...]:
        assert self.versions is not None, "a trainer has attached"
        steps = self.versions.oldest_steps(stored.versions)
        return (-NEVER,) if steps is None else steps

    def _steps_then(self, stored: Stored) -> tuple[int, ...]:
        """For a step that is repeated: as counted on the branch that had it first, whose policies come again."""
        return tuple(min(self.tree[version].step for version in sample) for sample in stored.versions)

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

    def _unbuffer(self, key: Key) -> None:
        stored = self._buffer.pop(key, None)
        if stored is not None:
            self._buffered_bytes -= stored.place.size

    def _note_full(self, now: float) -> None:
        if self.buffered < self._config.batch_groups:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now

    def _forget_unneeded(self) -> None:
        """Groups of steps that nobody can ask for again."""
        needed = self._branches.ordinals()
        needed |= {ordinal for assigned in self._replay.values() for ordinal in assigned.ordinals}
        for ordinal, stored in list(self._stored.items()):
            if ordinal not in needed and stored.key not in self._buffer:
                del self._stored[ordinal]
                self._remember(ordinal, stored.hash)

    def _remember(self, ordinal: int, digest: bytes) -> None:
        self._hashes[ordinal] = digest
        while len(self._hashes) > HASHES_KEPT:
            del self._hashes[next(iter(self._hashes))]


def hash_of(body: bytes) -> bytes:
    """Of a group's encoding."""
    return hashlib.blake2b(body, digest_size=16).digest()
