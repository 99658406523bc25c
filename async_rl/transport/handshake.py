"""Why a dialer does not get in: what ZeroMQ's monitor says about handshakes, as an error for people.

ZeroMQ itself says nothing: a dialer with a wrong key waits like one whose listener is away. The difference:

    nobody there, or a tunnel that closes at once    wait, as ever: the listener will come
    its list does not have our key                   Refused (HANDSHAKE_FAILED_AUTH)
    one side has keys and the other has none         Refused (HANDSHAKE_FAILED_PROTOCOL)
    its key is not the one that we expect            Refused, once it has hung up again and again

The last one hangs up without a word, as a dying listener or an empty tunnel does too, and the one before it often
does, when it is the faster side. So where somebody hung up, the port is asked what it is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Literal

import zmq

from async_rl.errors import Refused
from async_rl.transport.keys import ClientKey

__all__ = ["Handshakes", "event_of", "mechanism_at"]

HUNG_UP = 3
"""Times in a row, each confirmed by `mechanism_at`: a listener that is being replaced looks like a wrong key
once. With ZeroMQ's pauses between attempts this takes less than two seconds."""

GREETING_LIMIT_S = 2.0

_GREETING_BYTES = 64
# ZMTP 3.0: signature, version, mechanism (20 bytes), not a server, padding.
_OUR_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def event_of(frames: list[bytes]) -> tuple[int, int]:
    """The event and its value in a message of a monitor socket."""
    event, value = struct.unpack("=HI", frames[0])
    return event, value


class Handshakes:
    """The fate of one dialer's connections. Pure: events in, a verdict out."""

    def __init__(self, address: str, key: ClientKey | None) -> None:
        self._address, self._key = address, key
        self._hung_up = 0

    def on(self, event: int) -> Refused | Literal["look"] | None:
        """After an event of the monitor: an error, the wish to look what the port is (then `looked`), or
        nothing."""
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._hung_up = 0
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return self._not_allowed()
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return self._other_mechanism()
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return "look"
        return None

    def looked(self, mechanism: str) -> Refused | None:
        """The port was looked at after a connection was hung up on: `mechanism_at` said this."""
        right = mechanism == ("NULL" if self._key is None else "CURVE")
        # The right kind without keys has no reason to hang up: it was going, or coming.
        self._hung_up = 0 if not mechanism or (right and self._key is None) else self._hung_up + 1
        if self._hung_up < HUNG_UP:
            return None
        return self._wrong_server() if right else self._other_mechanism()

    def _not_allowed(self) -> Refused:
        if self._key is None:
            return self._other_mechanism()
        name, public = self._key.name, self._key.public.hex()
        return Refused(
            f"the orchestrator at {self._address} does not allow our key {name!r} (public key {public}): "
            "it never did, or the key was revoked",
            hint="ask whoever runs the orchestrator: in place of a key that was revoked make a new one (async-rl "
            f"keys new); one that was never allowed needs: async-rl keys allow {name} {public} --role ROLE "
            "--server DIR (worker, trainer or watcher)",
        )

    def _other_mechanism(self) -> Refused:
        if self._key is None:
            return Refused(
                f"what listens at {self._address} asks for a key, or is no orchestrator, and we have no key",
                hint="give a key file with --key or ASYNC_RL_KEY; `async-rl keys new` makes one on the "
                "orchestrator's side",
            )
        return Refused(
            f"what listens at {self._address} has no keys, or is no orchestrator, and we were given the key "
            f"{self._key.name!r}: nothing was sent",
            hint="set orchestrator.keys there, check the address, or leave out --key (and ASYNC_RL_KEY)",
        )

    def _wrong_server(self) -> Refused:
        assert self._key is not None
        return Refused(
            f"the orchestrator at {self._address} does not have the server key {self._key.server.hex()} that "
            f"the key {self._key.name!r} names, or it can't read its list of allowed keys",
            hint="compare with the server key that `async-rl keys list` prints there; if it differs for no "
            "reason that you know of, somebody may be posing as the orchestrator",
        )


def mechanism_at(address: str, limit_s: float = GREETING_LIMIT_S) -> str:
    """CURVE or NULL, with or without keys: what the ZeroMQ listener at tcp://host:port speaks. That much it says of
    itself, to anybody, before any handshake. Empty where none answers. Blocking, at most `limit_s`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    deadline = time.monotonic() + limit_s
    received = b""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s) as connection,
    ):
        connection.sendall(_OUR_GREETING)
        while len(received) < _GREETING_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (more := connection.recv(_GREETING_BYTES - len(received))):
                break
            received += more
    whole = len(received) == _GREETING_BYTES and received[0] == 0xFF and received[9] == 0x7F
    return received[12:32].rstrip(b"\0").decode("ascii", "replace") if whole else ""
