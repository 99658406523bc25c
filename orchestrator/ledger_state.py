"""What the journal makes of the ledger: the state that records change, and the little that is looked up in it. The
rules that decide which records are written are in ledger.py.

    now        a rule ──► _write(record) ──► journal.append ──┐
                                                              ├──► _apply(record)
    restored   journal.replay ────────────────────────────────┘

No prompt and no group changes its place in another way, so a journal that is played again gives the same ledger.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec

from async_rl.algo.staleness import Node, Tree
from async_rl.errors import StoreUnavailable
from async_rl.wire import Key
from orchestrator.branches import Branches
from orchestrator.config import OrchestratorConfig
from orchestrator.leases import LeaseTable, name_of
from orchestrator.pool import PromptPool
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
)
from orchestrator.spool import Journal, Place

__all__ = ["NEVER", "LedgerState", "Stored"]

DEAD_LETTERS_KEPT = 100
HASHES_KEPT = 10_000
"""Of groups that are not in the spool any more: a late duplicate of one is told from other bytes."""
GIVEN_UP_KEPT = 1000
"""Prompts whose late results are refused with the reason."""
LEFT_OUT = ("damaged", "too_large")
"""Why a group is left out of a step that has it, then and whenever the step is repeated."""
NEVER = 1 << 60
"""The ledger itself gives prompts up, and writes it down; its pool does not."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """An accepted group, in the journal. `versions`: of each sample, the policies that sampled it."""

    key: Key
    versions: tuple[tuple[int, ...], ...]
    place: Place
    hash: bytes
    worker: str = ""  # that delivered it


class LedgerState:
    """`dropped` counts groups by reason; under `stale`, work that was stopped, whose prompts were leased again."""

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
        self._config = config
        self._journal = journal
        self._pool = PromptPool(LeaseTable(ids, config.lease_s), NEVER)
        self._branches = Branches()
        self._replay: dict[int, Assigned] = {}  # by step: what comes before anything new
        self._level_at = 0  # step of the last version of the branch that is being repeated
        self._level_by = float("-inf")  # when it is not waited for any longer
        self._stored: dict[int, Stored] = {}  # by ordinal: every group that may still be asked for
        self._buffer: dict[Key, Stored] = {}  # those of them that no step of this branch has
        self._buffered_bytes = 0
        self._retired: set[int] = set()  # stored for the steps that have them, and for no other
        self._left_out: set[int] = set()  # groups that steps had, and that can't be sent any more
        self._hashes: dict[int, bytes] = {}  # of settled groups
        self._given_up: deque[int] = deque(maxlen=GIVEN_UP_KEPT)
        self._full_since: float | None = None  # since when a whole batch is buffered

    # ---------------------------------------------------------------- looking

    @property
    def pool(self) -> PromptPool:
        return self._pool

    @property
    def spool(self) -> str:
        """Where the journal is, for people."""
        return self._journal.where

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def buffered_bytes(self) -> int:
        """On the disk."""
        return self._buffered_bytes

    @property
    def full(self) -> bool:
        """Whether a batch can be made of what is buffered: its groups, or as many bytes as one may have."""
        config = self._config
        room = min(config.batch_bytes, config.buffer_bytes)
        return self.buffered >= config.batch_groups or self._buffered_bytes >= room

    @property
    def outstanding(self) -> int:
        return self._pool.outstanding

    @property
    def replaying(self) -> int:
        """Steps that an earlier life of the trainer has done, and this one has not."""
        return len(self._replay)

    def settled(self, key: Key) -> bool:
        """Whether the group of this key has been delivered before (stored, trained, dropped or
        filtered)."""
        issued = key.split == "train" and key.group == 0 and 0 <= key.ordinal < self.frontier
        return issued and key not in self._pool and key.ordinal not in self._given_up

    def hash_of(self, key: Key) -> bytes | None:
        """Of the group that was delivered for a settled key; None where it is not known any more."""
        stored = self._stored.get(key.ordinal)
        return stored.hash if stored is not None else self._hashes.get(key.ordinal)

    def deliverer(self, key: Key) -> str:
        """Who delivered a group that may still be asked for, by its lease and not by its own word; else ""."""
        stored = self._stored.get(key.ordinal) if key.split == "train" else None
        return stored.worker if stored is not None else ""

    def history(self) -> dict[int, Assigned]:
        """What each step had, or will have, on the branch of the trainer that has the run; not what is left out."""
        steps = {each.step for each in self._branches.all()}
        found = (self._branches.lookup(self.incarnation, step) for step in steps)
        return {each.step: self._without_left_out(each) for each in found if each is not None}

    def place_of(self, ordinal: int) -> Place | None:
        """Where the group of a prompt is; None where there is none that may still be asked for."""
        stored = self._stored.get(ordinal)
        return None if stored is None else stored.place

    # ---------------------------------------------------------------- the journal

    def restore(self, records: Iterable[tuple[Record, Place]], now: float) -> int:
        """Play a journal; how many records it had. Leases that ran get their whole time again. Raises
        StoreUnavailable where a first file is to be begun and the disk is full."""
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
            left_out=tuple(sorted(self._left_out)),
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
                self._retired.discard(ordinal)
                self._stored[ordinal] = self._buffer[key] = Stored(key, versions, place, digest, worker)
                self._buffered_bytes += place.size
                self.frontier = max(self.frontier, ordinal + 1)  # its lease may have been damaged
                self._note_full(now)
            case Settled():
                self._apply_settled(record, now)
            case Assigned(_, step, ordinals):
                if step > self.next_step:
                    self._pass_over(record)
                for ordinal in ordinals:
                    self._unbuffer(Key("train", ordinal))
                    # Where its group was found damaged when the journal was read: a step has had it all the same.
                    self._pool.discard(Key("train", ordinal))
                self._branches.assign(record)
                self._replay.pop(step, None)
                self.next_step = step + 1
                if record.replayed:
                    self._level_by = now + self._config.lease_s
                self._full_since = None
                self._note_full(now)
            case Dropped(ordinal, reason):
                key = Key("train", ordinal)
                if not self._take_out(key) and key not in self._pool:  # damaged, it is still leased
                    self._pool.add(key)
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
            self._retired.clear()
            self._left_out.clear()
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
            stored.key: stored
            for ordinal, stored in self._stored.items()
            if ordinal not in self._retired and not consumed(ordinal)
        }
        self._buffered_bytes = sum(stored.place.size for stored in self._buffer.values())
        self.frontier = max(self.frontier, took.frontier)
        self.incarnation, self.next_step = took.incarnation, took.step
        self._full_since = None
        self._note_full(0.0)

    def _apply_settled(self, settled: Settled, now: float) -> None:
        key = Key("train", settled.ordinal)
        self._pool.discard(key)
        self._take_out(key)
        if settled.reason in LEFT_OUT:  # there is nothing to keep for anybody
            self._stored.pop(settled.ordinal, None)
            self._retired.discard(settled.ordinal)
            self._left_out.add(settled.ordinal)
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
        self._left_out.update(snapshot.left_out)
        self.quarantine.restore(snapshot.quarantine, now)
        for prompt in snapshot.prompts:
            self._pool.restore(Key("train", prompt.ordinal), prompt, now)

    # ---------------------------------------------------------------- inside

    def _pass_over(self, assigned: Assigned) -> None:
        """The records of steps right before this one were damaged. Which groups they had, it knows itself: those that
        are neither its own nor left."""
        self._replay = {step: each for step, each in self._replay.items() if step >= assigned.step}
        if assigned.replayed:
            return  # a trainer that repeats steps took all of their groups when it began
        left = {*assigned.open, *assigned.ordinals}
        for key in [*self._buffer, *self._pool]:
            if key.ordinal < assigned.frontier and key.ordinal not in left:
                self._unbuffer(key)
                self._pool.discard(key)

    def _unbuffer(self, key: Key) -> None:
        stored = self._buffer.pop(key, None)
        if stored is not None:
            self._buffered_bytes -= stored.place.size

    def _take_out(self, key: Key) -> bool:
        """No step to come will have this group. Whether it stays all the same, and its prompt with it: the steps of
        another branch have it, and whoever resumes there gets it again. It was admitted once."""
        self._unbuffer(key)
        stays = self._branches.has(key.ordinal)
        if not stays:
            self._stored.pop(key.ordinal, None)
        elif (
            key.ordinal in self._stored
        ):  # else it was in a file that is gone, and its steps are soon forgotten, too
            self._retired.add(key.ordinal)
        return stays

    def _without_left_out(self, assigned: Assigned) -> Assigned:
        ordinals = tuple(each for each in assigned.ordinals if each not in self._left_out)
        return msgspec.structs.replace(assigned, ordinals=ordinals)

    def _note_full(self, now: float) -> None:
        if not self.full:
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
                self._retired.discard(ordinal)
                self._remember(ordinal, stored.hash)
        self._left_out &= needed

    def _remember(self, ordinal: int, digest: bytes) -> None:
        self._hashes[ordinal] = digest
        while len(self._hashes) > HASHES_KEPT:
            del self._hashes[next(iter(self._hashes))]
