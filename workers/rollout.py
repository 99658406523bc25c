"""The rollout worker: it generates groups for whoever trains, and follows the policy while it does.

    run.json ─► Hello, Welcome ─► newest version ─► engine ─► Credit
                                                                │
    Lease ─► token ids ─► n completions ─► rewards ─► GroupDone ─► Ack       rollout_leases.py
    Announce or poll ─► fetch and verify ─► swap in flight ─► Credit         rollout_versions.py
    every heartbeat_s ─► Heartbeat: what is served, how far each lease is
    every beat_s ─► the store: which versions are needed here                rollout_needs.py
    some times a second ─► the engine's load: Credit, where it has changed   rollout_credit.py
    Drain, SIGTERM ─► finish, or give back ─► Bye                            rollout_ending.py

It needs the URL of the run's store and the orchestrator's address (rollout_process.py); what the run is, it learns
from there. It outlives both: while the store is away it goes on generating with what it has, while the orchestrator
is away it finishes its groups and keeps them, and it says Hello again, for ever, until somebody knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal

from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.errors import AsyncRLError, EngineError, Malformed, Refused, WaitTimeout
from async_rl.heap import settle_heap
from async_rl.log import get_logger
from async_rl.threads import in_daemon_thread
from async_rl.transport.base import Dialer
from async_rl.view.model import WorkerView
from async_rl.weights.readers import ReaderBeat
from async_rl.weights.run import RunInfo
from async_rl.weights.subscriber import LocalVersion, Subscriber
from async_rl.wire import (
    PROTOCOL,
    Ack,
    Announce,
    AnyMessage,
    Bye,
    Cancel,
    Drain,
    Heartbeat,
    Hello,
    Lease,
    Nack,
    RunSettings,
    Welcome,
)
from async_rl.wire import Refused as RefusedMessage
from workers.engines import Engine
from workers.rollout_credit import Credits
from workers.rollout_ending import LONGEST_PAUSE_S, Ending, Over, cancel, delays
from workers.rollout_figures import Figures, Speed
from workers.rollout_groups import Texts
from workers.rollout_leases import Leases
from workers.rollout_needs import Needs
from workers.rollout_rewards import Rewards
from workers.rollout_settings import RolloutConfig
from workers.rollout_versions import Following

__all__ = ["RolloutWorker"]

log = get_logger(__name__)

HELLO_LIMIT_S = 5.0
"""A Hello that is not answered in this time is said again: the orchestrator is away, or just starting."""


class RolloutWorker:
    def __init__(
        self,
        *,
        name: str,
        run: RunInfo,
        subscriber: Subscriber,
        engine: Engine,
        dialer: Dialer,
        config: RolloutConfig,
        ending: Ending,
        why_silent: Callable[[], str] = lambda: "no answer",
    ) -> None:
        """`why_silent`: asked in a thread where the orchestrator does not answer, what may be the reason."""
        self.name = name
        self.run_info = run
        self.subscriber = subscriber
        self.engine = engine
        self.dialer = dialer
        self.config = config
        self.ending = ending
        self._why_silent = why_silent

        self._phase: Literal["starting", "serving", "draining"] = "starting"
        self._settings: RunSettings | None = None
        self._rewards = Rewards(config.reward_timeout_s, config.reward_parallel)
        self.needs = Needs(name, subscriber, self._reader_beat)
        self.following = Following(subscriber, engine, served=self._on_served, lacking=self.needs.say_now)
        self.leases = Leases(
            name, engine, ending, self._rewards, send=self._send, reach=self.following.reach
        )
        self.credits = Credits(
            engine,
            self.leases,
            self._rewards,
            max_groups=config.max_groups,
            send=self._send,
            known=lambda: not self._unknown.is_set(),
        )

        self._unknown = asyncio.Event()  # the orchestrator does not know us: say Hello
        self._unknown.set()
        self._answered = asyncio.Event()  # the last Hello was
        self._welcomed = asyncio.Event()
        self._refusal = ""
        self._beat_now = asyncio.Event()
        self._speed = Speed(time.monotonic())
        self.newest = (-1, -1)  # version and step, as announced

    async def run(self) -> None:
        """The whole life. Returns after a graceful end; raises what made it impossible to go on."""
        unless_over = self.ending.unless_over
        self.ending.background(self._listen())
        self.ending.background(self._introduce())
        self.ending.background(self._beat())
        saying = self.ending.background(self.needs.say())
        following = None
        try:
            await unless_over(self._welcomed.wait())  # waits for: an orchestrator that has a trainer
            first = self.following.first(self.config.join_timeout_s)
            local = await unless_over(first)  # waits for: the trainer's first version
            await unless_over(self._start_engine(local))
            self._phase = "serving"
            self.leases.serve(time.monotonic())
            assert self._settings is not None, "a Welcome holds them"
            self.credits.begin(self._settings)
            following = self.ending.background(self.following.follow())
            self.ending.background(self.credits.watch())
            self._beat_now.set()
            self.needs.say_now.set()
            await self.ending.wait()  # waits for: Drain, SIGTERM, or a failure
        except Over as over:
            log.info("leaving", reason=str(over), leases=len(self.leases))
            if following is not None:
                await cancel(following)
            await self._leave(str(over), finish_s=self.config.drain_s)
            await cancel(saying)
            await self.needs.end()
        except AsyncRLError as error:
            log.error("the worker can't go on", error=str(error), leases=len(self.leases))
            await self._leave(str(error), finish_s=0.0)
            raise
        finally:
            await self.ending.close()
            self._rewards.close()

    async def _start_engine(self, local: LocalVersion) -> None:
        self.needs.say_now.set()
        folder = await in_daemon_thread(self.subscriber.hf_folder, local)
        self.leases.texts = await in_daemon_thread(Texts, folder)
        log.info("engine starting", engine=self.config.engine, version=local.version)
        began = time.monotonic()
        await self.engine.start(folder, local.version)
        self.following.served_step = local.step
        settle_heap()
        log.info("engine ready", version=local.version, took_s=time.monotonic() - began)

    @property
    def _state(self) -> Literal["starting", "serving", "updating", "draining"]:
        return "updating" if self._phase == "serving" and self.following.updating else self._phase

    async def _on_served(self) -> None:
        await self.credits.say()
        self._beat_now.set()
        self.needs.say_now.set()  # also in the bucket, for who watches from there

    async def _leave(self, reason: str, *, finish_s: float) -> None:
        """Finish what is being generated within `finish_s`, give back the rest, say goodbye."""
        self._phase = "draining"
        self.leases.leave()
        if not self._welcomed.is_set():
            return
        await self.credits.end()
        self._beat_now.set()
        await self.leases.finish(0.0 if self.engine.failed else finish_s)
        await self.leases.give_back(reason)
        await self._send(Bye(reason))

    # ---------------------------------------------------------------- the orchestrator

    async def _listen(self) -> None:
        """Waits for: a message from the orchestrator."""
        while True:
            try:
                message = await self.dialer.recv()
            except Malformed as error:
                log.warning("a message could not be read", error=str(error))
                continue
            match message:
                case Welcome():
                    await self._on_welcome(message)
                case RefusedMessage():
                    self._on_refused(message)
                case Lease():
                    self.leases.take(message)
                case Ack(lease=lease):
                    self.leases.settle(lease)
                case Nack(lease=lease, key=key, reason=reason):
                    log.warning("group refused", key=key, reason=reason)
                    self.leases.settle(lease)
                case Announce(version=version, step=step):
                    self.newest = max(self.newest, (version, step))
                    if version > self.engine.version:
                        self.following.look_now.set()
                case Cancel(leases=leases, reason=reason):
                    self.leases.cancel(leases, reason)
                case Drain(reason=reason):
                    self.ending.stop(reason)
                case _:
                    log.warning("unexpected message", kind=type(message).__name__)

    async def _introduce(self) -> None:
        """Waits for: the orchestrator not knowing us (at the start, and when it was restarted). Ends never: a
        worker has nothing better to do than to ask again."""
        pauses, said = delays(0.25, LONGEST_PAUSE_S), ""
        while True:
            await self._unknown.wait()
            self._answered.clear()
            self._refusal = ""
            await self._send(
                Hello(
                    PROTOCOL,
                    self.name,
                    self.config.cluster,
                    self.run_info.run,
                    self.run_info.fingerprint,
                    self.engine.version,
                    self.config.engine,
                )
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), HELLO_LIMIT_S)
            if not self._unknown.is_set():
                pauses, said = delays(0.25, LONGEST_PAUSE_S), ""
                continue
            why = self._refusal or await in_daemon_thread(self._why_silent)
            if said != why:
                # A refusal comes from an orchestrator that waits itself. Silence may mean a mistake of ours.
                write = log.info if self._refusal else log.warning
                write("waiting for the orchestrator", answer=why)
                said = why
            await asyncio.sleep(next(pauses))

    async def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.settings != self._settings:
            settings = welcome.settings
            self.leases.environment = make_environment(
                EnvironmentConfig(settings.environment, settings.environment_args)
            )
            self._settings = settings
            if self.credits.begun:
                self.credits.begin(settings)
        log.info("welcome", run=welcome.run, newest_version=welcome.newest_version)
        self._unknown.clear()
        self._answered.set()
        self._welcomed.set()
        self._beat_now.set()
        self.following.look_now.set()
        if self._phase == "serving":
            await self.credits.say()
        await self.leases.send_again(heard=True)

    def _on_refused(self, refused: RefusedMessage) -> None:
        if not refused.retry:
            raise Refused(refused.reason, hint=refused.hint)
        self._refusal = refused.reason
        self._unknown.set()
        self._answered.set()

    async def _send(self, message: AnyMessage) -> None:
        """A queue that stays full means that the orchestrator is away. The message is dropped: heartbeats and
        credits are repeated anyway, and groups are kept until they are acknowledged."""
        try:
            await self.dialer.send(message)
        except WaitTimeout as error:
            log.warning("message dropped", kind=type(message).__name__, error=str(error))

    # ---------------------------------------------------------------- heartbeats

    async def _beat(self) -> None:
        """Waits for: the next heartbeat, or something worth saying at once."""
        while True:
            pause_s = self._settings.heartbeat_s if self._settings is not None else 1.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat_now.wait(), pause_s)
            self._beat_now.clear()
            if self.engine.failed:
                raise EngineError(f"the engine failed: {self.engine.failed}", hint="restart the worker")
            if self._unknown.is_set():
                continue  # nobody to tell
            await self._send(self._heartbeat())
            await self.leases.send_again()

    def _heartbeat(self) -> Heartbeat:
        return self._figures().heartbeat(self.leases.progress(), self.leases.finished)

    def _reader_beat(self) -> ReaderBeat:
        subscriber = self.subscriber
        expires_s = 5 * subscriber.config.beat_s
        return self._figures().reader_beat(subscriber.needed_versions, expires_s, subscriber.lacks)

    def picture(self) -> WorkerView:
        """For exporters, as the orchestrator would show it. Unknown where the worker itself can't know: how far it is
        behind before anybody has announced a version to it."""
        return self._figures().view()

    def _figures(self) -> Figures:
        load, following, now = self.engine.load(), self.following, time.monotonic()
        version, step = self.newest
        known = self.engine.version >= 0 and following.served_step >= 0 and version >= 0
        return Figures(
            worker=self.name,
            cluster=self.config.cluster,
            state=self._state,
            version=self.engine.version,
            lag=max(0, step - following.served_step) if known else None,
            fetching=following.fetching,
            fetched_fraction=following.fetched,
            tokens_per_s=self._speed.measure(load.tokens, now),
            leases=len(self.leases),
            capacity=self.credits.level,
            running=load.running,
            queued=load.queued,
            sync_bytes=following.sync_bytes,
            pause_s=following.pause_s,
            cache_used=load.cache_used,
            oldest_s=self.leases.oldest_s(now),
            idle_s=self.leases.idle_s(now),
        )

    @property
    def known(self) -> bool:
        """Whether the orchestrator knows us, as far as we know."""
        return self._welcomed.is_set() and not self._unknown.is_set()
