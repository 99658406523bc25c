"""The transport over ZeroMQ: ROUTER (listener) and DEALER (dialer) on asyncio.

ZeroMQ reconnects and frames; its own heartbeats find a broken path that TCP would not notice for minutes.
Every error of the library is mapped here.
"""

from __future__ import annotations

import asyncio
import errno

import zmq
import zmq.asyncio

from async_rl.errors import ConfigError, Malformed, WaitTimeout
from async_rl.log import get_logger
from async_rl.transport.base import HIGH_WATER, SEND_LIMIT_S, frame_of, message_of, new_identity, printable
from async_rl.wire import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES, AnyMessage

__all__ = ["ZmqDialer", "ZmqListener", "configure", "connect"]

log = get_logger(__name__)

LINGER_MS = 1000
"""A closed socket may take this long to send what it holds (the last Ack, Drain); then the process goes
on."""

_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
"""Five missed pings, as in the protocol above; a machine that swaps for a second or two is not cut off."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5_000


class ZmqListener:
    """A bound ROUTER. Raises ConfigError where the address is taken or can't be bound."""

    def __init__(
        self, address: str, *, max_bytes: int = MAX_MESSAGE_BYTES, high_water: int = HIGH_WATER
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._max_bytes = max_bytes
        configure(self._socket, address, max_bytes, high_water)
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
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def address(self) -> str:
        return self._address

    async def recv(self) -> tuple[bytes, AnyMessage | Malformed]:
        return self._taken(await self._socket.recv_multipart())

    def recv_now(self) -> tuple[bytes, AnyMessage | Malformed] | None:
        try:
            return self._taken(self._plain.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _taken(self, parts: list[bytes]) -> tuple[bytes, AnyMessage | Malformed]:
        peer, *frames = parts
        try:
            return peer, message_of(frames, self._max_bytes)
        except Malformed as error:
            return peer, error

    async def send(self, peer: bytes, message: AnyMessage) -> None:
        frame = frame_of(message, MAX_BATCH_BYTES)
        try:
            await self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            why = "its queue is full" if error.errno == errno.EAGAIN else "it is gone"
            log.debug("message dropped", peer=printable(peer), kind=type(message).__name__, why=why)

    async def close(self) -> None:
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
    ) -> None:
        self.identity = identity or new_identity(name)
        self._address = address
        self._max_bytes = max_bytes
        self._send_limit_s = send_limit_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, address, max_bytes, high_water)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        try:
            connect(self._socket, address)
        except ConfigError:
            self._socket.close(0)
            self._context.term()
            raise

    async def recv(self) -> AnyMessage:
        return message_of(await self._socket.recv_multipart(), self._max_bytes)

    async def send(self, message: AnyMessage) -> None:
        await self.send_frames(frame_of(message, MAX_MESSAGE_BYTES))

    async def send_frames(self, *frames: bytes) -> None:
        """The lower half of `send`; tests of hostile input use it with frames that are no message."""
        try:
            await asyncio.wait_for(self._socket.send_multipart(frames), self._send_limit_s)
        except TimeoutError as error:
            raise WaitTimeout(
                f"{self._address} took no message for {self._send_limit_s:g} s and the queue is full",
                hint="is the orchestrator running and reachable?",
            ) from error

    async def close(self) -> None:
        self._socket.close(LINGER_MS)
        await asyncio.to_thread(self._context.term)


def configure(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str, max_bytes: int, high_water: int
) -> None:
    """The options that every socket of ours has: bounded queues, message size and linger; heartbeats."""
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # Only where asked for: else `localhost` would be tried as ::1, and addresses print as ::ffff:127.0.0.1.
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 2 * _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)


def connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    """Raises ConfigError for an address that can't be one; an unreachable one shows only by silence."""
    try:
        socket.connect(address)
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
