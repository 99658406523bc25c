"""Held-out evaluation: which versions are measured, by whom, and how it ends."""

from __future__ import annotations

import pytest

from async_rl import wire
from async_rl.wire import EvalScore, Key
from orchestrator.config import EvalConfig
from tests.orchestration import TRAINER, Play, hello


def measured(play, peer, version=0, reward=1.0):
    """Fulfil every held-out lease that the worker holds; training leases are kept."""
    while evals := [lease for lease in play.leases(peer) if _keep(play, peer, lease)]:
        for lease in evals:
            play.mail.setdefault(peer, []).extend(play.deliver(peer, lease, version, rewards=[reward]))


def _keep(play, peer, lease):
    return lease.key.split == "eval"


def test_version_0_is_measured_first_with_one_sample_per_prompt_and_takes_no_slots():
    play = Play(evaluation=EvalConfig(every=2, prompts=3))
    play.attach()
    w1 = play.join(capacity=20)
    leases = play.leases(w1)
    assert [lease.key for lease in leases[:3]] == [Key("eval", ordinal, 0) for ordinal in range(3)]
    assert all(len(lease.seeds) == 1 for lease in leases[:3])
    assert leases[0].prompt.text == "eval 0" and leases[0].sampling == wire.Sampling(0.7, 8)
    assert len(leases) == 3 + 4, "admission is for training alone"
    play.ask(0)
    for lease, reward in zip(leases[:3], (1.0, 0.5, 0.0), strict=True):
        play.deliver(w1, lease, rewards=[reward])
    assert play.status().evals == (EvalScore(0, 0, 0.5, 3),)
    for lease in leases[3:5]:
        play.deliver(w1, lease)
    (batch,) = play.take(TRAINER)
    assert batch.evals == (EvalScore(0, 0, 0.5, 3),)
    play.now += 2.0
    assert play.ask(0) == [batch]
    assert play.status().evals == (EvalScore(0, 0, 0.5, 3),), "told, and still shown"


def test_every_kth_version_is_measured_by_workers_that_serve_it_or_a_newer_one():
    play = Play(evaluation=EvalConfig(every=2, prompts=1), max_lag=9)
    play.attach()
    w1, w2 = play.join("w1", capacity=1), play.join("w2", capacity=1)
    lease, *_ = play.leases(w1)
    play.deliver(w1, lease, rewards=[1.0])
    for version in (1, 2):
        play.say(TRAINER, wire.Published(1, version, version))
    play.take(w1), play.take(w2)
    assert not any(
        isinstance(m, wire.Lease) and m.key.split == "eval" for m in play.say(w1, wire.Credit(9, 0))
    )
    leases = [m for m in play.say(w2, wire.Credit(9, 2)) if isinstance(m, wire.Lease)]
    assert leases[0].key == Key("eval", 0, 2) and leases[0].oldest_version == 2
    nack, *rest = play.deliver(w2, leases[0], version=1)
    assert nack.reason.startswith("version")
    rest += play.deliver(w2, leases[1], version=2)  # a place that a group of training had
    again = next(m for m in rest if isinstance(m, wire.Lease))
    assert isinstance(play.deliver(w2, again, version=2)[0], wire.Ack)
    assert [score.version for score in play.status().evals] == [0, 2]


def test_a_third_evaluation_gives_up_the_oldest_and_counts_it():
    play = Play(evaluation=EvalConfig(every=1, prompts=2))
    play.attach()
    w1 = play.join(capacity=2)
    old = play.leases(w1)[:2]
    assert [lease.key.split for lease in old] == ["eval", "eval"]
    play.say(TRAINER, wire.Published(1, 1, 1))
    assert play.take(w1, wire.Cancel) == []
    play.say(TRAINER, wire.Published(1, 2, 2))
    (cancel,) = play.take(w1, wire.Cancel)
    assert set(cancel.leases) == {lease.lease for lease in old}
    assert play.status().dropped == {"evaluation": 2}
    assert isinstance(play.deliver(w1, old[0])[0], wire.Ack), "nobody wants it, the worker may forget it"


def test_a_held_out_prompt_that_fails_is_left_out_of_the_mean():
    play = Play(evaluation=EvalConfig(every=1, prompts=2), max_attempts=1)
    play.attach()
    w1 = play.join(capacity=2)
    good, bad, *_ = play.leases(w1)
    play.say(w1, wire.Failed(bad.lease, bad.key, "it raised"))
    play.deliver(w1, good, rewards=[1.0])
    assert play.status().evals == (EvalScore(0, 0, 1.0, 1),)
    assert play.status().dropped == {"evaluation": 1}


def test_the_leases_of_a_dead_worker_are_measured_by_another():
    play = Play(evaluation=EvalConfig(every=1, prompts=2), heartbeat_s=1.0)
    play.attach()
    lost = play.leases(play.join("w1", capacity=2))
    play.wait(6)
    again = play.leases(play.join("w2", capacity=2))
    assert [lease.key for lease in again] == [lease.key for lease in lost]
    assert [lease.seeds for lease in again] == [lease.seeds for lease in lost]


def test_the_final_version_is_measured_before_the_end():
    play = Play(evaluation=EvalConfig(every=100, prompts=2), final_eval_s=30.0)
    play.attach()
    w1 = play.join(capacity=20)
    measured(play, w1, reward=0.0)
    play.say(TRAINER, wire.Published(1, 1, 1))
    assert play.say(TRAINER, wire.Finish(1, 1)) == [], "waits for the evaluation"
    assert play.status().trainer == "finishing"
    play.take(w1)
    play.mail[w1] = play.beat(w1, version=1)
    assert [lease.key for lease in play.mail[w1]] == [Key("eval", 0, 1), Key("eval", 1, 1)]
    measured(play, w1, version=1)
    (finished,) = play.take(TRAINER)
    assert finished.evals == (EvalScore(0, 0, 0.0, 2), EvalScore(1, 1, 1.0, 2))
    assert play.say(TRAINER, wire.Finish(1, 1)) == [finished]


@pytest.mark.parametrize("evaluate", [True, False])
def test_the_final_evaluation_has_a_limit(evaluate):
    play = Play(evaluation=EvalConfig(every=100, prompts=2), final_eval_s=30.0, heartbeat_s=60.0)
    play.attach(version=1, version_step=1, step=1)
    w1 = play.join(version=1)
    answer = play.say(TRAINER, wire.Finish(1, 1, evaluate))
    if evaluate:
        assert answer == []
        play.wait(29)
        assert play.take(TRAINER) == []
        play.wait(1)
        answer = play.take(TRAINER)
        assert any(isinstance(message, wire.Cancel) for message in play.take(w1))
    assert answer == [wire.Finished(())]


def test_without_evaluation_nothing_is_measured():
    play = Play(evaluation=EvalConfig(every=0))
    play.attach()
    assert all(lease.key.split == "train" for lease in play.leases(play.join(capacity=20)))
    assert play.say(TRAINER, wire.Finish(1, 0)) == [wire.Finished(())]
    assert isinstance(play.say(b"w9:1", hello("w9"))[0], wire.Drain)


def test_held_out_prompts_take_as_many_places_of_a_worker_as_their_samples_fill():
    play = Play(evaluation=EvalConfig(every=2, prompts=9), group_size=4, batch_groups=4)
    play.attach()
    w1 = play.join(capacity=2)

    def granted(done):
        answers = [answer for lease in done for answer in play.deliver(w1, lease)]
        return [str(answer.key) for answer in answers if isinstance(answer, wire.Lease)]

    evals = play.leases(w1)
    assert [lease.key for lease in evals] == [Key("eval", ordinal, 0) for ordinal in range(8)]
    assert granted(evals[:1]) == [str(Key("eval", 8, 0))]
    assert granted(evals[1:2]) == [str(Key("train", 0))], "seven samples leave room for less than a group's"
    assert granted(evals[2:5]) == []
    assert granted(evals[5:6]) == [str(Key("train", 1))], "three are left"
