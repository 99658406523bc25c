"""What a worker offers: how many leases fit by its engine's load (rollout_load.py), said as that changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from async_rl.log import get_logger
from async_rl.wire import AnyMessage, Credit, RunSettings
from workers.engines import Engine
from workers.rollout_leases import Leases
from workers.rollout_load import LOOK_S, LoadControl, Look
from workers.rollout_rewards import Rewards

__all__ = ["Credits"]

log = get_logger(__name__)

AGAIN_S = 10.0
"""A Credit is a level, and changes seldom: said again after this long, a lost one costs little."""


class Credits:
    """Silent until `begin`, when the engine has started, and after `end`."""

    def __init__(
        self,
        engine: Engine,
        leases: Leases,
        rewards: Rewards,
        *,
        max_groups: int,
        send: Callable[[AnyMessage], Awaitable[None]],
        known: Callable[[], bool],
    ) -> None:
        """`known`: whether the orchestrator knows us; else there is nobody to tell."""
        self._engine = engine
        self._leases = leases
        self._rewards = rewards
        self._max_groups = max_groups
        self._send = send
        self._known = known
        self._ended = False
        self._control: LoadControl | None = None
        self._said, self._say_by = -1, 0.0

    def begin(self, settings: RunSettings) -> None:
        """Also where the run's settings are others than before."""
        load = self._engine.load()
        # A prompt is known when its lease comes. Where one is longer than what is generated, the cache will say so.
        tokens = min(self._engine.max_model_len, 2 * settings.sampling.max_tokens)
        self._control = LoadControl(
            group_size=settings.group_size,
            sequences=load.seats,
            max_groups=self._max_groups,
            cache_tokens=load.cache_tokens,
            tokens=tokens,
        )

    @property
    def begun(self) -> bool:
        return self._control is not None

    @property
    def level(self) -> int | None:
        """Leases that it offers to hold; None before it begins."""
        return self._control.level if self._control is not None else None

    async def watch(self) -> None:
        """Waits for: the next look. Says the level where it has changed, and now and then where it has not."""
        while not self._ended:
            self._look(time.monotonic())
            assert self._control is not None, "it has begun"
            if self._control.level != self._said or time.monotonic() >= self._say_by:
                await self.say()
            await asyncio.sleep(LOOK_S)

    async def say(self) -> None:
        if self._control is not None and not self._ended and self._known():
            if self._control.level != self._said:
                log.debug("leases to hold", leases=self._control.level, seats=self._control.seats)
            self._said, self._say_by = self._control.level, time.monotonic() + AGAIN_S
            await self._send(Credit(self._control.level, self._engine.version))

    async def end(self) -> None:
        """No more leases."""
        self._ended = True
        await self._send(Credit(0, self._engine.version))

    def _look(self, now: float) -> None:
        assert self._control is not None, "it has begun"
        load = self._engine.load()
        look = Look(
            held=self._leases.held,
            running=load.running,
            queued=load.queued,
            cache_used=load.cache_used,
            preempted=load.preempted,
            rewards_wait=self._rewards.waiting > 0,
            turnaround_s=self._leases.turnaround_s,
        )
        self._control.look(look, now)
