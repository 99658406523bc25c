"""A TCP proxy between those who dial and the one who binds, that loses, delays and stalls what passes.

with SocketProxy("tcp://127.0.0.1:5577") as proxy:
    proxy.address           # to dial
    proxy.delay_s = 0.2     # every block waits so long, both ways
    proxy.stall()           # connections stay, nothing passes; `flow()` ends it, and nothing was lost
    proxy.cut()             # every connection breaks, with what is on its way
    proxy.refuse()          # and new ones break too, until `flow()`
    proxy.counts            # connections, cuts
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from types import TracebackType

__all__ = ["SocketProxy"]

BLOCK = 64 << 10
LIMIT_S = 10.0


class SocketProxy:
    def __init__(self, backend: str) -> None:
        """`backend`: tcp://HOST:PORT."""
        host, _, port = backend.removeprefix("tcp://").rpartition(":")
        self._backend = (host, int(port))
        self.delay_s = 0.0
        self.counts: Counter[str] = Counter()
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="socket-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(LIMIT_S):
            raise AssertionError(f"the proxy did not listen within {LIMIT_S:g} s")
        self.address = f"tcp://127.0.0.1:{self._port}"

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def flow(self) -> None:
        self.delay_s, self._refusing = 0.0, False
        self._loop.call_soon_threadsafe(self._flowing.set)

    def cut(self) -> None:
        self.counts["cuts"] += 1
        self._loop.call_soon_threadsafe(self._break_all)

    def refuse(self) -> None:
        self._refusing = True
        self.cut()

    def close(self) -> None:
        self.flow()  # what is stalled would not end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)

    def __enter__(self) -> SocketProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flowing.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._break_all()
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=LIMIT_S))
        self._loop.close()

    def _break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(*self._backend)
        except OSError:  # its process is being started again
            writer.transport.abort()
            return
        both = {writer, there[1]}
        self._writers |= both
        try:
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(BLOCK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
