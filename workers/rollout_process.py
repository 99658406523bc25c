"""`async-rl rollout` as a process: the run and the parts of a worker, put together, and taken apart at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from pathlib import Path

from async_rl.errors import WaitTimeout
from async_rl.log import get_logger
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.threads import in_daemon_thread
from async_rl.transport.keys import ClientKey
from async_rl.transport.zmq import ZmqDialer
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import scratch_folder
from async_rl.weights.run import RunInfo, find_run
from async_rl.weights.subscriber import Subscriber
from workers.engines import make_engine
from workers.rollout import RolloutWorker
from workers.rollout_ending import LONGEST_PAUSE_S, Ending, Over, delays
from workers.rollout_settings import RolloutConfig

__all__ = ["run_worker"]

log = get_logger(__name__)


def run_worker(
    *,
    store_url: str,
    orchestrator_address: str,
    worker_id: str,
    rollout: RolloutConfig,
    store: StoreConfig,
    weights: WeightsConfig,
    key: ClientKey | None = None,
) -> int:
    """Run a worker until the run is over or it is told to stop; the exit status. Blocking: the entry of the
    process. An empty `worker_id` means host, pid and chance. With a key, the worker is called by the key's name, or
    NAME/… where that is not its id. Raises the error that made it impossible to go on."""
    name = worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    if key is not None and name != key.name and not name.startswith(f"{key.name}/"):
        name = f"{key.name}/{name}"
    opened = open_store(store_url, store)
    try:
        asyncio.run(_live(name, opened, orchestrator_address, rollout, weights, key))
    finally:
        opened.close()
    return 0


async def _live(
    name: str,
    store: ObjectStore,
    address: str,
    config: RolloutConfig,
    weights: WeightsConfig,
    key: ClientKey | None,
) -> None:
    ending = Ending()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, ending.stop, signal.Signals(signum).name)
    try:
        run = await ending.unless_over(_find_run(store, config.join_timeout_s))
    except Over:
        return
    with _cache_folder(config, run) as cache:
        engine = make_engine(config)
        dialer = ZmqDialer(address, name, key=key)
        subscriber = Subscriber(store, run, cache, weights)
        try:
            await RolloutWorker(
                name=name,
                run=run,
                subscriber=subscriber,
                engine=engine,
                dialer=dialer,
                config=config,
                ending=ending,
            ).run()
        finally:
            await engine.close()
            await dialer.close()
            subscriber.close()
            log.info("worker ended", worker=name)


def _cache_folder(config: RolloutConfig, run: RunInfo) -> contextlib.AbstractContextManager[Path]:
    if config.cache_dir:
        return contextlib.nullcontext(Path(config.cache_dir))
    return scratch_folder(sum(tensor.nbytes for tensor in run.tensors) * 3 // 2)


async def _find_run(store: ObjectStore, limit_s: float) -> RunInfo:
    """Waits for: run.json, which the trainer writes when it starts for the first time."""
    deadline = time.monotonic() + limit_s
    for pause_s in delays(0.5, LONGEST_PAUSE_S):
        if (run := await in_daemon_thread(find_run, store)) is not None:
            return run
        if time.monotonic() + pause_s > deadline:
            break
        log.info("waiting for the run to begin", store=store.url)
        await asyncio.sleep(pause_s)
    raise WaitTimeout(
        f"no run appeared at {store.url} within {limit_s:g} s",
        hint="start the trainer, and check that both were given the same URL",
    )
