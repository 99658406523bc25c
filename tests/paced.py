"""The reversing task with a judge that takes its time: for runs that only have to go on beside something else.

A run whose rewards are there at once trains as fast as the processors let it, and leaves little of them to what the
test starts beside it. With this one it mostly waits: each group that admission lets out takes `pace_s`.
"""

from __future__ import annotations

import asyncio

from async_rl.envs.reverse import Reverse, ReverseArgs
from async_rl.wire import Prompt

__all__ = ["Paced"]


class Paced(Reverse):
    name = "paced"

    def __init__(self, pace_s: float) -> None:
        super().__init__(ReverseArgs())
        self.pace_s = pace_s

    async def reward(self, prompt: Prompt, completion: str) -> float:
        await asyncio.sleep(self.pace_s)
        return await super().reward(prompt, completion)
