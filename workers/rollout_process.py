"""`async-rl rollout` as a process: the run and the parts of a worker, put together, and taken apart at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from functools import partial
from pathlib import Path
from urllib.parse import quote

from async_rl.errors import ConfigError, WaitTimeout
from async_rl.exporter import Exporter
from async_rl.log import get_logger
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.threads import in_daemon_thread
from async_rl.transport.address import check_address, why_silent
from async_rl.transport.keys import ClientKey
from async_rl.transport.zmq import ZmqDialer
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import scratch_folder
from async_rl.weights.run import RunInfo, find_run
from async_rl.weights.subscriber import Subscriber
from workers.engines import make_engine
from workers.exported_worker import ExportedWorker
from workers.rollout import RolloutWorker
from workers.rollout_ending import LONGEST_PAUSE_S, Ending, Over, delays
from workers.rollout_settings import RolloutConfig

__all__ = ["run_worker"]

log = get_logger(__name__)

LONGEST_NAME = 200
"""Bytes of a worker's name in its key `workers/NAME.json`, where all but plain letters take three or more: file
systems allow 255 for a name, and ZeroMQ as much for an identity, which has some of its own beside it."""


def run_worker(
    *,
    store_url: str,
    orchestrator_address: str,
    worker_id: str,
    rollout: RolloutConfig,
    store: StoreConfig,
    weights: WeightsConfig,
    key: ClientKey | None = None,
    metrics: str = "",
) -> int:
    """Run a worker until the run is over or it is told to stop; the exit status. Blocking: the entry of the
    process. An empty `worker_id` means host, pid and chance. With a key, the worker is called by the key's name, or
    NAME/… where that is not its id. Raises the error that made it impossible to go on."""
    check_address(orchestrator_address)
    name = worker_name(worker_id, key.name if key is not None else "")
    opened = open_store(store_url, store)
    try:
        asyncio.run(_live(name, opened, orchestrator_address, rollout, weights, key, metrics))
    finally:
        opened.close()
    return 0


def worker_name(wanted: str, key_name: str = "") -> str:
    """The name under which a worker is known to the orchestrator and to the store. Raises ConfigError for one that
    can't be such a name."""
    name = wanted or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    if key_name and name != key_name and not name.startswith(f"{key_name}/"):
        name = f"{key_name}/{name}"
    why = ""
    if not name.isprintable() or name != name.strip():
        why = "it has a character that can't be printed, or a space at an end"
    elif (length := len(quote(name, safe="").encode())) > LONGEST_NAME:
        why = f"as part of a key in the store it has {length} bytes, at most {LONGEST_NAME} fit"
    if why:
        raise ConfigError(
            f"{name!r} can't be the name of a worker: {why}",
            hint="give --worker-id a short name: letters, digits, '-', '_' and '/'",
        )
    return name


async def _live(
    name: str,
    store: ObjectStore,
    address: str,
    config: RolloutConfig,
    weights: WeightsConfig,
    key: ClientKey | None,
    metrics: str,
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
        worker = RolloutWorker(
            name=name,
            run=run,
            subscriber=subscriber,
            engine=engine,
            dialer=dialer,
            config=config,
            ending=ending,
            why_silent=partial(why_silent, address),
        )
        exporter = None
        try:
            if metrics:
                exporter = Exporter(metrics, ExportedWorker(loop, worker))
            await worker.run()
        finally:
            if exporter is not None:
                await asyncio.to_thread(exporter.close)  # it may be waiting for this very loop
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
    deadline, said = time.monotonic() + limit_s, False
    for pause_s in delays(0.5, LONGEST_PAUSE_S):
        if (run := await in_daemon_thread(find_run, store)) is not None:
            return run
        if time.monotonic() + pause_s > deadline:
            break
        if not said:
            said = True
            log.warning("there is no run yet: waiting for its trainer", store=store.url, limit_s=limit_s)
        await asyncio.sleep(pause_s)
    raise WaitTimeout(
        f"no run appeared at {store.url} within {limit_s:g} s",
        hint="start the trainer, and check that both were given the same URL (`async-rl weights ls --store URL` "
        "shows what a run has); rollout.join_timeout_s is the limit",
    )
