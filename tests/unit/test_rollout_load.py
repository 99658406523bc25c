"""How many leases a worker holds, played against engines that are a few lines each: a large cache, a small one, long
samples among short ones, a slow link, slow rewards."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from workers.rollout_load import LOOK_S, LoadControl, Look

STEP_S = 0.05
PROMPT = 20


class Group:
    def __init__(self, lengths: list[int]) -> None:
        self.left = len(lengths)
        self.lengths = lengths


class World:
    """An engine with so many seats and a cache, a link, rewards, and an orchestrator with endless leases."""

    def __init__(
        self,
        control: LoadControl,
        lengths: Iterator[int],
        *,
        size: int = 4,
        seats: int = 64,
        cache: int = 10**9,
        link_s: float = 0.0,
        reward_s: float = 0.0,
        leases: Callable[[float], int] = lambda now: 1 << 60,
        fixed: bool = False,
    ) -> None:
        self.control, self.lengths, self.size, self.seats, self.cache = control, lengths, size, seats, cache
        self.link_s, self.reward_s, self.leases, self.fixed = link_s, reward_s, leases, fixed
        self.now = 0.0
        self.level = control.level  # as the orchestrator knows it
        self.granted = self.returned = 0
        self.events: list = []  # (when, number, what)
        self.numbers = itertools.count()
        self.running: list[list] = []  # [tokens so far, length, group]
        self.waiting: deque[list] = deque()
        self.in_hand = self.unacked = self.preempted = self.tokens = self.redone = 0
        self.levels: list[int] = []
        self.queue: list[int] = []
        self.full: list[float] = []

    def run(self, seconds: float) -> World:
        end, next_look = self.now + seconds, self.now
        while self.now < end:
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            while self.granted - self.returned < self.level and self.granted < self.leases(self.now):
                self.granted += 1
                self.after(self.link_s / 2, self.lease)
            self.step()
            if self.now >= next_look:
                next_look += LOOK_S
                self.look()
            self.now += STEP_S
        return self

    def look(self) -> None:
        level = self.control.look(
            Look(
                self.in_hand + self.unacked,
                len(self.running),
                len(self.waiting),
                self.used / self.cache,
                self.preempted,
                turnaround_s=self.link_s,
            ),
            self.now,
        )
        if not self.fixed:
            self.after(self.link_s / 2, lambda: setattr(self, "level", level))
        self.levels.append(level)
        self.queue.append(len(self.waiting))
        self.full.append(len(self.running) / self.seats)

    @property
    def used(self) -> int:
        return sum(PROMPT + made for made, _, _ in self.running)

    def step(self) -> None:
        """One token for each. What does not fit into the cache any more is put out, and computed once more later."""
        while self.waiting and len(self.running) < self.seats and self.fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        while self.used + len(self.running) > self.cache:
            put_out = self.running.pop()
            self.redone += PROMPT + put_out[0]
            self.preempted += 1
            self.waiting.appendleft(put_out)
        for each in self.running:
            each[0] += 1
            if each[0] >= each[1]:
                self.tokens += each[1]
                each[2].left -= 1
                if not each[2].left:
                    self.after(self.reward_s, self.done)
        self.running = [each for each in self.running if each[0] < each[1]]

    def fits(self, each: list) -> bool:
        return self.used + PROMPT + each[0] + len(self.running) < self.cache

    def lease(self) -> None:
        self.in_hand += 1
        group = Group([next(self.lengths) for _ in range(self.size)])
        self.waiting.extend([0, length, group] for length in group.lengths)

    def done(self) -> None:
        self.in_hand -= 1
        self.unacked += 1
        self.after(self.link_s / 2, lambda: setattr(self, "returned", self.returned + 1))
        self.after(self.link_s, lambda: setattr(self, "unacked", self.unacked - 1))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what))

    def occupancy(self, looks: int = 200) -> float:
        last = self.full[-looks:]
        return sum(last) / len(last)


def between(low: int, high: int, seed: int = 1) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield draw.randint(low, high)


def long_tails(seed: int = 1) -> Iterator[int]:
    """One sample in ten is ten times as long."""
    draw = random.Random(seed)
    while True:
        yield 300 if draw.random() < 0.1 else 30


def pair(lengths: Callable[[], Iterator[int]], **world) -> tuple[World, World]:
    """The same world under the control, and with the constant that it replaced."""
    made = []
    for fixed in (False, True):
        control = LoadControl(group_size=4, sequences=world.get("seats", 64))
        made.append(World(control, lengths(), fixed=fixed, **world).run(120.0))
    return made[0], made[1]


def test_an_engine_with_room_for_all_is_kept_full_and_little_waits():
    found, constant = pair(lambda: between(20, 60))
    assert found.occupancy() > 0.95 > constant.occupancy()
    assert sorted(found.queue)[len(found.queue) * 9 // 10] <= 3 * found.size


def test_groups_with_one_long_sample_do_not_leave_the_seats_of_the_others_empty():
    found, constant = pair(long_tails)
    assert constant.occupancy() < 0.7, "this world can show it"
    assert found.occupancy() > 0.95
    assert found.tokens > 1.3 * constant.tokens
    assert sorted(found.queue)[len(found.queue) // 2] <= 2 * found.size


@pytest.mark.parametrize("delay", ["link_s", "reward_s"])
def test_a_slow_link_and_slow_rewards_are_covered_by_more_leases(delay):
    found, constant = pair(lambda: between(20, 60), **{delay: 2.0})
    assert constant.occupancy() < 0.7, "this world can show it"
    assert found.occupancy() > 0.9
    assert sorted(found.queue)[len(found.queue) // 2] <= 3 * found.size


def test_a_small_cache_is_filled_and_few_sequences_are_put_out_of_it_or_wait_for_it():
    """A sequence needs 70 tokens on average: the cache of 1400 holds about 20 to 27 of 64."""
    control = LoadControl(group_size=4, sequences=64, cache_tokens=1400, tokens=140)
    assert control.level == 2, "what is sure to fit: 10 sequences of 120 tokens and a prompt"
    found = World(control, between(40, 120), cache=1400).run(240.0)
    constant = World(LoadControl(group_size=4, sequences=64), between(40, 120), cache=1400, fixed=True).run(
        240.0
    )
    assert constant.redone > 0.5 * constant.tokens, "this world can show it"
    assert found.redone < constant.redone / 3
    assert found.tokens > 0.8 * constant.tokens, (
        "the worst case: a group more or less is a fifth of the cache"
    )
    assert sorted(found.queue)[len(found.queue) * 9 // 10] <= found.size < constant.queue[-1] / 4


def test_where_the_orchestrator_gives_less_nothing_grows():
    control = LoadControl(group_size=4, sequences=64)
    world = World(control, between(20, 60), leases=lambda now: int(now)).run(60.0)
    assert set(world.levels) == {16}


def test_where_rewards_wait_for_their_turn_nothing_grows():
    control = LoadControl(group_size=4, sequences=64)
    for tick in range(100):
        control.look(Look(held=16, running=0, queued=0, rewards_wait=True), tick * LOOK_S)
    assert control.level == 16


def test_a_burst_that_waits_for_a_moment_changes_nothing_and_a_standing_queue_does():
    control = LoadControl(group_size=4, sequences=16)
    now = itertools.count(0.0, LOOK_S)
    for tick in range(40):
        control.look(Look(held=4, running=16, queued=0 if tick % 4 == 3 else 12), next(now))
    assert control.level == 4
    for _ in range(6):
        control.look(Look(held=7, running=16, queued=12), next(now))
    assert control.level == 4, "three of the seven groups wait: they are not to be replaced"
    for _ in range(6):
        control.look(Look(held=4, running=8, queued=8), next(now))
    assert control.level == 2


def test_limits_hold():
    assert LoadControl(group_size=8, sequences=4).level == 1, "one group is always held"
    control = LoadControl(group_size=4, sequences=64, max_groups=3)
    for tick in range(100):
        control.look(Look(held=control.level, running=0, queued=0), tick * LOOK_S)
    assert control.level == 3
    control = LoadControl(group_size=4, sequences=8)
    for tick in range(100):
        control.look(Look(held=control.level, running=0, queued=0), tick * LOOK_S)
    assert control.level == 8, "one group per seat"
