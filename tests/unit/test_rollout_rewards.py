"""The rewards of a group: begun together, each with its own place."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator

import pytest

from async_rl.errors import EnvironmentFailed
from async_rl.wire import Prompt
from workers.rollout_rewards import Rewards

LIMIT_S = 20.0


class Judge:
    """Says how long the completion is; `slow` is judged when the test allows it. `said`: what happens, as it does."""

    name, reward_range = "judge", (0.0, 10.0)

    def __init__(self) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        self._allowed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reward(self, prompt: Prompt, completion: str) -> float:
        self._loop = asyncio.get_running_loop()
        self.said.put(f"begun {completion}")
        try:
            if completion.startswith("slow"):
                await self._allowed.wait()
        except asyncio.CancelledError:
            self.said.put(f"cancelled {completion}")
            raise
        if completion == "bad":
            raise KeyError("answer")
        return float(len(completion))

    def allow(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._allowed.set)

    async def says(self, *expected: str) -> None:
        """Waits for: all of these, in any order, among others."""
        missing = set(expected)
        while missing:
            missing.discard(await asyncio.to_thread(self.said.get, timeout=LIMIT_S))


@pytest.fixture
def two() -> Iterator[Rewards]:
    made = Rewards(timeout_s=LIMIT_S, parallel=2)
    yield made
    made.close()


async def test_rewards_come_in_the_order_of_the_completions(two: Rewards) -> None:
    assert await two.score_all(Judge(), Prompt(), ["abc", "", "a", "ab", "abcd"]) == [
        3.0,
        0.0,
        1.0,
        2.0,
        4.0,
    ]
    assert two.waiting == 0


async def test_a_slow_reward_holds_one_place_and_not_those_that_began_with_it(two: Rewards) -> None:
    judge = Judge()
    scoring = asyncio.create_task(two.score_all(judge, Prompt(), ["slow", "a", "b", "c"]))
    await judge.says("begun slow", "begun a", "begun b", "begun c")
    assert not scoring.done()
    judge.allow()
    assert await scoring == [4.0, 1.0, 1.0, 1.0]


async def test_one_that_fails_fails_all_at_once_and_the_others_are_given_up(two: Rewards) -> None:
    judge = Judge()
    with pytest.raises(EnvironmentFailed, match="KeyError: 'answer'"):
        await two.score_all(judge, Prompt(), ["slow", "bad", "slow too"])
    await judge.says("cancelled slow")
    assert await two.score_all(judge, Prompt(), ["a", "b", "c"]) == [1.0] * 3, "every place is free again"


async def test_a_group_that_is_cancelled_gives_its_places_back(two: Rewards) -> None:
    judge = Judge()
    scoring = asyncio.create_task(two.score_all(judge, Prompt(), ["slow", "slow one", "slow two"]))
    await judge.says("begun slow", "begun slow one")
    assert two.waiting == 1
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert await two.score_all(Judge(), Prompt(), ["a", "b"]) == [1.0, 1.0]
    assert two.waiting == 0


class Rough:
    """Does what code of others does: a graded program that calls exit, a client library that leaks a cancellation."""

    name, reward_range = "rough", (0.0, 1.0)

    async def reward(self, prompt: Prompt, completion: str) -> float:
        if completion:
            raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "cancel": asyncio.CancelledError}[
                completion
            ]
        return 1.0


@pytest.mark.parametrize("what", ["exit", "interrupt", "cancel"])
async def test_what_a_reward_raises_fails_its_group_and_nothing_else(two: Rewards, what: str) -> None:
    with pytest.raises(EnvironmentFailed, match="Exit|Interrupt|Cancelled"):
        await asyncio.wait_for(two.score(Rough(), Prompt(), what), LIMIT_S)
    assert await asyncio.wait_for(two.score(Rough(), Prompt(), ""), LIMIT_S) == 1.0


async def test_a_group_cancelled_as_its_rewards_begin_gives_its_places_back() -> None:
    rewards = Rewards(timeout_s=LIMIT_S, parallel=1)
    scoring = asyncio.create_task(rewards.score_all(Judge(), Prompt(), ["a", "b"]))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert await asyncio.wait_for(rewards.score(Judge(), Prompt(), "abc"), LIMIT_S) == 3.0
    rewards.close()
