"""The rollout worker: it generates groups for whoever trains, and follows the policy while it does.

    run.json ─► Hello, Welcome ─► newest version ─► engine ─► Credit
                                                                │
    Lease ─► token ids ─► n completions ─► rewards ─► GroupDone ─► Ack       many at once
    Announce or poll ─► fetch and verify ─► swap in flight ─► Credit         beside them
    every heartbeat_s ─► Heartbeat: what is served, how far each lease is
    Drain, SIGTERM ─► finish, or give back ─► Bye

It needs the URL of the run's store and the orchestrator's address; what the run is, it learns from there. It
outlives both: while the store is away it goes on generating with what it has, while the orchestrator is away it
finishes its groups and keeps them, and it says Hello again, for ever, until somebody knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from async_rl.envs import Environment, EnvironmentConfig, make_environment
from async_rl.errors import (
    AsyncRLError,
    EngineError,
    Malformed,
    Refused,
    StoreError,
    WaitTimeout,
    WeightsError,
)
from async_rl.exporter import Exporter
from async_rl.log import get_logger
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.threads import in_daemon_thread
from async_rl.transport.base import Dialer
from async_rl.transport.keys import ClientKey
from async_rl.transport.zmq import ZmqDialer
from async_rl.view.model import WorkerView
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import scratch_folder
from async_rl.weights.readers import ReaderBeat, drop_beat, write_beat
from async_rl.weights.run import RunInfo, find_run
from async_rl.weights.subscriber import LocalVersion, Subscriber
from async_rl.wire import (
    PROTOCOL,
    Ack,
    Announce,
    AnyMessage,
    Bye,
    Cancel,
    Credit,
    Drain,
    Failed,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Lease,
    LeaseProgress,
    Nack,
    RunSettings,
    Welcome,
)
from async_rl.wire import Refused as RefusedMessage
from workers.engines import Completion, Engine, make_engine
from workers.exported_worker import ExportedWorker
from workers.rollout_ending import Ending, Over, cancel, delays, to_the_end, together
from workers.rollout_groups import Texts, make_group
from workers.rollout_rewards import Rewards
from workers.rollout_settings import RolloutConfig

__all__ = ["RolloutWorker", "run_worker"]

log = get_logger(__name__)

HELLO_LIMIT_S = 5.0
"""A Hello that is not answered in this time is said again: the orchestrator is away, or just starting."""
LONGEST_PAUSE_S = 10.0
"""Between two attempts at anything; a fleet that waits for an orchestrator or a store is a light load then, and
still notices within seconds that it is back."""
RESEND_S = 10.0
"""A group that is not acknowledged after this long is sent again. An acknowledgement takes milliseconds."""
LAST_ACKS_S = 5.0
"""At the end, how long to wait for the acknowledgements of what was just sent."""
LAST_BEAT_S = 5.0
"""At the end, how long to try to take back what was said about needed versions; it expires by itself."""


class _Work:
    """A lease that is being fulfilled."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.running: set[str] = set()  # request ids inside the engine
        self.tokens = 0  # of the samples that are complete


class _Unacked(Struct):
    """A finished group, ours until it is acknowledged."""

    message: GroupDone
    sent: float


class _GiveBack(Exception):
    """This lease can't be fulfilled here, and it is not its fault."""


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
    ) -> None:
        self.name = name
        self.run_info = run
        self.subscriber = subscriber
        self.engine = engine
        self.dialer = dialer
        self.config = config
        self.ending = ending

        self._state = "starting"
        self._settings: RunSettings | None = None
        self._environment: Environment | None = None
        self._texts: Texts | None = None
        self._rewards = Rewards(config.reward_timeout_s, config.reward_parallel)

        self._work: dict[int, _Work] = {}  # by lease
        self._unacked: dict[int, _Unacked] = {}  # by lease

        self._unknown = asyncio.Event()  # the orchestrator does not know us: say Hello
        self._unknown.set()
        self._answered = asyncio.Event()  # the last Hello was
        self._welcomed = asyncio.Event()
        self._refusal = ""
        self._beat_now = asyncio.Event()
        self._look_now = asyncio.Event()  # for a new version
        self._say_now = asyncio.Event()  # which versions are needed
        self._beats = threading.Lock()  # one word about it at a time
        self._needs_nothing = False
        self._version_served = asyncio.Condition()
        self._all_acknowledged = asyncio.Event()
        self._all_acknowledged.set()

        self._fetching = -1
        self._fetched = 0.0
        self._sync_bytes = 0
        self._pause_s = 0.0
        self._speed = _Speed()
        self.newest = (-1, -1)  # version and step, as announced
        self.served_step = -1

    async def run(self) -> None:
        """The whole life. Returns after a graceful end; raises what made it impossible to go on."""
        unless_over = self.ending.unless_over
        self.ending.background(self._listen())
        self.ending.background(self._introduce())
        self.ending.background(self._beat())
        saying = self.ending.background(self._say_needs())
        following = None
        try:
            await unless_over(self._welcomed.wait())  # waits for: an orchestrator that has a trainer
            local = await unless_over(self._first_version())  # waits for: the trainer's first version
            await unless_over(self._start_engine(local))
            self._state = "serving"
            following = self.ending.background(self._follow())
            await self._send(Credit(self._capacity, self.engine.version))
            self._beat_now.set()
            self._say_now.set()
            await self.ending.wait()  # waits for: Drain, SIGTERM, or a failure
        except Over as over:
            log.info("leaving", reason=str(over), leases=len(self._work))
            if following is not None:
                await cancel(following)
            await self._leave(str(over), finish_s=self.config.drain_s)
            await cancel(saying)
            await self._need_nothing()
        except AsyncRLError as error:
            log.error("the worker can't go on", error=str(error), leases=len(self._work))
            await self._leave(str(error), finish_s=0.0)
            raise
        finally:
            await self.ending.close()
            self._rewards.close()

    # ---------------------------------------------------------------- the beginning

    async def _first_version(self) -> LocalVersion:
        """Waits for: a committed version that can be fetched and verified."""
        deadline = time.monotonic() + self.config.join_timeout_s
        for pause_s in delays(0.5, LONGEST_PAUSE_S):
            try:
                local = await self._fetch_newest()
                if local is not None:
                    return local
                log.info("waiting for the first version", run=self.run_info.run)
            except (WeightsError, StoreError) as error:
                log.warning("no version could be had", error=str(error))
            if time.monotonic() + pause_s > deadline:
                break
            await asyncio.sleep(pause_s)
        raise WaitTimeout(
            f"no usable policy version appeared within {self.config.join_timeout_s:g} s",
            hint="is the trainer running? `async-rl weights ls` lists the run's versions",
        )

    async def _start_engine(self, local: LocalVersion) -> None:
        self._say_now.set()
        folder = await in_daemon_thread(self.subscriber.hf_folder, local)
        self._texts = await in_daemon_thread(Texts, folder)
        log.info("engine starting", engine=self.config.engine, version=local.version)
        began = time.monotonic()
        await self.engine.start(folder, local.version)
        self.served_step = local.step
        log.info("engine ready", version=local.version, took_s=time.monotonic() - began)

    @property
    def _capacity(self) -> int:
        """Leases held at once."""
        assert self._settings is not None
        return self.config.max_groups or max(1, self.config.max_sequences // self._settings.group_size)

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
                    self._on_lease(message)
                case Ack(lease=lease):
                    self._settle(lease)
                case Nack(lease=lease, key=key, reason=reason):
                    log.warning("group refused", key=key, reason=reason)
                    self._settle(lease)
                case Announce(version=version, step=step):
                    self.newest = max(self.newest, (version, step))
                    if version > self.engine.version:
                        self._look_now.set()
                case Cancel(leases=leases, reason=reason):
                    self._on_cancel(leases, reason)
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
            self._refusal = "no answer"
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
            if said != self._refusal:
                log.info("waiting for the orchestrator", answer=self._refusal)
                said = self._refusal
            await asyncio.sleep(next(pauses))

    async def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.settings != self._settings:
            settings = welcome.settings
            self._environment = make_environment(
                EnvironmentConfig(settings.environment, settings.environment_args)
            )
            self._settings = settings
        log.info("welcome", run=welcome.run, newest_version=welcome.newest_version)
        self._unknown.clear()
        self._answered.set()
        self._welcomed.set()
        self._beat_now.set()
        self._look_now.set()
        if self._state == "serving":
            await self._send(Credit(self._capacity, self.engine.version))
        for unacked in list(self._unacked.values()):
            await self._send_group(unacked)

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

    # ---------------------------------------------------------------- leases

    def _on_lease(self, lease: Lease) -> None:
        if lease.lease in self._work or lease.lease in self._unacked:
            return
        work = self._work[lease.lease] = _Work(lease)
        work.task = self.ending.background(self._fulfil(work))

    async def _fulfil(self, work: _Work) -> None:
        """One lease from its prompt to the sending of its group, or of the reason why there is none."""
        lease = work.lease
        failure: Failed | None = None
        try:
            if self._state == "draining":
                raise _GiveBack("the worker is leaving")
            await self._reach(lease.oldest_version, lease.deadline_s / 2)
            group = await self._make_group(work)
            unacked = self._unacked[lease.lease] = _Unacked(GroupDone(lease.lease, group), time.monotonic())
            self._all_acknowledged.clear()
            await self._send_group(unacked)
        except _GiveBack as reason:
            failure = Failed(lease.lease, lease.key, str(reason), returned=True)
        except EngineError as error:
            if self.engine.failed:
                self.ending.fail(error)
                failure = Failed(lease.lease, lease.key, "its worker's engine failed", returned=True)
            else:
                failure = Failed(lease.lease, lease.key, str(error))
        except AsyncRLError as error:
            log.warning("lease failed", key=lease.key, error=str(error))
            failure = Failed(lease.lease, lease.key, str(error))
        finally:
            self._work.pop(lease.lease, None)
        if failure is not None:
            await self._send(failure)

    async def _make_group(self, work: _Work) -> Group:
        """Raises EnvironmentFailed, EngineError."""
        assert self._texts is not None and self._environment is not None
        lease, texts, environment = work.lease, self._texts, self._environment
        prompt_ids = texts.prompt_ids(lease.prompt)
        room = self.engine.max_model_len - lease.sampling.max_tokens
        if len(prompt_ids) > room:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and {lease.sampling.max_tokens} to generate are over the "
                f"engine's limit of {self.engine.max_model_len}",
                hint="raise rollout.max_model_len, lower sampling.max_tokens, or leave out such prompts",
            )
        began = time.monotonic()
        completions = await together(
            *(self._sample(work, prompt_ids, index, seed) for index, seed in enumerate(lease.seeds))
        )
        generated = time.monotonic()
        answers = [texts.completion(completion.tokens.tolist()) for completion in completions]
        rewards = await together(
            *(self._rewards.score(environment, lease.prompt, answer) for answer in answers)
        )
        return make_group(
            lease,
            self.name,
            prompt_ids,
            completions,
            answers,
            rewards,
            generate_s=generated - began,
            reward_s=time.monotonic() - generated,
        )

    async def _sample(self, work: _Work, prompt_ids: list[int], index: int, seed: int) -> Completion:
        request_id = f"{work.lease.lease}-{index}"
        work.running.add(request_id)
        try:
            completion = await self.engine.generate(
                prompt_ids,
                seed=seed,
                temperature=work.lease.sampling.temperature,
                max_tokens=work.lease.sampling.max_tokens,
                request_id=request_id,
            )
        finally:
            work.running.discard(request_id)
        work.tokens += len(completion.tokens)
        return completion

    async def _reach(self, version: int, limit_s: float) -> None:
        """Waits for: the engine serving `version` or a later one; the orchestrator knew of it before us."""
        if self.engine.version >= version:
            return
        self._look_now.set()
        try:
            async with self._version_served:
                served = self._version_served.wait_for(lambda: self.engine.version >= version)
                await asyncio.wait_for(served, limit_s)
        except TimeoutError:
            raise _GiveBack(
                f"it asks for version {version}, and {self.engine.version} is what this worker has after "
                f"{limit_s:.0f} s"
            ) from None

    async def _send_group(self, unacked: _Unacked) -> None:
        """Raises Malformed for a group over the size limit; it is then not kept."""
        unacked.sent = time.monotonic()
        try:
            await self._send(unacked.message)
        except Malformed:
            self._settle(unacked.message.lease)
            raise

    def _settle(self, lease: int) -> None:
        """The orchestrator has the group, or does not want it."""
        self._unacked.pop(lease, None)
        if not self._unacked:
            self._all_acknowledged.set()

    def _on_cancel(self, leases: tuple[int, ...], reason: str) -> None:
        for lease in leases:
            self._settle(lease)
            work = self._work.pop(lease, None)
            if work is not None and work.task is not None:
                work.task.cancel()
                log.debug("lease cancelled", key=work.lease.key, reason=reason)

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
            for unacked in list(self._unacked.values()):
                if time.monotonic() - unacked.sent > RESEND_S:
                    await self._send_group(unacked)

    def _heartbeat(self) -> Heartbeat:
        load = self.engine.load()
        return Heartbeat(
            version=self.engine.version,
            state=self._state,  # type: ignore[arg-type]
            progress=tuple(
                LeaseProgress(lease, work.tokens + sum(map(self.engine.progress, work.running)))
                for lease, work in self._work.items()
            ),
            fetching_version=self._fetching,
            fetched_fraction=self._fetched,
            tokens_per_s=self._speed.measure(load.tokens, time.monotonic()),
            running=load.running,
            queued=load.queued,
            sync_bytes=self._sync_bytes,
            pause_s=self._pause_s,
        )

    def picture(self) -> WorkerView:
        """For exporters, as the orchestrator would show it. Unknown where the worker itself can't know: how far it is
        behind before anybody has announced a version to it."""
        beat, serving = self._heartbeat(), self.engine.version >= 0
        version, step = self.newest
        known = serving and self.served_step >= 0 and version >= 0
        return WorkerView(
            worker=self.name,
            cluster=self.config.cluster,
            state=self._state,
            version=self.engine.version if serving else None,
            lag=max(0, step - self.served_step) if known else None,
            fetching_version=beat.fetching_version if beat.fetching_version >= 0 else None,
            fetched_fraction=beat.fetched_fraction if beat.fetching_version >= 0 else None,
            tokens_per_s=beat.tokens_per_s,
            leases=len(self._work),
            capacity=self._capacity if self._settings is not None else None,
            running=beat.running,
            queued=beat.queued,
            sync_bytes=beat.sync_bytes,
            pause_s=beat.pause_s,
            cache_used=beat.cache_used,
            oldest_s=beat.oldest_s,
            idle_s=beat.idle_s,
        )

    @property
    def known(self) -> bool:
        """Whether the orchestrator knows us, as far as we know."""
        return self._welcomed.is_set() and not self._unknown.is_set()

    # ---------------------------------------------------------------- versions

    async def _follow(self) -> None:
        """Waits for: an announced version, or the next poll. Whatever goes wrong on the way to a new version, the
        old one is served until an attempt succeeds."""
        pauses: Iterator[float] | None = None  # between attempts, after one has failed
        while True:
            if pauses is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._look_now.wait(), self.subscriber.next_poll_s())
            else:
                await asyncio.sleep(next(pauses))
            self._look_now.clear()
            try:
                while (local := await self._fetch_newest()) is not None:
                    await self._serve(local)
                    await self._scrub(local)
                pauses = None
            except (WeightsError, StoreError, EngineError) as error:
                if self.engine.failed:
                    raise
                log.warning("no new version could be had", served=self.engine.version, error=str(error))
                pauses = pauses or delays(1.0, LONGEST_PAUSE_S)

    async def _fetch_newest(self, after: int | None = None) -> LocalVersion | None:
        """The newest version later than the one served (or than `after`), here and verified; None where there is
        none. Raises WeightsError, StoreError."""
        if after is None:
            after = self.engine.version
        manifest = await in_daemon_thread(self.subscriber.newest, after)
        if manifest is None:
            return None
        self._fetching, self._fetched = manifest.version, 0.0
        lacked = self.subscriber.lacks
        try:
            local = await in_daemon_thread(self.subscriber.fetch, manifest, self._on_fetched)
        finally:
            self._fetching = -1
            if self.subscriber.lacks != lacked:
                self._say_now.set()
        self._sync_bytes += local.fetched_bytes
        return local

    def _on_fetched(self, fraction: float) -> None:  # called from the fetching thread
        self._fetched = fraction

    async def _serve(self, local: LocalVersion) -> None:
        self._state = "updating"
        try:
            # A swap that a stop left half done would give wrong spans, or an engine that stands still, to the
            # groups which are finished before the end.
            update = await to_the_end(self.engine.update(local.version, local.shards))
        finally:
            if self._state == "updating":
                self._state = "serving"
        self._pause_s, self.served_step = update.pause_s, local.step
        log.info("version served", version=local.version, step=local.step, pause_s=update.pause_s)
        await self._send(Credit(self._capacity, self.engine.version))
        self._beat_now.set()
        self._say_now.set()  # also in the bucket, for who watches from there
        async with self._version_served:
            self._version_served.notify_all()

    async def _scrub(self, served: LocalVersion) -> None:
        """Now and then, between two updates. The engine can't be given a version again that it serves, so what it
        read from a damaged copy stays in it until the next one; the loss sees the logprobs it sampled with."""
        if not self.subscriber.scrub_due or await in_daemon_thread(self.subscriber.scrub):
            return
        log.error("the engine's weights may be damaged until its next version", served=served.version)
        local = await self._fetch_newest(served.version - 1)
        if local is not None and local.version > self.engine.version:
            await self._serve(local)

    async def _say_needs(self) -> None:
        """Waits for: the next beat, or a version that can't be had. Garbage collection goes by what is said here, and
        so can a trainer whose last way was lost; without it this worker finds another path."""
        pause_s = self.subscriber.config.beat_s
        while True:
            beat = ReaderBeat(
                self.name,
                self.subscriber.needed_versions,
                5 * pause_s,
                self.subscriber.lacks,
                cluster=self.config.cluster,
                state=self._state,
                version=self.engine.version,
                fetching=self._fetching,
                fetched_fraction=self._fetched,
                tokens_per_s=self._speed.rate,
                sync_bytes=self._sync_bytes,
            )
            try:
                await in_daemon_thread(self._write_beat, beat)
            except StoreError as error:
                log.debug("the store does not know which versions are needed here", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._say_now.wait(), pause_s)
            self._say_now.clear()

    def _write_beat(self, beat: ReaderBeat) -> None:
        """In a thread, which a cancelled wait leaves behind: what it writes must not come after `_drop_beat`."""
        with self._beats:
            if not self._needs_nothing:
                write_beat(self.subscriber.store, beat)

    def _drop_beat(self) -> None:
        self._needs_nothing = True
        with self._beats:
            drop_beat(self.subscriber.store, self.name)

    async def _need_nothing(self) -> None:
        try:
            await asyncio.wait_for(in_daemon_thread(self._drop_beat), LAST_BEAT_S)
        except (StoreError, TimeoutError) as error:
            log.debug("the last beat stays until it expires", error=str(error))

    # ---------------------------------------------------------------- the end

    async def _leave(self, reason: str, *, finish_s: float) -> None:
        """Finish what is being generated within `finish_s`, give back the rest, say goodbye."""
        self._state = "draining"
        if not self._welcomed.is_set():
            return
        await self._send(Credit(0, self.engine.version))
        self._beat_now.set()
        working = [work.task for work in self._work.values() if work.task is not None]
        if working and finish_s > 0 and not self.engine.failed:
            hurried = asyncio.create_task(self.ending.hurry.wait())
            finished = asyncio.create_task(_all_done(working))
            ends: list[asyncio.Task[Any]] = [hurried, finished]
            await asyncio.wait(ends, timeout=finish_s, return_when=asyncio.FIRST_COMPLETED)
            await cancel(*ends)
        left = list(self._work.values())
        await cancel(*(work.task for work in left if work.task is not None))
        for work in left:
            if unacked := self._unacked.get(work.lease.lease):  # it was interrupted while it was sent
                await self._send_group(unacked)
            else:
                await self._send(Failed(work.lease.lease, work.lease.key, reason, returned=True))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_acknowledged.wait(), LAST_ACKS_S)
        if self._unacked:
            log.warning("groups were not acknowledged and are lost", groups=len(self._unacked))
        await self._send(Bye(reason))


async def _all_done(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


class _Speed:
    """Tokens per second between two heartbeats."""

    def __init__(self) -> None:
        self._tokens, self._at, self.rate = 0, time.monotonic(), 0.0

    def measure(self, tokens: int, now: float) -> float:
        if now - self._at > 0.5:  # a heartbeat out of turn comes too soon after another to measure by
            self.rate = max(0, tokens - self._tokens) / (now - self._at)
            self._tokens, self._at = tokens, now
        return self.rate


# ---------------------------------------------------------------- the process


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
    NAME/… where that is not its id. `metrics`: where to answer Prometheus; empty: nowhere.
    Raises the error that made it impossible to go on."""
    name = worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    if key is not None and name != key.name and not name.startswith(f"{key.name}/"):
        name = f"{key.name}/{name}"
    opened = open_store(store_url, store)
    try:
        asyncio.run(_live(name, opened, orchestrator_address, rollout, weights, key, metrics))
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
