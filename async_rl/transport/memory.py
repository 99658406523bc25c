"""The in-memory twin of the ZeroMQ transport, for tests of whole conversations in one event loop.

It encodes and decodes like the real one, so a message that would not cross a socket does not cross this
either. Keys are compared, and nothing is encrypted: what would not be let in is not let in here either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_rl.errors import ConfigError, Malformed, NotAllowed, Refused, WaitTimeout
from async_rl.transport.allowed import Keyring
from async_rl.transport.base import (
    HIGH_WATER,
    SEND_LIMIT_S,
    Received,
    frame_of,
    message_of,
    new_identity,
)
from async_rl.transport.keys import ClientKey
from async_rl.wire import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES, AnyMessage

__all__ = ["MemoryDialer", "MemoryListener", "MemoryNetwork"]


class MemoryNetwork:
    """The addresses of one test. A dialer may dial before anybody listens, and outlives the listener."""

    def __init__(self) -> None:
        self._exchanges: dict[str, _Exchange] = {}
        self._ports = 0

    def bind(
        self,
        address: str = "memory://any:0",
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        keyring: Keyring | None = None,
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
        return MemoryListener(address, exchange, max_bytes, keyring)

    def dial(
        self,
        address: str,
        name: str,
        *,
        identity: bytes | None = None,
        high_water: int = HIGH_WATER,
        send_limit_s: float = SEND_LIMIT_S,
        key: ClientKey | None = None,
    ) -> MemoryDialer:
        return MemoryDialer(
            address, self._exchange(address), identity or new_identity(name), high_water, send_limit_s, key
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
    def __init__(
        self, address: str, exchange: _Exchange, max_bytes: int, keyring: Keyring | None = None
    ) -> None:
        self._address = address
        self._exchange = exchange
        self._max_bytes = max_bytes
        self._keyring = keyring
        self._inside: set[MemoryDialer] = set()  # their handshake succeeded
        exchange.bound = True

    @property
    def address(self) -> str:
        return self._address

    async def recv(self) -> tuple[bytes, Received]:
        while True:
            if (taken := self._taken(*await self._exchange.incoming.get())) is not None:
                return taken

    def _taken(self, sender: MemoryDialer, frames: Sequence[bytes]) -> tuple[bytes, Received] | None:
        """None for what comes from outside: it never arrives."""
        sender.room.release()
        if not self._lets_in(sender):
            return None
        if self._keyring is not None:
            assert sender.key is not None
            public = sender.key.public.hex()
            return sender.identity, self._keyring.received(public, sender.identity, frames, self._max_bytes)
        try:
            return sender.identity, message_of(frames, self._max_bytes)
        except Malformed as error:
            return sender.identity, error

    def _lets_in(self, sender: MemoryDialer) -> bool:
        """The handshake, once per dialer."""
        if sender in self._inside:
            return True
        key, keyring = sender.key, self._keyring
        if key is None and keyring is None:
            reason = ""
        elif key is None:
            reason = "asks for a key, and we have no key"
        elif keyring is None:
            reason = f"has no keys, and we were given the key {key.name!r}"
        elif key.server != keyring.public:
            reason = f"does not have the server key {key.server.hex()}"
        elif isinstance(keyring.find(key.public.hex()), NotAllowed):
            reason = f"does not allow our key {key.name!r}"
        else:
            reason = ""
        if reason:
            sender.refuse(
                Refused(f"the listener at {self._address} {reason}", hint="see `async-rl keys list`")
            )
            return False
        self._inside.add(sender)
        return True

    def recv_now(self) -> tuple[bytes, Received] | None:
        while not self._exchange.incoming.empty():
            if (taken := self._taken(*self._exchange.incoming.get_nowait())) is not None:
                return taken
        return None

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
        self,
        address: str,
        exchange: _Exchange,
        identity: bytes,
        high_water: int,
        send_limit_s: float,
        key: ClientKey | None = None,
    ) -> None:
        self.identity = identity
        self.key = key
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue(high_water)
        self._refused: Refused | None = None
        self.room = asyncio.Semaphore(high_water)  # for messages that the listener has not read yet
        self._address = address
        self._exchange = exchange
        self._send_limit_s = send_limit_s
        exchange.dialers[identity] = self  # the same identity again takes over, as a reconnect does

    async def recv(self) -> AnyMessage:
        frame = b"" if self._refused is not None else await self.inbox.get()
        if self._refused is not None:
            raise self._refused
        return message_of([frame], MAX_BATCH_BYTES)

    def refuse(self, reason: Refused) -> None:
        if self._refused is None:
            self._refused = reason
            if not self.inbox.full():
                self.inbox.put_nowait(b"")  # wakes who waits

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
