"""`python -m async_rl …` without waiting for its imports: real processes, forked from one that has imported torch,
transformers and the like, and nothing of ours.

    python -m tests.warm_start      reads orders, one JSON line each; says `{"pid": …}`, and `{"pid": …, "status": …}`
                                    when that one has ended

A process that starts for itself spends ten seconds of a core on these imports, and a run is five of them. A forked
one is otherwise what the command line starts: a session, an environment, a folder and a log of its own, our modules
imported anew (and changed by chaos/hooks, where that is on its PYTHONPATH), its own exit status; whom it starts with
`python -m async_rl` is forked likewise. Not for tests of the start itself, and not for the commands of `make chaos`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.forking import fork_at_order

__all__ = ["WarmProcess", "WarmStart"]

ROOT = Path(__file__).parents[1]
OURS = (
    "async_rl",
    "orchestrator",
    "workers",
    "tests",
    "sitecustomize",
    "without",
    "__main__",
    "__mp_main__",
)
WARM_LIMIT_S = 180.0
PR_SET_PDEATHSIG = 1


class WarmProcess:
    """What is used of subprocess.Popen, for a process that is the warm one's child."""

    def __init__(self, warm: WarmStart, pid: int) -> None:
        self._warm, self.pid = warm, pid

    @property
    def returncode(self) -> int | None:
        return self._warm.status_of(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self._warm.wait_for(self.pid, timeout)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class WarmStart:
    """The warm process, seen from the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_start"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        self._statuses: dict[int, int | None] = {}
        self._started: list[int] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="warm start", daemon=True).start()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path) -> WarmProcess:
        """`argv`: as for the interpreter itself, with it as the first word. Called by one thread at a time."""
        order = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "log": str(log_path)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._process.poll() is not None, WARM_LIMIT_S)
            assert self._started, f"the warm process started nothing: it ended with {self._process.poll()}"
            return WarmProcess(self, self._started.pop())

    def status_of(self, pid: int) -> int | None:
        with self._changed:
            return self._statuses[pid]

    def wait_for(self, pid: int, timeout: float | None) -> int:
        with self._changed:
            self._changed.wait_for(
                lambda: self._statuses[pid] is not None or self._process.poll() is not None, timeout
            )
            status = self._statuses[pid]
        if status is None:
            raise subprocess.TimeoutExpired(f"process {pid}", timeout or 0.0)
        return status

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30.0)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                self._statuses[message["pid"]] = message.get("status")
                if "status" not in message:
                    self._started.append(message["pid"])
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()  # it is gone


# ---------------------------------------------------------------- the warm process


def serve() -> None:
    warm_up()
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    fork_at_order(_obey)


def _obey(order: Mapping[str, Any]) -> NoReturn:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    become(order["argv"], order["env"], order["cwd"])


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks where `python -m async_rl` would be started."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        *rest,
    ):
        if list(args)[:3] != [sys.executable, "-m", "async_rl"]:
            ours = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags)
            pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return super()._execute_child(*ours, shell, *pipes, *rest)  # type: ignore[misc]
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for source, target in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
                if source != -1:
                    os.dup2(source, target)
            os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            become(list(args), dict(env), str(cwd or Path.cwd()))
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        return None


def become(argv: list[str], env: dict[str, str], cwd: str) -> NoReturn:
    """The forked child's whole life, as that of a fresh interpreter with these arguments."""
    status: object = 1
    try:
        os.closerange(3, 4096)
        _forget()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *BASE]
        sys.orig_argv[:] = argv
        sys.argv[:] = ["-m", *argv[3:]]
        with suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001  the end of this process, which tells what it was
        traceback.print_exc()
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF if isinstance(status, int) else int(status is not None))


def _forget() -> None:
    """What an exec would have done away with: handlers, what the parent does at its end, and our modules."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # folders of the parent's would be removed
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()


def warm_up() -> None:
    """Imports what is not ours; without starting a thread."""
    import torch

    from workers.pretrained import hide_broken_media_packages

    torch.set_num_threads(1)
    hide_broken_media_packages()
    names = "boto3 click msgspec numba numpy safetensors.torch zmq zmq.asyncio torch.distributed.fsdp"
    for name in (*names.split(), "torch.distributed.tensor", "torch.distributed.checkpoint"):
        importlib.import_module(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen3ForCausalLM  # noqa: F401

    assert threading.active_count() == 1, "the process that forks must have one thread"
    gc.collect()
    gc.freeze()  # or the first collection in each child would copy all these pages


BASE = [path for path in sys.path if path and Path(path).resolve() != ROOT]

if __name__ == "__main__":
    serve()
