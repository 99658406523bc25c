"""A group that the steps of one branch have can be taken from another branch, and the first one still repeats its
steps whole: the trainer that resumes there gets what its predecessor had, group by group. What can not be read any
more is left out of a step in the same way each time."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger
from orchestrator.records import Arrived, Assigned, Leased, Took, Version, encode_record
from orchestrator.spool import MemoryJournal, Place, Spool
from orchestrator.versions import Versions
from tests.orchestration import group

CONFIG = OrchestratorConfig(batch_groups=1, max_lag=1, straggler_hold_s=0.0, lease_s=20.0)


class Run:
    """A ledger, and a trainer that publishes each of its steps."""

    def __init__(self, journal=None):
        self.journal, self.leases = journal or MemoryJournal(), itertools.count(1)
        self.ledger = GroupLedger(CONFIG, self.journal, self.leases)
        self.ledger.open("run", "model")
        self.newest = -1
        self.attach(1, step=0, origin=-1, parent=-1)

    def attach(self, incarnation, *, step, origin, parent, frontier=0, open_=()):
        self.publish(step, parent)
        self.ledger.take(Took(incarnation, step, origin, frontier, open_, False))
        self.versions = self.ledger.versions = Versions(self.ledger.tree, self.newest, 0.0)

    def publish(self, step, parent):
        self.newest += 1
        self.ledger.publish(Version(self.newest, parent, step, f"{self.newest}"))

    def generate(self, worker):
        held = self.ledger.lease(worker, self.newest, 0.0)
        made = group(held.key, version=self.newest)
        self.ledger.deliver(held.lease, worker, made, ((self.newest,), (self.newest,)), 0.0)
        return made

    def train(self):
        formed = self.ledger.form_batch(0.0)
        self.publish(formed.assigned.step + 1, self.newest)
        self.versions.add(self.newest, 0.0)
        return formed

    def restart(self):
        """Of the orchestrator."""
        again = GroupLedger(CONFIG, self.journal, self.leases)
        again.restore(self.journal.replay(), 0.0)
        again.versions = self.ledger.versions
        assert again.snapshot() == self.ledger.snapshot()
        assert again._buffer.keys() == self.ledger._buffer.keys()
        assert again._stored.keys() == self.ledger._stored.keys()
        self.ledger = again


@pytest.fixture
def forked():
    return fork(Run())


def fork(run):
    """Two branches. Trainer 1 does step 0, writes a checkpoint, and gets the groups of step 1. Trainer 2 resumes
    there, repeats step 1 and writes a checkpoint, does step 2 with a group of `liar`, and step 3. Trainer 1 was not
    dead, and wrote a later one; trainer 3 resumes from that, on a branch of its own."""
    run.generate("good")
    run.train()
    fork = run.newest
    run.generate("good")
    run.train()
    run.attach(2, step=1, origin=1, parent=fork, frontier=1)
    run.train()
    run.liars = run.generate("liar")
    run.train()
    run.later = run.generate("good")
    run.train()
    run.attach(3, step=2, origin=1, parent=fork, frontier=2)
    assert not run.ledger.replaying, "what trainer 2 did is not in its past"
    assert run.liars.key in run.ledger._buffer, "but may be trained in its future"
    return run


def resume_on_the_second_branch(run):
    """The groups that its steps 2 and 3 get again."""
    run.attach(4, step=2, origin=2, parent=1, frontier=2)
    assert run.ledger.replaying == 2
    return [run.train().groups for _ in range(2)]


def test_a_quarantine_on_one_branch_leaves_the_steps_of_another_whole(forked):
    forked.ledger.put_in_quarantine("liar", "it lied", 0.0)
    assert forked.liars.key not in forked.ledger._buffer, "this branch does not train it"
    assert forked.ledger.dropped["quarantined"] == 1
    forked.restart()
    assert resume_on_the_second_branch(forked) == [(forked.liars,), (forked.later,)]


def test_a_group_too_old_for_one_branch_stays_for_the_steps_of_another(forked):
    forked.ledger.sweep(0.0)  # a policy is as many steps away as lie on the way back and forward
    assert forked.ledger.dropped["lag"] == 2 and not forked.ledger.buffered
    forked.restart()
    assert resume_on_the_second_branch(forked) == [(forked.liars,), (forked.later,)]


def test_a_group_that_one_branch_gave_up_does_not_come_back_to_a_third(forked):
    forked.ledger.put_in_quarantine("liar", "it lied", 0.0)
    forked.ledger.release("liar")
    forked.attach(4, step=2, origin=1, parent=1, frontier=2)
    assert forked.liars.key not in forked.ledger._buffer, "it would be dropped, and counted, once for each"
    assert forked.liars.key not in forked.ledger.pool, (
        "one prompt has one group, or steps could not be repeated"
    )
    assert forked.ledger.dropped["quarantined"] == 1


def test_a_group_given_up_is_forgotten_with_the_last_branch_that_had_it(forked):
    forked.ledger.put_in_quarantine("liar", "it lied", 0.0)
    forked.ledger.keep_from(4)
    assert forked.liars.key.ordinal not in forked.ledger._stored
    assert forked.ledger.settled(forked.liars.key) and forked.ledger.hash_of(forked.liars.key)


def test_a_group_of_a_quarantined_worker_that_no_step_has_is_generated_again(forked):
    forked.ledger.sweep(0.0)  # there is room again
    fresh = forked.generate("liar")
    forked.ledger.put_in_quarantine("liar", "it lied", 0.0)
    assert fresh.key in forked.ledger.pool and fresh.key.ordinal not in forked.ledger._stored


def test_a_group_given_up_stays_so_in_the_next_life_when_the_file_that_it_was_in_is_gone(tmp_path):
    spool = Spool(tmp_path, fsync=False, segment_bytes=1)
    spool.begin(GroupLedger(CONFIG, MemoryJournal(), itertools.count()).snapshot())
    forked = fork(Run(spool))
    forked.ledger.rotate()
    forked.ledger.put_in_quarantine("liar", "it lied", 0.0)
    forked.ledger.sweep(0.0)
    forked.generate("good")
    forked.ledger.keep_from(4)
    spool.close()
    assert len(list(tmp_path.glob("*.log"))) == 1
    again = Spool(tmp_path, fsync=False)
    restored = GroupLedger(CONFIG, again, itertools.count(100))
    restored.restore(again.replay(), 0.0)
    again.close()
    assert restored.snapshot() == forked.ledger.snapshot() and forked.liars.key not in restored.pool


# ---------------------------------------------------------------- groups that can't be read any more


@pytest.fixture
def torn():
    """A run whose next batch is of a group that the disk has spoiled."""
    run = Run()
    run.generate("good")
    (stored,) = run.ledger._buffer.values()
    run.journal._bodies[stored.place.offset] = b"spoiled"
    return run


def test_a_group_that_can_not_be_read_is_counted_once_and_the_journal_says_so(torn):
    formed = torn.train()
    assert formed.groups == () and torn.ledger.dropped["damaged"] == 1
    assert torn.ledger.formed(0).groups == () and torn.ledger.dropped["damaged"] == 1, "asked again"
    restored = GroupLedger(CONFIG, torn.journal, itertools.count())
    restored.restore(readable(torn.journal), 0.0)
    assert restored.dropped == torn.ledger.dropped and restored.snapshot() == torn.ledger.snapshot()


def test_a_repeat_leaves_out_what_was_left_out_before_though_the_disk_reads_again(torn):
    body = torn.journal._bodies[:]
    torn.train()
    torn.journal._bodies[: len(body)] = [encode_record(each) for each in torn.journal.records[: len(body)]]
    torn.attach(2, step=0, origin=-1, parent=0)
    assert torn.train().groups == () and torn.ledger.dropped["damaged"] == 1


def test_a_group_that_was_trained_and_then_spoiled_is_not_generated_again_after_a_restart():
    run = Run()
    trained = run.generate("good")
    (stored,) = run.ledger._buffer.values()
    assert run.train().groups == (trained,)
    run.journal._bodies[stored.place.offset] = b"spoiled"
    restored = GroupLedger(CONFIG, run.journal, itertools.count())
    restored.restore(readable(run.journal), 0.0)
    assert trained.key not in restored.pool and not list(restored.pool.held)


def test_a_damaged_lease_of_a_group_that_was_taken_does_not_lease_its_prompt_again():
    run = Run()
    taken = run.generate("good")
    spoil(run, Leased)
    again = restarted(run)
    assert again.frontier == 1 and again.lease("good", run.newest, 0.0).key.ordinal != taken.key.ordinal


def test_what_a_damaged_step_had_is_not_trained_again_in_a_later_one():
    run = Run()
    trained = run.generate("good")
    run.train()
    later = run.generate("good")
    run.train()
    spoil(run, Assigned)
    again = restarted(run)
    assert again.next_step == 2 and not again.buffered, "the next step says which groups were left"
    assert again.settled(trained.key) and again.settled(later.key)


def test_a_damaged_step_leaves_what_the_next_one_left():
    run = Run()
    run.generate("good")
    kept = run.ledger.lease("good", run.newest, 0.0)
    run.train()
    run.generate("good")
    run.train()
    spoil(run, Assigned)
    again = restarted(run)
    assert list(again.pool) == [kept.key] and not again.buffered


def test_a_damaged_repeat_of_a_step_is_not_waited_for_when_the_next_one_was_repeated():
    run = Run()
    for _ in range(2):
        run.generate("good")
        run.train()
    run.attach(2, step=0, origin=-1, parent=0)
    before = len(run.journal.records)
    run.train(), run.train()
    spoil(run, Assigned, after=before)
    again = restarted(run)
    assert again.next_step == 2 and not again.replaying
    assert again.slots_in_use == 2, "or admission would have a step less for ever"


def test_a_damaged_group_of_a_worker_in_quarantine_is_generated_once_more_and_no_lease_is_left_over():
    run = Run()
    group_of_liar = run.generate("liar")
    spoil(run, Arrived)
    run.ledger.put_in_quarantine("liar", "it lied", 0.0)
    again = restarted(run)
    again.expire(100.0)
    assert group_of_liar.key in again.pool and not list(again.pool.held) and again.expire(200.0) == []


def test_a_step_is_repeated_though_the_record_of_the_policy_that_sampled_its_group_is_damaged():
    run = Run()
    run.generate("good")
    run.train()
    trained = run.generate("good")  # by version 1
    run.train()
    run.attach(2, step=0, origin=-1, parent=0)
    spoil(run, Version, after=4)
    again = restarted(run)
    assert 1 not in again.tree
    again.form_batch(0.0)
    formed = again.form_batch(0.0)
    assert (
        formed.assigned.replayed
        and formed.assigned.ordinals == (trained.key.ordinal,)
        and formed.groups == (trained,)
    )


def spoil(run, kind, after=0):
    """The first record of a kind."""
    at = next(at for at, each in enumerate(run.journal.records) if at >= after and isinstance(each, kind))
    run.journal._bodies[at] = b"spoiled"


def restarted(run):
    again = GroupLedger(CONFIG, run.journal, itertools.count(100))
    again.restore(readable(run.journal), 0.0)
    again.versions = Versions(again.tree, run.newest, 0.0)
    return again


def readable(journal):
    """What a restart finds: the record of a spoiled group is passed over."""
    for at, record in enumerate(journal.records):
        if journal._bodies[at] != b"spoiled":
            yield record, Place(0, at, len(journal._bodies[at]))
