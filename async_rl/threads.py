"""Blocking calls beside an event loop, in threads that never keep a process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_daemon_thread"]

T = TypeVar("T")


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
