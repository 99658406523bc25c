"""What is answered is on the disk first: an answer waits for the commit of what it follows from, while the next turns
are under way already.

    turn n       receive ─► control ─► records ─► seal ─► write, fsync (in a thread) ─┐
                                  └──► answers ───────────────────────────────────────┴─► are sent
    turn n + 1              receive ─► control ─► records ─► (sealed when the write has ended)

One write at a time, in the order of the turns; the turns meanwhile share the next one. If the loop stood still for
every fsync, a thousand workers that deliver would find it so for a third of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from async_rl.errors import StoreUnavailable
from async_rl.log import get_logger
from orchestrator.outbox import Outgoing
from orchestrator.spool import Journal

__all__ = ["Commits", "InThread"]

log = get_logger(__name__)

MESSAGES_PER_COMMIT = 512
"""More would only delay the first one's answer; these keep the loop busy for about as long as a disk needs for those
before them."""
BYTES_PER_COMMIT = 64 << 20
"""Likewise, those that are being written included: so many groups of the largest size would not fit into memory."""
FULL_PAUSE_S = 1.0
"""Between two attempts to write what was received to a full disk: nobody is answered meanwhile."""

InThread: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function that blocks, beside the loop."""


class Commits:
    """`full_wait_s`: limit on the wait for room on a full disk; `stop` ends it, too. Use from one loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        full_wait_s: float,
        stop: asyncio.Event,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._journal = journal
        self._full_wait_s = full_wait_s
        self._stop = stop
        self._in_thread = in_thread
        self._messages = 0  # taken since the last seal
        self._waiting: Outgoing = []  # answers that follow from what is not sealed
        self._sealed: Outgoing = []  # from what is being written
        self._writing: asyncio.Task[None] | None = None
        self._no_room = self._closing = False

    # ---------------------------------------------------------------- what a turn brings

    def took_one(self) -> None:
        """A message, of which everything is in the journal before the next one is taken."""
        self._messages += 1

    @property
    def full(self) -> bool:
        """Whether the next commit is as large as it should be."""
        return self._messages >= MESSAGES_PER_COMMIT or self._journal.unwritten >= BYTES_PER_COMMIT

    def add(self, answers: Outgoing) -> None:
        """To be sent when everything appended so far is on the disk."""
        self._waiting += answers

    # ---------------------------------------------------------------- the disk

    @property
    def writing(self) -> asyncio.Task[None] | None:
        """The write that goes on, or has ended and was not looked at; None: the next one may begin."""
        return self._writing

    @property
    def stand_still(self) -> bool:
        """Whether nothing may happen before the write has ended: there is no room, on the disk or in the next one."""
        return self._writing is not None and not self._writing.done() and (self._no_room or self.full)

    def ended(self) -> Outgoing:
        """The answers that waited for the last write, if it has ended. Raises what it raised: StoreUnavailable where
        there was no room on the disk within the limit, or until we were to stop; OSError where it fails. Then none of
        them may be sent any more."""
        if self._writing is None or not self._writing.done():
            return []
        write, self._writing = self._writing, None
        write.result()
        answers, self._sealed = self._sealed, []
        return answers

    def begin(self) -> Outgoing:
        """Begin the next write where none goes on. The answers that may be sent at once: those of turns that nothing
        durable followed from."""
        if self._writing is not None:
            return []
        self._messages = 0
        durable = self._journal.seal()
        answers, self._waiting = self._waiting, []
        if not durable:
            with contextlib.suppress(StoreUnavailable):
                self._journal.write()
                return answers
        self._sealed = answers
        self._writing = asyncio.create_task(self._write())
        return []

    async def rest(self) -> Outgoing:
        """At the end: all answers that are left, when everything is on the disk. Raises as `ended`."""
        answers = self.ended() + self.begin()
        while self._writing is not None:
            await asyncio.wait({self._writing})
            answers += self.ended() + self.begin()
        return answers

    async def close(self) -> None:
        """No thread writes any longer. What was not written stays in the journal, its answers are not sent."""
        self._closing = True
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
        if self._writing is not None:
            self._writing.exception()  # or whoever closes would be told that nobody looked at it

    async def _write(self) -> None:
        """A full disk is waited for: nothing has been acknowledged, so nothing is lost by it."""
        deadline = time.monotonic() + self._full_wait_s
        try:
            while True:
                try:
                    return await self._in_thread(self._journal.write)
                except StoreUnavailable as error:
                    self._no_room = True
                    if self._closing or self._stop.is_set() or time.monotonic() >= deadline:
                        raise
                    log.error("waiting for room on the disk", reason=error.message, hint=error.hint)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), FULL_PAUSE_S)
        finally:
            self._no_room = False
