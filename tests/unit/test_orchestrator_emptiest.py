"""Whose turn it is to get a lease: one that only says that it can hold many keeps nobody waiting. And what is kept to
find out does not grow with the run."""

from __future__ import annotations

from collections import Counter

from async_rl import wire
from async_rl.wire import Hello
from orchestrator.fair import MOST_OUTDATED, Emptiest
from orchestrator.roster import FIRST_LEASES, Roster
from tests.orchestration import TRAINER, Play

WORKERS = 20


class Fleet:
    """Workers that hold leases, and the order in which they would get the next one."""

    def __init__(self):
        self.roster = Roster(2.0)
        self.leases = Counter()
        self.emptiest = Emptiest(self.roster, lambda name: self.leases[name])
        self.workers = [self._join(f"w{index}") for index in range(WORKERS)]

    def _join(self, name):
        worker = self.roster.join(Hello(3, name, "here", version=0), name.encode(), 0.0)
        worker.capacity, worker.state = 8, "serving"
        self.emptiest.touch(worker)
        return worker

    def grant(self, version):
        worker = self.emptiest.pop(lambda each: each == version)
        if worker is not None:
            self.leases[worker.name] += 1
            self.roster.granted(worker)
            self.emptiest.touch(worker)
        return worker


def test_versions_that_get_no_leases_any_more_leave_nothing_behind():
    fleet = Fleet()
    for version in range(1, 200):
        for worker in fleet.workers:
            worker.version = version
            fleet.emptiest.touch(worker)
        assert fleet.grant(version) is not None
        fleet.leases.clear()
        assert len(fleet.emptiest) <= 2 * WORKERS + MOST_OUTDATED


def test_a_fleet_that_is_never_full_leaves_nothing_behind_and_takes_turns():
    fleet, turns = Fleet(), Counter()
    for _ in range(1000):
        first = fleet.grant(0)
        turns[first.name] += 1
        fleet.leases[first.name] += 1  # a busier state, whose turn does not come while others are emptier
        fleet.emptiest.touch(first)
        fleet.leases[first.name] -= 2
        fleet.emptiest.touch(first)
        assert len(fleet.emptiest) <= 2 * WORKERS + MOST_OUTDATED
    assert set(turns.values()) == {1000 // WORKERS}


def test_a_worker_that_is_seen_to_serve_another_version_while_it_is_anothers_turn_is_not_forgotten():
    fleet = Fleet()
    first, moved = fleet.workers[:2]
    for each in fleet.workers[2:]:
        fleet.roster.remove(each)
    first.version = 1
    fleet.leases[first.name] = 4
    fleet.emptiest = Emptiest(fleet.roster, lambda name: fleet.leases[name])
    fleet.emptiest.touch(first), fleet.emptiest.touch(moved)
    moved.version = 1  # it said Hello again, and nothing since
    assert fleet.emptiest.pop(lambda version: True) is moved, "it is the emptiest"


# ---------------------------------------------------------------- fairness

HUGE = 1 << 16


def playing(**config):
    """20 leases may run at once."""
    play = Play(**{"batch_groups": 10, "max_lag": 1, "lease_s": 30.0} | config)
    play.attach()
    return play


def held(play):
    return {worker.worker: worker.leases for worker in play.status().workers}


class Holder:
    """A worker that says in each heartbeat what it holds, and how far it is: ever further, or not at all."""

    def __init__(self, play, name, capacity, *, works):
        self.play, self.works, self.tokens, self.leases = play, works, 0, []
        self.peer = play.join(name, capacity=capacity)

    def look(self):
        for message in self.play.take(self.peer):
            if isinstance(message, wire.Lease):
                self.leases.append(message)
        return self.leases

    def beat(self):
        self.tokens += self.works
        self.play.beat(
            self.peer, progress=[wire.LeaseProgress(each.lease, self.tokens) for each in self.look()]
        )

    def finish_one(self):
        lease = self.look().pop(0)
        self.play.mail[self.peer] = self.play.deliver(self.peer, lease)


def beating(play, seconds, *holders):
    """Time passes, and these say that they live."""
    for _ in range(int(seconds)):
        play.wait(1.0)
        for holder in holders:
            holder.beat()


def test_a_worker_that_is_alone_may_have_all_leases():
    play = playing()
    play.join("alone", capacity=HUGE)
    assert held(play) == {"alone": 20}


def test_one_that_says_it_can_hold_any_number_leaves_others_twice_what_they_can_hold_or_an_equal_share():
    play = playing()
    honest = Holder(play, "honest", 5, works=True)
    Holder(play, "liar", HUGE, works=False)
    assert held(play) == {"honest": 5, "liar": 10}
    play.ask(0)
    for _ in range(10):
        honest.finish_one()
    assert play.take(TRAINER, wire.Batch), "no lease of the liar's is needed for it"


def test_one_that_came_first_and_took_all_and_finishes_nothing_gets_nothing_while_others_can():
    play = playing(max_attempts=9)
    liar = Holder(play, "liar", HUGE, works=False)
    honest = Holder(play, "honest", 18, works=True)
    assert held(play) == {"liar": 20, "honest": 0}
    beating(play, 30, liar, honest)
    assert held(play) == {"liar": 0, "honest": 18}, "its leases came to nothing"
    beating(play, 10, liar, honest)
    assert held(play)["liar"] == 1, "once more it may show what it can"
    play.say(honest.peer, wire.Bye("enough"))
    assert held(play) == {"liar": 20}, "there is nobody else"


def test_one_that_rests_may_try_a_lease_while_no_other_could_get_one():
    fleet = Fleet()
    resting, *others = fleet.workers
    resting.failed(100.0, times=FIRST_LEASES)
    resting.version = 1
    fleet.emptiest.touch(resting)
    assert fleet.grant(1) is resting, "the others serve a version that gets none"
    assert fleet.grant(1) is None, "one, to try"
    fleet.leases.clear()
    others[0].version = 1
    for worker in (resting, others[0]):
        fleet.emptiest.touch(worker)
    others[0].capacity = 1
    fleet.leases[others[0].name] = 1
    fleet.emptiest.touch(others[0])
    assert fleet.grant(1) is None, "another one could, and is only full"


def test_who_comes_to_nothing_again_rests_longer_until_it_finishes_something():
    worker = Fleet().workers[0]
    rests = []
    for _ in range(8):
        worker.failed(0.0, times=8)
        rests.append(worker.rest_until)
        worker.shown = 1
    assert rests == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
    worker.finished(1)
    worker.failed(0.0, times=8)
    assert worker.rest_until == 10.0


def test_a_rest_is_over_when_its_time_is():
    fleet = Fleet()
    first = fleet.workers[0]
    first.failed(100.0, times=8)
    assert fleet.roster.rested(109.9) == [] and not first.good_for
    assert fleet.roster.rested(110.0) == [first] and first.good_for == 1


def test_who_has_finished_groups_is_before_who_comes_new_and_no_share_holds_it_back():
    fleet = Fleet()
    fleet.emptiest.turn(lambda: 2 * WORKERS)
    for worker in fleet.workers:
        worker.capacity = 100
        fleet.emptiest.touch(worker)
    proven, new = fleet.workers[:2]
    for held_then in range(4, 50):
        proven.finished(held_then)
    while (worker := fleet.emptiest.pop(lambda version: True)) is not None:
        fleet.leases[worker.name] += 1
        fleet.emptiest.touch(worker)
    assert fleet.leases[proven.name] == 53 and fleet.leases[new.name] == FIRST_LEASES


def test_a_fleet_of_newcomers_shares_all_that_is_there_from_the_start():
    play = playing(batch_groups=30)
    for name, capacity in {"small": 2, "middle": 16, "large": 60}.items():
        play.join(name, capacity=capacity)
    assert held(play) == {"small": 2, "middle": 16, "large": 36}, "the rest, less 4 and a third"


def test_what_a_worker_has_shown_ends_with_what_it_holds_and_is_soon_lost():
    worker = Fleet().workers[0]
    worker.capacity = HUGE
    for _ in range(10_000):
        worker.finished(held=12)
    assert worker.good_for == 24
    worker.failed(0.0, times=20)
    assert worker.good_for == 4
    worker.failed(0.0, times=1000)
    assert worker.good_for == 0


def test_leases_that_fail_at_once_do_not_make_a_worker_smaller():
    play = playing(max_attempts=99)
    first, second = play.join("first", capacity=10), play.join("second", capacity=10)
    for lease in play.leases(first)[:9]:
        play.mail.setdefault(first, []).extend(
            play.say(first, wire.Failed(lease.lease, lease.key, "it raised"))
        )
    play.wait(5.0)
    play.beat(second, progress=[wire.LeaseProgress(each.lease, 1) for each in play.leases(second)])
    assert held(play) == {"first": 10, "second": 10}
