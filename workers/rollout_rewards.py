"""Rewards, computed beside generation: in a thread with an event loop of its own.

An environment is the user's code. It may block where it should await, take minutes, or raise; none of that may
hold up the worker's heartbeats or its engine. At most `parallel` rewards are computed at once; the clock of one
starts when its turn has come, and when its time is up it gives its place back, also where it hangs for ever.
"""

from __future__ import annotations

import asyncio
import math
import threading

from async_rl.envs.base import Environment
from async_rl.errors import EnvironmentFailed
from async_rl.wire import Prompt

__all__ = ["Rewards"]


class Rewards:
    def __init__(self, timeout_s: float, parallel: int) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(parallel)
        self.waiting = 0  # for their turn
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()

    async def score(self, environment: Environment, prompt: Prompt, completion: str) -> float:
        """Raises EnvironmentFailed: it raised, gave no finite number, or took longer than the limit.

        Waits for: a place (no reward holds one longer than the limit), then for the reward.
        """
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        try:
            value = await self._within_limit(environment, prompt, completion)
        finally:
            self._places.release()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailed(f"the reward is {value!r}, not a finite number")
        return float(value)

    async def _within_limit(self, environment: Environment, prompt: Prompt, completion: str) -> object:
        running = asyncio.run_coroutine_threadsafe(_reward(environment, prompt, completion), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), self._timeout_s)
        except asyncio.CancelledError:
            running.cancel()
            raise
        except TimeoutError:
            raise EnvironmentFailed(
                f"the reward took longer than {self._timeout_s:g} s", hint="raise rollout.reward_timeout_s"
            ) from None
        except Exception as error:
            raise EnvironmentFailed(f"the reward raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _reward(environment: Environment, prompt: Prompt, completion: str) -> object:
    """A TimeoutError of the user's own must not look like our limit."""
    try:
        return await environment.reward(prompt, completion)
    except TimeoutError as error:
        raise RuntimeError(f"TimeoutError: {error}") from error
