"""A rollout worker for the exporter: what it would say of itself, asked in its own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from async_rl.exporter import Health
from async_rl.gauges import Reading, of_worker
from async_rl.threads import ask_loop

if TYPE_CHECKING:
    from workers.rollout import RolloutWorker

__all__ = ["ExportedWorker"]

ANSWER_S = 2.0
"""For the loop to come by; it is never busy for long, the engine and the store have threads of their own."""


class ExportedWorker:
    """A Source for the exporter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: RolloutWorker) -> None:
        self._loop, self._worker = loop, worker

    @property
    def run(self) -> str:
        return self._worker.run_info.run

    def readings(self) -> Iterable[Reading]:
        """Raises TimeoutError where the loop does not answer."""
        return list(of_worker(ask_loop(self._loop, self._worker.picture, ANSWER_S)))

    def health(self) -> Health:
        """A worker that serves while the orchestrator is away is well: it waits for it by itself."""
        try:
            view = ask_loop(self._loop, self._worker.picture, ANSWER_S)
        except TimeoutError:
            return Health(False, f"the worker's loop has not answered for {ANSWER_S:g} s")
        facts = {
            "worker": view.worker,
            "state": view.state,
            "version": view.version,
            "orchestrator": "connected" if self._worker.known else "away",
        }
        if failed := self._worker.engine.failed:
            return Health(False, f"the engine failed: {failed}", facts)
        if view.state not in ("serving", "updating"):
            return Health(False, f"it does not serve: {view.state}", facts)
        return Health(True, "", facts)
