"""The worker between a scripted orchestrator and a real store, with the reference engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.algo.staleness import Node, Tree
from async_rl.errors import EngineError, Refused, StoreUnavailable
from async_rl.store import ObjectStore, open_store
from async_rl.transport.memory import MemoryNetwork
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import read_manifest
from async_rl.weights.readers import ReaderBeat, live_readers, write_beat
from async_rl.weights.subscriber import Subscriber
from async_rl.wire import (
    Ack,
    Announce,
    Bye,
    Cancel,
    Credit,
    Drain,
    Failed,
    GroupDone,
    Hello,
    Key,
    Lease,
    Message,
    Nack,
    Prompt,
    RunSettings,
    Sampling,
)
from async_rl.wire import Refused as RefusedMessage
from orchestrator.acceptance import Fault, Requirements, examine
from orchestrator.versions import Versions
from tests.rollout_support import Judge, Orchestrator, Steps, Trainer, Truth, until
from tests.weights_support import ScriptedStore, raises
from workers import rollout_needs
from workers.engines import EngineLoad, make_engine
from workers.rollout import RolloutWorker
from workers.rollout_ending import Ending
from workers.rollout_settings import RolloutConfig

pytestmark = pytest.mark.timeout(120)

SAMPLING = Sampling(temperature=1.0, max_tokens=12)
SETTINGS = RunSettings("tests.rollout_support:Judge", {}, SAMPLING, 4, 2, heartbeat_s=0.05)
QUICK = WeightsConfig(poll_s=0.05)

lease_ids = itertools.count(100)


def lease(ordinal=0, *, n=4, max_tokens=12, oldest=0, prompt=None, deadline_s=60.0) -> Lease:
    return Lease(
        next(lease_ids),
        Key("train", ordinal),
        prompt or Judge().prompt("train", ordinal),
        tuple(range(ordinal * n, ordinal * n + n)),
        Sampling(1.0, max_tokens),
        deadline_s,
        oldest,
    )


class World:
    """One worker and what surrounds it."""

    def __init__(self, folder: Path, model: Path, **config) -> None:
        self.store = ScriptedStore(open_store(f"file://{folder}/run"))
        self.trainer = Trainer(self.store, model)
        self.trainer.publish()
        self.orchestrator = Orchestrator(network := MemoryNetwork(), SETTINGS)
        config = RolloutConfig(
            **{"engine": "reference", "max_sequences": 32, "max_model_len": 300} | config
        )
        self.engine = make_engine(config)
        self.ending = Ending()
        self.wondered = threading.Event()  # why the orchestrator does not answer
        self.worker = RolloutWorker(
            name="w1",
            run=self.trainer.run,
            subscriber=Subscriber(self.store, self.trainer.run, folder / "cache", QUICK),
            engine=self.engine,
            dialer=network.dial(self.orchestrator.address, "w1"),
            config=config,
            ending=self.ending,
            why_silent=self.why_silent,
        )
        self.running = asyncio.create_task(self.worker.run())

    def why_silent(self) -> str:
        self.wondered.set()
        return "nobody knows why"

    async def serve(self) -> Credit:
        """Until the worker offers its credit."""
        await self.orchestrator.welcome()
        return await self.orchestrator.expect(Credit)

    async def served(self, version: int) -> None:
        """Until it offers its credit for a version; the credit is said again now and then."""
        while (await self.orchestrator.expect(Credit)).version < version:
            pass

    async def credit(self, wanted: Callable[[int], bool]) -> None:
        while not wanted((await self.orchestrator.expect(Credit)).capacity):
            pass

    async def fulfil(self, wanted: Lease) -> GroupDone:
        await self.orchestrator.say(wanted)
        done = await self.orchestrator.expect(GroupDone)
        assert (done.lease, done.group.key) == (wanted.lease, wanted.key)
        await self.orchestrator.say(Ack(done.lease, done.group.key))
        return done


@pytest.fixture
def world(tmp_path, tiny_model):
    @asynccontextmanager
    async def make(**config) -> AsyncIterator[World]:
        made = World(tmp_path, tiny_model, **config)
        try:
            yield made
        finally:
            made.running.cancel()
            await asyncio.gather(made.running, return_exceptions=True)
            await made.engine.close()
            await made.orchestrator.close()

    return make


def spans_of(done: GroupDone) -> list[list[tuple[int, int]]]:
    flat = [sample.spans.numpy().tolist() for sample in done.group.samples]
    return [list(zip(each[0::2], each[1::2], strict=True)) for each in flat]


async def test_a_lease_becomes_a_group_that_the_orchestrator_accepts(world):
    async with world() as w:
        hello = await w.orchestrator.welcome()
        assert (hello.run, hello.fingerprint) == (w.trainer.run.run, w.trainer.run.fingerprint)
        assert hello.version == -1
        credit = await w.orchestrator.expect(Credit)
        assert credit == Credit(capacity=8, version=0)  # 32 sequences, groups of 4
        done = await w.fulfil(lease(3))
        versions = Versions(Tree({0: Node(-1, 0)}), 0, 0.0)
        result = examine(done.group, Requirements(4, 12, w.trainer.run.vocab_size, (0.0, 1.0)), versions)
        assert not isinstance(result, Fault), result
        assert done.group.worker == "w1" and done.group.generate_s > 0
        assert len({sample.tokens.data.tobytes() for sample in done.group.samples}) > 1
        for sample in done.group.samples:
            assert "<|end|>" not in sample.text
            assert sample.reward == await Judge().reward(Prompt(), sample.text)
        again = await w.fulfil(lease(3))
        assert [s.tokens for s in again.group.samples] == [s.tokens for s in done.group.samples]
        await w.orchestrator.until(lambda: w.orchestrator.beat.state == "serving", "a heartbeat")


async def test_an_update_in_the_middle_of_a_group_gives_each_token_its_version(world):
    async with world() as w:
        await w.serve()
        steps = Steps(w.engine)
        wanted = lease(max_tokens=50)
        await w.orchestrator.say(wanted)
        steps.allow(20)
        orchestrator = w.orchestrator
        await orchestrator.until(
            lambda: [p.tokens for p in orchestrator.beat.progress] == [4 * 20], "20 steps"
        )
        version = w.trainer.publish()
        await orchestrator.say(Announce(version, 1))
        await orchestrator.until(
            lambda: orchestrator.beat.state == "updating", "the swap to wait for the step"
        )
        steps.allow(1)  # the step that is in progress, still of the old version
        assert await orchestrator.expect(Credit) == Credit(8, 1)
        steps.allow(100)
        done = await orchestrator.expect(GroupDone)
        assert spans_of(done) == [[(0, 21), (1, 29)]] * 4
        await orchestrator.until(
            lambda: orchestrator.beat.version == 1 and orchestrator.beat.sync_bytes > 0, "the new version"
        )


async def test_a_stop_during_an_update_lets_it_finish_so_that_the_last_groups_have_right_spans(world):
    async with world() as w:
        await w.serve()
        steps, swap = Steps(w.engine), w.engine._swap
        began, free = threading.Event(), threading.Event()

        def gated(shards):
            began.set()
            assert free.wait(60.0), "the test did not go on"
            swap(shards)

        w.engine._swap = gated
        await w.orchestrator.say(lease(max_tokens=50))
        steps.allow(20)
        await w.orchestrator.until(
            lambda: [p.tokens for p in w.orchestrator.beat.progress] == [4 * 20], "20 steps"
        )
        await w.orchestrator.say(Announce(w.trainer.publish(), 1))
        await w.orchestrator.until(lambda: w.orchestrator.beat.state == "updating", "the update")
        steps.allow(1)  # the step that is in progress
        await until(began.is_set, "the swap")
        w.ending.stop("SIGTERM")
        await until(lambda: any(task.cancelling() for task in w.ending._tasks), "the stop to be heard")
        free.set()
        assert await w.orchestrator.expect(Credit) == Credit(0, 1)
        steps.allow(100)
        done = await w.orchestrator.expect(GroupDone)
        assert spans_of(done) == [[(0, 21), (1, 29)]] * 4
        await w.orchestrator.say(Ack(done.lease, done.group.key))
        await w.orchestrator.expect(Bye)


async def test_an_environment_that_raises_fails_its_lease_and_no_other(world):
    async with world() as w:
        await w.serve()
        bad = lease(1, prompt=Prompt(text="abc", answer="raise"))
        await w.orchestrator.say(bad)
        failed = await w.orchestrator.expect(Failed)
        assert failed.lease == bad.lease and not failed.returned
        assert "RuntimeError: the judge is out of office" in failed.reason
        await w.fulfil(lease(2))


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_limit(world):
    async with world() as w:
        await w.serve()
        await w.orchestrator.say(lease(prompt=Prompt(messages=(Message("user", "a" * 300),))))
        failed = await w.orchestrator.expect(Failed)
        assert "limit of 300" in failed.reason and not failed.returned
        await w.fulfil(lease(2))


async def test_a_lease_for_a_version_on_its_way_waits_for_it(world):
    async with world() as w:
        await w.serve()
        await w.orchestrator.say(lease(oldest=1))
        assert w.trainer.publish() == 1
        done = await w.orchestrator.expect(GroupDone)
        assert {version for spans in spans_of(done) for version, _ in spans} == {1}
        await w.orchestrator.say(lease(oldest=7, deadline_s=0.2))
        failed = await w.orchestrator.expect(Failed)
        assert failed.returned and "version 7" in failed.reason


async def test_a_version_that_can_not_be_had_leaves_the_old_one_serving(world, tiny_model):
    async with world() as w:
        await w.serve()
        w.store.on("list_after", "versions/", raises(StoreUnavailable("the store is down")), times=2)
        w.trainer.publish()
        damaged = read_manifest(w.store, 1).way.packs[0].key
        data = bytearray(w.store.get(damaged))
        data[-1] ^= 1
        w.store.put(damaged, bytes(data))
        await w.orchestrator.say(Announce(1, 1))
        done = await w.fulfil(lease())
        assert spans_of(done)[0][0][0] == 0
        await until(lambda: lacked(w.store) == {1}, "the worker to say what it lacks")
        w.trainer.publish()  # a delta from a version that can't be had
        await until(lambda: lacked(w.store) == {2}, "the worker to say what it lacks")
        Trainer(w.store, tiny_model).publish()  # a full one
        await w.served(3)
        done = await w.fulfil(lease())
        assert spans_of(done)[0][0][0] == 3
        await until(lambda: lacked(w.store) == {-1}, "the worker to lack nothing")


def lacked(store: ScriptedStore) -> set[int]:
    return {beat.lacks for beat in live_readers(store)}


async def test_the_store_knows_which_versions_a_worker_needs_until_it_leaves(world):
    async with world() as w:
        await w.serve()
        await until(lambda: [beat.worker for beat in live_readers(w.store)] == ["w1"], "the first beat")
        w.worker.needs.say_now.set()
        found: list[ReaderBeat] = []

        def another() -> bool:
            found[:] = live_readers(w.store)
            return [beat.versions for beat in found] == [(0,)]

        await until(another, "another")
        assert found[0].expires_s == 5 * QUICK.beat_s
        await w.orchestrator.say(Drain("the run is finished"))
        await w.orchestrator.expect(Bye)
        assert await asyncio.wait_for(w.running, 10.0) is None
        assert live_readers(w.store) == []


async def test_a_beat_that_is_on_its_way_when_the_worker_leaves_does_not_stay(world, monkeypatch):
    began, let_go, written = threading.Event(), threading.Event(), threading.Event()

    def slow(store: ObjectStore, beat: ReaderBeat) -> None:
        began.set()
        let_go.wait(10.0)
        write_beat(store, beat)
        written.set()

    async with world() as w:
        await w.serve()
        await until(lambda: [beat.worker for beat in live_readers(w.store)] == ["w1"], "the first beat")
        monkeypatch.setattr(rollout_needs, "write_beat", slow)
        w.worker.needs.say_now.set()
        await until(began.is_set, "a beat on its way")
        await w.orchestrator.say(Drain("the run is finished"))
        await w.orchestrator.expect(Bye)
        with contextlib.suppress(TimeoutError):  # without a guard it has left by then
            await asyncio.wait_for(asyncio.shield(w.running), 1.0)
        let_go.set()
        await until(written.is_set, "the beat")
        await asyncio.wait_for(w.running, 10.0)
        assert live_readers(w.store) == []


async def test_a_store_that_takes_no_beats_stops_nobody(world):
    async with world() as w:
        w.store.on("put", "workers/", raises(StoreUnavailable("the store is down")), times=99)
        await w.serve()
        w.worker.needs.say_now.set()
        await w.fulfil(lease())
        w.worker.needs.say_now.set()
        w.trainer.publish()
        await w.served(1)


async def test_a_copy_damaged_on_this_machine_is_found_by_a_scrub_and_replaced(world):
    async with world() as w:
        await w.serve()
        w.worker.subscriber.config = msgspec.structs.replace(QUICK, scrub_every=1)
        update, fetch, paths = w.engine.update, w.worker.subscriber.fetch, []

        async def damaging(version, shards):
            done = await update(version, shards)
            with shards[0].open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x77")
            w.engine.update = update
            return done

        def noted(*args):
            paths.append(fetch(*args).path)
            return fetch(*args)

        w.engine.update, w.worker.subscriber.fetch = damaging, noted
        w.trainer.publish()
        await w.served(1)
        await until(lambda: len(paths) == 2, "the damaged copy to be replaced")
        assert paths[0].startswith("from version 0") and paths[1].startswith("from nothing")
        w.trainer.publish()
        await w.served(2)
        assert paths[2].startswith("from version 1")
        assert w.worker.subscriber.scrub() and not w.engine.failed


async def test_a_group_is_kept_until_it_is_acknowledged_across_a_restart_of_the_orchestrator(world):
    async with world() as w:
        await w.serve()
        await w.orchestrator.say(lease(5))
        first = await w.orchestrator.expect(GroupDone)
        await w.orchestrator.restart()
        await w.orchestrator.until(lambda: w.orchestrator.beat is not None, "a heartbeat")
        await w.orchestrator.say(RefusedMessage("I do not know you", retry=True))
        hello = await w.orchestrator.welcome()
        assert hello.version == 0
        again = await w.orchestrator.expect(GroupDone)
        assert again == first
        assert (await w.orchestrator.expect(Credit)).capacity == 8
        await w.orchestrator.say(Nack(again.lease, again.group.key, "lease: not mine"))
        await w.fulfil(lease(6))
        await w.orchestrator.say(Drain("done"))
        await w.orchestrator.expect(Bye)
        assert not any(isinstance(m, GroupDone) for m in w.orchestrator.heard), "both are forgotten"


async def test_a_heartbeat_says_what_the_engine_does_and_which_groups_wait_for_their_ack(world):
    async with world() as w:
        await w.serve()
        steps = Steps(w.engine)
        slow, quick = lease(1, max_tokens=200), lease(2, max_tokens=2)
        await w.orchestrator.until(
            lambda: w.orchestrator.beat is not None and w.orchestrator.beat.idle_s > 0, "it to be idle"
        )
        await w.orchestrator.say(slow)
        await w.orchestrator.say(quick)
        await w.orchestrator.until(lambda: w.orchestrator.beat.oldest_s > 0, "sequences to begin")
        idle_s, oldest_s = w.orchestrator.beat.idle_s, w.orchestrator.beat.oldest_s
        steps.allow(4)
        done = await w.orchestrator.expect(GroupDone)
        assert done.lease == quick.lease
        await w.orchestrator.until(lambda: w.orchestrator.beat.finished == (quick.lease,), "it to be said")
        await w.orchestrator.say(Ack(done.lease, done.group.key))
        await w.orchestrator.until(lambda: w.orchestrator.beat.finished == (), "it to be forgotten")
        beat = w.orchestrator.beat
        assert beat.idle_s == idle_s and beat.oldest_s > oldest_s, "it has worked all the time"
        assert [each.lease for each in beat.progress] == [slow.lease]
        steps.allow(300)
        await w.orchestrator.expect(GroupDone)
        await w.orchestrator.until(lambda: w.orchestrator.beat.idle_s > idle_s, "it to be idle again")
        assert w.orchestrator.beat.oldest_s == 0


async def test_leases_grow_until_the_engine_is_full_and_fall_when_too_many_wait(world):
    """Two of its four seats are taken by the long samples of two groups; the short ones are done."""
    async with world(max_sequences=4) as w:
        assert (await w.serve()).capacity == 1
        steps = Steps(w.engine)
        given = [lease(i, max_tokens=250) for i in range(6)]
        w.worker.engine.load = lambda: EngineLoad(running=2, queued=0, tokens=0, seats=4)
        await w.orchestrator.say(given[0])
        await w.credit(lambda level: level == 2)
        for each in given[1:]:
            await w.orchestrator.say(each)
        w.worker.engine.load = lambda: EngineLoad(running=4, queued=20, tokens=0, seats=4)
        await w.credit(lambda level: level == 1)
        steps.allow(1000)


async def test_cancelled_leases_leave_the_engine(world):
    async with world() as w:
        await w.serve()
        steps = Steps(w.engine)
        gone, kept = lease(1, max_tokens=200), lease(2, max_tokens=5)
        await w.orchestrator.say(gone)
        await w.orchestrator.say(kept)
        steps.allow(2)
        await w.orchestrator.until(
            lambda: [p.tokens for p in w.orchestrator.beat.progress] == [8, 8], "both to run"
        )
        await w.orchestrator.say(Cancel((gone.lease, 99), "not needed"))
        await w.orchestrator.until(
            lambda: [p.lease for p in w.orchestrator.beat.progress] == [kept.lease], "it to be cancelled"
        )
        steps.allow(10)
        assert (await w.orchestrator.expect(GroupDone)).lease == kept.lease
        assert w.engine.load().running == 0


async def test_a_drained_worker_finishes_what_it_has_and_says_goodbye(world):
    async with world() as w:
        await w.serve()
        steps = Steps(w.engine)
        wanted, late = lease(1, max_tokens=5), lease(2)
        await w.orchestrator.say(wanted)
        steps.allow(2)
        await w.orchestrator.until(lambda: w.orchestrator.beat.running == 4, "it to run")
        await w.orchestrator.say(Drain("the run is finished"))
        assert (await w.orchestrator.expect(Credit)).capacity == 0
        await w.orchestrator.until(lambda: w.orchestrator.beat.state == "draining", "the state")
        await w.orchestrator.say(late)
        failed = await w.orchestrator.expect(Failed)
        assert failed.lease == late.lease and failed.returned
        steps.allow(10)
        done = await w.orchestrator.expect(GroupDone)
        assert done.lease == wanted.lease
        assert not any(isinstance(m, Bye) for m in w.orchestrator.heard), "not before the acknowledgement"
        await w.orchestrator.say(Ack(done.lease, done.group.key))
        assert (await w.orchestrator.expect(Bye)).reason == "the run is finished"
        assert await asyncio.wait_for(w.running, 10.0) is None


@pytest.mark.parametrize("hurried", [False, True])
async def test_what_can_not_be_finished_is_given_back(world, hurried):
    """After drain_s, or at once at a second signal."""
    async with world(drain_s=60.0 if hurried else 0.0) as w:
        await w.serve()
        steps = Steps(w.engine)
        wanted = lease(1, max_tokens=200)
        await w.orchestrator.say(wanted)
        steps.allow(3)
        await w.orchestrator.until(
            lambda: [p.tokens for p in w.orchestrator.beat.progress] == [12], "it to run"
        )
        w.ending.stop("SIGTERM")
        if hurried:
            assert (await w.orchestrator.expect(Credit)).capacity == 0
            w.ending.stop("SIGTERM")
        steps.allow(1)  # the one in progress
        failed = await w.orchestrator.expect(Failed)
        assert failed == Failed(wanted.lease, wanted.key, "SIGTERM", returned=True)
        await w.orchestrator.expect(Bye)
        assert await asyncio.wait_for(w.running, 10.0) is None


async def test_a_worker_that_hears_nothing_looks_why_and_goes_on_asking(world, monkeypatch):
    monkeypatch.setattr("workers.rollout.HELLO_LIMIT_S", 0.01)
    async with world() as w:
        await w.orchestrator.expect(Hello)
        await until(w.wondered.is_set, "it to look why nobody answers")
        await w.orchestrator.expect(Hello)
        await w.serve()


async def test_a_refusal_ends_the_worker_unless_it_says_to_come_again(world):
    async with world() as w:
        for _ in range(2):
            await w.orchestrator.expect(Hello)
            await w.orchestrator.say(RefusedMessage("no trainer attached yet", retry=True))
        await w.orchestrator.expect(Hello)
        await w.orchestrator.say(
            RefusedMessage("worker w1 speaks protocol 1, the orchestrator 2", "upgrade")
        )
        with pytest.raises(Refused, match="protocol 1, the orchestrator 2"):
            await asyncio.wait_for(w.running, 10.0)


async def test_a_worker_whose_engine_fails_gives_its_leases_back_and_ends_with_the_error(world):
    async with world() as w:
        await w.serve()
        steps = Steps(w.engine)
        wanted = lease(1, max_tokens=200)
        await w.orchestrator.say(wanted)
        steps.allow(3)
        await w.orchestrator.until(lambda: w.orchestrator.beat.running == 4, "it to run")

        def broken(*_):
            raise RuntimeError("out of memory")

        w.engine._batch._forward = broken
        steps.allow(1)
        failed = await w.orchestrator.expect(Failed)
        assert failed.lease == wanted.lease and failed.returned
        await w.orchestrator.expect(Bye)
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(w.running, 10.0)


async def test_logprobs_in_the_group_are_those_of_its_tokens_under_the_published_weights(world):
    async with world() as w:
        await w.serve()
        done = await w.fulfil(lease(1))
        folder = w.worker.subscriber.hf_folder(w.worker.subscriber.fetch(read_manifest(w.store, 0)))
        truth = Truth(folder)
        prompt = done.group.prompt.numpy().tolist()
        for sample in done.group.samples:
            expected = truth.logprobs(prompt, sample.tokens.numpy().tolist())
            assert np.abs(sample.logprobs.numpy() - expected).mean() < 0.02
