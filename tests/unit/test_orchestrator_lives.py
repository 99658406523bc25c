"""Conversations across the ends of the orchestrator and of the trainer, message by message."""

from __future__ import annotations

import msgspec
import pytest

from async_rl import wire
from tests.orchestration import TRAINER, Play, group

SECOND = b"trainer:2"


def restarted(play, **config):
    """The orchestrator's next life, on the same disk."""
    again = Play(journal=play.journal, **config)
    again.now = play.now
    again.control.restore(play.journal.replay(), again.now)
    return again


def fill(play, peer, groups, version=0):
    for lease in play.leases(peer)[:groups]:
        assert isinstance(play.deliver(peer, lease, version=version)[0], wire.Ack)


def keys(batch):
    return [each.key.ordinal for each in batch.groups]


def test_an_acknowledged_group_survives_the_orchestrator():
    play = Play(batch_groups=2)
    play.attach()
    fill(play, play.join(), 2)
    again = restarted(play, batch_groups=2)
    again.attach()
    (batch,) = again.ask(0)
    assert keys(batch) == [0, 1]
    assert again.status().buffered == 0


def test_a_batch_that_had_left_is_given_again_to_the_trainer_that_may_have_missed_it():
    play = Play()
    play.attach()
    fill(play, play.join(), 2)
    (batch,) = play.ask(0)
    again = restarted(play)
    again.attach(step=0, frontier=batch.frontier, open=batch.open)
    (same,) = again.ask(0)
    assert same.groups == batch.groups and (same.frontier, same.open) == (batch.frontier, batch.open)


def test_a_trainer_that_is_ahead_of_the_last_checkpoint_goes_on_after_a_restart_of_the_orchestrator():
    play = Play(max_lag=3)
    play.attach()
    w1 = play.join(capacity=8)
    fill(play, w1, 4)
    play.ask(0)
    (last,) = play.ask(1)
    again = restarted(play, max_lag=3)
    again.attach(step=2, frontier=last.frontier, open=last.open)
    assert again.ask(2) == [], "nothing new yet, and nothing old"
    again.join()
    assert again.status().outstanding == 4, "leases run on"
    assert not {0, 1, 2, 3} & {lease.key.ordinal for lease in again.leases(b"w1:1")}


def test_a_worker_delivers_to_the_next_life_what_it_had_leased_from_the_one_before():
    play = Play()
    play.attach()
    leases = play.leases(play.join())
    again = restarted(play)
    again.attach()
    w1 = again.join()
    for lease in leases[:2]:
        assert again.deliver(w1, lease) == [wire.Ack(lease.lease, lease.key)]
    (batch,) = again.ask(0)
    assert keys(batch) == [0, 1]


def test_a_resumed_trainer_gets_the_same_batches_again_and_then_new_ones():
    play = Play(max_lag=3, batch_groups=1)
    play.attach()
    w1 = play.join(capacity=8)
    fill(play, w1, 4)
    batches = [play.ask(step)[0] for step in range(3)]
    for step in range(3):
        play.say(TRAINER, wire.Published(1, step + 1, step + 1, step, f"digest{step + 1}"))
    assert [batch.replayed for batch in batches] == [False] * 3
    # killed; the checkpoint was of step 1, its version 1
    play.attach(
        incarnation=2,
        step=1,
        version=4,
        version_step=1,
        parent=1,
        digest="digest1",
        origin=1,
        frontier=batches[0].frontier,
        open=batches[0].open,
        peer=SECOND,
    )
    for step in (1, 2):
        (batch,) = play.ask(step, incarnation=2, peer=SECOND)
        assert batch.groups == batches[step].groups and batch.replayed and batch.incarnation == 2
        play.say(SECOND, wire.Published(2, step + 4, step + 1, step + 3, f"digest{step + 1}"))
    (batch,) = play.ask(3, incarnation=2, peer=SECOND)
    assert keys(batch) == [3] and not batch.replayed


def test_while_steps_are_repeated_nothing_in_the_buffer_grows_too_old():
    """It is of the end of the branch before: how far that is shows only when the repeat has come there."""
    play = Play(max_lag=1, batch_groups=1)
    play.attach()
    w1 = play.join(capacity=8)
    leases = play.leases(w1)

    def one_more(version):
        answers = play.beat(w1, version=version) + play.leases(w1)
        leases.extend(each for each in answers if isinstance(each, wire.Lease))
        answers = play.deliver(w1, leases.pop(0), version=version)
        leases.extend(each for each in answers if isinstance(each, wire.Lease))

    for step in range(6):
        one_more(step)
        (batch,) = play.take(TRAINER, wire.Batch) or play.ask(step)
        if step == 0:
            first = batch
        play.say(TRAINER, wire.Published(1, step + 1, step + 1, step, f"digest{step + 1}"))
    one_more(6)
    buffered = play.status().buffered
    assert buffered >= 1
    play.attach(
        incarnation=2,
        step=1,
        version=7,
        version_step=1,
        parent=1,
        digest="digest1",
        origin=1,
        frontier=first.frontier,
        open=first.open,
        peer=SECOND,
    )
    for step in range(1, 6):
        (batch,) = play.ask(step, incarnation=2, peer=SECOND)
        assert batch.replayed
        play.say(SECOND, wire.Published(2, step + 7, step + 1, step + 6, f"digest{step + 1}"))
    assert play.status().buffered == buffered and "lag" not in play.status().dropped
    (batch,) = play.ask(6, incarnation=2, peer=SECOND)
    assert not batch.replayed and batch.lags == ((0, 0),)


def test_the_first_new_batch_waits_until_the_repeated_versions_are_out_but_not_for_ever():
    play = Play(max_lag=0, batch_groups=1)
    play.attach()
    w1 = play.join()
    fill(play, w1, 1)
    play.ask(0)
    play.say(TRAINER, wire.Published(1, 1, 1, 0, "b"))
    lease = next(each for each in play.beat(w1, version=1) if isinstance(each, wire.Lease))
    play.deliver(w1, lease, version=1)
    play.attach(incarnation=2, version=2, parent=0, peer=SECOND)
    assert play.ask(0, incarnation=2, peer=SECOND)[0].replayed
    assert play.ask(1, incarnation=2, peer=SECOND) == [], "version 1 looks two steps away"
    (batch,) = [m for m in play.say(SECOND, wire.Published(2, 3, 1, 2, "b")) if isinstance(m, wire.Batch)]
    assert batch.lags == ((0, 0),)
    play.attach(incarnation=3, version=4, parent=0, peer=b"trainer:3")
    for step in range(2):
        assert play.ask(step, incarnation=3, peer=b"trainer:3")[0].replayed
    assert play.ask(2, incarnation=3, peer=b"trainer:3") == []
    play.wait(61)
    assert play.status().dropped == {}


def test_a_run_that_begins_again_gives_nothing_old():
    play = Play(batch_groups=1)
    play.attach()
    w1 = play.join()
    fill(play, w1, 2)
    play.ask(0)
    play.attach(incarnation=2, version=1, parent=0, anew=True, peer=SECOND)
    assert play.ask(0, incarnation=2, peer=SECOND) == []
    assert play.status().buffered == 0
    assert [lease.key.ordinal for lease in play.leases(w1)] == [0, 1], "from the first prompt on"


def test_without_its_disk_the_orchestrator_goes_on_from_what_the_checkpoint_says():
    play = Play(batch_groups=2, max_lag=2)
    play.attach(incarnation=3, step=5, version=9, version_step=5, frontier=14, open=(7, 12))
    assert [lease.key.ordinal for lease in play.leases(play.join(version=9, capacity=6))] == [
        7,
        12,
        14,
        15,
        16,
        17,
    ]


def test_an_older_trainer_stays_fenced_through_a_restart():
    play = Play()
    play.attach(incarnation=2)
    again = restarted(play)
    (refused,) = again.attach(incarnation=1)
    assert not refused.retry and "incarnation 2 has taken the run" in refused.reason


def test_a_disk_of_another_run_is_refused():
    play = Play()
    play.attach()
    again = restarted(play)
    (refused,) = again.attach(run="other")
    assert not refused.retry and "spool" in refused.reason and "'run'" in refused.reason


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "filtered"])
def test_the_same_group_again_is_acknowledged_and_another_for_its_key_is_not(stored):
    play = Play()
    play.attach()
    w1 = play.join()
    lease = play.leases(w1)[0]
    rewards = [0.0, 1.0] if stored else [1.0, 1.0]
    made = group(lease.key, rewards=rewards)
    (ack,) = [m for m in play.say(w1, wire.GroupDone(lease.lease, made)) if not isinstance(m, wire.Lease)]
    again = restarted(play)
    again.attach()
    w1 = again.join()
    again.take(w1)
    assert again.say(w1, wire.GroupDone(lease.lease, made)) == [ack]
    other = msgspec.structs.replace(made, worker="w2")
    (nack,) = again.say(w1, wire.GroupDone(lease.lease, other))
    assert isinstance(nack, wire.Nack) and nack.reason.startswith("duplicate")
    assert again.status().refused == {"duplicate": 1}


def test_a_version_whose_trainer_could_not_tell_is_known_from_the_next_one():
    """Killed between a version's commit and the word about it; a worker had begun to serve it."""
    play = Play(max_lag=3)
    play.attach()
    w1 = play.join()
    lease = play.leases(w1)[0]
    play.attach(
        incarnation=2,
        version=2,
        parent=0,
        digest="same",
        known=((0, -1, 0, "same"), (1, 0, 1, "b")),
        peer=SECOND,
    )
    assert isinstance(play.deliver(w1, lease, version=1)[0], wire.Ack)


def test_in_a_run_that_begins_again_a_prompt_that_was_given_up_is_one_like_others():
    play = Play(batch_groups=1, max_lag=0, max_attempts=1)
    play.attach()
    w1 = play.join()
    (lease,) = play.leases(w1)
    play.say(w1, wire.Failed(lease.lease, lease.key, "it raised"))
    assert play.status().dropped == {"failed": 1}
    play.attach(incarnation=2, version=1, parent=0, anew=True, peer=SECOND)
    again = next(each for each in play.take(w1) + play.beat(w1, version=1) if isinstance(each, wire.Lease))
    assert again.key == lease.key
    for _ in range(2):  # the first Ack was lost
        answers = play.deliver(w1, again, version=1)
        assert isinstance(answers[0], wire.Ack)
