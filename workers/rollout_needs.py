"""What a worker tells the store, now and then: which versions it still needs, and which one it found no way to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from async_rl.errors import StoreError
from async_rl.log import get_logger
from async_rl.threads import in_daemon_thread
from async_rl.weights.readers import ReaderBeat, drop_beat, write_beat
from async_rl.weights.subscriber import Subscriber

__all__ = ["Needs"]

log = get_logger(__name__)

LAST_BEAT_S = 5.0
"""At the end, how long to try to take back what was said about needed versions; it expires by itself."""


class Needs:
    """Garbage collection goes by what is said here, and so can a trainer whose last way was lost; without it this
    worker finds another path."""

    def __init__(self, worker: str, subscriber: Subscriber, beat: Callable[[], ReaderBeat]) -> None:
        """`beat`: what is to be said now."""
        self._worker = worker
        self._subscriber = subscriber
        self._beat = beat
        self._writing = threading.Lock()  # one word about it at a time
        self._none = False
        self.say_now = asyncio.Event()

    async def say(self) -> None:
        """Waits for: the next beat, a version that can't be had, or one that is served."""
        pause_s = self._subscriber.config.beat_s
        while True:
            try:
                await in_daemon_thread(self._write, self._beat())
            except StoreError as error:
                log.debug("the store does not know which versions are needed here", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.say_now.wait(), pause_s)
            self.say_now.clear()

    async def end(self) -> None:
        """Nothing is needed any more."""
        try:
            await asyncio.wait_for(in_daemon_thread(self._drop), LAST_BEAT_S)
        except (StoreError, TimeoutError) as error:
            log.debug("the last beat stays until it expires", error=str(error))

    def _write(self, beat: ReaderBeat) -> None:
        """In a thread, which a cancelled wait leaves behind: what it writes must not come after `_drop`."""
        with self._writing:
            if not self._none:
                write_beat(self._subscriber.store, beat)

    def _drop(self) -> None:
        self._none = True
        with self._writing:
            drop_beat(self._subscriber.store, self._worker)
