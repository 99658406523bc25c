"""The loop, from Attach to Finished, between a scripted trainer and scripted workers over the in-memory
transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest

from async_rl import wire
from async_rl.errors import StoreUnavailable
from async_rl.transport.memory import MemoryNetwork
from orchestrator import commits, server
from orchestrator.commits import Commits
from orchestrator.config import EvalConfig, VerifyConfig
from orchestrator.hours import Hours
from orchestrator.records import Leased
from orchestrator.rescoring import Rescorer
from orchestrator.server import serve
from orchestrator.spool import MemoryJournal
from tests.orchestration import TRAINER, VOCAB, Counting, Play, group, hello

LIMIT_S = 10.0
STEPS = 4


async def trainer(dialer, lags):
    async def ask(message, kind):
        await dialer.send(message)
        while not isinstance(answer := await dialer.recv(), kind):
            raise AssertionError(f"{answer} is no answer to {message}")
        return answer

    await ask(wire.Attach(wire.PROTOCOL, "run", "model", 1, 0, 0, 0, VOCAB), wire.Attached)
    evals = []
    for step in range(STEPS):
        batch = await ask(wire.NextBatch(1, step), wire.Batch)
        lags += [lag for of_group in batch.lags for lag in of_group]
        evals += batch.evals
        await dialer.send(wire.Published(1, step + 1, step + 1))
    finished = await ask(wire.Finish(1, STEPS), wire.Finished)
    return evals + list(finished.evals)


async def worker(dialer, name):
    """Generates at once, with the version that was announced last. Ends when it is drained."""
    version, keys = 0, []
    while True:
        await dialer.send(hello(name, version))
        if isinstance(await dialer.recv(), wire.Welcome):
            break
        await asyncio.sleep(0)  # no trainer yet
    await dialer.send(wire.Credit(2, version))
    while True:
        match await dialer.recv():
            case wire.Lease() as lease:
                n = len(lease.seeds)
                rewards = [(1.0 + index) / n for index in range(n)]
                done = group(lease.key, version, n=n, rewards=rewards, worker=name)
                await dialer.send(wire.GroupDone(lease.lease, done))
                keys.append(lease.key)
            case wire.Announce(version=version):
                await dialer.send(wire.Heartbeat(version, "serving"))
            case wire.Drain():
                await dialer.send(wire.Bye("drained"))
                return keys
            case wire.Nack() as nack:
                raise AssertionError(nack.reason)


class Counted(MemoryJournal):
    unwritten = 0


def test_a_turn_takes_what_is_there_until_as_much_waits_to_be_written_as_memory_should_hold(monkeypatch):
    monkeypatch.setattr(commits, "BYTES_PER_COMMIT", 100)
    journal, there = Counted(), iter(range(1, 9))
    listener = SimpleNamespace(recv_now=lambda: next(there, None))
    taking = Commits(journal, full_wait_s=1.0, stop=asyncio.Event())
    taken = []
    for each in server._with_more(0, listener, taking):
        taken.append(each)
        journal.unwritten += 40
    assert taken == [0, 1, 2], "the next ones are of the next commit"
    journal.unwritten = 0
    assert list(server._with_more(3, listener, taking)) == [3, 3, 4, 5, 6, 7, 8]
    monkeypatch.setattr(server, "MESSAGES_PER_TURN", 2)
    listener.recv_now = lambda: 1
    assert list(server._with_more(0, listener, taking)) == [0, 1]


class NoRoom(MemoryJournal):
    """It is time for a new file, and there is no room for one; nor, at first, for the records."""

    def __init__(self):
        super().__init__()
        self.refused = Counter()

    def due(self):
        return True

    def begin(self, snapshot):
        self.refused["begin"] += 1
        raise StoreUnavailable("the disk is full")

    def write(self):
        if len(self.records) and not self.refused["commit"]:
            self.refused["commit"] += 1
            raise StoreUnavailable("the disk is full")


@pytest.mark.parametrize("journal", [MemoryJournal, NoRoom])
async def test_a_run_from_attach_to_finished(journal, monkeypatch):
    monkeypatch.setattr(commits, "FULL_PAUSE_S", 0.01)
    monkeypatch.setattr(server, "ROTATE_PAUSE_S", 0.0)
    network = MemoryNetwork()
    listener = network.bind("memory://orchestrator")
    play = Play(evaluation=EvalConfig(every=2, prompts=3), max_lag=1, journal=journal())
    lags: list[int] = []
    dial = [network.dial(listener.address, name) for name in ("trainer", "w1", "w2")]
    results = await asyncio.wait_for(
        asyncio.gather(
            serve(listener, play.control, play.journal, stop=asyncio.Event()),
            trainer(dial[0], lags),
            worker(dial[1], "w1"),
            worker(dial[2], "w2"),
        ),
        LIMIT_S,
    )
    _, evals, *keys = results
    assert [score.version for score in evals] == [0, 2, 4] and all(score.prompts == 3 for score in evals)
    assert len(lags) == STEPS * 2 * 2 and max(lags) <= 1
    train = [key for each in keys for key in each if key.split == "train"]
    assert len(set(train)) == len(train) >= STEPS * 2
    assert all(keys), "both workers were used"
    if journal is NoRoom:
        assert play.journal.refused["begin"] > 1 and play.journal.refused["commit"] == 1


async def test_the_stop_ends_the_loop_at_once():
    listener = MemoryNetwork().bind()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(serve(listener, Play().control, MemoryJournal(), stop=stop))
    await asyncio.sleep(0)
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)


async def test_a_run_that_is_finished_is_served_to_its_end_though_the_stop_comes_first():
    """A worker that missed the Drain, because it was away, must find somebody who repeats it."""
    network = MemoryNetwork()
    listener = network.bind()
    play = Play()
    play.attach()
    w1 = play.join("w1")
    play.say(TRAINER, wire.Finish(1, 0))
    stop = asyncio.Event()
    stop.set()
    serving = asyncio.ensure_future(
        serve(listener, play.control, play.journal, clock=lambda: play.now, stop=stop)
    )
    back, late = network.dial(listener.address, "back"), network.dial(listener.address, "late")
    for dialer, name in ((late, "w2"), (back, "w3")):
        await dialer.send(hello(name))
        assert isinstance(await asyncio.wait_for(dialer.recv(), LIMIT_S), wire.Drain)
    assert not serving.done(), f"{w1} is still here"
    play.now += 10.0  # drain_s
    await asyncio.wait_for(serving, LIMIT_S)


async def test_garbage_from_one_peer_does_not_end_the_loop():
    network = MemoryNetwork()
    listener = network.bind()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(serve(listener, Play().control, MemoryJournal(), stop=stop))
    evil, good = network.dial(listener.address, "evil"), network.dial(listener.address, "watcher")
    for frames in ((b"\xff\xfe",), (), (b"", b"")):
        await evil.send_frames(*frames)
        assert isinstance(await asyncio.wait_for(evil.recv(), LIMIT_S), wire.Refused)
    await good.send(wire.StatusRequest())
    status = await asyncio.wait_for(good.recv(), LIMIT_S)
    assert status.refused == {"malformed": 3}
    stop.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(serving, LIMIT_S)


async def test_a_worker_that_makes_up_rewards_is_found_while_groups_are_acknowledged_at_once():
    """Every group is scored again, by an environment that knows the prompt; the text answers none of them."""
    network = MemoryNetwork()
    listener = network.bind()
    verify = VerifyConfig(rescore_share=1.0, rescore_wrong=2)
    play = Play(verify=verify, max_lag=3, rescoring_salt="salt")
    play.attach()
    stop = asyncio.Event()
    rescorer = Rescorer(Counting(), timeout_s=5.0)
    serving = asyncio.ensure_future(
        serve(listener, play.control, play.journal, rescorer=rescorer, clock=lambda: play.now, stop=stop)
    )
    dialer = network.dial(listener.address, "w1")
    await dialer.send(hello("w1"))
    assert isinstance(await dialer.recv(), wire.Welcome)
    await dialer.send(wire.Credit(1, 0))
    acknowledged = 0
    while not isinstance(message := await asyncio.wait_for(dialer.recv(), LIMIT_S), wire.Refused):
        acknowledged += isinstance(message, wire.Ack)
        if isinstance(message, wire.Lease):
            await dialer.send(wire.GroupDone(message.lease, group(message.key)))
    assert "wrong rewards" in message.reason and "when scored again" in message.reason
    assert acknowledged >= 2
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)
    rescorer.close()


class FullForMinutes(MemoryJournal):
    """From the first lease on there is no room, for five minutes of the test's clock."""

    def __init__(self, full):
        super().__init__()
        self.clock_s, self.full = 1000.0, full

    def write(self):
        if self.full and any(isinstance(record, Leased) for record in self.records):
            self.clock_s += 100.0
            self.full -= 1
            raise StoreUnavailable("the disk is full")


async def test_after_minutes_of_a_full_disk_nobody_was_silent_and_no_lease_has_expired(monkeypatch):
    monkeypatch.setattr(commits, "FULL_PAUSE_S", 0.01)
    network, journal = MemoryNetwork(), FullForMinutes(3)
    listener = network.bind()
    play = Play(journal=journal)
    play.attach()
    stop, hours = asyncio.Event(), Hours(lambda: journal.clock_s)
    serving = asyncio.ensure_future(serve(listener, play.control, journal, clock=hours.turn, stop=stop))
    async with asyncio.timeout(LIMIT_S):
        dialer = network.dial(listener.address, "w1")
        await dialer.send(hello())
        await dialer.recv()
        await dialer.send(wire.Credit(2, 0))
        for _ in range(2):
            assert isinstance(await dialer.recv(), wire.Lease)
        assert journal.clock_s == 1300.0
        watcher = network.dial(listener.address, "watcher")
        for _ in range(2):  # the first answer is of the turn in which we came back
            await watcher.send(wire.StatusRequest())
            status = await watcher.recv()
    (worker,) = status.workers
    assert (worker.state, worker.leases) == ("serving", 2)
    assert worker.last_seen_s < 1.0 and hours() - 1000.0 < 1.0
    stop.set()
    await asyncio.wait_for(serving, LIMIT_S)


async def test_a_stop_ends_the_wait_for_room_on_a_full_disk():
    network, journal = MemoryNetwork(), FullForMinutes(1 << 30)
    listener = network.bind()
    play = Play(journal=journal)
    play.attach()
    stop = asyncio.Event()
    serving = asyncio.ensure_future(serve(listener, play.control, journal, stop=stop))
    dialer = network.dial(listener.address, "w1")
    await dialer.send(hello())
    await dialer.recv()
    await dialer.send(wire.Credit(2, 0))
    async with asyncio.timeout(LIMIT_S):
        while journal.clock_s == 1000.0:  # noqa: ASYNC110
            await asyncio.sleep(0)
    stop.set()
    with pytest.raises(StoreUnavailable, match="is full"):
        await asyncio.wait_for(serving, LIMIT_S)
