"""The ledger under every sequence of events that hypothesis can think of: workers at different versions,
results in any order, late ones, duplicates, failures, deaths, and a trainer that goes on whenever it can.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger
from orchestrator.records import Took, Version
from orchestrator.spool import MemoryJournal
from orchestrator.versions import Versions
from tests.orchestration import group

WORKERS = ("w1", "w2", "w3")
GROUP_BYTES = 300
"""A record of one of the test's groups has some 270."""


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        batch=st.integers(1, 3),
        max_lag=st.integers(0, 3),
        hold_s=st.sampled_from([0.0, 5.0]),
        fit=st.sampled_from([None, 1, 2]),
        buffered=st.sampled_from([None, 1, 2]),
    )
    def start(self, batch, max_lag, hold_s, fit, buffered):
        """`fit`: groups that a batch has room for, `buffered`: likewise the buffer; None: any number."""
        self.config = OrchestratorConfig(
            batch_groups=batch,
            max_lag=max_lag,
            straggler_hold_s=hold_s,
            lease_s=20.0,
            max_attempts=2,
            **({"batch_bytes": fit * GROUP_BYTES} if fit else {}),
            **({"buffer_bytes": buffered * GROUP_BYTES} if buffered else {}),
        )
        self.fit = min(batch, fit or batch)
        self.now = 0.0
        self.journal = MemoryJournal()
        self.ledger = GroupLedger(self.config, self.journal, itertools.count())
        self.ledger.publish(Version(0, -1, 0, ""))
        self.ledger.take(Took(1, 0, -1, 0, (), False))
        self.versions = self.ledger.versions = Versions(self.ledger.tree, 0, 0.0)
        self.served = dict.fromkeys((*WORKERS, "fast", "good"), 0)  # policy version
        self.given = []  # every lease that was ever given
        self.delivered = {}  # key -> outcome of its accepted group
        self.trained = []  # keys, in order
        self.given_up = set()

    # ---------------------------------------------------------------- events

    @rule(worker=st.sampled_from(WORKERS), most=st.integers(1, 4))
    def a_worker_gets_leases(self, worker, most):
        for _ in range(most):
            self.lease(worker, self.served[worker])

    def lease(self, worker, version):
        before = self.ledger.slots_in_use
        held = self.ledger.lease(worker, version, self.now)
        if held is not None:
            step = self.versions.step_of(version)
            assert before < (step + self.config.max_lag + 1) * self.config.batch_groups, "over the limit"
            assert held.key not in self.delivered and held.key not in self.given_up
            self.given.append(held)
        return held

    @rule(data=st.data(), most=st.integers(1, 4), signal=st.sampled_from([True, True, False]))
    def results_arrive_in_any_order(self, data, most, signal):
        for _ in range(min(most, self.ledger.outstanding)):
            held = data.draw(st.sampled_from(sorted(self.ledger.pool.held, key=lambda held: held.lease)))
            self.deliver(held, self.served[held.worker], signal)

    @rule(data=st.data())
    def a_late_result_or_a_duplicate_arrives(self, data):
        if not self.given:
            return
        held = data.draw(st.sampled_from(self.given))
        self.deliver(held, self.served[held.worker], True)

    @rule(
        slow=st.sampled_from(WORKERS),
        most=st.integers(1, 3),
        steps=st.integers(1, 5),
        arrives=st.booleans(),
        updates=st.booleans(),
    )
    def a_worker_is_slow_while_a_fast_one_and_the_trainer_go_on(self, slow, most, steps, arrives, updates):
        leases = [self.lease(slow, self.served[slow]) for _ in range(most)]
        for _ in range(steps):
            self.served["fast"] = self.versions.newest
            for _ in range(2 * self.config.batch_groups):
                held = self.lease("fast", self.versions.newest)
                if held is not None:
                    self.deliver(held, self.versions.newest, True)
            self.now += self.config.straggler_hold_s
            self.the_trainer_goes_on(publish=True)
        if updates:
            self.served[slow] = self.versions.newest  # in flight: its groups have older and newer tokens
        for held in leases:
            if held is not None and arrives:
                self.deliver(held, self.served[slow], True)

    def deliver(self, held, newest, signal):
        """The oldest token is by the policy that the worker served when it got the lease."""
        key = held.key
        if not self.ledger.pool.expects(held.lease, key, held.worker):
            known = key in self.delivered or key in self.given_up
            assert known or held not in self.ledger.pool.held
            assert self.ledger.settled(key) == (key in self.delivered)
            return
        rewards = [0.0, 1.0] if signal else [1.0, 1.0]
        delivery = self.ledger.deliver(
            held.lease,
            held.worker,
            group(key, rewards=rewards),
            ((held.version,), (max(newest, held.version),)),
            self.now,
        )
        assert key not in self.delivered, "one group was taken twice"
        self.delivered[key] = delivery.outcome
        if not signal:
            assert delivery.outcome == "no_signal"
        if delivery.obsolete is not None:
            assert delivery.obsolete.key == key and delivery.obsolete.lease != held.lease

    @rule(data=st.data(), returned=st.booleans())
    def a_worker_fails(self, data, returned):
        if not self.given:
            return
        held = data.draw(st.sampled_from(self.given))
        self.note(self.ledger.fail(held.lease, held.worker, "it raised", self.now, counted=not returned))

    @rule(worker=st.sampled_from(WORKERS), most=st.integers(0, 4))
    def a_worker_reports_tokens_and_what_is_too_old_is_stopped(self, worker, most):
        """The first report of a token bounds the age of the lease's oldest one."""
        mine = self.ledger.pool.of_worker(worker)
        for held in mine[:most]:
            held.begun = held.begun if held.begun >= 0 else self.served[worker]
        for held in mine:
            if self.ledger.stale(held, self.now):
                self.stop(held)

    def stop(self, held):
        oldest = self.versions.step_of(held.version)
        assert self.ledger.next_step - oldest > self.config.max_lag, "it could still be trained"
        slots, stopped = self.ledger.slots_in_use, self.ledger.dropped["stale"]
        failure = self.ledger.give_up_stale(held, "too old")
        self.note([failure])
        assert (self.ledger.slots_in_use, self.ledger.dropped["stale"]) == (slots - 1, stopped + 1)
        assert not self.ledger.pool.wants(held.lease, held.worker), "its result would be too old, too"

    @rule(data=st.data())
    def a_lease_is_lost_on_its_way(self, data):
        if not self.ledger.outstanding:
            return
        held = data.draw(st.sampled_from(sorted(self.ledger.pool.held, key=lambda held: held.lease)))
        failures = self.ledger.pool.failures(held.key)
        failure = self.ledger.lose(held, "lost")
        assert not failure.given_up and self.ledger.pool.failures(held.key) == failures
        assert self.ledger.pool.expects(held.lease, held.key, held.worker), "a late result counts"

    @rule(worker=st.sampled_from(WORKERS), killed=st.booleans())
    def a_worker_leaves(self, worker, killed):
        self.note(self.ledger.worker_left(worker, "gone", counted=killed))

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_is_quarantined_and_released(self, worker):
        lost = {stored.key for stored in self.ledger._buffer.values() if stored.worker == worker}
        self.note(self.ledger.put_in_quarantine(worker, "it lied", self.now))
        assert not self.ledger.pool.count(worker)
        self.delivered = {key: outcome for key, outcome in self.delivered.items() if key not in lost}
        self.ledger.release(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_updates_to_the_newest_version(self, worker):
        self.served[worker] = self.versions.newest

    @rule(seconds=st.sampled_from([0.1, 3.0, 21.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.note(self.ledger.expire(self.now))

    @rule(publish=st.booleans())
    def the_trainer_trains(self, publish):
        self.the_trainer_goes_on(publish)

    def the_trainer_goes_on(self, publish):
        """It trains a batch if one is ready, and may take more steps before it publishes."""
        self.take_batch()
        if self.ledger.next_step > self.versions.newest_step and publish:
            self.publish()

    def take_batch(self):
        step = self.ledger.next_step
        if not self.ledger.readiness(self.now).ready:
            return
        batch = self.ledger.form_batch(self.now)
        assert 1 <= len(batch.groups) <= self.fit
        if self.config.buffer_bytes >= self.config.batch_bytes >= self.config.batch_groups * GROUP_BYTES:
            assert len(batch.groups) == self.config.batch_groups
        assert self.ledger.next_step == step + 1
        for made, lags in zip(batch.groups, batch.lags, strict=True):
            assert max(lags) <= self.config.max_lag, "a group over the lag limit was trained"
            assert self.delivered[made.key] == "stored"
            assert made.key not in self.trained, "a group was trained twice"
            self.trained.append(made.key)

    def publish(self):
        newest = self.versions.newest
        self.ledger.publish(Version(newest + 1, newest, self.ledger.next_step, ""))
        self.versions.add(newest + 1, self.now)

    def note(self, failures):
        self.given_up |= {failure.key for failure in failures if failure.given_up}

    # ---------------------------------------------------------------- what always holds

    @invariant()
    def every_prompt_is_in_exactly_one_place(self):
        ledger = self.ledger
        waiting, leased = set(ledger.pool.waiting), {held.key for held in ledger.pool.held}
        assert len(leased) == ledger.outstanding, "two leases run for one prompt"
        places = [waiting, leased, set(self.delivered), self.given_up]
        assert sum(map(len, places)) == len(set().union(*places)) == ledger.frontier
        assert len(ledger.pool) == len(waiting) + len(leased)
        # and what was delivered is in the buffer, trained, filtered or dropped
        stored = sum(outcome == "stored" for outcome in self.delivered.values())
        assert (
            len(self.delivered)
            == ledger.buffered + len(self.trained) + ledger.dropped["no_signal"] + ledger.dropped["lag"]
        )
        assert ledger.buffered + len(self.trained) <= stored
        assert ledger.dropped["failed"] == len(self.given_up)

    @invariant()
    def slots_stay_under_the_limit_of_the_newest_version(self):
        assert self.ledger.slots_in_use <= max(
            self.ledger.admitted_limit(self.versions.newest),
            self.ledger.next_step * self.config.batch_groups,
        )

    def teardown(self):
        """No deadlock: whatever has happened, one good worker at the newest version makes the next batch
        ready."""
        if not hasattr(self, "ledger"):
            return
        if self.ledger.next_step > self.versions.newest_step:
            self.publish()  # the trainer trains what it has, and publishes
        for _ in range(200):
            if self.ledger.readiness(self.now).ready:
                break
            self.now += 5.0
            self.note(self.ledger.expire(self.now))
            held = self.lease("good", self.versions.newest)
            if held is not None:
                self.deliver(held, self.versions.newest, True)
        else:
            raise AssertionError(f"no batch: {self.ledger.readiness(self.now).reason}")
        self.take_batch()
        self.every_prompt_is_in_exactly_one_place()
        self.the_journal_played_again_gives_the_same_ledger()

    def the_journal_played_again_gives_the_same_ledger(self):
        again = GroupLedger(self.config, MemoryJournal(), itertools.count())
        again.restore(self.journal.replay(), self.now)
        assert again.dropped == +self.ledger.dropped
        assert list(again.pool.waiting) == list(self.ledger.pool.waiting)
        assert {h.lease for h in again.pool.held} == {h.lease for h in self.ledger.pool.held}
        assert all(again.pool.failures(key) == self.ledger.pool.failures(key) for key in again.pool)


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_ledger_conserves_leases_bounds_lag_and_never_deadlocks = LedgerMachine.TestCase
