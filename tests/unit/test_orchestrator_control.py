"""Whole conversations with the orchestrator, message by message, under a clock that the test moves."""

from __future__ import annotations

import msgspec
import pytest

from async_rl import wire
from async_rl.errors import EnvironmentFailed, Malformed, NotAllowed
from async_rl.wire import LeaseProgress
from orchestrator.config import EvalConfig
from orchestrator.records import Arrived
from orchestrator.spool import MemoryJournal
from tests.orchestration import TRAINER, Counting, Play, group, hello, sample, train_key

# ---------------------------------------------------------------- handshakes


def test_a_worker_waits_for_the_trainer_and_is_then_told_what_the_run_is():
    play = Play()
    (refused,) = play.say(b"w1:1", hello())
    assert refused.retry and "no trainer" in refused.reason
    (attached,) = play.attach()
    assert attached == wire.Attached("run", max_lag=1, batch_groups=2)
    (welcome,) = play.say(b"w1:1", hello())
    assert welcome.settings.environment_args == {"to": 9}
    assert welcome.settings.sampling == wire.Sampling(0.7, 8)
    assert (welcome.settings.group_size, welcome.newest_version) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"protocol": 99}, ("99", str(wire.PROTOCOL))),
        ({"run": "other"}, ("'other'", "'run'")),
        ({"fingerprint": "0ther"}, ("0ther", "model")),
    ],
)
@pytest.mark.parametrize("who", ["worker", "trainer"])
def test_who_does_not_belong_here_is_refused_for_good_and_told_what_differs(who, changes, both):
    play = Play()
    play.attach()
    if who == "worker":
        (refused,) = play.say(b"w1:1", hello(**changes))
    else:
        (refused,) = play.attach(incarnation=2, peer=b"trainer:2", **changes)
    assert isinstance(refused, wire.Refused) and not refused.retry and refused.hint
    assert all(text in refused.reason for text in both)


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": 3},
        {"parent": 4},
        {"known": ((2, 2, 0, "d"),)},
        {"known": ((1, 2, 0, "d"), (2, 1, 0, "d"))},
    ],
)
def test_a_trainer_whose_versions_go_round_is_refused(changes):
    (refused,) = Play().attach(version=3, **changes)
    assert "can't have followed" in refused.reason


@pytest.mark.parametrize("parent", [1, 2])
def test_a_version_that_follows_itself_or_a_later_one_is_not_published(parent):
    play = Play()
    play.attach()
    worker = play.join()
    (refused,) = play.say(TRAINER, wire.Published(1, 1, 1, parent, "d"))
    assert "can't have followed" in refused.reason
    assert play.status().newest_version == 0 and not play.take(worker, wire.Announce)


def turned_away(play, peer, **why):
    (answer,) = [
        m for p, m in play.control.receive(peer, NotAllowed("no", hint="ask", **why), play.now) if p == peer
    ]
    return answer


def test_a_worker_whose_key_was_revoked_loses_its_leases_at_once_and_gets_none():
    play = Play()
    play.attach()
    peer = play.join("fleet/1", capacity=2)
    assert play.leases(peer)
    before = play.status()
    refused = turned_away(play, peer, code="key_revoked", revoked="fleet")
    assert isinstance(refused, wire.Refused) and not refused.retry
    status = play.status()
    assert (before.workers[0].leases, status.workers) == (2, ()) and status.outstanding == 0
    assert status.refused == {"key_revoked": 1}
    other = play.join("w2", capacity=2)
    assert len(play.leases(other)) == 2, "the prompts went back"


@pytest.mark.parametrize(
    "why", [{"code": "key_role"}, {"code": "key_name"}, {"code": "key_revoked", "revoked": "w2"}]
)
def test_what_a_key_may_not_say_changes_nothing_for_the_worker_it_names(why):
    play = Play()
    play.attach()
    peer = play.join("w1", capacity=2)
    before = play.status()
    assert not turned_away(play, peer, **why).retry
    assert play.status().workers == before.workers


def test_strangers_are_told_to_introduce_themselves():
    play = Play()
    (refused,) = play.ask(0)
    assert refused.retry and "attach" in refused.reason
    play.attach()
    for message in (
        wire.Credit(1, 0),
        wire.Heartbeat(0, "serving"),
        wire.GroupDone(1, group(train_key(0))),
    ):
        (refused,) = play.say(b"w1:1", message)
        assert refused.retry and "Hello" in refused.reason
    assert play.say(b"w1:1", wire.Bye("leaving")) == []


def test_what_is_no_message_or_not_for_us_is_counted_and_answered():
    play = Play()
    play._post(play.control.receive(b"evil", Malformed("not a message"), play.now))
    (refused,) = play.take(b"evil")
    assert "not a message" in refused.reason
    assert play.say(b"evil", wire.Drain("leave!"))[0].reason.startswith("Drain")
    assert play.status().refused == {"malformed": 2}


def test_two_processes_with_one_name_do_not_take_each_others_leases():
    play = Play()
    play.attach()
    first = play.join("w1", nonce="1")
    assert len(play.leases(first)) == 4
    (refused,) = play.say(b"w1:2", hello("w1"))
    assert refused.retry and "another process" in refused.reason
    play.wait(11)  # the first one is silent: it was killed, and the second is its restart
    (welcome,) = play.say(b"w1:2", hello("w1"))
    assert isinstance(welcome, wire.Welcome)
    assert play.status().outstanding == 0


def test_a_worker_that_says_hello_again_keeps_its_leases():
    play = Play()
    play.attach()
    w1 = play.join()
    lease, *_ = play.leases(w1)
    assert isinstance(play.say(w1, hello())[0], wire.Welcome)
    assert play.status().outstanding == 4
    assert play.deliver(w1, lease) == [wire.Ack(lease.lease, lease.key)]


# ---------------------------------------------------------------- leases


def test_credit_is_a_level_and_leases_are_spread_over_the_workers():
    play = Play(batch_groups=4, max_lag=3)
    play.attach()
    w1, w2 = play.join("w1", capacity=2), play.join("w2", capacity=4)
    assert (len(play.leases(w1)), len(play.leases(w2))) == (2, 4)
    assert play.say(w1, wire.Credit(2, 0)) == [], "said again, it changes nothing"
    play.say(w1, wire.Credit(0, 0))
    play.say(w2, wire.Credit(0, 0))
    w3, w4 = play.join("w3", capacity=0), play.join("w4", capacity=0)
    play.say(w3, wire.Credit(8, 0))
    play.say(w4, wire.Credit(8, 0))
    assert play.status().outstanding == 16


def test_slots_that_come_free_go_to_the_emptiest_worker_in_turn():
    play = Play(batch_groups=4, max_lag=0)
    play.attach()
    w1 = play.join("w1", capacity=8)
    leases = play.leases(w1)
    w2 = play.join("w2", capacity=8)
    assert play.leases(w2) == [], "admission is used up"
    play.say(w1, wire.Bye("leaving"))
    assert [lease.key for lease in play.leases(w2)] == [lease.key for lease in leases], (
        "given back, leased first"
    )
    assert play.leases(w1) == []


def test_a_lease_says_all_that_is_needed_and_the_same_key_has_the_same_seeds():
    play = Play()
    play.attach()
    w1 = play.join(capacity=1)
    (lease,) = play.leases(w1)
    assert lease.key == train_key(0) and lease.prompt.text == "train 0"
    assert len(set(lease.seeds)) == 2 and all(0 <= seed < 2**31 for seed in lease.seeds)
    assert (lease.deadline_s, lease.oldest_version) == (60.0, 0)
    play.say(w1, wire.Bye("restart"))
    again = play.leases(play.join("w2", capacity=1))[0]
    assert (again.key, again.seeds) == (lease.key, lease.seeds) and again.lease != lease.lease
    other = Play(seed=8)
    other.attach()
    assert other.leases(other.join(capacity=1))[0].seeds != lease.seeds


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_a_worker_that_starts_or_drains_gets_no_leases(state):
    play = Play()
    play.attach()
    w1 = play.join(capacity=0)
    play.beat(w1, state=state)
    assert play.say(w1, wire.Credit(4, -1 if state == "starting" else 0)) == []


def test_a_silent_worker_is_gone_and_its_prompts_go_to_others_and_it_may_come_back():
    play = Play()
    play.attach()
    w1 = play.join("w1")
    w2 = play.join("w2")
    lost = play.leases(w1)
    got = []
    for _ in range(12):
        got += play.beat(w2, after=1.0)
        play.wait(0.1)
    got += play.take(w2)
    assert [worker.state for worker in play.status().workers] == ["gone", "serving"]
    assert [lease.key for lease in got] == [lease.key for lease in lost]
    (refused,) = play.beat(w1)
    assert refused.retry
    assert isinstance(play.say(w1, hello())[0], wire.Welcome)
    # what it had finished meanwhile still counts, and the second worker is told to stop
    assert isinstance(play.say(w1, wire.GroupDone(lost[0].lease, group(lost[0].key)))[0], wire.Ack)
    (cancel,) = play.take(w2, wire.Cancel)
    assert len(cancel.leases) == 1
    play.wait(61 + 60)
    assert play.status().workers == (), "after a while it is forgotten"


def test_a_worker_that_goes_silent_with_its_leases_again_and_again_rests():
    play = Play(batch_groups=16, max_lag=0)
    play.attach()
    other = play.join("other", capacity=8)
    held = [each.lease for each in play.leases(other)]
    got = []
    for _ in range(6):
        got.append(len(play.leases(play.join("flaps", capacity=8))))
        for _ in range(12):
            play.wait(1.0)
            play.beat(other, progress=[LeaseProgress(lease, int(play.now)) for lease in held])
    assert got[0] == 8 and sum(got[1:]) <= 3, "one now and then, to try"


def test_a_worker_that_was_silent_once_without_leases_has_lost_nothing():
    play = Play(batch_groups=64)
    play.attach()
    play.join("idle", capacity=0)
    play.wait(30.0)
    play.attach(step=0)
    assert len(play.leases(play.join("idle", capacity=20))) == 20


def test_progress_keeps_a_lease_and_useless_work_is_cancelled():
    play = Play(lease_s=5.0, batch_groups=1, max_lag=0)
    play.attach()
    w1 = play.join(capacity=1)
    (lease,) = play.leases(w1)
    for tokens in range(1, 10):
        assert play.beat(w1, after=2.0, progress=[LeaseProgress(lease.lease, tokens)]) == []
        play.wait(0.1)
    assert play.status().outstanding == 1
    (cancel,) = play.beat(w1, progress=[LeaseProgress(lease.lease, 11), LeaseProgress(5, 1)])
    assert cancel.leases == (5,), "a lease of a former life of the orchestrator"


def test_a_failing_prompt_is_given_up_with_its_reason_and_the_run_goes_on():
    play = Play(batch_groups=1, max_lag=0)
    play.attach()
    w1 = play.join(capacity=1)
    for _ in range(2):
        (lease,) = play.leases(w1)
        assert lease.key == train_key(0)
        play.mail[w1] = play.say(w1, wire.Failed(lease.lease, lease.key, "ZeroDivisionError"))
    assert play.leases(w1)[0].key == train_key(1)
    status = play.status()
    assert status.dropped == {"failed": 1}
    assert status.dead_letters == (("train/0", "w1: ZeroDivisionError"),)


def test_an_environment_that_raises_for_a_prompt_ends_the_orchestrator_and_names_it():
    class Broken(Counting):
        def prompt(self, split, ordinal):
            raise KeyError("answer")

    play = Play(environment=Broken())
    play.attach()
    with pytest.raises(EnvironmentFailed, match="train prompt 0: KeyError: 'answer'"):
        play.join()


# ---------------------------------------------------------------- groups


def test_a_group_is_acknowledged_as_often_as_it_is_sent_and_kept_once():
    play = Play()
    play.attach()
    w1 = play.join(capacity=1)
    (lease,) = play.leases(w1)
    done = wire.GroupDone(lease.lease, group(lease.key))
    for _ in range(3):
        assert play.say(w1, done)[0] == wire.Ack(lease.lease, lease.key)
    status = play.status()
    assert status.buffered == 1 and status.workers[0].groups_done == 1


def test_a_group_for_somebody_elses_lease_is_refused():
    play = Play()
    play.attach()
    w1, w2 = play.join("w1", capacity=1), play.join("w2", capacity=1)
    (lease,), (other,) = play.leases(w1), play.leases(w2)
    for number, key in ((lease.lease, other.key), (other.lease, other.key), (99, train_key(99))):
        (nack,) = play.say(w1, wire.GroupDone(number, group(key)))
        assert isinstance(nack, wire.Nack) and nack.reason.startswith("lease")
    assert play.status().refused == {"lease": 3} and play.status().buffered == 0


def test_a_group_that_means_nothing_is_refused_by_reason_and_counts_as_an_attempt():
    play = Play(batch_groups=1, max_lag=0)
    play.attach()
    w1 = play.join(capacity=1)
    for _ in range(2):
        (lease,) = play.leases(w1)
        assert lease.key == train_key(0)
        nack, *rest = play.deliver(w1, lease, rewards=[0.0, 7.0])
        assert isinstance(nack, wire.Nack) and "reward 7.0 is outside 0.0..1.0" in nack.reason
        play.mail[w1] = rest
    status = play.status()
    assert status.refused == {"reward": 2} and status.dropped == {"failed": 1}


def test_a_version_the_worker_saw_before_us_costs_no_attempt():
    play = Play(batch_groups=1, max_lag=0, max_attempts=1)
    play.attach()
    w1 = play.join(capacity=1)
    (lease,) = play.leases(w1)
    nack, again = play.deliver(w1, lease, version=1)
    assert nack.reason.startswith("early") and again.key == lease.key
    play.say(TRAINER, wire.Published(1, 1, 1))
    play.take(w1)
    assert isinstance(play.deliver(w1, again, version=1)[0], wire.Ack)


# ---------------------------------------------------------------- batches


def fill(play, peer, count, version=0):
    """Deliver `count` groups from a worker's leases."""
    leases = play.leases(peer)
    for lease in leases[:count]:
        play.mail.setdefault(peer, []).extend(
            message for message in play.deliver(peer, lease, version) if isinstance(message, wire.Lease)
        )
    play.mail.setdefault(peer, []).extend(leases[count:])


def test_a_batch_is_answered_when_it_is_ready_and_again_when_it_is_asked_for_again():
    play = Play()
    play.attach(frontier=10)
    w1 = play.join()
    assert play.ask(0) == [] and play.status().trainer == "waiting"
    play.now += 3.0
    fill(play, w1, 2)
    (batch,) = play.take(TRAINER)
    assert [each.key.ordinal for each in batch.groups] == [10, 11]
    assert batch.lags == ((0, 0), (0, 0)) and batch.waited_s == pytest.approx(3.0)
    assert batch.frontier == 14, "the next prompt that was never leased"
    assert play.ask(0) == [], "it is on its way"
    play.now += 2.0
    assert play.ask(0) == [batch]
    fill(play, w1, 2)
    play.now += 4.0
    assert play.ask(0) == [batch]
    play.say(TRAINER, wire.Published(1, 1, 1))
    (second,) = play.ask(1)
    assert [each.key.ordinal for each in second.groups] == [12, 13] and second.lags == ((1, 1), (1, 1))
    (refused,) = play.ask(0)
    assert not refused.retry and "step 0" in refused.reason
    (refused,) = play.ask(5)
    assert not refused.retry


def test_a_batch_that_is_long_on_its_way_is_not_sent_as_often_as_it_is_asked_for():
    play = Play()
    play.attach()
    fill(play, play.join(), 2)
    copies = len(play.ask(0))
    for _ in range(300):  # ten minutes in which the disk is full, or the line slow
        play.now += 2.0
        copies += len(play.ask(0))
    assert 2 < copies < 20
    play.attach(step=0)
    assert len(play.ask(0)) == 1, "over a new connection at once"


def test_no_lag_means_that_nobody_generates_while_the_trainer_trains():
    play = Play(max_lag=0)
    play.attach()
    w1 = play.join(capacity=8)
    for step in range(3):
        assert play.ask(step) == []
        fill(play, w1, 2, version=step)
        (batch,) = play.take(TRAINER)
        assert batch.step == step and batch.lags == ((0, 0), (0, 0))
        assert play.leases(w1) == []
        play.say(TRAINER, wire.Published(1, step + 1, step + 1))
        assert play.take(w1) == [wire.Announce(step + 1, step + 1)]
        play.mail[w1] = play.beat(w1, version=step + 1)
        assert len(play.mail[w1]) == 2


def test_dropped_groups_and_lag_are_counted_over_the_run():
    play = Play(batch_groups=1, max_lag=1)
    play.attach()
    w1 = play.join(capacity=1)
    play.ask(0)
    (lease,) = play.leases(w1)
    (_, lease) = play.deliver(w1, lease, rewards=[1.0, 1.0])
    (_, lease) = play.deliver(w1, lease)
    (batch,) = play.take(TRAINER)
    assert batch.dropped == {"no_signal": 1}
    play.say(TRAINER, wire.Published(1, 1, 1))
    play.ask(1)
    play.deliver(w1, lease)
    assert play.take(TRAINER)[0].lags == ((1, 1),)
    status = play.status()
    assert status.lag_counts == {0: 2, 1: 2}
    assert (status.lag_p50, status.lag_p95, status.lag_max) == (0.0, 1.0, 1)
    assert (status.step, status.newest_version, status.reward) == (1, 1, 0.5)


# ---------------------------------------------------------------- who has the run


def test_a_newer_incarnation_takes_over_and_the_older_gets_nothing_more():
    play = Play()
    play.attach(incarnation=1)
    w1 = play.join()
    fill(play, w1, 1)
    kept = play.leases(w1)
    new = b"trainer:2"
    (attached,) = play.attach(
        incarnation=2, step=5, version=9, version_step=5, parent=0, frontier=3, peer=new
    )
    assert isinstance(attached, wire.Attached)
    cancel, announce, *_ = play.take(w1)
    used = {lease.lease for lease in kept if lease.key.ordinal < 3}
    assert set(cancel.leases) == used, "what the checkpoint has used" and announce == wire.Announce(9, 5)
    for message in (wire.NextBatch(1, 0), wire.Published(1, 1, 1), wire.Finish(1, 0)):
        (refused,) = play.say(TRAINER, message)
        assert not refused.retry and "incarnation 2" in refused.reason
    (refused,) = play.attach(incarnation=1)
    assert not refused.retry
    status = play.status()
    assert (status.step, status.buffered, status.outstanding, status.newest_version) == (5, 0, 1, 9)
    assert status.workers[0].lag == 5, "its version is the one that the new branch grew from"
    (ack,) = play.deliver(w1, kept[0])
    assert isinstance(ack, wire.Ack), "of a step that is done"
    (late,) = play.deliver(w1, kept[2])
    assert isinstance(late, wire.Ack) and play.status().dropped == {"lag": 1}
    leases = [each for each in play.beat(w1, version=9) if isinstance(each, wire.Lease)]
    assert [lease.key.ordinal for lease in leases] == [4, 5, 6, 7]
    assert leases[0].oldest_version == 9
    play.ask(5, incarnation=2, peer=new)
    for lease in leases[:2]:
        play.deliver(w1, lease, version=9)
    assert play.take(new)[0].step == 5


def test_a_trainer_that_reconnects_goes_on_where_it_was():
    play = Play()
    play.attach()
    w1 = play.join()
    fill(play, w1, 2)
    (batch,) = play.ask(0)
    (attached,) = play.attach(step=0)
    assert isinstance(attached, wire.Attached)
    assert play.ask(0) == [batch] and play.status().outstanding == 2


def test_the_same_incarnation_over_another_connection_is_refused():
    play = Play()
    play.attach()
    (refused,) = play.attach(peer=b"trainer:2")
    assert not refused.retry and "another connection" in refused.reason
    (refused,) = play.ask(0, peer=b"trainer:2")
    assert not refused.retry


# ---------------------------------------------------------------- the end


def test_at_the_end_leases_are_cancelled_workers_drained_and_the_trainer_answered():
    play = Play()
    play.attach()
    w1 = play.join()
    leases = play.leases(w1)
    (finished,) = play.say(TRAINER, wire.Finish(1, 0))
    assert finished == wire.Finished(())
    cancel, drain = play.take(w1)
    assert set(cancel.leases) == {lease.lease for lease in leases} and isinstance(drain, wire.Drain)
    assert play.say(TRAINER, wire.Finish(1, 0)) == [finished]
    assert play.say(b"w2:1", hello("w2")) == [drain], "it ends as those do that were here"
    assert play.say(w1, wire.Heartbeat(0, "serving")) == [drain], "it did not get the first one"
    assert play.say(w1, wire.Heartbeat(0, "draining")) == []
    assert play.status().trainer == "finished"
    assert not play.control.ended(play.now)
    play.say(w1, wire.Bye("drained"))
    assert play.control.ended(play.now)


def test_a_worker_that_does_not_leave_holds_the_end_up_for_a_limited_time():
    play = Play(drain_s=10.0, heartbeat_s=60.0)
    play.attach()
    play.join()
    play.say(TRAINER, wire.Finish(1, 0))
    assert not play.control.ended(play.now + 9.9)
    assert play.control.ended(play.now + 10.0)


def test_a_trainer_that_stopped_asking_is_shown_as_absent():
    play = Play()
    assert play.status().trainer == "absent"
    play.attach()
    assert play.status().trainer == "training"
    play.ask(0)
    assert play.status().trainer == "waiting"
    play.now += 20
    assert play.status().trainer == "absent"


def test_the_last_evaluation_does_not_wait_for_leases_that_were_cancelled():
    play = Play(evaluation=EvalConfig(every=5, prompts=3))
    play.attach(version=1, version_step=0)
    w1 = play.join(version=1, capacity=4)
    training = play.leases(w1)
    assert len(training) == 4 and all(lease.key.split == "train" for lease in training)
    play.say(TRAINER, wire.Finish(1, 0))
    assert [lease.key.split for lease in play.leases(w1)] == ["eval"] * 3
    assert play.status().outstanding == 0
    (ack,) = play.deliver(w1, training[0], version=1)
    assert isinstance(ack, wire.Ack) and play.status().buffered == 1, "what comes all the same is kept"


def test_what_a_worker_says_at_length_is_kept_short():
    play = Play(max_attempts=1)
    play.attach()
    w1 = play.join("w1", capacity=2)
    failed, long = play.leases(w1)
    play.say(w1, wire.Failed(failed.lease, failed.key, "x" * (1 << 20)))
    done = group(long.key, 0, n=2)
    samples = (sample(spans=[(0, 1)] * 100_000), done.samples[1])
    answers = play.say(w1, wire.GroupDone(long.lease, msgspec.structs.replace(done, samples=samples)))
    (nack,) = [each for each in answers if isinstance(each, wire.Nack)]
    assert "100000 in all] tokens do not sum to 4" in nack.reason and len(nack.reason) < 200
    status = play.status()
    assert len(status.dead_letters) == 2 and len(wire.encode(status)) < 10_000


def test_a_credit_beyond_what_a_heartbeat_can_name_counts_as_that():
    play = Play()
    play.attach()
    w1 = play.join("w1", capacity=1 << 60)
    assert [each.capacity for each in play.status().workers] == [wire.MOST_LEASES]
    for capacity in (0, 1 << 60, 0, 3):
        play.say(w1, wire.Credit(capacity, 0))
    assert [each.capacity for each in play.status().workers] == [3]


def test_of_a_group_nothing_is_kept_that_we_do_not_know():
    journal = MemoryJournal()
    play = Play(batch_groups=1, journal=journal)
    play.attach()
    w1 = play.join()
    lease = play.leases(w1)[0]
    known = msgspec.msgpack.encode(group(lease.key))
    foreign = bytes([known[0] + 1]) + known[1:] + b"\x91" * 500 + b"\xc0"  # a field more, deeply nested
    frame = b"\x93\xaagroup_done" + msgspec.msgpack.encode(lease.lease) + foreign
    play._post(play.control.receive(w1, wire.decode(frame), play.now))
    assert play.take(w1, wire.Ack)
    assert [bytes(each.group) for each in journal.records if isinstance(each, Arrived)] == [known]
