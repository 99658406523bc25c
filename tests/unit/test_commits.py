"""An answer leaves after the commit of what it follows from, whether that is slow, fails, or finds no room."""

from __future__ import annotations

import asyncio
import errno

import pytest

from async_rl import wire
from async_rl.errors import StoreUnavailable
from async_rl.transport.memory import MemoryNetwork
from orchestrator import commits
from orchestrator.commits import Commits
from orchestrator.server import serve
from orchestrator.spool import MemoryJournal
from tests.orchestration import Play, group, hello

LIMIT_S = 10.0


class Disk(MemoryJournal):
    """Counts what is written. `errors`: what the next writes raise."""

    def __init__(self):
        super().__init__()
        self.durable, self.unwritten_bytes, self.errors = True, 0, []
        self.appended = self.sealed = self.written = 0

    @property
    def unwritten(self):
        return self.unwritten_bytes

    def append(self, record):
        self.appended += 1
        return super().append(record)

    def seal(self):
        durable, self.sealed = self.durable and self.appended > self.sealed, self.appended
        return durable

    def write(self):
        if self.errors and self.sealed > self.written:
            raise self.errors.pop(0)
        self.written = self.sealed


class Gate:
    """Runs a write when it is told to: a disk that is as slow as the test likes."""

    def __init__(self):
        self.waiting: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def __call__(self, write):
        go = asyncio.Event()
        self.waiting.put_nowait(go)
        await go.wait()
        write()

    async def let_one_through(self):
        (await asyncio.wait_for(self.waiting.get(), LIMIT_S)).set()


def answers(*names):
    return [(name.encode(), wire.Drain(name)) for name in names]


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def make(disk, gate):
    def made(**options):
        return Commits(disk, **{"full_wait_s": 5.0, "stop": asyncio.Event(), "in_thread": gate, **options})

    return made


async def end_of(commits):
    await asyncio.wait_for(asyncio.wait({commits.writing}), LIMIT_S)
    return commits.ended()


async def test_an_answer_waits_for_its_own_commit_and_not_for_the_one_before(make, disk, gate):
    waiting = make()
    disk.appended = 1
    waiting.add(answers("first"))
    assert waiting.begin() == []
    disk.appended = 2
    waiting.add(answers("second"))
    assert waiting.begin() == [] and waiting.ended() == [], "one write at a time"
    await gate.let_one_through()
    assert await end_of(waiting) == answers("first")
    assert (disk.written, waiting.ended()) == (1, [])
    assert waiting.begin() == []
    await gate.let_one_through()
    assert await end_of(waiting) == answers("second") and disk.written == 2


async def test_what_needs_no_disk_leaves_at_once_but_never_before_what_it_follows(make, disk, gate):
    waiting = make()
    waiting.add(answers("status"))
    assert waiting.begin() == answers("status") and waiting.writing is None
    disk.appended = 1
    waiting.add(answers("ack"))
    waiting.begin()
    waiting.add(answers("status"))
    assert waiting.begin() == []
    await gate.let_one_through()
    assert await end_of(waiting) == answers("ack") and waiting.begin() == answers("status")


async def test_where_the_disk_fails_nothing_leaves_any_more(make, disk, gate):
    waiting = make()
    disk.appended, disk.errors = 1, [OSError(errno.EIO, "broken")]
    waiting.add(answers("ack"))
    waiting.begin()
    await gate.let_one_through()
    with pytest.raises(OSError, match="broken"):
        await end_of(waiting)
    await waiting.close()


async def test_a_full_disk_is_waited_for_while_everything_stands_still(make, disk, gate, monkeypatch):
    monkeypatch.setattr(commits, "FULL_PAUSE_S", 0.0)
    waiting = make()
    disk.appended, disk.errors = 1, [StoreUnavailable("full")]
    waiting.add(answers("ack"))
    waiting.begin()
    assert not waiting.stand_still
    await gate.let_one_through()
    again = await asyncio.wait_for(gate.waiting.get(), LIMIT_S)
    assert waiting.stand_still and waiting.ended() == []
    again.set()
    assert await end_of(waiting) == answers("ack") and not waiting.stand_still


@pytest.mark.parametrize("why", ["the limit is over", "we are to stop", "we are closed"])
async def test_a_full_disk_is_not_waited_for_any_longer_than(make, disk, gate, why):
    stop = asyncio.Event()
    waiting = make(full_wait_s=0.0 if why == "the limit is over" else 60.0, stop=stop)
    disk.appended, disk.errors = 1, [StoreUnavailable("full")] * 100
    waiting.add(answers("ack"))
    waiting.begin()
    closing = None
    if why == "we are to stop":
        stop.set()
    elif why == "we are closed":
        closing = asyncio.ensure_future(waiting.close())
        await asyncio.sleep(0)
    await gate.let_one_through()
    if closing is not None:
        await asyncio.wait_for(closing, LIMIT_S)
    with pytest.raises(StoreUnavailable):
        await end_of(waiting)


async def test_what_needs_no_disk_waits_too_where_there_is_no_room_for_it(make, disk, gate):
    waiting = make()
    disk.appended, disk.durable, disk.errors = 1, False, [StoreUnavailable("full")]
    waiting.add(answers("lease"))
    assert waiting.begin() == []
    await gate.let_one_through()
    assert await end_of(waiting) == answers("lease")


@pytest.mark.parametrize("limit", ["messages", "bytes"])
async def test_no_more_is_taken_than_one_commit_should_hold(make, disk, gate, limit):
    waiting = make()
    disk.appended = 1
    waiting.begin()
    if limit == "messages":
        for _ in range(commits.MESSAGES_PER_COMMIT):
            assert not waiting.full
            waiting.took_one()
    else:
        assert not waiting.full
        disk.unwritten_bytes = commits.BYTES_PER_COMMIT
    assert waiting.full and waiting.stand_still
    await gate.let_one_through()
    disk.unwritten_bytes = 0
    await end_of(waiting)
    assert not waiting.stand_still
    waiting.begin()
    assert not waiting.full


async def test_at_the_end_everything_is_written_and_answered(make, disk, gate):
    waiting = make()
    disk.appended = 1
    waiting.add(answers("first"))
    waiting.begin()
    disk.appended = 2
    waiting.add(answers("second"))
    rest = asyncio.ensure_future(waiting.rest())
    await gate.let_one_through()
    await gate.let_one_through()
    assert await asyncio.wait_for(rest, LIMIT_S) == answers("first", "second") and disk.written == 2


# ---------------------------------------------------------------- in the loop


class Run:
    """The loop with a worker that holds two leases; from then on the disk waits for the test."""

    def __init__(self, disk, gate):
        self.network = MemoryNetwork()
        listener = self.network.bind()
        self.play = Play(journal=disk)
        self.play.attach()
        self.gate, self.held, self.stop = gate, False, asyncio.Event()
        self.serving = asyncio.ensure_future(
            serve(listener, self.play.control, disk, in_thread=self.write, stop=self.stop)
        )
        self.dialer = self.network.dial(listener.address, "w1")

    async def write(self, write):
        if self.held:
            await self.gate(write)
        else:
            write()

    async def two_leases(self):
        await self.dialer.send(hello())
        await self.dialer.recv()
        await self.dialer.send(wire.Credit(2, 0))
        leases = [await self.next() for _ in range(2)]
        self.held = True
        return leases

    async def deliver(self, lease):
        await self.dialer.send(wire.GroupDone(lease.lease, group(lease.key)))

    async def next(self):
        return await asyncio.wait_for(self.dialer.recv(), LIMIT_S)

    async def until(self, true):
        async with asyncio.timeout(LIMIT_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_groups_are_taken_while_the_disk_is_slow_and_each_is_acknowledged_by_its_own_commit(
    disk, gate
):
    run = Run(disk, gate)
    first, second = await run.two_leases()
    written = disk.written
    await run.deliver(first)
    await run.until(lambda: gate.waiting.qsize())
    of_first = disk.appended
    await run.deliver(second)
    await run.until(lambda: disk.appended > of_first)
    assert disk.written == written and run.dialer.inbox.empty(), "nothing is on the disk, nothing was said"
    await gate.let_one_through()
    assert await run.next() == wire.Ack(first.lease, first.key)
    assert isinstance(await run.next(), wire.Lease) and disk.written == of_first
    await run.until(lambda: gate.waiting.qsize())
    assert run.dialer.inbox.empty(), "the second is not on the disk yet"
    await gate.let_one_through()
    assert await run.next() == wire.Ack(second.lease, second.key)
    run.stop.set()
    await asyncio.wait_for(run.serving, LIMIT_S)


async def test_a_group_whose_commit_fails_is_not_acknowledged_and_the_end_says_why(disk, gate):
    run = Run(disk, gate)
    first, _ = await run.two_leases()
    disk.errors = [OSError(errno.EIO, "broken")]
    await run.deliver(first)
    await gate.let_one_through()
    with pytest.raises(OSError, match="broken"):
        await asyncio.wait_for(run.serving, LIMIT_S)
    assert run.dialer.inbox.empty()
