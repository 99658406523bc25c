"""Workers with real engines at a real control plane: a lease that is lost on its way, and one that takes too long."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from async_rl import wire
from async_rl.envs import EnvironmentConfig
from async_rl.store import open_store
from async_rl.transport.memory import MemoryNetwork
from async_rl.weights.config import WeightsConfig
from async_rl.weights.subscriber import Subscriber
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.control import Control
from orchestrator.server import serve
from orchestrator.spool import MemoryJournal
from tests.rollout_support import Judge, Steps, Trainer, until
from workers.engines import make_engine
from workers.rollout import RolloutWorker
from workers.rollout_ending import Ending
from workers.rollout_settings import RolloutConfig

pytestmark = pytest.mark.timeout(120)

ENVIRONMENT = EnvironmentConfig("tests.rollout_support:Judge", {})
LIMIT_S = 60.0


class Cluster:
    """A control plane whose trainer is played by the test."""

    def __init__(self, folder: Path, model: Path, **config) -> None:
        self.folder = folder
        self.store = open_store(f"file://{folder}/run")
        self.trainer = Trainer(self.store, model)
        self.trainer.publish()
        self.network = MemoryNetwork()
        self.lose = 0  # leases
        journal = MemoryJournal()
        self.control = Control(
            environment=Judge(),
            environment_config=ENVIRONMENT,
            sampling=SamplingConfig(group_size=2, max_tokens=8),
            config=OrchestratorConfig(
                batch_groups=1,
                heartbeat_s=1.0,
                lease_s=600.0,
                straggler_hold_s=0.0,
                drop_no_signal=False,
                **config,
            ),
            evaluation=EvalConfig(every=0),
            seed=1,
            lease_ids=itertools.count(100),
            now=time.monotonic(),
            journal=journal,
        )
        listener = self.network.bind()
        self.address, deliver = listener.address, listener.send

        async def send(peer: bytes, message: wire.AnyMessage) -> None:
            if isinstance(message, wire.Lease) and self.lose:
                self.lose -= 1
            else:
                await deliver(peer, message)

        listener.send = send
        self.serving = asyncio.create_task(serve(listener, self.control, journal, stop=asyncio.Event()))
        self.dialer = self.network.dial(self.address, "trainer")

    async def attach(self) -> None:
        run = self.trainer.run
        attach = wire.Attach(wire.PROTOCOL, run.run, run.fingerprint, 1, 0, 0, 0, run.vocab_size)
        await self.dialer.send(attach)
        assert isinstance(await self.dialer.recv(), wire.Attached)

    async def batch(self, step: int) -> wire.Batch:
        await self.dialer.send(wire.NextBatch(1, step))
        answer = await asyncio.wait_for(self.dialer.recv(), LIMIT_S)
        assert isinstance(answer, wire.Batch), answer
        return answer

    async def publish(self, step: int) -> None:
        version = await asyncio.to_thread(self.trainer.publish)
        await self.dialer.send(wire.Published(1, version, step))

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[RolloutWorker]:
        config = RolloutConfig(engine="reference", max_sequences=2, max_model_len=300)
        engine, ending = make_engine(config), Ending()
        worker = RolloutWorker(
            name=name,
            run=self.trainer.run,
            subscriber=Subscriber(
                self.store, self.trainer.run, self.folder / name, WeightsConfig(poll_s=0.05)
            ),
            engine=engine,
            dialer=self.network.dial(self.address, name),
            config=config,
            ending=ending,
        )
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await engine.close()

    def status(self) -> wire.Status:
        return self.control.status(time.monotonic())


@pytest.fixture
def cluster(tmp_path, tiny_model):
    @asynccontextmanager
    async def make(**config) -> AsyncIterator[Cluster]:
        made = Cluster(tmp_path, tiny_model, **config)
        try:
            await made.attach()
            yield made
        finally:
            made.serving.cancel()
            await asyncio.gather(made.serving, return_exceptions=True)

    return make


async def test_a_lease_that_is_lost_on_its_way_holds_nobody_up(cluster):
    """It is the only one that admission allows, and its time would be over in ten minutes."""
    async with cluster(max_lag=0, max_attempts=1) as c, c.worker("w1"):
        c.lose = 1
        batch = await c.batch(0)
        assert batch.groups[0].key == wire.Key("train", 0)
        status = c.status()
        assert c.lose == 0 and status.dead_letters == () and status.dropped == {}


async def test_a_lease_that_takes_longer_than_the_lag_allows_is_stopped_and_done_by_another(cluster):
    async with cluster(max_lag=1) as c, AsyncExitStack() as stack:
        slow = await stack.enter_async_context(c.worker("slow"))
        await until(lambda: slow.engine.version == 0, "its engine")
        steps = Steps(slow.engine)
        steps.allow(1)  # and then it stands still, in the middle of a step
        stack.callback(steps.allow, 1000)
        await until(lambda: any(p.tokens for p in slow.leases.progress()), "a first token")
        (late,) = [each.lease.key for each in slow.leases._work.values()]
        await stack.enter_async_context(c.worker("quick"))
        trained = []
        for step in range(2):
            trained += [group.key for group in (await c.batch(step)).groups]
            await c.publish(step + 1)
        assert late not in trained
        await until(lambda: c.status().dropped == {"stale": 1}, "its lease to be ended")
        await until(lambda: not slow.leases.progress(), "it to be stopped")
        trained = [group.key for step in (2, 3) for group in (await c.batch(step)).groups]
        assert late in trained and c.status().dead_letters == ()
