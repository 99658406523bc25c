"""A link of a given rate and round trip between a client and a server on this machine: a TCP proxy.

    with Link(server.endpoint) as link:
        link.endpoint     # what the client is given instead of the server's

Each direction has one line of `rate_bit_s` that all connections share, block by block; a block arrives half a
round trip after it has left the line, and a new connection opens a round trip late. A sender is taken from as
fast as the line goes, with a queue of QUEUE_S before it, so a slow line pushes back as a router does. It has no
slow start and loses nothing: kinder than a real link, to everybody alike. The host in a request's signature is
the proxy's own, so the server must not care under which port it is called (SeaweedFS and MinIO take the Host
header as it comes).

It runs as a process of its own (`python -m tests.bench.link HOST:PORT RATE ROUND_TRIP`), which prints its port.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import deque
from types import TracebackType
from urllib.parse import urlsplit

__all__ = ["RATE_BIT_S", "ROUND_TRIP_S", "Link"]

RATE_BIT_S = 200e6
ROUND_TRIP_S = 0.040

QUEUE_S = 0.010
"""What may wait before the line, in time: more would make small requests wait behind large ones for longer than the
link itself takes."""
BLOCK_BYTES = 32 << 10
"""1.3 ms of the line at 200 Mbit/s: the turn that one connection has before the next."""
START_LIMIT_S = 30.0


class Link:
    """The proxy's process, from the client's side."""

    def __init__(
        self, endpoint: str, rate_bit_s: float = RATE_BIT_S, round_trip_s: float = ROUND_TRIP_S
    ) -> None:
        argv = [
            sys.executable,
            "-m",
            "tests.bench.link",
            urlsplit(endpoint).netloc,
            str(rate_bit_s),
            str(round_trip_s),
        ]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the link's process ended with {self._process.wait(START_LIMIT_S)}")
        self.endpoint = f"http://127.0.0.1:{port}"

    def env(self, env: dict[str, str]) -> dict[str, str]:
        """A server's environment with this endpoint."""
        return {**env, "AWS_ENDPOINT_URL": self.endpoint}

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(START_LIMIT_S)


class _Line:
    """One direction: when may a block leave, when does it arrive. Times are the loop's clock, in seconds."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self._free_at = 0.0

    def backlog_s(self, now: float) -> float:
        return self._free_at - now

    def arrival(self, now: float, nbytes: int) -> float:
        self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
        return self._free_at + self.delay_s


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, line: _Line) -> None:
    """Until the source ends. What has left the line travels while the next block waits for its turn."""
    loop = asyncio.get_running_loop()
    under_way: deque[tuple[float, bytes]] = deque()
    arrived = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not under_way:
                arrived.clear()
                await arrived.wait()
            at, block = under_way[0]
            await asyncio.sleep(max(0.0, at - loop.time()))
            under_way.popleft()
            if not block:
                return
            target.write(block)
            await target.drain()

    delivery = asyncio.create_task(deliver())
    try:
        while not delivery.done():
            while (backlog := line.backlog_s(loop.time()) - QUEUE_S) > 0:  # noqa: ASYNC110  (others may go first)
                await asyncio.sleep(backlog)
            block = await source.read(BLOCK_BYTES)
            under_way.append((line.arrival(loop.time(), len(block)), block))
            arrived.set()
            if not block:
                break
        await delivery
        if target.can_write_eof():
            target.write_eof()
    finally:
        delivery.cancel()


async def _serve(backend: str, rate_bit_s: float, round_trip_s: float) -> None:
    host, _, port = backend.rpartition(":")
    there, back = (_Line(rate_bit_s / 8, round_trip_s / 2) for _ in range(2))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = None
        try:
            await asyncio.sleep(round_trip_s)  # the handshake
            from_server, opened = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_carry(reader, opened, there), _carry(from_server, writer, back))
        except OSError:
            pass  # one side hung up: so does the other
        finally:
            writer.close()
            if opened is not None:
                opened.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    # The parent holds the other end of stdin: when it is gone, however it ended, so is the link.
    await asyncio.to_thread(os.read, 0, 1)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
