"""The versions of a worker's policy: the first one, and then the newest one again and again, swapped in flight.

Announce or poll ─► fetch and verify ─► engine.update ─► `served`
                          │ fails
                          └─► the old one goes on serving; tried again after a pause
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

from async_rl.errors import EngineError, StoreError, WaitTimeout, WeightsError
from async_rl.log import get_logger
from async_rl.threads import in_daemon_thread
from async_rl.weights.subscriber import LocalVersion, Subscriber
from workers.engines import Engine
from workers.rollout_ending import LONGEST_PAUSE_S, delays, to_the_end

__all__ = ["Following"]

log = get_logger(__name__)


class Following:
    """`served` is awaited after every update. Between two heartbeats the other attributes say how it goes."""

    def __init__(
        self,
        subscriber: Subscriber,
        engine: Engine,
        *,
        served: Callable[[], Awaitable[None]],
        lacking: asyncio.Event,
    ) -> None:
        """`lacking` is set where a version can't be had, or can again."""
        self._subscriber = subscriber
        self._engine = engine
        self._served = served
        self._lacking = lacking
        self._version_served = asyncio.Condition()
        self.look_now = asyncio.Event()  # for a new version
        self.updating = False
        self.fetching = -1
        self.fetched = 0.0
        self.sync_bytes = 0
        self.pause_s = 0.0
        self.served_step = -1

    async def first(self, limit_s: float) -> LocalVersion:
        """Waits for: a committed version that can be fetched and verified."""
        deadline = time.monotonic() + limit_s
        for pause_s in delays(0.5, LONGEST_PAUSE_S):
            try:
                local = await self._fetch_newest()
                if local is not None:
                    return local
                log.info("waiting for the first version", run=self._subscriber.run.run)
            except (WeightsError, StoreError) as error:
                log.warning("no version could be had", error=str(error))
            if time.monotonic() + pause_s > deadline:
                break
            await asyncio.sleep(pause_s)
        raise WaitTimeout(
            f"no usable policy version appeared within {limit_s:g} s",
            hint="is the trainer running? `async-rl weights ls` lists the run's versions",
        )

    async def follow(self) -> None:
        """Waits for: an announced version, or the next poll. Whatever goes wrong on the way to a new version, the
        old one is served until an attempt succeeds."""
        pauses: Iterator[float] | None = None  # between attempts, after one has failed
        while True:
            if pauses is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.look_now.wait(), self._subscriber.next_poll_s())
            else:
                await asyncio.sleep(next(pauses))
            self.look_now.clear()
            try:
                while (local := await self._fetch_newest()) is not None:
                    await self._serve(local)
                    await self._scrub(local)
                pauses = None
            except (WeightsError, StoreError, EngineError) as error:
                if self._engine.failed:
                    raise
                log.warning("no new version could be had", served=self._engine.version, error=str(error))
                pauses = pauses or delays(1.0, LONGEST_PAUSE_S)

    async def reach(self, version: int, limit_s: float) -> bool:
        """Waits for: the engine serving `version` or a later one. False where it does not within the limit."""
        if self._engine.version >= version:
            return True
        self.look_now.set()
        try:
            async with self._version_served:
                served = self._version_served.wait_for(lambda: self._engine.version >= version)
                await asyncio.wait_for(served, limit_s)
        except TimeoutError:
            return False
        return True

    async def _fetch_newest(self, after: int | None = None) -> LocalVersion | None:
        """The newest version later than the one served (or than `after`), here and verified; None where there is
        none. Raises WeightsError, StoreError."""
        if after is None:
            after = self._engine.version
        manifest = await in_daemon_thread(self._subscriber.newest, after)
        if manifest is None:
            return None
        self.fetching, self.fetched = manifest.version, 0.0
        lacked = self._subscriber.lacks
        try:
            local = await in_daemon_thread(self._subscriber.fetch, manifest, self._on_fetched)
        finally:
            self.fetching = -1
            if self._subscriber.lacks != lacked:
                self._lacking.set()
        self.sync_bytes += local.fetched_bytes
        return local

    def _on_fetched(self, fraction: float) -> None:  # called from the fetching thread
        self.fetched = fraction

    async def _serve(self, local: LocalVersion) -> None:
        self.updating = True
        try:
            # A swap that a stop left half done would give wrong spans, or an engine that stands still, to the
            # groups which are finished before the end.
            update = await to_the_end(self._engine.update(local.version, local.shards))
        finally:
            self.updating = False
        self.pause_s, self.served_step = update.pause_s, local.step
        log.info("version served", version=local.version, step=local.step, pause_s=update.pause_s)
        await self._served()
        async with self._version_served:
            self._version_served.notify_all()

    async def _scrub(self, served: LocalVersion) -> None:
        """Now and then, between two updates. The engine can't be given a version again that it serves, so what it
        read from a damaged copy stays in it until the next one; the loss sees the logprobs it sampled with."""
        if not self._subscriber.scrub_due or await in_daemon_thread(self._subscriber.scrub):
            return
        log.error("the engine's weights may be damaged until its next version", served=served.version)
        local = await self._fetch_newest(served.version - 1)
        if local is not None and local.version > self._engine.version:
            await self._serve(local)
