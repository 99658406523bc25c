"""Rewards computed once more, by an environment of the orchestrator's own: beside its loop, one group at a time.

An environment is the user's code. It may be slow, block, or raise; acknowledgements and leases wait for none of it
(judge.py keeps it in a process of its own).
What can't be scored again in time says nothing about the worker.

What is verified: that each reward is what the environment gives for the completion's text; and, where the run's
tokenizer can be read here, that the text is what the tokens say. Without it the text is the worker's word.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from async_rl.envs.base import Environment
from async_rl.envs.draws import hash_fraction
from async_rl.log import get_logger
from async_rl.wire import Group, Key, Prompt, Sample
from orchestrator.leases import name_of

__all__ = ["Outcome", "Rescorer", "Rescoring", "chosen", "difference"]

log = get_logger(__name__)

MOST_WAITING = 32
MOST_WAITING_BYTES = 64 << 20
"""While so many groups wait, or so much, further ones are passed over: the sample gets smaller, nothing else."""
HUNG_S = 5.0
"""Beyond the limit, before a thread counts as lost: asyncio's own limit ends all but what blocks."""
MOST_LOST = 3
"""Threads that an environment may block for ever; then nothing is scored again."""
REWARD_TOLERANCE = 1e-6
"""Of the width of the reward range: what sums in another order may differ by."""


class Rescoring(msgspec.Struct, frozen=True):
    """A group of a worker, and the prompt that it answers."""

    worker: str
    prompt: Prompt
    group: Group


class Outcome(msgspec.Struct, frozen=True):
    """`wrong`: what differs; empty: nothing."""

    worker: str
    key: Key
    wrong: str


def chosen(key: Key, salt: str, share: float) -> bool:
    """Whether a group belongs to the sample. The salt is not known to workers."""
    return share > 0 and hash_fraction(f"{salt}/{name_of(key)}") < share


def difference(
    group: Group,
    rewards: Sequence[float],
    reward_range: tuple[float, float],
    fits: Callable[[Sample], bool] | None = None,
) -> str:
    """What differs from what the worker said, in words. `fits`: whether a text is what the tokens say; None: there is
    no tokenizer to ask."""
    low, high = reward_range
    tolerance = REWARD_TOLERANCE * max(1.0, high - low)
    for index, (sample, reward) in enumerate(zip(group.samples, rewards, strict=True)):
        if fits is not None and not fits(sample):
            return f"{name_of(group.key)} sample {index}: its text is not what its tokens say"
        if not abs(sample.reward - reward) <= tolerance:
            return f"{name_of(group.key)} sample {index}: reward {sample.reward:g}, and {reward:g} when scored again"
    return ""


def _size(group: Group) -> int:
    return sum(
        len(s.tokens.data) + len(s.logprobs.data) + len(s.mask.data) + len(s.text) for s in group.samples
    )


class Rescorer:
    """`environment`: used by this alone, in a thread. `fits`: see `difference`. Not thread-safe: called by the
    orchestrator's loop."""

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float,
        fits: Callable[[Sample], bool] | None = None,
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._fits = fits
        self._waiting: deque[Rescoring] = deque()
        self._running: tuple[Rescoring, concurrent.futures.Future[str], float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = 0

    @property
    def idle(self) -> bool:
        return self._running is None and not self._waiting

    def add(self, rescoring: Rescoring) -> None:
        waiting = sum(_size(each.group) for each in self._waiting)
        room = len(self._waiting) < MOST_WAITING and waiting < MOST_WAITING_BYTES
        if self._lost < MOST_LOST and room:
            self._waiting.append(rescoring)

    def turn(self, now: float) -> list[Outcome]:
        """What is done since the last call; begins what comes next. Never waits."""
        outcomes = []
        if self._running is not None:
            rescoring, future, began = self._running
            if future.done():
                self._running = None
                outcomes += self._outcome(rescoring, future)
            elif now - began > self._timeout_s + HUNG_S:
                self._running, self._loop = None, None
                self._lost += 1
                log.warning(
                    "the environment blocks: a group is not scored again",
                    key=name_of(rescoring.group.key),
                    limit_s=self._timeout_s,
                    hint="" if self._lost < MOST_LOST else "no more groups are scored again in this life",
                )
                if self._lost >= MOST_LOST:
                    self._waiting.clear()
        if self._running is None and self._waiting:
            rescoring = self._waiting.popleft()
            future = asyncio.run_coroutine_threadsafe(self._score(rescoring), self._thread())
            self._running = (rescoring, future, now)
        return outcomes

    def close(self) -> None:
        """What is running is left behind, in a thread that does not keep the process from ending."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    # ---------------------------------------------------------------- inside

    def _outcome(self, rescoring: Rescoring, future: concurrent.futures.Future[str]) -> list[Outcome]:
        try:
            return [Outcome(rescoring.worker, rescoring.group.key, future.result())]
        except Exception as error:  # noqa: BLE001  (the edge to the user's environment: whatever it raises)
            log.info(
                "a group could not be scored again",
                key=name_of(rescoring.group.key),
                reason=f"{type(error).__name__}: {error}",
            )
            return []

    def _thread(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rescoring", daemon=True).start()
        return self._loop

    async def _score(self, rescoring: Rescoring) -> str:
        group = rescoring.group
        rewards = asyncio.gather(
            *(self._environment.reward(rescoring.prompt, sample.text) for sample in group.samples)
        )
        values = [float(value) for value in await asyncio.wait_for(rewards, self._timeout_s)]
        if not all(map(math.isfinite, values)):
            raise ValueError(f"rewards {values} are not all finite")
        return difference(group, values, self._environment.reward_range, self._fits)
