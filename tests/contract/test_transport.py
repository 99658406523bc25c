"""One suite for every transport: what async_rl/transport/base.py promises."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest
import zmq

from async_rl import wire
from async_rl.errors import ConfigError, Malformed, NotAllowed, Refused, WaitTimeout
from async_rl.transport.allowed import Allowed, Keyring, add, remove
from async_rl.transport.base import from_here, is_loopback, new_identity
from async_rl.transport.handshake import HUNG_UP
from async_rl.transport.keys import ClientKey, new_secret
from async_rl.transport.memory import MemoryNetwork
from async_rl.transport.zmq import ZmqDialer, ZmqListener

LIMIT_S = 10.0


class OverZmq:
    def bind(self, address="tcp://127.0.0.1:0", **options):
        return ZmqListener(address, **options)

    def dial(self, address, name, **options):
        return ZmqDialer(address, name, **options)


class OverMemory:
    def __init__(self):
        network = MemoryNetwork()
        self.bind, self.dial = network.bind, network.dial


@pytest.fixture(params=[OverZmq, OverMemory])
async def transport(request):
    """Binds and dials; closes whatever the test left open."""
    made = request.param()
    opened = []

    class Tracked:
        def bind(self, *args, **options):
            opened.append(made.bind(*args, **options))
            return opened[-1]

        def dial(self, *args, **options):
            opened.append(made.dial(*args, **options))
            return opened[-1]

        async def close(self, end):
            opened.remove(end)
            await end.close()

    yield Tracked()
    for end in reversed(opened):
        await end.close()


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, LIMIT_S)


def hello(worker="w1", version=0):
    return wire.Hello(wire.PROTOCOL, worker, "here", "run", "model", version)


async def test_a_message_arrives_with_its_sender_and_the_answer_comes_back(transport):
    listener = transport.bind()
    dialer = transport.dial(listener.address, "w1")
    await dialer.send(hello())
    peer, message = await soon(listener.recv())
    assert message == hello()
    assert peer == dialer.identity and peer.startswith(b"w1:")
    await listener.send(peer, wire.Announce(3, 2))
    assert await soon(dialer.recv()) == wire.Announce(3, 2)


async def test_messages_of_one_dialer_keep_their_order_and_answers_find_their_dialer(transport):
    listener = transport.bind()
    dialers = [transport.dial(listener.address, f"w{index}") for index in range(3)]
    for version in range(20):
        for dialer in dialers:
            await dialer.send(hello(version=version))
    seen: dict[bytes, list[int]] = {}
    for _ in range(60):
        peer, message = await soon(listener.recv())
        seen.setdefault(peer, []).append(message.version)
    assert seen == {dialer.identity: list(range(20)) for dialer in dialers}
    for index, dialer in enumerate(dialers):
        await listener.send(dialer.identity, wire.Announce(index, index))
    assert [(await soon(dialer.recv())).version for dialer in dialers] == [0, 1, 2]


async def test_a_cancelled_recv_loses_no_message(transport):
    listener = transport.bind()
    dialer = transport.dial(listener.address, "w1")
    for version in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listener.recv(), 0.001)
        await dialer.send(hello(version=version))
        assert (await soon(listener.recv()))[1].version == version


@pytest.mark.parametrize(
    "frames",
    [
        (b"\xff not a message",),
        (b"",),
        (wire.encode(wire.Bye("x")), b"a second frame"),
        (b"\x92\xa7no_such\x01",),
    ],
    ids=["garbage", "empty", "two frames", "unknown tag"],
)
async def test_bytes_that_are_no_message_surface_with_their_sender_and_the_listener_lives_on(
    transport, frames
):
    listener = transport.bind()
    dialer = transport.dial(listener.address, "w1")
    await dialer.send_frames(*frames)
    await dialer.send(hello())
    peer, message = await soon(listener.recv())
    assert isinstance(message, Malformed) and peer == dialer.identity
    assert await soon(listener.recv()) == (peer, hello())


async def test_a_dialer_may_come_first_and_outlives_its_listener(transport):
    listener = transport.bind()
    address = listener.address
    dialer = transport.dial(address, "w1")
    await dialer.send(hello(version=1))
    peer, _ = await soon(listener.recv())
    await transport.close(listener)

    async def resend():  # as every requester does: the first one may be lost with the broken connection
        while True:
            await dialer.send(hello(version=2))
            await asyncio.sleep(0.05)

    sending = asyncio.ensure_future(resend())
    try:
        again = transport.bind(address)
        peer_again, message = await soon(again.recv())
        assert message.version == 2
        assert peer_again == peer, "a reconnect must not look like another worker"
        await again.send(peer_again, wire.Announce(7, 7))
        assert await soon(dialer.recv()) == wire.Announce(7, 7)
    finally:
        sending.cancel()


async def test_the_same_identity_again_takes_over(transport):
    listener = transport.bind()
    identity = new_identity("w1")
    first = transport.dial(listener.address, "w1", identity=identity)
    await first.send(hello(version=1))
    await soon(listener.recv())
    second = transport.dial(listener.address, "w1", identity=identity)
    await second.send(hello(version=2))
    peer, message = await soon(listener.recv())
    assert message.version == 2
    await listener.send(peer, wire.Announce(5, 5))
    assert await soon(second.recv()) == wire.Announce(5, 5)


async def test_sending_to_a_peer_that_was_never_there_is_dropped(transport):
    listener = transport.bind()
    await soon(listener.send(b"nobody", wire.Drain("x")))
    dialer = transport.dial(listener.address, "w1")
    await dialer.send(hello())
    assert (await soon(listener.recv()))[1] == hello()


async def test_a_peer_that_does_not_read_stops_nobody(transport):
    listener = transport.bind()
    deaf = transport.dial(listener.address, "deaf", high_water=4)
    good = transport.dial(listener.address, "good")
    for dialer in (deaf, good):
        await dialer.send(hello())
        await soon(listener.recv())
    for _ in range(5000):  # far more than any queue holds
        await soon(listener.send(deaf.identity, wire.Drain("x" * 2000)))
    await listener.send(good.identity, wire.Announce(1, 1))
    assert await soon(good.recv()) == wire.Announce(1, 1)


async def test_a_full_queue_ends_the_wait_of_a_sender_with_an_error_that_names_the_address(transport):
    listener = transport.bind()
    address = listener.address
    await transport.close(listener)
    dialer = transport.dial(address, "w1", high_water=3, send_limit_s=0.05)
    with pytest.raises(WaitTimeout, match=re.escape(address)):
        for _ in range(10):
            await soon(dialer.send(hello()))


async def test_a_message_over_the_limit_is_refused_by_its_sender(transport, monkeypatch):
    listener = transport.bind()
    dialer = transport.dial(listener.address, "w1")
    await dialer.send(hello())
    peer, _ = await soon(listener.recv())
    for module in ("zmq", "memory"):
        monkeypatch.setattr(f"async_rl.transport.{module}.MAX_MESSAGE_BYTES", 100)
        monkeypatch.setattr(f"async_rl.transport.{module}.MAX_BATCH_BYTES", 100)
    with pytest.raises(Malformed, match="over the limit"):
        await dialer.send(wire.Bye("x" * 200))
    with pytest.raises(Malformed, match="over the limit"):
        await listener.send(peer, wire.Drain("x" * 200))


async def test_an_address_that_is_taken_is_named(transport):
    listener = transport.bind()
    with pytest.raises(ConfigError, match=re.escape(listener.address)) as caught:
        transport.bind(listener.address)
    assert caught.value.hint


# ---------------------------------------------------------------- with keys


@pytest.fixture
def ring(tmp_path):
    return Keyring.create(tmp_path / "keys")


def make_key(ring, name, role="worker", *, allowed=True, server=None):
    key = ClientKey(name, new_secret(), server or ring.public)
    if allowed:
        add(ring.folder, Allowed(role, name, key.public.hex()))
    return key


async def test_with_keys_an_allowed_dialer_is_heard_and_answered(transport, ring):
    listener = transport.bind(keyring=ring)
    dialer = transport.dial(listener.address, "w1", key=make_key(ring, "w1"))
    await dialer.send(hello())
    assert await soon(listener.recv()) == (dialer.identity, hello())
    await listener.send(dialer.identity, wire.Announce(3, 2))
    assert await soon(dialer.recv()) == wire.Announce(3, 2)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("no key", "asks for a key.* we have no key"),
        ("a key that was never allowed", "does not allow our key 'evil'"),
        ("a key that was revoked before it came", "does not allow our key 'evil'"),
        ("a listener of another key", "does not have the server key"),
        ("a listener without keys", "has no keys.* the key 'evil'"),
    ],
)
async def test_a_dialer_that_is_not_let_in_ends_with_a_clear_error_and_is_not_heard(
    transport, ring, case, error
):
    keyed = case != "a listener without keys"
    listener = transport.bind(keyring=ring if keyed else None)
    key = make_key(
        ring,
        "evil",
        allowed=case != "a key that was never allowed",
        server=b"\7" * 32 if case == "a listener of another key" else None,
    )
    if case == "a key that was revoked before it came":
        remove(ring.folder, "evil")
    outside = transport.dial(listener.address, "evil", key=None if case == "no key" else key)
    inside = transport.dial(listener.address, "w1", key=make_key(ring, "w1") if keyed else None)
    with contextlib.suppress(Refused):  # known that soon
        await outside.send(hello("evil"))
    hearing = asyncio.ensure_future(soon(listener.recv()))
    for _ in range(2):  # and it stays so
        with pytest.raises(Refused, match=error) as caught:
            await soon(outside.recv())
    assert caught.value.hint
    await inside.send(hello())
    assert await hearing == (inside.identity, hello()), "the first that was heard"


async def test_a_revoked_key_is_refused_on_its_next_message_and_nobody_else_is(transport, ring):
    listener = transport.bind(keyring=ring)
    gone = transport.dial(listener.address, "w1", key=make_key(ring, "w1"))
    stays = transport.dial(listener.address, "w2", key=make_key(ring, "w2"))
    for dialer, name in ((gone, "w1"), (stays, "w2")):
        await dialer.send(hello(name))
        assert (await soon(listener.recv()))[1] == hello(name)
    remove(ring.folder, "w1")
    await gone.send(wire.Credit(1, 0))
    peer, refused = await soon(listener.recv())
    assert peer == gone.identity and isinstance(refused, NotAllowed)
    assert (refused.code, refused.revoked, refused.retry) == ("key_revoked", "w1", False)
    await stays.send(wire.Credit(2, 0))
    assert await soon(listener.recv()) == (stays.identity, wire.Credit(2, 0))
    await listener.send(gone.identity, wire.Refused(refused.message))  # it can be told
    assert (await soon(gone.recv())).reason == "key 'w1' was revoked"


async def test_what_a_revoked_key_sends_is_not_even_decoded(transport, ring):
    listener = transport.bind(keyring=ring)
    dialer = transport.dial(listener.address, "w1", key=make_key(ring, "w1"))
    await dialer.send_frames(b"\xff not a message")
    assert isinstance((await soon(listener.recv()))[1], Malformed)
    remove(ring.folder, "w1")
    await dialer.send_frames(b"\xff not a message")
    assert isinstance((await soon(listener.recv()))[1], NotAllowed)


async def test_a_list_that_cant_be_read_allows_nobody_until_it_can(transport, ring):
    listener = transport.bind(keyring=ring)
    dialer = transport.dial(listener.address, "w1", key=make_key(ring, "w1"))
    await dialer.send(hello())
    await soon(listener.recv())
    whole = (ring.folder / "allowed").read_text()
    (ring.folder / "allowed").write_text("worker w1\n")
    await dialer.send(hello())
    _, refused = await soon(listener.recv())
    assert isinstance(refused, NotAllowed) and refused.retry and refused.code == "key_list"
    (ring.folder / "allowed").write_text(whole)
    await dialer.send(hello())
    assert (await soon(listener.recv()))[1] == hello()


async def test_no_worker_speaks_for_another_and_none_for_the_trainer(transport, ring):
    listener = transport.bind(keyring=ring)
    key = make_key(ring, "w1")
    own, posing = (transport.dial(listener.address, name, key=key) for name in ("w1/7", "w2"))
    for dialer, message, code in [
        (own, hello("w1/7"), None),
        (own, hello("w10"), "key_name"),
        (posing, wire.Credit(1, 0), "key_name"),
        (posing, hello("w1"), "key_name"),
        (own, wire.NextBatch(1, 0), "key_role"),
    ]:
        await dialer.send(message)
        _, heard = await soon(listener.recv())
        assert getattr(heard, "code", None) == code, heard


async def test_messages_that_are_here_already_obey_the_same_rules(transport, ring):
    listener = transport.bind(keyring=ring)
    dialer = transport.dial(listener.address, "w1", key=make_key(ring, "w1", "watcher"))
    for message in (wire.StatusRequest(), hello(), wire.StatusRequest()):
        await dialer.send(message)
    heard = [(await soon(listener.recv()))[1]]
    while len(heard) < 3:
        if (now := listener.recv_now()) is not None:
            heard.append(now[1])
        await asyncio.sleep(0)
    assert heard[0] == heard[2] == wire.StatusRequest() and isinstance(heard[1], NotAllowed)


async def test_a_dialer_with_a_key_may_come_first_and_outlives_its_listener(transport, ring):
    listener = transport.bind(keyring=ring)
    address = listener.address
    await transport.close(listener)
    dialer = transport.dial(address, "w1", key=make_key(ring, "w1"))
    for version in (1, 2):
        receiving = asyncio.ensure_future(dialer.recv())
        listener = transport.bind(address, keyring=Keyring.open(ring.folder))
        message = None
        while message is None or message.version != version:
            await dialer.send(hello(version=version))
            with contextlib.suppress(TimeoutError):
                _, message = await asyncio.wait_for(listener.recv(), 0.1)
        await listener.send(dialer.identity, wire.Announce(version, 0))
        assert await soon(receiving) == wire.Announce(version, 0)
        await transport.close(listener)


async def test_a_tunnel_with_nobody_behind_it_is_waited_on(ring):
    """It takes connections and hangs up, as a listener with another key does: only ZeroMQ meets it."""
    hung_up = asyncio.Queue()

    async def hang_up(_, writer):
        writer.close()
        hung_up.put_nowait(None)

    tunnel = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = tunnel.sockets[0].getsockname()[1]
    dialer = ZmqDialer(f"tcp://127.0.0.1:{port}", "w1", key=make_key(ring, "w1"))
    receiving = asyncio.ensure_future(dialer.recv())
    try:
        await dialer.send(hello())
        for _ in range(2 * (HUNG_UP + 1)):  # half of them are looks at the port
            await soon(hung_up.get())
        assert not receiving.done()
    finally:
        tunnel.close()
    listener = ZmqListener(f"tcp://127.0.0.1:{port}", keyring=ring)
    try:
        assert (await soon(listener.recv()))[1] == hello()
        await listener.send(dialer.identity, wire.Announce(1, 1))
        assert await soon(receiving) == wire.Announce(1, 1)
    finally:
        await dialer.close()
        await listener.close()


async def test_a_message_of_exactly_the_limit_passes_encrypted_too(transport, ring):
    whole = wire.Bye("x" * 1000)
    listener = transport.bind(keyring=ring, max_bytes=len(wire.encode(whole)))
    dialer = transport.dial(listener.address, "w1", key=make_key(ring, "w1"))
    await dialer.send(whole)
    assert (await soon(listener.recv()))[1] == whole
    await dialer.send(wire.Bye("x" * 1001))
    assert isinstance((await soon(listener.recv()))[1], Malformed)


# ---------------------------------------------------------------- only ZeroMQ


async def test_a_batch_larger_than_a_workers_message_may_be_reaches_a_dialer_that_allows_it():
    """Only ZeroMQ has this limit at the receiver."""
    listener = ZmqListener("tcp://127.0.0.1:0")
    trainer = ZmqDialer(listener.address, "trainer", max_bytes=1 << 20)
    small = ZmqDialer(listener.address, "w1", max_bytes=1000)
    try:
        for dialer in (trainer, small):
            await dialer.send(hello())
            await soon(listener.recv())
        await listener.send(trainer.identity, wire.Drain("x" * 5000))
        assert len((await soon(trainer.recv())).reason) == 5000
        with pytest.raises(Malformed):
            wire.decode(wire.encode(wire.Drain("x" * 5000)), 1000)
    finally:
        for end in (trainer, small, listener):
            await end.close()


async def test_an_oversized_frame_cuts_its_sender_off_and_nobody_else():
    listener = ZmqListener("tcp://127.0.0.1:0", max_bytes=1000)
    good = ZmqDialer(listener.address, "good")
    context = zmq.Context()
    hostile = context.socket(zmq.DEALER)
    try:
        hostile.connect(listener.address)
        hostile.send(b"x" * 100_000)
        await good.send(hello())
        assert (await soon(listener.recv()))[1] == hello()
    finally:
        hostile.close(0)
        context.term()
        await good.close()
        await listener.close()


@pytest.mark.parametrize(
    "address", ["tcp://nonsense", "127.0.0.1:5577", "tcp://203.0.113.7:5577", "udp://x:1"]
)
async def test_an_address_that_cant_be_bound_is_named(address):
    with pytest.raises(ConfigError) as caught:
        await ZmqListener(address).close()
    assert address in caught.value.message and caught.value.hint


async def test_an_address_that_cant_be_dialled_is_named():
    with pytest.raises(ConfigError, match="no scheme"):
        ZmqDialer("no scheme", "w1")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:5577", True),
        ("tcp://127.8.8.8:0", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:5577", True),
        ("ipc:///tmp/x", True),
        ("tcp://*:5577", False),
        ("tcp://0.0.0.0:5577", False),
        ("tcp://[::]:5577", False),
        ("tcp://eth0:5577", False),
        ("tcp://10.0.0.1:5577", False),
        ("tcp://gpu-node:5577", False),
    ],
)
def test_loopback_addresses_are_told_apart(address, local):
    assert is_loopback(address) is local


async def test_a_listener_on_every_interface_is_reached_from_here():
    listener = ZmqListener("tcp://*:0")
    dialer = ZmqDialer(from_here(listener.address), "w1")
    try:
        await dialer.send(hello())
        assert (await soon(listener.recv()))[1] == hello()
    finally:
        await dialer.close()
        await listener.close()


async def test_a_send_does_not_hide_what_arrives_meanwhile():
    """ZeroMQ tells once that something has come; whoever calls the socket next has heard it."""
    listener = ZmqListener("tcp://127.0.0.1:0")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(listener.address)
    try:
        for number in range(30):
            hearing = asyncio.ensure_future(listener.recv())
            await asyncio.sleep(0)  # it waits now
            dealer.send(wire.encode(wire.Credit(number, 0)))
            for _ in range(500):  # in one go, while the message comes in
                with contextlib.suppress(StopIteration):
                    listener.send(b"nobody", wire.Drain("x")).send(None)
            assert (await soon(hearing))[1] == wire.Credit(number, 0)
    finally:
        dealer.close(0)
        context.term()
        await listener.close()
