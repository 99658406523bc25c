"""What is kept to find the emptiest worker does not grow with the run."""

from __future__ import annotations

from collections import Counter

from async_rl.wire import Hello
from orchestrator.roster import MOST_OUTDATED, Emptiest, Roster

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
