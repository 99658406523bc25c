"""The listener's door: ZeroMQ asks here, for each new connection, whether its key is allowed (ZAP, RFC 27).

A thread of its own, so that a handshake never waits for a loop that is busy with groups. It ends with the
listener's context. Where it is not there, ZeroMQ lets nobody in (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq

from async_rl.errors import NotAllowed
from async_rl.log import get_logger
from async_rl.transport.allowed import Keyring

__all__ = ["answer", "start_zap"]

log = get_logger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_TOLD = 1000
"""Refused keys that are logged, each once: whoever tries for ever does not fill the log."""


def start_zap(context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
    """Before the listener binds."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ADDRESS)
    threading.Thread(target=_serve, args=(socket, keyring), name="zap", daemon=True).start()


def _serve(socket: zmq.Socket[bytes], keyring: Keyring) -> None:
    told: set[str] = set()
    try:
        while True:
            request = socket.recv_multipart()  # waits for: a connection, or the end of the context
            reply, refused = answer(request, keyring)
            if refused is not None:
                keyring.turned_away[refused.code] += 1
            if refused is not None and refused.message not in told and len(told) < _TOLD:
                told.add(refused.message)
                origin = request[3].decode("ascii", "replace") if len(request) > 3 else "?"
                log.warning("connection refused", origin=origin, reason=refused.message)
            socket.send_multipart(reply)
    except zmq.ContextTerminated:
        pass
    finally:
        socket.close(0)


def answer(request: Sequence[bytes], keyring: Keyring) -> tuple[list[bytes], NotAllowed | None]:
    """The reply to [version, id, domain, address, identity, mechanism, public key]. The user id that it gives
    stands beside every message of the connection."""
    version, request_id = (*request, b"", b"")[:2]
    public = request[6].hex() if len(request) == 7 and request[5] == b"CURVE" else None
    entry = keyring.find(public)
    if isinstance(entry, NotAllowed):
        # 300: come again later. 400: for good, which ends the dialer with a clear error.
        status = b"300" if entry.retry else b"400"
        return [version, request_id, status, b"not allowed", b"", b""], entry
    return [version, request_id, b"200", b"OK", entry.public.encode(), b""], None
