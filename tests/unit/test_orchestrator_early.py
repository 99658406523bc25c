"""Leases that end before their time: lost on the way, or too old to be trained."""

from __future__ import annotations

from async_rl import wire
from async_rl.wire import LeaseProgress
from orchestrator.config import EvalConfig
from tests.orchestration import TRAINER, Play, train_key


def test_a_lease_that_was_lost_on_its_way_goes_back_within_seconds_and_counts_for_nobody():
    play = Play(max_lag=0, max_attempts=1, evaluation=EvalConfig(every=10, prompts=1))
    play.attach()
    w1 = play.join(capacity=3)
    evaluation, kept, lost = play.leases(w1)
    assert evaluation.key.split == "eval"
    known = [LeaseProgress(kept.lease, 1)]
    assert play.beat(w1, progress=known) == [], "sent before the leases arrived"
    for _ in range(3):
        assert play.beat(w1, after=0.1, progress=known) == [], "said out of turn, it is no further one"
    for _ in range(2):
        assert play.beat(w1, after=2.0, progress=known) == []
    again = play.beat(w1, after=2.0, progress=known)
    assert [lease.key for lease in again] == [evaluation.key, lost.key]
    assert play.status().dead_letters == () and play.status().outstanding == 2
    assert play.deliver(w1, lost)[0] == wire.Ack(lost.lease, lost.key), "a late result counts"
    (cancel,) = play.beat(w1, after=2.0, progress=[*known, LeaseProgress(again[1].lease, 1)])
    assert cancel.leases == (again[1].lease,)


def test_a_lease_that_is_named_now_and_then_or_waits_for_its_ack_is_not_lost():
    play = Play()
    play.attach()
    w1 = play.join(capacity=2)
    running, finished = play.leases(w1)
    for turn in range(9):
        progress = [LeaseProgress(running.lease, turn)] if turn % 3 == 2 else []
        beat = wire.Heartbeat(0, "serving", tuple(progress), finished=(finished.lease,))
        assert play.say(w1, beat, after=2.0) == []
    assert play.status().outstanding == 2


def stale_play(**config):
    """A trainer at step 1, a slow worker with a lease begun under version 0, and a quick worker."""
    play = Play(**{"max_lag": 0, "batch_groups": 1} | config)
    play.attach()
    slow = play.join("slow", capacity=1)
    (lease,) = play.leases(slow)
    return play, slow, lease


def train_one(play, step, worker="quick"):
    """A step of which nobody knows but a quick worker."""
    quick = play.join(worker, capacity=1, version=step, nonce=str(step))
    (lease,) = play.leases(quick)
    play.deliver(quick, lease, version=step)
    play.ask(step)
    play.say(quick, wire.Bye("done"))
    play.say(TRAINER, wire.Published(1, step + 1, step + 1))


def test_what_would_be_too_old_in_any_case_is_stopped_and_its_prompt_goes_back():
    play, slow, lease = stale_play(max_lag=1)
    progress = [LeaseProgress(lease.lease, 3)]
    assert play.beat(slow, progress=progress) == []
    train_one(play, 0)
    assert play.beat(slow, progress=progress) == [], "still in time"
    play.say(slow, wire.Credit(0, 0))
    train_one(play, 1)
    (cancel,) = play.beat(slow, progress=progress)
    assert cancel.leases == (lease.lease,) and "too old" in cancel.reason
    status = play.status()
    assert status.dropped == {"stale": 1} and status.dead_letters == ()
    (again,) = play.leases(play.join("w3", capacity=1, version=2))
    assert (again.key, again.seeds) == (lease.key, lease.seeds)
    (repeated,) = play.beat(slow, version=2, progress=progress)
    assert repeated.leases == (lease.lease,), "a Cancel that was lost is said again"


def test_a_lease_of_which_no_token_was_heard_may_still_begin_under_a_newer_version():
    play, slow, lease = stale_play(max_lag=1)
    assert play.beat(slow, progress=[LeaseProgress(lease.lease, 0)]) == []
    train_one(play, 0)
    train_one(play, 1)
    progress = [LeaseProgress(lease.lease, 5)]
    assert play.beat(slow, version=2, progress=progress) == [], "it waited, and began under version 2"
    assert play.status().dropped == {}
    ack, *_ = play.deliver(slow, lease, version=2)
    assert isinstance(ack, wire.Ack) and play.status().buffered == 1


def test_a_prompt_that_always_takes_longer_than_the_lag_allows_is_given_up_in_the_end():
    play, slow, lease = stale_play(max_lag=0, max_attempts=2, batch_groups=1)
    for attempt in range(2):
        version = attempt
        progress = [LeaseProgress(lease.lease, 3)]
        play.beat(slow, version=version, progress=progress)
        # The trainer goes on without it, with a batch that it had before: what is outstanding fills its slot.
        play.control._ledger.next_step += 1
        play.say(TRAINER, wire.Published(1, version + 1, version + 1))
        answers = play.beat(slow, version=version + 1, progress=progress)
        assert isinstance(answers[0], wire.Cancel)
        (lease,) = [m for m in answers if isinstance(m, wire.Lease)]
    status = play.status()
    assert lease.key == train_key(1) and status.dropped == {"stale": 2, "failed": 1}
    ((key, reason),) = status.dead_letters
    assert key == "train/0" and reason == "slow: begun under version 1, and not done in time"
