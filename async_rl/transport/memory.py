"""The in-memory twin of the ZeroMQ transport, for tests of whole conversations in one event loop.

It encodes and decodes like the real one, so a message that would not cross a socket does not cross this
either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_rl.errors import ConfigError, Malformed, WaitTimeout
from async_rl.transport.base import HIGH_WATER, SEND_LIMIT_S, frame_of, message_of, new_identity
from async_rl.wire import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES, AnyMessage

__all__ = ["MemoryDialer", "MemoryListener", "MemoryNetwork"]


class MemoryNetwork:
    """The addresses of one test. A dialer may dial before anybody listens, and outlives the listener."""

    def __init__(self) -> None:
        self._exchanges: dict[str, _Exchange] = {}
        self._ports = 0

    def bind(
        self, address: str = "memory://any:0", *, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> MemoryListener:
        """Raises ConfigError where somebody listens at the address already."""
        if address.endswith(":0"):
            self._ports += 1
            address = f"{address[:-1]}{self._ports}"
        exchange = self._exchange(address)
        if exchange.bound:
            raise ConfigError(
                f"{address} is already taken by another process", hint="choose another address"
            )
        return MemoryListener(address, exchange, max_bytes)

    def dial(
        self,
        address: str,
        name: str,
        *,
        identity: bytes | None = None,
        high_water: int = HIGH_WATER,
        send_limit_s: float = SEND_LIMIT_S,
    ) -> MemoryDialer:
        return MemoryDialer(
            address, self._exchange(address), identity or new_identity(name), high_water, send_limit_s
        )

    def _exchange(self, address: str) -> _Exchange:
        return self._exchanges.setdefault(address, _Exchange())


class _Exchange:
    """What stands between the dialers of one address and whoever listens there now, or will."""

    def __init__(self) -> None:
        self.bound = False
        self.incoming: asyncio.Queue[tuple[MemoryDialer, Sequence[bytes]]] = asyncio.Queue()
        self.dialers: dict[bytes, MemoryDialer] = {}


class MemoryListener:
    def __init__(self, address: str, exchange: _Exchange, max_bytes: int) -> None:
        self._address = address
        self._exchange = exchange
        self._max_bytes = max_bytes
        exchange.bound = True

    @property
    def address(self) -> str:
        return self._address

    async def recv(self) -> tuple[bytes, AnyMessage | Malformed]:
        return self._taken(*await self._exchange.incoming.get())

    def _taken(self, sender: MemoryDialer, frames: Sequence[bytes]) -> tuple[bytes, AnyMessage | Malformed]:
        sender.room.release()
        try:
            return sender.identity, message_of(frames, self._max_bytes)
        except Malformed as error:
            return sender.identity, error

    def recv_now(self) -> tuple[bytes, AnyMessage | Malformed] | None:
        if self._exchange.incoming.empty():
            return None
        return self._taken(*self._exchange.incoming.get_nowait())

    async def send(self, peer: bytes, message: AnyMessage) -> None:
        frame = frame_of(message, MAX_BATCH_BYTES)
        dialer = self._exchange.dialers.get(peer)
        if dialer is not None and not dialer.inbox.full():
            dialer.inbox.put_nowait(frame)

    async def close(self) -> None:
        self._exchange.bound = False
        while not self._exchange.incoming.empty():  # what had reached the listener is lost with it
            sender, _ = self._exchange.incoming.get_nowait()
            sender.room.release()


class MemoryDialer:
    def __init__(
        self, address: str, exchange: _Exchange, identity: bytes, high_water: int, send_limit_s: float
    ) -> None:
        self.identity = identity
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue(high_water)
        self.room = asyncio.Semaphore(high_water)  # for messages that the listener has not read yet
        self._address = address
        self._exchange = exchange
        self._send_limit_s = send_limit_s
        exchange.dialers[identity] = self  # the same identity again takes over, as a reconnect does

    async def recv(self) -> AnyMessage:
        return message_of([await self.inbox.get()], MAX_BATCH_BYTES)

    async def send(self, message: AnyMessage) -> None:
        await self.send_frames(frame_of(message, MAX_MESSAGE_BYTES))

    async def send_frames(self, *frames: bytes) -> None:
        try:
            await asyncio.wait_for(self.room.acquire(), self._send_limit_s)
        except TimeoutError as error:
            raise WaitTimeout(
                f"{self._address} took no message for {self._send_limit_s:g} s and the queue is full",
                hint="is the orchestrator running and reachable?",
            ) from error
        self._exchange.incoming.put_nowait((self, frames))

    async def close(self) -> None:
        if self._exchange.dialers.get(self.identity) is self:
            del self._exchange.dialers[self.identity]
