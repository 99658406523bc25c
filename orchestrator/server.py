"""The orchestrator process: one loop between a listener and the ledgers.

Everything that is decided is decided in control.py, from a message or the time; this file only waits, and
carries.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from async_rl.envs.base import Environment, EnvironmentConfig
from async_rl.log import get_logger
from async_rl.transport.base import Listener, from_here
from async_rl.transport.zmq import ZmqListener
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig, check_bind
from orchestrator.control import Control
from orchestrator.prompts import check_prompts

__all__ = ["run_orchestrator", "serve"]

log = get_logger(__name__)

TICK_S = 0.1
"""How late an expiry, a silent worker or the end of a hold may be noticed; far below the limits
themselves."""


async def serve(
    listener: Listener,
    control: Control,
    *,
    clock: Callable[[], float] = time.monotonic,
    stop: asyncio.Event,
) -> None:
    """Until the run is finished and the workers have left, or `stop` is set. A run that is finished already
    goes on to its end all the same: workers that nobody tells about it would look for us for ever.

    Each turn waits for: a message from anybody, the next tick, or the stop. Sending never waits: what a
    peer does not take is dropped, and asked for again.
    """
    receiving = asyncio.create_task(listener.recv())
    stopping = asyncio.create_task(stop.wait())
    ticked = clock()
    try:
        while not control.ended(clock()) and (control.finished or not stop.is_set()):
            awaited = {receiving} if stopping.done() else {receiving, stopping}
            await asyncio.wait(awaited, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            outgoing = []
            if receiving.done():
                peer, message = receiving.result()
                outgoing += control.receive(peer, message, clock())
                receiving = asyncio.create_task(listener.recv())
            if (now := clock()) - ticked >= TICK_S:
                outgoing += control.tick(now)
                ticked = now
            for peer, answer in outgoing:
                await listener.send(peer, answer)
    finally:
        for task in (receiving, stopping):
            task.cancel()
        await asyncio.gather(receiving, stopping, return_exceptions=True)


def run_orchestrator(
    *,
    environment: Environment,
    environment_config: EnvironmentConfig,
    sampling: SamplingConfig,
    config: OrchestratorConfig,
    evaluation: EvalConfig,
    seed: int,
    address_file: Path | None = None,
) -> None:
    """Serve one run until it is finished, or until SIGTERM or SIGINT. Blocking: the entry of the process.

    `address_file`: where to write the address for this machine's processes, for a parent that asked for
    port 0. Raises ConfigError where the address is taken, can't be bound, or could be reached from other
    machines without leave, or the prompts can't be read; EnvironmentFailed where the environment has no
    prompt.
    """
    check_bind(config)
    check_prompts(environment, evaluation)

    async def main() -> None:
        listener = ZmqListener(config.bind)
        try:
            now = time.monotonic()
            control = Control(
                environment=environment,
                environment_config=environment_config,
                sampling=sampling,
                config=config,
                evaluation=evaluation,
                seed=seed,
                # From a random start: a worker that outlives us must not mistake a new lease for an old
                # one.
                lease_ids=itertools.count(secrets.randbits(46) << 16),
                now=now,
            )
            stop = asyncio.Event()
            for signum in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(signum, stop.set)
            log.info("orchestrator listening", address=listener.address)
            if address_file is not None:
                _write_whole(address_file, from_here(listener.address))
            await serve(listener, control, stop=stop)
            log.info("run finished" if control.finished else "orchestrator stopped")
        finally:
            await listener.close()

    asyncio.run(main())


def _write_whole(path: Path, text: str) -> None:
    """A reader that polls for the file sees all of it or none."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
