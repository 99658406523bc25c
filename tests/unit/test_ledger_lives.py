"""The ledger through lives of the orchestrator and of the trainer, in every order that hypothesis can think of. What
must hold is checked from a log that the test keeps itself.

An imagined trainer trains batches, publishes, writes checkpoints, is killed, and resumes from any checkpoint that is
kept: also from one that its predecessor, not dead yet, wrote later, which starts a branch. Its weights are a function
of what it has trained, so equal histories have equal digests. Workers are quarantined, and what they had delivered is
left out where no step has it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger
from orchestrator.records import Took, Version
from orchestrator.spool import MemoryJournal
from orchestrator.versions import Versions
from tests.orchestration import group

WORKERS = ("w1", "w2")


class Done(NamedTuple):
    """A step: who did it (one that was repeated is equal, but another branch's), and with which groups."""

    incarnation: int
    ordinals: tuple[int, ...]


@dataclass
class Checkpoint:
    incarnation: int
    step: int
    frontier: int
    open: tuple[int, ...]
    history: tuple[Done, ...]
    version: int


@dataclass
class Trainer:
    incarnation: int
    history: list[Done] = field(default_factory=list)  # by step: what survives
    frontier: int = 0
    open: tuple[int, ...] = ()
    version: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr([done.ordinals for done in self.history]).encode()).hexdigest()[:16]


class Lives(RuleBasedStateMachine):
    @initialize(batch=st.integers(1, 3), max_lag=st.integers(0, 3))
    def start(self, batch, max_lag):
        self.config = OrchestratorConfig(
            batch_groups=batch, max_lag=max_lag, straggler_hold_s=0.0, lease_s=20.0, max_attempts=2
        )
        self.now, self.newest = 0.0, -1
        self.journal = MemoryJournal()
        self.leases = itertools.count(1)
        self.ledger = GroupLedger(self.config, self.journal, self.leases)
        self.ledger.open("run", "model")
        self.acknowledged: set[int] = set()
        self.dropped: dict[int, str] = {}
        self.generated_again = 0
        self.made = itertools.count(1)
        self.had: dict[
            tuple[int, int], tuple[tuple[int, float], ...]
        ] = {}  # groups, by incarnation and step
        self.checkpoints: list[Checkpoint] = []
        self.zombie: Trainer | None = None
        self.trainer = Trainer(0)
        self.served = dict.fromkeys(WORKERS, 0)
        self.attach(Trainer(1), parent=-1, took=Took(1, 0, -1, 0, (), False))

    # ---------------------------------------------------------------- the trainer

    def attach(self, trainer, parent, took):
        self.trainer = trainer
        self.newest += 1
        trainer.version = self.newest
        self.ledger.publish(Version(self.newest, parent, len(trainer.history), trainer.digest))
        self.ledger.take(took)
        self.versions = self.ledger.versions = Versions(self.ledger.tree, self.newest, self.now)

    @rule()
    def the_trainer_trains_and_publishes(self):
        step = len(self.trainer.history)
        before = Counter(self.ledger.dropped)
        buffered = {key.ordinal for key in self.ledger._buffer}
        self.ledger.sweep(self.now)
        gone = buffered - {key.ordinal for key in self.ledger._buffer}
        assert len(gone) == self.ledger.dropped["lag"] - before["lag"], "every drop is counted"
        self.dropped |= dict.fromkeys(gone, "lag")
        if not self.ledger.readiness(self.now).ready:
            return
        before = Counter(self.ledger.dropped)
        buffered = {key.ordinal for key in self.ledger._buffer}
        formed = self.ledger.form_batch(self.now)
        ordinals = tuple(made.key.ordinal for made in formed.groups)
        assert ordinals == formed.assigned.ordinals and formed.assigned.step == step
        assert all(lag <= self.config.max_lag for lags in formed.lags for lag in lags), (
            "trained though too old"
        )
        assert self.ledger.formed(step).groups == formed.groups, "asked again, the same answer"
        which = tuple((made.key.ordinal, made.generate_s) for made in formed.groups)
        if formed.assigned.replayed:
            assert which in {had for (_, at), had in self.had.items() if at == step}, "not what it was"
        self.had[self.trainer.incarnation, step] = which
        self.trainer.history.append(Done(self.trainer.incarnation, ordinals))
        self.trainer.frontier, self.trainer.open = formed.assigned.frontier, formed.assigned.open
        gone = buffered - {key.ordinal for key in self.ledger._buffer} - set(ordinals)
        assert len(gone) == self.ledger.dropped["lag"] - before["lag"], "every drop is counted"
        self.dropped |= dict.fromkeys(gone, "lag")
        self.publish()

    def publish(self):
        parent = self.trainer.version
        self.newest += 1
        self.trainer.version = self.newest
        self.ledger.publish(Version(self.newest, parent, len(self.trainer.history), self.trainer.digest))
        self.versions.add(self.newest, self.now)

    @rule()
    def the_trainer_writes_a_checkpoint(self):
        self.write_checkpoint(self.trainer)

    @precondition(lambda self: self.zombie is not None)
    @rule()
    def the_trainer_before_was_not_dead_and_writes_one_too(self):
        if len(self.zombie.history) >= self.ledger.resumable:
            self.write_checkpoint(self.zombie)
        self.zombie = None

    def write_checkpoint(self, t):
        if t.history and t.history[-1].incarnation == t.incarnation:  # nothing new is not written again
            made = Checkpoint(
                t.incarnation, len(t.history), t.frontier, t.open, tuple(t.history), t.version
            )
            self.checkpoints.append(made)

    @precondition(lambda self: self.checkpoints)
    @rule()
    def old_checkpoints_are_deleted(self):
        self.checkpoints = self.checkpoints[-2:]
        # Never past the step that is asked for next, as trainer_desk.py has it.
        self.ledger.keep_from(min(len(self.trainer.history), *(each.step for each in self.checkpoints)))

    @rule(data=st.data())
    def the_trainer_is_killed_and_resumes(self, data):
        if self.checkpoints:
            # mostly the newest; sometimes an older one, which starts a branch
            self.resume(data.draw(st.sampled_from([self.checkpoints[-1], *self.checkpoints])))
        elif not self.ledger.resumable:
            self.zombie, incarnation = self.trainer, self.trainer.incarnation + 1
            self.attach(Trainer(incarnation), 0, Took(incarnation, 0, -1, 0, (), False))

    def resume(self, chosen):
        incarnation = self.trainer.incarnation + 1
        longest, self.zombie = list(self.trainer.history), self.trainer
        took = Took(incarnation, chosen.step, chosen.incarnation, chosen.frontier, chosen.open, False)
        trainer = Trainer(incarnation, list(chosen.history), chosen.frontier, chosen.open)
        self.attach(trainer, chosen.version, took)
        mine = self.trainer.history
        if longest[: len(mine)] == mine:  # the one before had the same past: its steps come again
            again = [self.ledger._replay[step].ordinals for step in range(len(mine), len(longest))]
            assert again == [done.ordinals for done in longest[len(mine) :]]

    @rule(steps=st.integers(1, 3), quarantined=st.booleans())
    def a_branch_is_left_for_that_of_a_zombie_and_followed_again(self, steps, quarantined):
        self.work()
        self.the_trainer_writes_a_checkpoint()
        if not self.checkpoints:
            return
        self.work()
        self.resume(self.checkpoints[-1])
        self.work()
        self.the_trainer_writes_a_checkpoint()
        ours = self.checkpoints[-1]
        for _ in range(steps):
            self.work()
        self.the_trainer_before_was_not_dead_and_writes_one_too()
        self.resume(self.checkpoints[-1])
        if quarantined:
            self.a_worker_is_quarantined_and_released(WORKERS[0])
        self.the_trainer_trains_and_publishes()
        self.resume(ours)
        for _ in range(steps):
            self.the_trainer_trains_and_publishes()

    def work(self):
        """All groups that may be asked for arrive, and the trainer goes on if it can."""
        for worker in WORKERS:
            self.a_worker_gets_leases(worker, self.config.batch_groups, True)
        for held in list(self.ledger.pool.held):
            self.arrive(held, True)
        self.the_trainer_trains_and_publishes()

    # ---------------------------------------------------------------- the orchestrator

    @rule()
    def the_orchestrator_is_killed_and_restarts(self):
        before = self.ledger
        self.ledger = GroupLedger(self.config, self.journal, self.leases)
        self.ledger.restore(self.journal.replay(), self.now)
        assert self.ledger.snapshot() == before.snapshot()
        assert self.ledger._buffer.keys() == before._buffer.keys()
        assert {(h.lease, h.worker) for h in self.ledger.pool.held} == {
            (h.lease, h.worker) for h in before.pool.held
        }
        self.versions = self.ledger.versions = Versions(self.ledger.tree, self.trainer.version, self.now)

    # ---------------------------------------------------------------- the workers

    @rule(worker=st.sampled_from(WORKERS), most=st.integers(1, 6), updates=st.booleans())
    def a_worker_gets_leases(self, worker, most, updates):
        if updates:
            self.served[worker] = self.versions.newest
        for _ in range(most):
            self.ledger.lease(worker, self.served[worker], self.now)

    @rule(data=st.data(), most=st.integers(1, 6), signal=st.sampled_from([True, True, True, False]))
    def groups_arrive(self, data, most, signal):
        for _ in range(min(most, self.ledger.outstanding)):
            held = data.draw(st.sampled_from(sorted(self.ledger.pool.held, key=lambda held: held.lease)))
            self.arrive(held, signal)

    def arrive(self, held, signal):
        rewards = [0.0, 1.0] if signal else [1.0, 1.0]
        served = (held.version, max(held.version, self.served[held.worker]))
        made = group(held.key, rewards=rewards, generate_s=float(next(self.made)))
        outcome = self.ledger.deliver(held.lease, held.worker, made, (served, served), self.now).outcome
        ordinal = held.key.ordinal
        assert ordinal not in self.acknowledged
        self.acknowledged.add(ordinal)
        if outcome != "stored":
            self.dropped[ordinal] = outcome

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_dies(self, worker):
        for failure in self.ledger.worker_left(worker, "gone", counted=True):
            if failure.given_up:
                self.dropped[failure.key.ordinal] = "failed"

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_is_quarantined_and_released(self, worker):
        mine = {key.ordinal for key, stored in self.ledger._buffer.items() if stored.worker == worker}
        before = self.ledger.dropped["quarantined"]
        self.ledger.put_in_quarantine(worker, "it lied", self.now)
        self.ledger.release(worker)
        assert self.ledger.dropped["quarantined"] - before == len(mine), "every drop is counted"
        kept = {
            ordinal
            for (_, step), had in self.had.items()
            if step >= self.ledger.resumable
            for ordinal, _ in had
        }
        self.dropped |= dict.fromkeys(mine & kept, "quarantined")
        again = mine - kept
        assert again <= {key.ordinal for key in self.ledger.pool}
        self.acknowledged -= again
        self.generated_again += len(again)

    # ---------------------------------------------------------------- what always holds

    @invariant()
    def the_surviving_history_has_trained_every_group_at_most_once(self):
        trained = [ordinal for done in self.trainer.history for ordinal in done.ordinals]
        assert len(trained) == len(set(trained))
        assert set(trained) <= self.acknowledged

    @invariant()
    def every_acknowledged_group_was_trained_or_will_be_or_was_dropped_with_a_count(self):
        trained = {ordinal for done in self.trainer.history for ordinal in done.ordinals}
        buffered = {key.ordinal for key in self.ledger._buffer}
        coming = {ordinal for each in self.ledger._replay.values() for ordinal in each.ordinals}
        assert not trained & buffered and not trained & coming and not buffered & coming
        assert self.acknowledged <= trained | buffered | coming | self.dropped.keys()

    @invariant()
    def no_prompt_is_lost(self):
        trained = {ordinal for done in self.trainer.history for ordinal in done.ordinals}
        buffered = {key.ordinal for key in self.ledger._buffer}
        coming = {ordinal for each in self.ledger._replay.values() for ordinal in each.ordinals}
        pool = {key.ordinal for key in self.ledger.pool}
        everywhere = trained | buffered | coming | pool | self.dropped.keys()
        assert set(range(self.ledger.frontier)) <= everywhere

    @invariant()
    def the_size_of_the_buffer_is_known(self):
        assert self.ledger.buffered_bytes == sum(each.place.size for each in self.ledger._buffer.values())

    @invariant()
    def drops_are_counted(self):
        assert sum(self.ledger.dropped.values()) == len(self.dropped) + self.generated_again


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_the_ledger_survives_the_ends_of_trainers_and_orchestrators = Lives.TestCase
