"""Real processes, cheap: a warm one that has imported everything forks them, before it has any thread.

    python -m tests.chaos.forks     reads `{"entry": …, "args": {…}, "socket": …}` lines, forks, says `{"pid": …}`,
                                    and later `{"pid": …, "status": …}` when that one has ended

A child connects to the socket it is given and speaks JSON lines there; its end of the connection closes when it
dies. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tests.forking import fork_at_order, say

LIMIT_S = 60.0
WARM_LIMIT_S = 300.0
"""Where the codec's kernels were never compiled on this machine, that takes a minute or more."""

ROOT = Path(__file__).parents[2]


class Link:
    """JSON lines over a socket; the same at both ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(LIMIT_S)
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the other side is gone."""
        try:
            line = self._file.readline()
        except ConnectionResetError:
            return None
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Child:
    """A forked process, seen from the test."""

    def __init__(self, forks: Forks, pid: int, link: Link, errors: Path) -> None:
        self._forks, self.pid, self.link, self._errors = forks, pid, link, errors

    def ask(self, **message: Any) -> dict[str, Any]:
        """Tell it something, hear the answer. Raises AssertionError if it dies instead."""
        self.link.tell(message)
        answer = self.link.hear()
        assert answer is not None, (
            f"process {self.pid} ended instead of answering {message}: {self.stderr()}"
        )
        return answer

    def story(self) -> list[dict[str, Any]]:
        """All it says until its end."""
        said = []
        while (message := self.link.hear()) is not None:
            said.append(message)
        return said

    def wait(self) -> int:
        """Its exit status; -9 for a killed one."""
        return self._forks.status_of(self.pid)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stderr(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        """Kill it if it is still there."""
        self.link.close()
        if not self._forks.has_ended(self.pid):
            with suppress(ProcessLookupError):  # it has ended by itself just now
                self.signal(signal.SIGKILL)
            self.wait()


class Forks:
    """The warm process, seen from the test. Thread-safe."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self._env = dict(env)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.forks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )
        self._statuses: dict[int, int] = {}
        self._born: set[int] = set()  # told by the warm process, and not handed out yet
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._started = 0
        self._warm = False
        threading.Thread(target=self._listen, name="forks", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._warm or self._process.poll() is not None, WARM_LIMIT_S)
        assert self._warm, f"the warm process did not start: it ended with {self._process.poll()}"

    def start(self, entry: str, **args: Any) -> Child:
        """`entry`: a module of this package with `main(link, args)`."""
        with self._starting:
            self._started += 1
            name = f"{self._folder.name}/{self._started}"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)
            listener.listen(1)
            listener.settimeout(LIMIT_S)
            order = {"entry": entry, "args": args, "socket": name, "errors": f"{name}.err"}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise AssertionError(
                f"no process came from the warm one: it ended with {self._process.poll()}"
            ) from error
        listener.close()
        link = Link(connection)
        hello = link.hear()
        assert hello is not None, Path(f"{name}.err").read_text()
        pid = hello["pid"]
        with (
            self._changed
        ):  # a number may have been another child's before, whose status is forgotten by then
            assert self._changed.wait_for(lambda: pid in self._born, LIMIT_S), (
                f"nobody tells of process {pid}"
            )
            self._born.discard(pid)
        return Child(self, pid, link, Path(f"{name}.err"))

    def status_of(self, pid: int) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self._statuses, LIMIT_S):
                raise AssertionError(f"process {pid} had not ended after {LIMIT_S:g} s")
            return self._statuses[pid]

    def has_ended(self, pid: int) -> bool:
        with self._changed:
            return pid in self._statuses

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._folder.cleanup()

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                self._warm |= "warm" in message
                if "status" in message:
                    self._statuses[message["pid"]] = message["status"]
                elif "pid" in message:
                    self._statuses.pop(message["pid"], None)
                    self._born.add(message["pid"])
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()  # it is gone


# ---------------------------------------------------------------- the warm process


def serve() -> None:
    warm_up()
    say({"warm": os.getpid()})
    fork_at_order(_become)


def _become(order: dict[str, Any]) -> NoReturn:
    """The child's whole life."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(errors, 2)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(order["socket"])
        link = Link(connection)
        link.tell({"pid": os.getpid()})
        importlib.import_module(f"tests.chaos.{order['entry']}").main(link, order["args"])
        status = 0
    except BaseException:  # noqa: BLE001  the end of this process: what happened is told, then it exits
        os.write(2, traceback.format_exc().encode())
    os._exit(status)


def warm_up() -> None:
    """Import all that the entries need and compile the kernels; without starting a thread."""
    import numpy as np
    import torch

    from async_rl.log import setup
    from async_rl.store import open_store
    from async_rl.weights.codec import TILE, apply_tile, digest_of, encode_tile
    from tests.servers import read_descriptions_once

    torch.set_num_threads(1)
    setup("chaos", "INFO")
    read_descriptions_once()
    open_store("s3://warm/up").close()
    for name in ("publisher", "reader"):
        importlib.import_module(f"tests.chaos.{name}")
    base = np.arange(1000, dtype=np.uint16)
    new = base.copy()
    new[::50] += 1
    for small in (False, True):
        coded = encode_tile(base, new, 0, small=small)
        assert coded is not None
        apply_tile(coded.mode, coded.data, base.copy(), 0)
    digest_of(base, TILE)
    assert threading.active_count() == 1, "the process that forks must have one thread"


if __name__ == "__main__":
    serve()
