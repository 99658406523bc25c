"""The proxy between processes and the orchestrator loses, delays and stalls, and otherwise changes nothing."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.chaos.socket_proxy import SocketProxy

LIMIT_S = 10.0


@pytest.fixture
def server():
    listening = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=back, args=(connection,), daemon=True).start()

    def back(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def dial(proxy: SocketProxy) -> socket.socket:
    port = int(proxy.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def is_broken(link: socket.socket) -> bool:
    try:
        return link.recv(10) == b""
    except ConnectionError:
        return True


def test_what_is_said_comes_back_also_after_a_stall(server):
    with SocketProxy(server) as proxy, dial(proxy) as link:
        link.sendall(b"one")
        assert link.recv(10) == b"one"
        proxy.stall()
        link.sendall(b"two")
        link.settimeout(0.05)
        with pytest.raises(TimeoutError):
            link.recv(10)
        link.settimeout(LIMIT_S)
        proxy.flow()
        assert link.recv(10) == b"two"


def test_a_cut_breaks_what_is_there_and_refusal_what_comes(server):
    with SocketProxy(server) as proxy:
        for refuse in (False, True):
            with dial(proxy) as link:
                link.sendall(b"x")
                assert link.recv(10) == b"x"
                proxy.refuse() if refuse else proxy.cut()
                assert is_broken(link)
        with dial(proxy) as link:
            assert is_broken(link)
        proxy.flow()
        with dial(proxy) as link:
            link.sendall(b"again")
            assert link.recv(10) == b"again"
