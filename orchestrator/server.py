"""The orchestrator process: one loop between a listener and the ledgers.

Everything that is decided is decided in control.py, from a message or the time; this file only waits, and
carries.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from async_rl.envs.base import Environment, EnvironmentConfig
from async_rl.errors import Malformed, StoreUnavailable
from async_rl.exporter import Exporter
from async_rl.log import get_logger
from async_rl.transport.allowed import Allowed, Keyring
from async_rl.transport.base import Listener, Received, from_here, printable
from async_rl.transport.zmq import ZmqListener
from orchestrator.commits import Commits, InThread
from orchestrator.config import (
    EvalConfig,
    OrchestratorConfig,
    SamplingConfig,
    check_bind,
    check_sizes,
    groups_that_fit,
)
from orchestrator.control import Control, Outgoing
from orchestrator.exported import ExportedStatus
from orchestrator.hours import Hours
from orchestrator.judge import Judge
from orchestrator.prompts import check_prompts
from orchestrator.rescoring import Rescorer
from orchestrator.spool import Journal, Spool
from orchestrator.texts import token_reader

__all__ = ["run_orchestrator", "serve"]

log = get_logger(__name__)

MESSAGES_PER_TURN = 128
"""Before we look whether a write has ended, and send the answers that waited for it."""
ROTATE_PAUSE_S = 10.0
"""Between two attempts to begin a new spool file there: nobody waits for it."""
GC_THRESHOLDS = (20_000, 10, 20)
"""A turn of many groups makes thousands of objects that are gone after it. With Python's own 700 the collector looks
for cycles among them, of which there are none, in a tenth of the time."""
TICK_S = 0.1
"""How late an expiry, a silent worker or the end of a hold may be noticed; far below the limits
themselves."""


async def serve(
    listener: Listener,
    control: Control,
    journal: Journal,
    *,
    full_wait_s: float = 600.0,
    rescorer: Rescorer | None = None,
    clock: Callable[[], float] | None = None,
    in_thread: InThread = asyncio.to_thread,
    stop: asyncio.Event,
) -> None:
    """Until the run is finished and the workers have left, or `stop` is set. A run that is finished already
    goes on to its end all the same: workers that nobody tells about it would look for us for ever.

    Each turn waits for: a message from anybody, the end of a write, the next tick, or the stop. It takes the messages
    that are there, and hands what they changed to the disk; the answers are sent when it is there: what is
    acknowledged is on the disk. Sending never waits: what a peer does not take is dropped, and asked
    for again. All of a turn happens at one time: `clock` is asked once in each. None: Hours. `in_thread` runs what
    waits for the disk.
    """
    clock = clock or Hours().turn
    commits = Commits(journal, full_wait_s=full_wait_s, stop=stop, in_thread=in_thread)
    receiving = asyncio.create_task(listener.recv())
    stopping = asyncio.create_task(stop.wait())
    now = ticked = rotate_after = clock()
    try:
        while not control.ended(now) and (control.finished or not stop.is_set()):
            await _something(receiving, stopping, commits)
            now = clock()
            answers = commits.ended()
            if now >= rotate_after and commits.writing is None:
                rotate_after = now + (0.0 if _rotate(control) else ROTATE_PAUSE_S)
            await _send(listener, answers + commits.begin())
            if receiving.done() and not commits.stand_still:
                arrived = _with_more(receiving.result(), listener, commits)
                commits.add(control.receive_all(arrived, now))
                receiving = asyncio.create_task(listener.recv())
            if now - ticked >= TICK_S:
                commits.add(control.tick(now))
                ticked = now
            if rescorer is not None:
                commits.add(_rescore(control, rescorer, now))
            await _send(listener, commits.begin())
        await _send(listener, await commits.rest())
    finally:
        for task in (receiving, stopping):
            task.cancel()
        await asyncio.gather(receiving, stopping, return_exceptions=True)
        await commits.close()


async def _something(
    receiving: asyncio.Task[tuple[bytes, Received]], stopping: asyncio.Task[Literal[True]], commits: Commits
) -> None:
    """Waits for: a message, the stop, the end of a write, or the next tick. While nothing more may be taken before
    the write has ended, for nothing else: nobody's silence counts in that time (hours.py)."""
    writing = commits.writing
    while writing is not None and commits.stand_still:
        await asyncio.wait({writing})
    awaited: set[asyncio.Task[Any]] = {receiving}
    if not stopping.done():
        awaited.add(stopping)
    if writing is not None:
        awaited.add(writing)
    await asyncio.wait(awaited, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)


async def _send(listener: Listener, answers: Outgoing) -> None:
    """One answer that can't be sent must not end the run, or again after each restart. What goes to one peer is sent
    together, in its order: in one packet, mostly."""
    for peer, answer in sorted(answers, key=itemgetter(0)):
        try:
            await listener.send(peer, answer)
        except Malformed as error:
            log.error("an answer was not sent", peer=printable(peer), reason=error.message, hint=error.hint)


def _with_more(
    first: tuple[bytes, Received], listener: Listener, commits: Commits
) -> Iterator[tuple[bytes, Received]]:
    """What arrived, and what is there besides, as far as one turn, or one commit, should hold it."""
    arrived: tuple[bytes, Received] | None = first
    for _ in range(MESSAGES_PER_TURN):
        if arrived is None:
            return
        commits.took_one()
        yield arrived  # and what it says is in the journal when the next one is asked for
        arrived = None if commits.full else listener.recv_now()


def _rescore(control: Control, rescorer: Rescorer, now: float) -> Outgoing:
    for rescoring in control.take_rescorings():
        rescorer.add(rescoring)
    return [message for outcome in rescorer.turn(now) for message in control.rescored(outcome, now)]


def _rotate(control: Control) -> bool:
    """A new file of the journal can wait: on a full disk the old one goes on."""
    try:
        control.rotate()
    except StoreUnavailable as error:
        log.warning("no new spool file could be begun", reason=error.message, hint=error.hint)
        return False
    return True


def run_orchestrator(
    *,
    environment: Environment,
    environment_config: EnvironmentConfig,
    sampling: SamplingConfig,
    config: OrchestratorConfig,
    evaluation: EvalConfig,
    seed: int,
    spool: Path,
    address_file: Path | None = None,
    trainer_key: str = "",
    judge: Judge | None = None,
    model: Path | None = None,
    metrics: str = "",
) -> None:
    """Serve one run until it is finished, or until SIGTERM or SIGINT. Blocking: the entry of the process.

    `address_file`: where to write the address for this machine's processes, for a parent that asked for
    port 0. `trainer_key`: the public key of the trainer that starts us, allowed beside those in
    orchestrator.keys. `judge`: the same environment in a process of its own, to score a sample of groups again; None:
    nothing is. `model`: a folder with its tokenizer.json, to read their tokens with. `metrics`: where to answer
    Prometheus; empty: nowhere.

    Raises ConfigError where the address is taken, can't be bound, or could be reached from
    other machines without leave, the keys or the spool can't be used, or the prompts can't be read;
    EnvironmentFailed where the environment has no prompt.
    """
    check_bind(config)
    check_sizes(sampling)
    if (fit := groups_that_fit(sampling, config)) < config.batch_groups:
        log.warning(
            "where samples are long, a step is trained with fewer groups",
            batch_groups=config.batch_groups,
            fit=fit,
            hint="lower orchestrator.batch_groups, or sampling.group_size or max_tokens",
        )
    keyring = _keyring(config, trainer_key)
    check_prompts(environment, evaluation)

    rescorer = _rescorer(judge, model, config)

    gc.set_threshold(*GC_THRESHOLDS)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            listener = ZmqListener(config.bind, keyring=keyring)
            stack.push_async_callback(listener.close)
            if rescorer is not None and judge is not None:
                stack.callback(judge.close)
                stack.callback(rescorer.close)
            journal = Spool(spool, fsync=config.fsync)
            stack.callback(journal.close)
            hours, stop = Hours(), asyncio.Event()
            control = Control(
                environment=environment,
                environment_config=environment_config,
                sampling=sampling,
                config=config,
                evaluation=evaluation,
                seed=seed,
                # From a random start: a worker that outlives us must not mistake a new lease for an old one.
                lease_ids=itertools.count(secrets.randbits(46) << 16),
                now=hours(),
                journal=journal,
                rescoring_salt=secrets.token_hex(16) if rescorer is not None else None,
                turned_away=keyring.turned_away if keyring is not None else None,
            )
            loop = asyncio.get_running_loop()
            if metrics:
                exporter = Exporter(metrics, ExportedStatus(loop, lambda: control.status(hours())))
                stack.push_async_callback(
                    asyncio.to_thread, exporter.close
                )  # it may be waiting for this loop
            records = control.restore(journal.replay(), hours())
            log.info("spool opened", folder=str(spool), records=records, damaged=journal.damaged)
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, stop.set)
            log.info("orchestrator listening", address=listener.address, keys=config.keys or "none")
            if address_file is not None:
                _write_whole(address_file, from_here(listener.address))
            await serve(
                listener,
                control,
                journal,
                full_wait_s=config.spool_full_wait_s,
                rescorer=rescorer,
                clock=hours.turn,
                stop=stop,
            )
            log.info("run finished" if control.finished else "orchestrator stopped")

    asyncio.run(main())


def _rescorer(judge: Judge | None, model: Path | None, config: OrchestratorConfig) -> Rescorer | None:
    """None where nothing is to be scored again."""
    if judge is None or not judge.deterministic or not config.verify.rescore_share:
        return None
    fits = token_reader(model) if model is not None else None
    return Rescorer(judge, timeout_s=config.verify.rescore_timeout_s, fits=fits, renew=judge.close)


def _keyring(config: OrchestratorConfig, trainer_key: str) -> Keyring | None:
    if not config.keys:
        return None
    extra = [Allowed("trainer", "trainer", trainer_key)] if trainer_key else []
    return Keyring.open(Path(config.keys), extra)


def _write_whole(path: Path, text: str) -> None:
    """A reader that polls for the file sees all of it or none."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
