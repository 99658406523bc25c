"""The ledger of training groups, case by case; test_ledger_machine.py plays the rest."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from async_rl.wire import LeaseProgress
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import FAILURES_IN_A_ROW, GroupLedger
from orchestrator.records import Took, Version
from orchestrator.spool import MemoryJournal
from orchestrator.versions import Versions
from tests.orchestration import group, train_key

NOW = 100.0


def ledger_of(*, step=0, frontier=0, version=0, **config):
    defaults = {
        "batch_groups": 2,
        "max_lag": 1,
        "lease_s": 60.0,
        "max_attempts": 2,
        "straggler_hold_s": 5.0,
    }
    settings = OrchestratorConfig(**{**defaults, **config})
    ledger = GroupLedger(settings, MemoryJournal(), itertools.count())
    for each in range(version + 1):
        ledger.publish(Version(each, each - 1, step - (version - each), ""))
    ledger.take(Took(1, step, -1, frontier, (), False))
    ledger.versions = Versions(ledger.tree, version, NOW)
    return ledger, ledger.versions


def publish(ledger, version, step):
    ledger.publish(Version(version, ledger.versions.newest, step, ""))
    ledger.versions.add(version, NOW)


def lease_all(ledger, version=0, worker="w1", now=NOW):
    return list(iter(lambda: ledger.lease(worker, version, now), None))


def deliver(ledger, held, *, rewards=(0.0, 1.0), versions=None, now=NOW):
    made = group(held.key, rewards=list(rewards))
    served = tuple((version,) for version in versions or (held.version, held.version))
    return ledger.deliver(held.lease, held.worker, made, served, now)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_worker_gets_leases_for_max_lag_more_steps_than_its_version_has(max_lag):
    ledger, _ = ledger_of(max_lag=max_lag, batch_groups=4)
    assert len(lease_all(ledger)) == (0 + max_lag + 1) * 4
    publish(ledger, 1, step=2)
    assert len(lease_all(ledger, version=1)) == 2 * 4
    assert lease_all(ledger, version=0) == [], (
        "a worker on an old version gets nothing beyond its own limit"
    )


def test_a_worker_that_serves_an_unknown_version_gets_nothing():
    ledger, _ = ledger_of(version=5, step=3)
    assert ledger.lease("w1", 6, NOW) is None, "not published yet"
    assert ledger.lease("w1", 5, NOW) is not None


def test_prompts_are_leased_in_order_from_the_frontier():
    ledger, _ = ledger_of(frontier=40)
    assert [held.key.ordinal for held in lease_all(ledger)] == [40, 41, 42, 43]
    assert ledger.frontier == 44


@pytest.mark.parametrize(
    "end",
    [
        lambda ledger, held: deliver(ledger, held, rewards=(1.0, 1.0)),
        lambda ledger, held: deliver(ledger, held, versions=(99, 0)),
        lambda ledger, held: [ledger.fail(held.lease, "w1", "x", NOW), _fail_again(ledger)],
    ],
    ids=["filtered", "too old", "given up"],
)
def test_a_group_that_will_not_be_trained_gives_its_slot_back(end):
    ledger, _ = ledger_of(max_lag=0)
    held, *_ = lease_all(ledger)
    assert ledger.lease("w1", 0, NOW) is None
    end(ledger, held)
    assert ledger.settled(held.key) or ledger.dropped["failed"] == 1
    again = ledger.lease("w1", 0, NOW)
    assert again is not None and again.key != held.key


def _fail_again(ledger):
    held = ledger.lease("w1", 0, NOW)
    ledger.fail(held.lease, "w1", "x", NOW)


def test_an_expired_prompt_comes_back_first_and_its_late_result_counts_once():
    ledger, _ = ledger_of()
    first, second, *_ = lease_all(ledger)
    ledger.progress(LeaseProgress(second.lease, 10), "w1", NOW + 30)
    assert [failure.key for failure in ledger.expire(NOW + 60)].count(first.key) == 1
    assert second.lease in [held.lease for held in ledger.pool.held], "progress extends a lease"
    again = ledger.lease("w2", 0, NOW + 60)
    assert again.key == first.key and again.lease != first.lease
    assert deliver(ledger, first).obsolete == again, "the second worker's lease is for nothing now"
    assert ledger.settled(first.key)
    assert not ledger.pool.expects(again.lease, again.key, "w2")


def test_only_growth_extends_a_lease():
    ledger, _ = ledger_of(batch_groups=1, max_lag=0)
    (held,) = lease_all(ledger)
    for moment in (20, 40, 60):
        ledger.progress(LeaseProgress(held.lease, 7), "w1", NOW + moment)
        ledger.progress(LeaseProgress(held.lease, 9), "somebody else", NOW + moment)
    assert ledger.expire(NOW + 79) == []
    assert [failure.key for failure in ledger.expire(NOW + 80)] == [held.key]


def test_a_prompt_is_given_up_after_max_attempts_and_its_late_result_is_not_taken():
    ledger, _ = ledger_of(batch_groups=1, max_lag=0)
    first = ledger.lease("w1", 0, NOW)
    assert ledger.expire(NOW + 60)[0].given_up is False
    second = ledger.lease("w1", 0, NOW + 60)
    (failure,) = ledger.fail(second.lease, "w1", "KeyError('answer')", NOW)
    assert failure.given_up and ledger.dropped["failed"] == 1
    assert list(ledger.dead_letters) == [("train/0", "KeyError('answer')")]
    assert not ledger.settled(first.key) and not ledger.pool.expects(first.lease, first.key, "w1")
    assert ledger.lease("w1", 0, NOW).key == train_key(1), "the run goes on"


def test_a_lease_given_back_is_no_attempt():
    ledger, _ = ledger_of(batch_groups=1, max_lag=0)
    for _ in range(20):
        held = ledger.lease("w1", 0, NOW)
        assert held.key == train_key(0)
        ledger.fail(held.lease, "w1", "draining", NOW, counted=False)
        assert not ledger.pool.expects(held.lease, held.key, "w1"), (
            "it said itself that no result will come"
        )
    assert ledger.dropped["failed"] == 0


def test_a_worker_that_dies_gives_all_of_its_leases_back_and_nobody_elses():
    ledger, _ = ledger_of()
    mine = [ledger.lease("w1", 0, NOW), ledger.lease("w1", 0, NOW)]
    other = ledger.lease("w2", 0, NOW)
    ledger.worker_left("w1", "it went silent", counted=True)
    assert [held.lease for held in ledger.pool.held] == [other.lease]
    assert [ledger.lease("w2", 0, NOW).key for _ in mine] == [held.key for held in mine]


def test_leasing_slows_down_when_everything_fails_and_recovers_with_the_first_success():
    ledger, _ = ledger_of(batch_groups=100)
    kept = ledger.lease("w1", 0, NOW)
    now, failures = NOW, 0
    while (held := ledger.lease("w1", 0, now)) is not None:
        ledger.fail(held.lease, "w1", "the reward function raised", now)
        failures += 1
        assert failures < 100
    assert failures == FAILURES_IN_A_ROW
    assert ledger.lease("w1", 0, now + 0.2) is not None, "slowly, not never"
    deliver(ledger, kept, now=now)
    assert ledger.lease("w1", 0, now) is not None


def test_a_batch_takes_the_oldest_groups_first():
    ledger, _ = ledger_of(max_lag=2)
    old = lease_all(ledger)
    publish(ledger, 1, step=1)
    young = lease_all(ledger, version=1)
    for held in [*young, *old[:1]]:
        deliver(ledger, held)
    batch = ledger.form_batch(NOW)
    assert [group.key for group in batch.groups] == [old[0].key, young[0].key]
    assert batch.lags == ((0, 0), (-1, -1))


def test_a_batch_of_too_few_groups_is_never_formed():
    ledger, _ = ledger_of()
    deliver(ledger, lease_all(ledger)[0])
    assert not ledger.readiness(NOW).ready and ledger.readiness(NOW).reason == "1 of 2 groups"
    with pytest.raises(ValueError, match="no batch of 2"):
        ledger.form_batch(NOW)


def test_the_lag_of_a_group_is_that_of_its_oldest_sample():
    ledger, _ = ledger_of(step=3, version=3, max_lag=1)
    publish(ledger, 4, step=4)
    held = ledger.lease("w1", 4, NOW)
    assert deliver(ledger, held, versions=(4, 1)).outcome == "lag"
    held = ledger.lease("w1", 4, NOW)
    assert deliver(ledger, held, versions=(4, 2)).outcome == "stored"


def test_what_grows_too_old_in_the_buffer_is_dropped_when_the_step_moves():
    ledger, _ = ledger_of(max_lag=0)
    publish(ledger, 1, step=1)
    for held in lease_all(ledger, version=1):
        deliver(ledger, held, versions=(0, 0))
    assert ledger.buffered == 4
    ledger.form_batch(NOW)
    assert ledger.buffered == 0 and ledger.dropped["lag"] == 2


def test_a_full_batch_is_held_for_a_straggler_that_would_be_too_old_for_the_next():
    ledger, _ = ledger_of(max_lag=1)
    straggler, _, third, fourth = lease_all(ledger)
    deliver(ledger, third)
    deliver(ledger, fourth)
    ledger.form_batch(NOW)
    publish(ledger, 1, step=1)
    for held in lease_all(ledger, version=1, worker="w2"):
        deliver(ledger, held, now=NOW + 10)
    ready = ledger.readiness(NOW + 14.9)
    assert not ready.ready and ready.reason == "2 stragglers, for 0.1 s more"
    assert ledger.readiness(NOW + 15.0).ready, "the hold has a limit"
    deliver(ledger, straggler, now=NOW + 11)
    assert not ledger.readiness(NOW + 11).ready, "another of the same age is still out"
    ledger.worker_left("w1", "gone", counted=True)
    assert ledger.readiness(NOW + 11).ready, "nobody to wait for"
    assert ledger.form_batch(NOW + 11).groups[0].key == straggler.key


def test_nobody_waits_for_a_lease_that_is_too_old_already_or_can_wait_itself():
    ledger, _ = ledger_of(max_lag=2, batch_groups=1)
    first, second, _third = lease_all(ledger)
    deliver(ledger, second)
    assert ledger.readiness(NOW).ready, "the first may still be trained in the next step"
    ledger.next_step = 3
    assert ledger.readiness(NOW).ready, "the first is too old for this one as well"
    assert deliver(ledger, first).outcome == "lag"


def test_a_step_gets_the_groups_that_fit_oldest_first_and_the_others_are_next():
    ledger, _ = ledger_of(batch_groups=3, max_lag=2)
    leases = lease_all(ledger)[:3]
    for held in leases:
        deliver(ledger, held)
    sizes = [stored.place.size for stored in ledger._buffer.values()]
    ledger._config = msgspec.structs.replace(ledger._config, batch_bytes=sum(sizes[:2]))
    formed = ledger.form_batch(NOW)
    assert [made.key for made in formed.groups] == [held.key for held in leases[:2]]
    assert not ledger.readiness(NOW).ready and list(ledger._buffer) == [leases[2].key]
    publish(ledger, 1, 1)
    for held in lease_all(ledger, 1)[:2]:
        deliver(ledger, held)
    assert ledger.form_batch(NOW).groups[0].key == leases[2].key
    assert not ledger.dropped


def test_a_buffer_that_holds_less_than_a_batch_is_a_batch_when_it_is_full():
    ledger, _ = ledger_of(batch_groups=4, buffer_bytes=400)
    for held in iter(lambda: ledger.lease("w1", 0, NOW), None):
        deliver(ledger, held)
    assert ledger.buffered == 2, "more is not leased"
    assert ledger.readiness(NOW).ready and len(ledger.form_batch(NOW).groups) == 2


def test_a_batch_formed_without_a_limit_is_cut_in_the_same_way_each_time(monkeypatch):
    ledger, _ = ledger_of(batch_groups=3)
    for held in lease_all(ledger)[:3]:
        deliver(ledger, held)
    monkeypatch.setattr("orchestrator.ledger.MOST_BATCH_BYTES", 600)
    formed = ledger.form_batch(NOW)
    assert len(formed.assigned.ordinals) == 3 and len(formed.groups) == 2
    assert ledger.formed(0).groups == formed.groups and ledger.dropped == {"too_large": 1}
    again = GroupLedger(ledger._config, MemoryJournal(), itertools.count())
    again.restore(ledger._journal.replay(), NOW)
    assert again.dropped == ledger.dropped and again.snapshot() == ledger.snapshot()


def test_filtering_can_be_switched_off():
    ledger, _ = ledger_of(drop_no_signal=False)
    assert deliver(ledger, lease_all(ledger)[0], rewards=(1.0, 1.0)).outcome == "stored"


def test_keys_that_were_never_issued_are_not_settled():
    ledger, _ = ledger_of(frontier=10)
    lease_all(ledger)
    assert not ledger.settled(train_key(50)) and not ledger.settled(train_key(10)), "leased, not delivered"
    assert ledger.settled(train_key(9)), "the checkpoint says that a step has used it"
