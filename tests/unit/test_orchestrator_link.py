"""The trainer's blocking link and `async-rl lag`, against a real orchestrator on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from async_rl import errors, wire
from async_rl.cli.lag import command, render
from async_rl.errors import ConfigError, WaitTimeout
from async_rl.transport.allowed import Allowed, Keyring, add, remove
from async_rl.transport.keys import ClientKey, new_secret
from async_rl.transport.link import StatusLink, TrainerLink, ask_status
from async_rl.transport.zmq import ZmqDialer, ZmqListener
from async_rl.wire import Attach
from orchestrator.server import serve
from tests.orchestration import VOCAB, Play, group, hello

LIMIT_S = 10.0


class Running:
    """An orchestrator in a thread, which can be stopped and started again at the same address."""

    def __init__(self, address="tcp://127.0.0.1:0", keyring=None, **settings):
        self.settings = settings
        self.keyring = keyring
        self.address = address
        self.start()

    def start(self):
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self.thread.start()
        assert ready.wait(LIMIT_S)

    async def _main(self, ready):
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        listener = ZmqListener(self.address, keyring=self.keyring)
        self.address = listener.address
        ready.set()
        play = Play(**self.settings)
        play.control._started = time.monotonic()
        await serve(listener, play.control, play.journal, stop=self.stopped)
        await listener.close()

    def stop(self):
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopped.set)
            self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


class Worker(threading.Thread):
    """Fulfils every lease at once with the version it was told last; says Hello again when it is asked
    to."""

    def __init__(self, address, signal=True):
        super().__init__(daemon=True)
        self.address, self.signal = address, signal
        self.start()

    def run(self):
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(self._main(), LIMIT_S))

    async def _main(self):
        dialer = ZmqDialer(self.address, "w1")
        try:
            await self._work(dialer)
        finally:  # a context that is left to the garbage collector waits for its sockets for ever
            await dialer.close()

    async def _work(self, dialer):
        version = 0
        await dialer.send(hello("w1", version))
        while True:
            try:
                message = await asyncio.wait_for(dialer.recv(), 0.1)
            except TimeoutError:
                message = None
            match message:
                case None:
                    await dialer.send(wire.Heartbeat(version, "serving"))
                case wire.Refused(retry=True):
                    await asyncio.sleep(0.02)
                    await dialer.send(hello("w1", version))
                case wire.Welcome(newest_version=version) | wire.Announce(version=version):
                    await dialer.send(wire.Credit(2, version))
                case wire.Lease() as lease:
                    rewards = [0.0, 1.0] if self.signal else [1.0, 1.0]
                    done = group(lease.key, version, rewards=rewards)
                    await dialer.send(wire.GroupDone(lease.lease, done))
                case wire.Drain():
                    return await dialer.send(wire.Bye("drained"))


@pytest.fixture
def running():
    made = Running(max_lag=0)
    yield made
    made.stop()


@pytest.fixture
def link(running):
    with TrainerLink(running.address, connect_timeout_s=LIMIT_S) as made:
        yield made


def attach(incarnation=1, step=0, version=0, **changes):
    return Attach(wire.PROTOCOL, "run", "model", incarnation, step, version, step, VOCAB, **changes)


def test_a_run_over_the_link(running, link):
    worker = Worker(running.address)
    link.published(1, 0, 0)  # before there is anybody to tell
    assert link.attach(attach()) == wire.Attached("run", 0, 2)
    for step in range(3):
        batch = link.next_batch(1, step, LIMIT_S)
        assert (batch.step, len(batch.groups)) == (step, 2)
        link.published(1, step + 1, step + 1)
    status = ask_status(running.address, LIMIT_S)
    assert status.newest_version == 3 and "unattached" not in status.refused
    assert link.finish(1, 3, evaluate=True, timeout_s=LIMIT_S) == wire.Finished(())
    worker.join(LIMIT_S)
    running.thread.join(LIMIT_S)
    assert not running.thread.is_alive(), "the worker left, the run is over"


def test_a_version_published_from_another_thread_gets_through_while_a_batch_is_awaited(running, link):
    """With max_lag = 0 the batch needs that version, so the wait would never end otherwise."""
    Worker(running.address)
    link.attach(attach())
    link.next_batch(1, 0, LIMIT_S)
    publisher = threading.Timer(0.2, link.published, (1, 1, 1))
    publisher.start()
    assert link.next_batch(1, 1, LIMIT_S).step == 1
    publisher.join()


def test_a_batch_that_arrives_after_a_short_limit_is_not_lost(running, link):
    link.attach(attach())
    with pytest.raises(WaitTimeout):
        link.next_batch(1, 0, 0.05)
    Worker(running.address)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            batch = link.next_batch(1, 0, 0.01)
            break
        except WaitTimeout:
            continue
    assert batch == link.next_batch(1, 0, LIMIT_S)


def test_a_restarted_orchestrator_is_attached_again_at_the_step_the_trainer_has_reached(running, link):
    Worker(running.address)
    link.attach(attach())
    first = link.next_batch(1, 0, LIMIT_S)
    link.published(1, 1, 1)
    link.next_batch(1, 1, LIMIT_S)
    link.published(1, 2, 2)
    running.stop()
    running.start()
    batch = link.next_batch(1, 2, LIMIT_S)
    assert batch.step == 2
    # The prompts go on after those that the trainer has had: two batches of two.
    assert first.frontier == 2 and [each.key.ordinal for each in batch.groups] == [4, 5]
    assert ask_status(running.address, LIMIT_S).newest_version == 2


def test_an_older_trainer_is_refused_with_the_reason(running, link):
    link.attach(attach(incarnation=3))
    with (
        TrainerLink(running.address) as old,
        pytest.raises(errors.Refused, match="incarnation 3 has the run"),
    ):
        old.attach(attach(incarnation=2))
    with TrainerLink(running.address) as new:
        new.attach(attach(incarnation=4))
        with pytest.raises(errors.Refused, match="incarnation 4 has the run"):
            link.next_batch(3, 0, LIMIT_S)


def test_a_wait_for_a_batch_ends_with_the_reason_why_there_is_none(running, link):
    link.attach(attach())
    with pytest.raises(WaitTimeout, match=r"0\.1 s for a batch for step 0; .*0 of 2 groups.*workers: none"):
        link.next_batch(1, 0, 0.1)
    Worker(running.address, signal=False)
    with pytest.raises(WaitTimeout, match=r"w1 serving, version 0.*dropped: no_signal \d+"):
        link.next_batch(1, 0, 1.0)


def test_a_slice_of_a_longer_wait_ends_without_asking_for_the_picture(running, link):
    link.attach(attach())
    with pytest.raises(WaitTimeout) as caught:
        link.next_batch(1, 0, 0.1, explain=False)
    assert caught.value.message == "waited 0.1 s for a batch for step 0"
    assert "0 of 2 groups" in link.picture()


def test_what_a_step_has_shown_is_left_out_where_no_message_holds_it(running, link, monkeypatch):
    link.attach(attach())
    monkeypatch.setattr("async_rl.transport.link.MAX_MESSAGE_BYTES", 4000)
    row = wire.Measured(wire.Key("train", 0), 0, True, 9, 0.0, 0.0, 0.0)
    link.checked(wire.Checked(1, 0, (row,) * 1000))
    assert "0 of 2 groups" in link.picture(), "the trainer goes on"


def test_a_batch_that_arrives_while_the_picture_is_taken_is_kept():
    """The orchestrator is played by hand: it answers NextBatch only when it has been asked for its Status."""
    asked = []
    with Scripted(asked) as address, TrainerLink(address, connect_timeout_s=LIMIT_S) as link:
        link.attach(attach())
        with pytest.raises(WaitTimeout, match="0 of 2 groups"):
            link.next_batch(1, 0, 0.1)
        assert link.next_batch(1, 0, LIMIT_S).step == 0
    assert asked.count("NextBatch") == 1, "the batch travelled once"


class Scripted:
    """Answers in its own order, in a thread: Attached at once, the Batch right before the Status."""

    def __init__(self, asked):
        self.asked = asked

    def __enter__(self):
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self.thread.start()
        assert ready.wait(LIMIT_S)
        return self.address

    async def _main(self, ready):
        listener = ZmqListener("tcp://127.0.0.1:0")
        self.address = listener.address
        ready.set()
        try:
            while "StatusRequest" not in self.asked:
                peer, message = await asyncio.wait_for(listener.recv(), LIMIT_S)
                self.asked.append(type(message).__name__)
                if isinstance(message, Attach):
                    await listener.send(peer, wire.Attached("run", 0, 2))
            await listener.send(peer, wire.Batch(1, 0, (), (), 0))
            await listener.send(peer, Play().status())
        finally:
            await listener.close()

    def __exit__(self, *_):
        self.thread.join(LIMIT_S)


def test_a_watcher_that_asked_before_anybody_was_there_gets_no_old_answers():
    with ZmqPort() as address, StatusLink(address) as watcher:
        with pytest.raises(WaitTimeout, match=address):
            watcher.ask(0.1)
        late = Running(address)
        try:
            assert watcher.ask(LIMIT_S).trainer == "absent"
            with TrainerLink(address) as link:
                link.attach(attach(version=7))
                status = watcher.ask(LIMIT_S)
                assert (status.trainer, status.newest_version) == ("training", 7)
        finally:
            late.stop()


def test_nobody_at_the_address():
    with ZmqPort() as address:
        with (
            TrainerLink(address, connect_timeout_s=0.1) as link,
            pytest.raises(WaitTimeout, match=address) as caught,
        ):
            link.attach(attach())
        assert caught.value.hint
        with pytest.raises(WaitTimeout, match=address):
            ask_status(address, 0.1)
    with pytest.raises(ConfigError, match="nonsense"):
        TrainerLink("nonsense")


class ZmqPort:
    """A port where nothing listens any more."""

    def __enter__(self):
        async def free():
            listener = ZmqListener("tcp://127.0.0.1:0")
            await listener.close()
            return listener.address

        return asyncio.run(free())

    def __exit__(self, *_):
        pass


# ---------------------------------------------------------------- async-rl lag


def test_lag_shows_trainer_and_workers(running, link):
    Worker(running.address)
    link.attach(attach())
    link.next_batch(1, 0, LIMIT_S)
    link.published(1, 1, 1)  # never waits; what is asked over another connection may arrive before it
    with StatusLink(running.address) as watcher:
        deadline = time.monotonic() + LIMIT_S
        while watcher.ask(LIMIT_S).newest_version < 1:
            assert time.monotonic() < deadline
    shown = CliRunner().invoke(command, ["--orchestrator", running.address])
    assert shown.exit_code == 0, shown.output
    for text in ("run", "step 1", "newest version", "p50 0", "limit 0", "w1", "serving", "buffered"):
        assert text in shown.output


def test_lag_as_json_names_every_field(running, link):
    link.attach(attach(step=4, version=7))
    shown = CliRunner().invoke(command, ["--json"], env={"ASYNC_RL_ORCHESTRATOR": running.address})
    assert shown.exit_code == 0, shown.output
    status = json.loads(shown.output)
    assert (status["newest_version"], status["step"], status["workers"]) == (7, 4, [])
    assert status["reward"] is None, "not a number yet"


def test_lag_of_nobody_is_a_clear_error_in_limited_time(monkeypatch):
    monkeypatch.setattr("async_rl.cli.lag.CONNECT_LIMIT_S", 0.1)
    with ZmqPort() as address:
        shown = CliRunner().invoke(command, ["--orchestrator", address])
    assert isinstance(shown.exception, WaitTimeout) and address in shown.exception.message


def test_a_worker_beyond_the_limit_or_gone_or_fetching_can_be_told_at_a_glance():
    play = Play(max_lag=1)
    play.attach(version=1, version_step=1, step=1)
    slow, fetching = play.join("slow", version=1), play.join("fetching", version=1)
    play.say(b"trainer:1", wire.Published(1, 2, 5))
    play.beat(slow, version=1, after=6.0)
    beat = wire.Heartbeat(1, "serving", fetching_version=2, fetched_fraction=0.4, tokens_per_s=99.6)
    play.say(fetching, beat)
    out = io.StringIO()
    Console(width=140, file=out).print(render(play.status()))
    text = out.getvalue()
    assert "fetching 2 40%" in text and "100" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("slow")]
    assert [line[:5] for line in lines] == [["slow", "not", "fetching", "1", "4"]]


# ---------------------------------------------------------------- with keys


@pytest.fixture
def locked(tmp_path):
    """An orchestrator with keys; `locked.key(role)` makes an allowed one."""
    ring = Keyring.create(tmp_path / "keys")
    running = Running(keyring=ring)

    def key(role, *, server=ring.public):
        made = ClientKey(f"{role}-{server[0]}", new_secret(), server)
        add(ring.folder, Allowed(role, made.name, made.public.hex()))
        return made

    running.key = key
    yield running
    running.stop()


def test_a_trainer_and_a_watcher_with_keys_are_served_and_a_revoked_trainer_is_told(locked):
    key = locked.key("trainer")
    with TrainerLink(locked.address, connect_timeout_s=LIMIT_S, key=key) as link:
        link.attach(attach())
        assert ask_status(locked.address, LIMIT_S, locked.key("watcher")).incarnation == 1
        remove(locked.keyring.folder, key.name)
        with pytest.raises(errors.Refused, match="was revoked"):
            link.next_batch(1, 0, LIMIT_S)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda key: None, "we have no key"),
        (lambda key: ClientKey("x", new_secret(), key("watcher").server), "does not allow our key 'x'"),
        (lambda key: key("trainer", server=b"\7" * 32), "does not have the server key"),
        (lambda key: key("worker"), "role worker, which may not send Attach"),
    ],
)
def test_a_trainer_that_is_not_let_in_says_why_before_its_limit(locked, make, error):
    with (
        TrainerLink(locked.address, connect_timeout_s=60.0, key=make(locked.key)) as link,
        pytest.raises(errors.Refused, match=error),
    ):
        link.attach(attach())


def test_a_watcher_that_is_not_let_in_says_why_every_time(locked):
    with StatusLink(locked.address) as link:
        for _ in range(2):
            with pytest.raises(errors.Refused, match="we have no key"):
                link.ask(LIMIT_S)
