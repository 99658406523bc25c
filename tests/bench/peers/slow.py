"""The reverse task with a judge that takes its time: half a second, and a tail.

    latency = 0.5 s + exponential with mean 0.25 s, at most 3 s

86 in 100 take 0.5 to 1 s, one in 100 more than 1.65 s; the slowest of 128 about 1.7 s. The latency is a function of
prompt and completion, so both sides meet the same. Held-out prompts are judged at once: measuring is not what is
measured.
"""

from __future__ import annotations

import asyncio
import math

from async_rl.envs.base import Split
from async_rl.envs.draws import hash_fraction, split_of
from async_rl.envs.reverse import Reverse, ReverseArgs
from async_rl.wire import Prompt

__all__ = ["SlowReverse", "latency_s"]

FLOOR_S, MEAN_TAIL_S, LIMIT_S = 0.5, 0.25, 3.0


def latency_s(question: str, completion: str) -> float:
    if split_of(question) == "eval":
        return 0.0
    fraction = hash_fraction(f"{question}\n{completion}")
    return min(FLOOR_S - MEAN_TAIL_S * math.log1p(-fraction), LIMIT_S)


class SlowReverse:
    """`tests.bench.peers.slow:SlowReverse` in a run file."""

    name = "slow-reverse"
    reward_range = (0.0, 1.0)

    def __init__(
        self, min_length: int = 4, max_length: int = 4, alphabet: str = "abcdefghij", seed: int = 0
    ) -> None:
        self._task = Reverse(ReverseArgs(min_length, max_length, alphabet, "", seed))

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        return self._task.prompt(split, ordinal)

    async def reward(self, prompt: Prompt, completion: str) -> float:
        await asyncio.sleep(latency_s(prompt.messages[-1].content, completion))
        return await self._task.reward(prompt, completion)
