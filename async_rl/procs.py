"""Child processes that never outlive their parent.

`async-rl trainer` owns an orchestrator and its ranks; `async-rl demo` owns a store, a trainer and a worker, which
have children of their own. Each child leads a process group, so a stop reaches its whole family: first SIGTERM,
then, after a limit, SIGKILL. On Linux the kernel sends SIGTERM to a child whose parent was killed outright.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from async_rl.errors import ProcessFailed
from async_rl.log import get_logger

__all__ = ["Child", "Fleet", "Stopped", "stop_signals"]

log = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
KILL_LIMIT_S = 5.0
"""A killed process is gone as soon as the kernel gets to it; longer means a device that does not let go."""
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A stop signal arrived. A BaseException, so that no handler of ordinary errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def stop_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread, once; later ones are ignored, because a
    second Ctrl-C must not interrupt the stopping of children."""

    def handle(signum: int, frame: FrameType | None) -> None:
        for each in _STOP:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    before = {each: signal.signal(each, handle) for each in _STOP}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Child:
    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path | None) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    def running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self, lines: int = 15) -> str:
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def signal_group(self, signum: int) -> None:
        """To every process of the child's group; the group can outlive the child itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def group_alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def wait_group(self, deadline: float) -> bool:
        """Whether the child and its whole group have ended by `deadline` (of time.monotonic)."""
        while self.running() or self.group_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


class Fleet:
    """Children of this process, stopped in the reverse order of their start when the context ends.

    with Fleet() as fleet:
        fleet.start("orchestrator", [sys.executable, "-m", "async_rl", "orchestrator", …], log_path=…)
        fleet.wait(trainer)
    """

    def __init__(self, grace_s: float = 10.0) -> None:
        self.grace_s = grace_s
        self.children: list[Child] = []

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        cwd: Path | None = None,
    ) -> Child:
        """Start a child in a process group of its own. Without a `log_path` it writes where this process does."""
        out: IO[bytes] | None = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            out = log_path.open("ab")
        parent = os.getpid()

        def die_with_parent() -> None:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:  # it died between the fork and the prctl
                    os._exit(1)

        try:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            if out is not None:
                out.close()
        child = Child(name, process, log_path)
        self.children.append(child)
        log.debug("process started", name=name, pid=child.pid)
        return child

    def check(self) -> None:
        """Raises ProcessFailed for a child that ended with an error, with the end of its log."""
        for child in self.children:
            code = child.process.poll()
            if code:
                tail = child.log_tail()
                raise ProcessFailed(
                    f"the {child.name} process ended with {describe_exit(code)}"
                    + (f":\n{tail}" if tail else ""),
                    hint=f"its whole log: {child.log_path}" if child.log_path else "",
                )

    def wait(self, child: Child, poll_s: float = 0.2) -> int:
        """Until `child` ends; its exit status. Raises ProcessFailed as soon as any other child fails."""
        while child.running():
            self.check()
            try:
                child.process.wait(poll_s)
            except subprocess.TimeoutExpired:
                continue
        return child.process.returncode

    def stop(self) -> None:
        """Stop every child and its group, newest first: SIGTERM, wait, SIGKILL."""
        for child in reversed(self.children):
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        for child in reversed(self.children):
            if not child.wait_group(deadline):
                log.warning("process did not stop in time, killing it", name=child.name, pid=child.pid)
                child.signal_group(signal.SIGKILL)
                child.wait_group(time.monotonic() + KILL_LIMIT_S)
            child.process.wait()
        self.children.clear()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
