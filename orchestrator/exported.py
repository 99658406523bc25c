"""The orchestrator for the exporter: its Status, taken in its own loop. A loop that hangs is not healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from async_rl.exporter import Health
from async_rl.gauges import Reading, of_view
from async_rl.threads import ask_loop
from async_rl.view.model import View, of_status
from async_rl.wire import Status

__all__ = ["ExportedStatus"]

ANSWER_S = 2.0
"""For the loop to come by. It ticks ten times a second; only a disk that hangs or a stopped process is slower."""


class ExportedStatus:
    """A Source for the exporter. `status` is called in `loop`, because nothing it reads is safe for threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, status: Callable[[], Status]) -> None:
        self._loop, self._status = loop, status
        self._run = ""

    @property
    def run(self) -> str:
        return self._run

    def readings(self) -> Iterable[Reading]:
        """Raises TimeoutError where the loop does not answer."""
        return list(of_view(self._look()))

    def health(self) -> Health:
        try:
            view = self._look()
        except TimeoutError:
            return Health(False, f"the orchestrator's loop has not answered for {ANSWER_S:g} s")
        here = [each for each in view.workers if each.state != "gone"]
        facts = {"run": view.run, "trainer": view.trainer, "step": view.step, "workers": len(here)}
        if view.trainer == "absent":
            return Health(False, "no trainer is attached, or it was not heard for long", facts)
        return Health(True, "", facts)

    def _look(self) -> View:
        view = of_status(ask_loop(self._loop, self._status, ANSWER_S))
        self._run = view.run
        return view
