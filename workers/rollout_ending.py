"""How a worker's life ends: by a wish (SIGTERM, Drain) or by a failure, whichever comes first.

Every wait of the main path goes through `unless_over`, so that no wait is left that a stop can't interrupt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

from async_rl.log import get_logger

__all__ = ["LONGEST_PAUSE_S", "Ending", "Over", "cancel", "delays", "to_the_end", "together"]

log = get_logger(__name__)

T = TypeVar("T")

LONGEST_PAUSE_S = 10.0
"""Between two attempts at anything; a fleet that waits for an orchestrator or a store is a light load then, and
still notices within seconds that it is back."""
CANCEL_AGAIN_S = 0.5
CANCEL_LIMIT_S = 15.0
"""An update of the engine that has begun is finished first; everything else ends at once."""


class Over(Exception):
    """The worker shall leave, and why. Not an error: it is how `unless_over` interrupts."""


class Ending:
    def __init__(self) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hurry = asyncio.Event()
        """Set by a second wish to stop: what was to be finished is given up now."""

    def stop(self, reason: str) -> None:
        if self._over.done():
            self.hurry.set()
        else:
            self._over.set_exception(Over(reason))

    def fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def unless_over(self, awaitable: Awaitable[T]) -> T:
        """The result; or raises Over, or the failure of a background loop. The awaitable is then cancelled."""
        task = asyncio.ensure_future(awaitable)
        either: list[asyncio.Future[Any]] = [task, self._over]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                self._over.result()
            return task.result()
        finally:
            await cancel(task)

    async def wait(self) -> None:
        """Until it is over: raises Over or the failure."""
        await asyncio.shield(self._over)

    def background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a loop beside the main path; where it fails, the worker does."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def close(self) -> None:
        await cancel(*self._tasks)
        if self._over.done():
            self._over.exception()  # looked at: asyncio need not complain about it


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is not done, and wait until it is.

    More than once: a cancellation that arrives in the moment in which what a task awaits is done can be
    swallowed (asyncio.wait_for before Python 3.12, an engine that finishes its update first), and a loop would
    go on for ever.
    """
    deadline = time.monotonic() + CANCEL_LIMIT_S
    waiting = {task for task in tasks if not task.done()}
    while waiting and time.monotonic() < deadline:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=CANCEL_AGAIN_S)
    for task in waiting:
        log.warning("a task did not end when it was cancelled", task=str(task), limit_s=CANCEL_LIMIT_S)
    await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order. The first failure cancels the rest, and is raised when they have ended."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(*tasks)


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of what must not be left half done. A cancellation waits until it is done, and is then raised."""
    task = asyncio.create_task(coroutine)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # perhaps more than one, see `cancel`
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("what a stop had to wait for has failed", error=str(failure))
    raise cancellation


def delays(first_s: float, longest_s: float) -> Iterator[float]:
    """Pauses between attempts: doubling, and jittered by half, so that a fleet does not come back in step."""
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(longest_s, 2 * pause_s)
