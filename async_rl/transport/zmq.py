"""The transport over ZeroMQ: ROUTER (listener) and DEALER (dialer) on asyncio.

ZeroMQ reconnects and frames; its own heartbeats find a broken path that TCP would not notice for minutes.
With keys, everything is encrypted and both sides are authenticated (CURVE). Every error of the library is
mapped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import Any, TypeVar

import zmq
import zmq.asyncio
import zmq.backend

from async_rl.errors import ConfigError, Malformed, Refused, WaitTimeout
from async_rl.log import get_logger
from async_rl.threads import in_daemon_thread
from async_rl.transport.address import check_address
from async_rl.transport.allowed import Keyring
from async_rl.transport.base import (
    HIGH_WATER,
    SEND_LIMIT_S,
    Received,
    frame_of,
    message_of,
    new_identity,
    printable,
)
from async_rl.transport.handshake import Handshakes, event_of, mechanism_at
from async_rl.transport.keys import ClientKey
from async_rl.transport.zap import start_zap
from async_rl.wire import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES, AnyMessage

__all__ = ["ZmqDialer", "ZmqListener", "configure", "connect", "use_key", "watch_handshakes"]

log = get_logger(__name__)

LINGER_MS = 1000
"""A closed socket may take this long to send what it holds (the last Ack, Drain); then the process goes
on."""

_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
"""Five missed pings, as in the protocol above; a machine that swaps for a second or two is not cut off."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5_000
_SEALED_BYTES = 64
"""An encrypted frame is longer than its message by less than this."""
_NOW, _MORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
"""As plain numbers: combining zmq's flags costs as much as sending."""
_send = zmq.backend.Socket.send
"""zmq.Socket's own looks for options that only other kinds of sockets have, for longer than sending takes."""
_LARGE_BYTES = 1 << 20
"""From here on a frame is handed to zmq without a copy: a Batch."""
_WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class ZmqListener:
    """A bound ROUTER; with a keyring, encrypted and only for the keys in it. Raises ConfigError where the
    address is taken or can't be bound."""

    def __init__(
        self,
        address: str,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        high_water: int = HIGH_WATER,
        keyring: Keyring | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._max_bytes = max_bytes
        self._keyring = keyring
        self._readable = asyncio.Event()
        self._to_look = False
        self._loop: asyncio.AbstractEventLoop | None = None  # watches the socket, from the first recv on
        configure(self._socket, address, max_bytes, high_water)
        if keyring is not None:
            start_zap(self._context, keyring)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"async-rl")
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # A reconnecting peer arrives with its old identity while the old connection may still look alive:
        # without the handover the ROUTER would refuse it until TCP gives up.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Makes a send to a missing or full peer fail at once instead of vanishing, so it can be logged.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise _bind_error(address, error) from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def address(self) -> str:
        return self._address

    async def recv(self) -> tuple[bytes, Received]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._look)
        while (received := self.recv_now()) is None:
            self._readable.clear()
            await self._readable.wait()
        return received

    def recv_now(self) -> tuple[bytes, Received] | None:
        try:
            peer = self._socket.recv(_NOW)
        except zmq.Again:
            return None
        # A message comes whole. A Frame knows whether more follow; to ask the socket takes as long as receiving. What
        # is decoded are views into it.
        frames = [self._socket.recv(_NOW, copy=False)]
        while frames[-1].more:
            frames.append(self._socket.recv(_NOW, copy=False))
        parts = [frame.buffer for frame in frames]
        if self._keyring is not None:
            # What the handshake proved: zap.py put it there. Not the peer's word.
            public: str | None = None
            with contextlib.suppress(zmq.ZMQError):
                public = str(frames[-1].get("User-Id"))
            return peer, self._keyring.received(public, peer, parts, self._max_bytes)
        try:
            return peer, message_of(parts, self._max_bytes)
        except Malformed as error:
            return peer, error

    def _look(self) -> None:
        """The descriptor tells only of changes, and a send takes note of them too: after it somebody must look. A
        recv that finds nothing has looked."""
        self._to_look = False
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
            self._readable.set()

    async def send(self, peer: bytes, message: AnyMessage) -> None:
        frame = frame_of(message, MAX_BATCH_BYTES)
        try:
            _send(self._socket, peer, _NOW | _MORE)
            if len(frame) < _LARGE_BYTES:
                _send(self._socket, frame, _NOW)
            else:
                _send(self._socket, frame, _NOW, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            why = "its queue is full" if error.errno == errno.EAGAIN else "it is gone"
            log.debug("message dropped", peer=printable(peer), kind=type(message).__name__, why=why)
        if self._loop is not None and not self._to_look:
            # Once for all that is sent before the loop goes on.
            self._to_look = True
            self._loop.call_soon(self._look)

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(LINGER_MS)
        await asyncio.to_thread(
            self._context.term
        )  # returns within the linger: the last messages have left


class ZmqDialer:
    """A connected DEALER. `name` stands in its identity; the connection is made, and made again, in the
    background."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        identity: bytes | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        high_water: int = HIGH_WATER,
        send_limit_s: float = SEND_LIMIT_S,
        key: ClientKey | None = None,
    ) -> None:
        self.identity = identity or new_identity(name)
        self._address = address
        self._max_bytes = max_bytes
        self._send_limit_s = send_limit_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, address, max_bytes, high_water)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        if key is not None:
            use_key(self._socket, key)
        self._handshakes = Handshakes(address, key)
        self._monitor = watch_handshakes(self._socket)
        self._watching: asyncio.Task[Refused] | None = None
        self._receiving: asyncio.Future[list[bytes]] | None = None
        try:
            connect(self._socket, address)
        except ConfigError:
            self._let_go(0)
            self._context.term()
            raise

    async def recv(self) -> AnyMessage:
        """Waits for: a message, or the word that we are not let in. A cancelled recv loses no message: the
        next one goes on with what it waited for."""
        watching = self._watched()
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._socket.recv_multipart())
        if not self._receiving.done():
            either: list[asyncio.Future[Any]] = [self._receiving, watching]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._receiving.done():
            raise watching.result()
        frames, self._receiving = self._receiving.result(), None
        return message_of(frames, self._max_bytes)

    def _watched(self) -> asyncio.Task[Refused]:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return self._watching

    async def _watch(self) -> Refused:
        """Waits for: a handshake that says why it failed."""
        while True:
            event, _ = event_of(await self._monitor.recv_multipart())
            verdict = self._handshakes.on(event)
            if verdict == "look":
                verdict = self._handshakes.looked(await in_daemon_thread(mechanism_at, self._address))
            if verdict is not None:
                return verdict

    async def send(self, message: AnyMessage) -> None:
        await self.send_frames(frame_of(message, MAX_MESSAGE_BYTES))

    async def send_frames(self, *frames: bytes) -> None:
        """The lower half of `send`; tests of hostile input use it with frames that are no message."""
        watching = self._watched()
        sending = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sending.done():
            either: list[asyncio.Future[Any]] = [sending, watching]
            await asyncio.wait(either, timeout=self._send_limit_s, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
            return
        sending.cancel()
        if watching.done():
            raise watching.result()
        raise WaitTimeout(
            f"{self._address} took no message for {self._send_limit_s:g} s and the queue is full",
            hint="is the orchestrator running and reachable?",
        )

    async def close(self) -> None:
        ours = [task for task in (self._watching, self._receiving) if task is not None]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
        self._let_go(LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def _let_go(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)


def configure(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str, max_bytes: int, high_water: int
) -> None:
    """The options that every socket of ours has: bounded queues, message size and linger; heartbeats."""
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _SEALED_BYTES)  # message_of holds it to the byte
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # Only where asked for: else `localhost` would be tried as ::1, and addresses print as ::ffff:127.0.0.1.
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2 * _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)


def use_key(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, key: ClientKey) -> None:
    """Before connecting: prove who we are, and accept only the listener that the key names."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server)


S = TypeVar("S", zmq.Socket[bytes], zmq.asyncio.Socket)


def watch_handshakes(socket: S) -> S:
    """A socket of the same kind from which the fate of every handshake can be read (handshake.py)."""
    return socket.get_monitor_socket(_WATCHED)


def connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    """Raises ConfigError for an address that can't be one; an unreachable one shows only by silence."""
    try:
        socket.connect(check_address(address))
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{address!r} is no address to connect to: {error.strerror}", hint="use tcp://host:port"
        ) from error


def _bind_error(address: str, error: zmq.ZMQError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{address} is already taken by another process",
            hint="stop it, or set orchestrator.bind to another port (tcp://127.0.0.1:0 takes any free one)",
        )
    return ConfigError(
        f"can't listen at {address!r}: {error.strerror}",
        hint="use tcp://ADDRESS:PORT with an address of this machine; 127.0.0.1 is reachable only from it",
    )
