"""Rewards, computed beside generation: in a thread with an event loop of its own.

An environment is the user's code. It may block where it should await, take minutes, or raise; none of that may
hold up the worker's heartbeats or its engine. At most `parallel` rewards are computed at once; the clock of one
starts when its turn has come, and when its time is up it gives its place back, also where it hangs for ever.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence

from async_rl.envs.base import Environment
from async_rl.errors import EnvironmentFailed
from async_rl.wire import Prompt
from workers.rollout_ending import together

__all__ = ["Rewards"]


class Rewards:
    def __init__(self, timeout_s: float, parallel: int) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(parallel)
        self.waiting = 0  # for their turn
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()

    async def score(self, environment: Environment, prompt: Prompt, completion: str) -> float:
        """One of `score_all`."""
        return (await self.score_all(environment, prompt, [completion]))[0]

    async def score_all(
        self, environment: Environment, prompt: Prompt, completions: Sequence[str]
    ) -> list[float]:
        """In order. Raises EnvironmentFailed, as soon as one of them raised, gave no finite number, or took longer
        than the limit; the others are then given up.

        Waits for: places (no reward holds one longer than the limit), then for the rewards. As many as there are
        places for begin together, in one hop to the other thread: hops cost more than a quick reward does.
        """
        count = await self._take(len(completions))
        places = _Places(self._places, count)
        try:
            now = self._begun_together(environment, prompt, completions[:count], places)
            if count == len(completions):
                return await now
            parts = await together(now, self.score_all(environment, prompt, completions[count:]))
            return [reward for part in parts for reward in part]
        finally:
            places.give_back(places.held)  # a task that is cancelled before it began has given back none

    async def _take(self, most: int) -> int:
        """Places that are free now, at least one. Waits for: the first."""
        self.waiting += most
        try:
            await self._places.acquire()
        finally:
            self.waiting -= most
        count = 1
        while count < most and not self._places.locked():
            await self._places.acquire()  # at once
            count += 1
        return count

    async def _begun_together(
        self, environment: Environment, prompt: Prompt, completions: Sequence[str], places: _Places
    ) -> list[float]:
        main, running = asyncio.get_running_loop(), None
        try:
            running = asyncio.run_coroutine_threadsafe(
                _rewards(
                    environment,
                    prompt,
                    completions,
                    lambda count: main.call_soon_threadsafe(places.give_back, count),
                ),
                self._loop,
            )
            values = await asyncio.wait_for(asyncio.wrap_future(running), self._timeout_s)
        except asyncio.CancelledError:
            if running is not None:
                running.cancel()
            raise
        except TimeoutError:
            raise EnvironmentFailed(
                f"the reward took longer than {self._timeout_s:g} s", hint="raise rollout.reward_timeout_s"
            ) from None
        except Exception as error:
            raise EnvironmentFailed(f"the reward raised {type(error).__name__}: {error}") from error
        finally:
            places.give_back(places.held)
        return [_finite(value) for value in values]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class _Places:
    """Held by rewards that began together; given back one by one, and what is left at the end."""

    def __init__(self, places: asyncio.Semaphore, held: int) -> None:
        self._places, self.held = places, held

    def give_back(self, count: int) -> None:
        for _ in range(min(count, self.held)):
            self.held -= 1
            self._places.release()


async def _rewards(
    environment: Environment, prompt: Prompt, completions: Sequence[str], finished: Callable[[int], object]
) -> list[object]:
    """In the other thread. `finished` is told of each that is done before the last."""
    tasks = [asyncio.create_task(_reward(environment, prompt, each)) for each in completions]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if pending:
                finished(len(done))
        return [task.result() for task in tasks]
    finally:
        for task in pending:
            task.cancel()


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFailed(f"the reward is {value!r}, not a finite number")
    return float(value)


async def _reward(environment: Environment, prompt: Prompt, completion: str) -> object:
    """What the user's code raises is a failure of this reward and nothing else: a TimeoutError must not look like
    our limit, a CancelledError that nobody asked for not like a lease that was given up, and what ends a program (a
    graded one may call exit) would end the loop of all rewards."""
    try:
        return await environment.reward(prompt, completion)
    except TimeoutError as error:
        raise RuntimeError(f"TimeoutError: {error}") from error
    except asyncio.CancelledError as error:
        if _asked_to_end():
            raise
        raise RuntimeError("CancelledError, though nobody had cancelled it") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _asked_to_end() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
