"""Messages between one listener and many dialers, as everything else sees it.

The orchestrator listens; workers and the trainer dial out, because they may sit behind NAT. One contract
suite (tests/contract/test_transport.py) holds both implementations, ZeroMQ and the in-memory twin, to what
stands here:

- A message arrives whole or not at all, and in the order in which one dialer sent it.
- A dialer outlives its listener: when the listener comes back at the same address, the dialer goes on with
  the same identity. What was on its way is lost; requests are therefore repeated, and their answers
  idempotent.
- A peer is an identity: the dialer's name and a nonce drawn once per dialer. A reconnect keeps it, so it
  takes over the place of the broken connection; a restarted process has a new one, so nobody mistakes it
  for the old.
- Sending to a peer that is gone, or that does not read, drops the message: one slow peer never stops the
  rest.
- Bytes that are no message surface as a Malformed beside the peer that sent them; the listener lives on.
- A listener with keys (allowed.py) takes connections only of keys that it allows, and looks at the list again
  before every message: what a key may not say, or not any more, surfaces as a NotAllowed beside its peer.
- A dialer that is not let in (its key, or the listener's, is not the one that the other expects) ends with
  Refused from `recv`; one whose listener is merely away waits.
- Queues are bounded. Credits keep them nearly empty; the bound is only the net below.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from async_rl.errors import Malformed, NotAllowed
from async_rl.wire import AnyMessage, decode, encode

__all__ = [
    "HIGH_WATER",
    "SEND_LIMIT_S",
    "Dialer",
    "Listener",
    "Received",
    "frame_of",
    "from_here",
    "is_loopback",
    "message_of",
    "new_identity",
    "printable",
]

HIGH_WATER = 1000
"""Messages queued per peer and direction. A worker has at most its leases, an acknowledgement each and a
heartbeat on the way, a few hundred; what goes beyond is a peer that stopped reading."""

SEND_LIMIT_S = 30.0
"""How long a dialer's `send` waits for room in a full queue before it raises WaitTimeout."""


Received: TypeAlias = AnyMessage | Malformed | NotAllowed
"""What a listener hands out for one message that arrived."""


class Listener(Protocol):
    @property
    def address(self) -> str:
        """The address that was really bound: with the port, where port 0 or `*` was asked for."""
        ...

    async def recv(self) -> tuple[bytes, Received]:
        """The next message and the identity of its sender. Never raises for what a peer sent."""
        ...

    def recv_now(self) -> tuple[bytes, Received] | None:
        """The next message if it is here already. Not while a `recv` waits."""
        ...

    async def send(self, peer: bytes, message: AnyMessage) -> None:
        """To one peer; dropped where it is gone or its queue is full. Raises Malformed over the size
        limit."""
        ...

    async def close(self) -> None:
        """Stop listening; what is queued is sent within a short limit."""
        ...


class Dialer(Protocol):
    async def recv(self) -> AnyMessage:
        """The next message. Raises Malformed for bytes that are none (and can be called again), and Refused
        where the listener does not let us in, or is not the one that we expect (and every time after)."""
        ...

    async def send(self, message: AnyMessage) -> None:
        """Queue a message. Raises WaitTimeout where the queue stays full, Malformed over the size limit, and Refused
        where it is known, and matters, that the listener does not let us in."""
        ...

    async def close(self) -> None: ...


def new_identity(name: str) -> bytes:
    """The routing identity of one dialer: its name, for the logs, and a nonce (ZeroMQ allows 255 bytes)."""
    return name.encode()[:200] + b":" + secrets.token_hex(6).encode()


def printable(peer: bytes) -> str:
    """A peer's identity for logs; the ones ZeroMQ makes up (for `async-rl lag`) are binary."""
    return peer.decode() if peer[:1] != b"\x00" and peer.isascii() else peer.hex()


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a listener at `address`."""
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return scheme in ("ipc", "inproc", "memory")
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # `*`, an interface, a host name
        return False


def from_here(address: str) -> str:
    """The address by which this machine reaches a listener bound to every interface."""
    return address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://127.0.0.1:")


def frame_of(message: AnyMessage, limit: int) -> bytes:
    """The one frame of a message. Raises Malformed over `limit` bytes (the receiver would cut the connection), and
    for a text that is none (half of a surrogate pair, as JSON may hold)."""
    try:
        frame = encode(message)
    except UnicodeEncodeError as error:
        raise Malformed(
            f"a {type(message).__name__} holds a text that can't be written as UTF-8: {error}",
            hint="repair the prompt that it came from",
        ) from error
    if len(frame) > limit:
        raise Malformed(
            f"a {type(message).__name__} of {len(frame)} bytes is over the limit of {limit}",
            hint="use fewer or shorter samples per group",
        )
    return frame


def message_of(frames: Sequence[bytes | memoryview], limit: int) -> AnyMessage:
    """The message in the frames that arrived. Raises Malformed."""
    if len(frames) != 1:
        raise Malformed(f"a message is one frame, not {len(frames)}")
    return decode(frames[0], limit)
