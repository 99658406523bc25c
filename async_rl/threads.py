"""Blocking calls in threads that never keep a process from ending: awaited, or asked for now and then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["Lookout", "ask_loop", "give_way", "in_daemon_thread"]

T = TypeVar("T")

_NICE = 10


def give_way() -> None:
    """This thread, and those that it starts, get the processor when others of the machine don't need it. On Linux,
    which gives every thread a priority of its own; elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


async def in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Like asyncio.to_thread, but each call has a thread of its own, and one that hangs (in a store that is down, in
    a user's reward function) neither takes another call's thread nor keeps the process from ending.

    Cancelled, it returns at once; the thread goes on, and what it returns is forgotten.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function(*args))
        except BaseException as error:  # noqa: BLE001  (handed to the awaiting task)
            outcome = (done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=getattr(function, "__name__", "work"), daemon=True).start()
    return await done


def ask_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], limit_s: float) -> T:
    """Call `function` in `loop`, from a thread that is not the loop's. Raises TimeoutError where the loop does not
    come by within the limit (it hangs, or has ended), and what the function raises."""
    done: Future[T] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  (handed to the thread that asked)
                done.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError as error:
        raise TimeoutError("the loop has ended") from error
    try:
        return done.result(limit_s)
    finally:
        done.cancel()


class Lookout(Generic[T]):
    """For a loop that wants to know something now and then, and must not wait for it (a store may be away for
    minutes): the question is asked in a daemon thread, one at a time."""

    def __init__(self, question: Callable[[], T], every_s: float) -> None:
        self._question, self._every_s = question, every_s
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, Exception | None] = (None, None)

    def answer(self) -> T | None:
        """The answer that has arrived since the last call, or None; raises what the question raised. Asks
        again every `every_s`. Returns at once."""
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
            found, error = self._outcome
            if error is not None:
                raise error
            return found
        if time.monotonic() - self._asked >= self._every_s:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._ask, name="lookout", daemon=True)
            self._thread.start()
        return None

    def _ask(self) -> None:
        try:
            self._outcome = (self._question(), None)
        except Exception as error:  # noqa: BLE001  (raised by the next `answer`)
            self._outcome = (None, error)
