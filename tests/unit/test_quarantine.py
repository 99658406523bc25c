"""A worker whose numbers do not fit is shown, then gets nothing; what it delivered is generated again by others."""

from __future__ import annotations

import msgspec
import pytest

from async_rl import wire
from async_rl.cli.lag import render
from async_rl.gauges import of_view
from async_rl.view.model import of_status
from async_rl.wire import Array, Measured
from orchestrator.config import EvalConfig, VerifyConfig
from orchestrator.quarantine import LONGEST_S, Quarantine
from orchestrator.records import Dropped, Quarantined
from orchestrator.rescoring import Outcome, chosen
from tests.orchestration import TRAINER, Play, group, hello, sample

QUICK = VerifyConfig(min_groups=4, max_faults=2, fault_window=4, quarantine_s=100.0)
SECOND = b"trainer:2"


def attached(**changes):
    play = Play(**{"verify": QUICK, "batch_groups": 2, "max_lag": 3} | changes)
    play.attach()
    return play


def broken(lease):
    """Its second sample has a token outside the vocabulary."""
    bad = sample(reward=0.0, tokens=Array.of([1, 2, 3, 10_000], "<i4"))
    return wire.GroupDone(lease.lease, group(lease.key, samples=(sample(), bad)))


def offend(play, peer, times=2):
    """Groups that are refused for what they say; the answers to the last."""
    for lease in play.leases(peer)[:times]:
        answers = play.say(peer, broken(lease))
    return answers


def standing(play, name):
    return next((each for each in play.status().standings if each.worker == name), None)


# ---------------------------------------------------------------- how it begins


def test_refused_groups_make_suspect_and_then_quarantined_and_the_worker_is_told_why():
    play = attached()
    w1 = play.join(capacity=4)
    first, second, *_ = play.leases(w1)
    assert isinstance(play.say(w1, broken(first))[0], wire.Nack)
    assert standing(play, "w1").state == "suspect"
    answers = play.say(w1, broken(second))
    (refused,) = [each for each in answers if isinstance(each, wire.Refused)]
    assert refused.retry and refused.hint, "it may come again: one that ended would only be started anew"
    assert "in quarantine" in refused.reason and "outside 0..49" in refused.reason
    assert "in 100 s" in refused.hint
    (cancel,) = [each for each in answers if isinstance(each, wire.Cancel)]
    assert len(cancel.leases) == 3, "the two it had left, and one that came for the first that was refused"
    assert not [
        each for each in answers if isinstance(each, wire.Lease) and each.lease not in cancel.leases
    ]
    kept = standing(play, "w1")
    assert (kept.state, kept.left_s) == ("quarantined", 100.0) and "were refused" in kept.reason
    assert play.status().workers[0].state == "quarantined"
    states = [each for each in of_view(of_status(play.status())) if each.name == "async_rl_worker_state"]
    assert [each.labels["state"] for each in states if each.value] == ["quarantined"], "for an alert"


def test_a_broken_message_of_a_worker_counts_and_a_strangers_does_not():
    from async_rl.errors import Malformed

    play = attached()
    w1 = play.join()
    for _ in range(5):
        play._post(play.control.receive(b"stranger", Malformed("not a message"), play.now))
    assert standing(play, "w1") is None
    for _ in range(2):
        play._post(play.control.receive(w1, Malformed("not a message"), play.now))
    assert standing(play, "w1").state == "quarantined"


def test_faults_that_are_few_among_good_groups_or_nobodys_are_forgiven():
    play = attached(batch_groups=16)
    w1 = play.join(capacity=16)
    for lease in play.leases(w1)[:8]:  # one of four is refused, and one names a version not known here yet
        play.say(w1, broken(lease)) if lease.key.ordinal == 0 else play.deliver(w1, lease)
        play.deliver(w1, lease, version=1)
    assert standing(play, "w1") is None, "the window has passed over the one"


class Training:
    """Steps of two groups each; `ratios`: what the trainer finds in the groups of each worker."""

    def __init__(self, play, ratios, **changes):
        self.play, self.ratios, self.changes = play, ratios, changes
        self.leases = {peer: play.leases(peer) for peer in ratios}
        self.step = 0

    def go(self, steps=1):
        for _ in range(steps):
            able = [peer for peer, leases in self.leases.items() if leases]
            rows = [self.deliver(able[index % len(able)]) for index in range(2)]
            self.say(TRAINER, wire.NextBatch(1, self.step))
            self.say(TRAINER, wire.Checked(1, self.step, tuple(rows)))
            self.step += 1
            self.say(TRAINER, wire.Published(1, self.step, self.step))
            for peer in self.ratios:
                self.say(peer, wire.Credit(4, self.step))

    def deliver(self, peer):
        lease = self.leases[peer].pop(0)
        made = group(lease.key, self.step, **{"worker": peer.decode().split(":")[0]} | self.changes)
        assert isinstance(self.say(peer, wire.GroupDone(lease.lease, made))[0], wire.Ack)
        return Measured(lease.key, 0, True, 1000, 0.001, self.ratios[peer], 0.0)

    def say(self, peer, message):
        answers = self.play.say(peer, message)
        for each in [*([peer] if peer in self.leases else []), *self.leases]:
            mine = answers if each == peer else self.play.take(each)
            self.leases[each] += [m for m in mine if isinstance(m, wire.Lease)]
            for cancel in (m for m in mine if isinstance(m, wire.Cancel)):
                self.leases[each] = [x for x in self.leases[each] if x.lease not in cancel.leases]
        return answers


def test_a_worker_whose_logprobs_do_not_fit_is_quarantined_and_the_run_learns_from_the_other():
    play = attached()
    w1, w2 = play.join("w1"), play.join("w2")
    training = Training(play, {w1: 0.0, w2: 0.4})
    training.go(3)
    assert (standing(play, "w2").state, standing(play, "w2").groups) == ("unjudged", 3)
    training.go()
    kept = standing(play, "w2")
    assert kept.state == "quarantined" and kept.reason.startswith("ratio +0.4 per token")
    assert standing(play, "w1").state == "good"
    training.go(3)
    assert training.leases[w2] == [] and play.status().step == 7


def test_the_worker_is_the_one_that_had_the_lease_whatever_the_group_says():
    play = attached()
    training = Training(play, {play.join("w1"): 0.4}, worker="w2")
    training.go(4)
    assert [(each.worker, each.state) for each in play.status().standings] == [("w1", "quarantined")]


def test_what_an_older_trainer_says_counts_for_nothing():
    play = attached()
    training = Training(play, {play.join("w1"): 0.4})
    training.go(1)
    (refused,) = play.say(b"trainer:0", wire.Checked(0, 0, ()))
    assert isinstance(refused, wire.Refused) and standing(play, "w1").groups == 2


def test_where_quarantine_is_turned_off_a_worker_is_only_shown():
    play = attached(verify=msgspec.structs.replace(QUICK, quarantine=False))
    w1 = play.join()
    assert not any(isinstance(each, wire.Refused) for each in offend(play, w1, times=3))
    assert standing(play, "w1").state == "suspect"


# ---------------------------------------------------------------- what follows


def test_what_it_had_delivered_and_no_step_has_is_generated_again_by_others_and_counted():
    play = attached(batch_groups=8, max_lag=0)
    w1 = play.join("w1", capacity=5)
    leases = play.leases(w1)
    for lease in leases[:2]:
        play.deliver(w1, lease)
    assert play.status().buffered == 2
    for lease in leases[2:4]:
        answers = play.say(w1, broken(lease))
    assert isinstance(answers[0], wire.Nack)
    status = play.status()
    assert (status.buffered, status.outstanding, status.dropped) == (0, 0, {"quarantined": 2})
    w2 = play.join("w2", capacity=8)
    again = play.leases(w2)
    assert {lease.key for lease in leases} <= {lease.key for lease in again} and len(again) == 8
    for lease in again:
        play.deliver(w2, lease)
    (batch,) = play.ask(0)
    assert {each.key for each in batch.groups} == {lease.key for lease in again}
    assert status.dead_letters == (), "coming back so is no failed attempt"


def test_later_groups_are_refused_and_hellos_too_until_its_time_is_over():
    play = attached()
    w1 = play.join(capacity=4)
    late = play.leases(w1)
    play.mail[w1] = list(late)
    offend(play, w1)
    nack, refused = play.say(w1, wire.GroupDone(late[3].lease, group(late[3].key)))
    assert isinstance(nack, wire.Nack) and "quarantined" in nack.reason
    assert isinstance(refused, wire.Refused)
    (refused,) = play.say(w1, hello("w1"), after=50.0)
    assert "in 50 s" in refused.hint and refused.retry
    assert play.say(w1, wire.Credit(4, 0)) == [refused], "and nothing else"
    play.take(w1)
    play.wait(51.0, step_s=5.0)
    play.take(w1)
    assert isinstance(play.say(w1, hello("w1"))[0], wire.Welcome)
    assert len([m for m in play.say(w1, wire.Credit(4, 0)) if isinstance(m, wire.Lease)]) == 4
    assert standing(play, "w1") is None, "nothing is held against it"


def test_a_worker_that_is_here_when_its_time_is_over_is_told_to_come_again():
    play = attached()
    w1 = play.join(capacity=4)
    offend(play, w1)
    for _ in range(25):
        play.say(w1, hello("w1"), after=4.5)
        play.wait(0.1)
    assert isinstance(play.say(w1, hello("w1"))[0], wire.Welcome)


def test_what_comes_to_light_while_it_is_in_quarantine_is_not_held_against_it_afterwards():
    verify = msgspec.structs.replace(QUICK, rescore_share=1.0, rescore_wrong=2)
    play = attached(verify=verify, rescoring_salt="salt")
    w1 = play.join(capacity=4)
    made = play.leases(w1)
    for lease in made:
        play.deliver(w1, lease)
    for lease in made:  # the last two are scored again when it is in quarantine already
        play._post(play.control.rescored(Outcome("w1", lease.key, "reward 1, and 0"), play.now))
    assert standing(play, "w1").state == "quarantined"
    play.wait(101.0, step_s=5.0)
    play.say(w1, hello("w1"))
    play.say(w1, wire.Credit(4, 0))
    play._post(play.control.rescored(Outcome("w1", made[0].key, ""), play.now))
    assert standing(play, "w1") is None


def test_found_again_it_stays_twice_as_long():
    quarantine = Quarantine(100.0)
    for times, length_s in enumerate((100.0, 200.0, 400.0)):
        quarantine.add("w1", "it lied", 1000.0 * times)
        assert quarantine.left_s("w1", 1000.0 * times) == length_s
        assert quarantine.over(1000.0 * times + length_s) == ["w1"]
        quarantine.release("w1")
        assert "w1" not in quarantine
    for _ in range(100):
        quarantine.add("w1", "it lied", 0.0)
    assert quarantine.left_s("w1", 0.0) == LONGEST_S


def test_a_thousand_names_of_the_past_are_remembered_and_no_more():
    quarantine = Quarantine(100.0)
    for number in range(1500):
        quarantine.add(f"w{number}", "it lied", 0.0)
        quarantine.release(f"w{number}")
    assert len(quarantine.kept()) == 1000


def test_at_the_end_of_the_run_a_quarantined_worker_is_sent_home():
    play = attached()
    w1 = play.join(capacity=4)
    offend(play, w1)
    play.take(w1)
    play.say(TRAINER, wire.Finish(1, 0, False))
    assert any(isinstance(each, wire.Drain) for each in play.take(w1))
    assert play.say(w1, wire.Bye("the run is finished")) == []
    assert play.control.ended(play.now)


def test_lag_names_who_is_in_quarantine_and_why():
    from rich.console import Console

    play = attached()
    offend(play, play.join(capacity=4))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(render(play.status()))
    text = console.export_text()
    assert "quarantined" in text and "w1 (1 min 40 s more)" in text and "were refused" in text


# ---------------------------------------------------------------- lives


def restarted(play):
    again = Play(verify=QUICK, journal=play.journal, batch_groups=2, max_lag=3)
    again.control.restore(play.journal.replay(), again.now)
    return again


def test_a_restart_keeps_the_quarantine_and_gives_it_its_whole_time_again():
    play = attached()
    w1 = play.join(capacity=4)
    leases = play.leases(w1)
    play.deliver(w1, leases[0])
    play.mail[w1] = list(leases[1:])
    offend(play, w1)
    assert [type(each) for each in play.journal.records[-7:]].count(Quarantined) == 1
    assert sum(isinstance(each, Dropped) for each in play.journal.records) == 1
    play.wait(60.0)
    again = restarted(play)
    assert standing(again, "w1").left_s == 100.0
    again.attach()
    (refused,) = again.say(w1, hello("w1"))
    assert "outside 0..49" in refused.reason
    assert (again.status().buffered, again.status().dropped) == (0, {"quarantined": 1})
    w2 = again.join("w2", capacity=8)
    assert leases[0].key in [lease.key for lease in again.leases(w2)], "its group is asked of another"


def test_a_snapshot_says_all_that_the_records_said():
    play = attached()
    offend(play, play.join(capacity=4))
    again = Play(verify=QUICK)
    ledger = again.control._ledger
    ledger._apply(play.control._ledger.snapshot(), None, again.now)
    assert (
        list(ledger.quarantine) == ["w1"]
        and ledger.quarantine.kept() == play.control._ledger.quarantine.kept()
    )


def two_steps_and_a_quarantine():
    play = attached()
    w1 = play.join(capacity=8)
    leases = play.leases(w1)
    for lease in leases[:4]:
        play.deliver(w1, lease)
    (first,) = [m for m in play.ask(0) if isinstance(m, wire.Batch)]
    play.say(TRAINER, wire.Published(1, 1, 1, 0, "one"))
    play.ask(1)
    play.mail[w1] = list(leases[4:])
    offend(play, w1)
    assert standing(play, "w1").state == "quarantined"
    return play, first


def test_steps_that_a_resumed_trainer_repeats_have_the_same_groups_whoever_made_them():
    play, first = two_steps_and_a_quarantine()
    play.attach(incarnation=2, version=2, parent=0, peer=SECOND)
    (again,) = [m for m in play.ask(0, 2, SECOND) if isinstance(m, wire.Batch)]
    assert again.replayed and again.groups == first.groups
    assert play.status().dropped == {}


def test_what_a_resume_puts_back_into_the_buffer_is_dropped_there():
    play, _ = two_steps_and_a_quarantine()
    branch = {"version": 2, "version_step": 1, "parent": 1, "digest": "other", "origin": 7, "frontier": 2}
    play.attach(incarnation=2, step=1, peer=SECOND, **branch)  # its checkpoint is of a branch unknown here
    status = play.status()
    assert status.buffered == 0 and status.dropped == {"quarantined": 2}


# ---------------------------------------------------------------- rewards scored again


def test_a_sample_of_the_groups_is_scored_again_chosen_by_key_and_salt():
    share = 0.1
    keys = [wire.Key("train", ordinal) for ordinal in range(2000)]
    picked = {key for key in keys if chosen(key, "salt", share)}
    assert 140 < len(picked) < 260
    assert picked == {key for key in keys if chosen(key, "salt", share)}
    assert picked != {key for key in keys if chosen(key, "other", share)}
    assert not any(chosen(key, "salt", 0.0) for key in keys)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_rewards_that_differ_make_suspect_and_then_quarantined(split):
    verify = msgspec.structs.replace(QUICK, rescore_share=1.0, rescore_wrong=2)
    evaluation = EvalConfig(every=1, prompts=4) if split == "eval" else None
    play = attached(verify=verify, evaluation=evaluation, rescoring_salt="salt")
    w1 = play.join(capacity=3)
    for number, lease in enumerate(play.leases(w1)[:3]):
        assert lease.key.split == split
        play.deliver(w1, lease)
        (rescoring,) = play.control.take_rescorings()
        assert (rescoring.worker, rescoring.group.key) == ("w1", lease.key)
        assert rescoring.prompt.text == f"{split} {lease.key.ordinal}"
        play._post(play.control.rescored(Outcome("w1", lease.key, "reward 1, and 0" if number else ""), 0))
        assert (
            standing(play, "w1") is None
            if not number
            else standing(play, "w1").state == ("suspect" if number == 1 else "quarantined")
        )
    assert play.status().refused["reward_differs"] == 2


def test_without_an_environment_of_its_own_nothing_is_kept_for_scoring():
    play = attached(verify=msgspec.structs.replace(QUICK, rescore_share=1.0))
    w1 = play.join()
    play.deliver(w1, play.leases(w1)[0])
    assert play.control.take_rescorings() == []


def test_a_trainer_that_waits_in_vain_is_told_who_is_in_quarantine():
    from async_rl.transport.link import _describe

    play = attached()
    offend(play, play.join(capacity=4))
    assert "in quarantine: w1: 2 of its last 2 groups were refused" in _describe(play.status())
