"""A whole run of real processes, for integration tests and benches: the CLI's own commands, a folder each.

with LocalRun(tmp_path, store_url, model_dir) as run:
    run.start_trainer()
    run.start_worker("w1", engine="reference")
    run.wait("three steps", lambda: run.steps() >= 3, limit_s=60)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from async_rl.errors import AsyncRLError
from async_rl.procs import Child, Fleet
from async_rl.store.local_server import free_ports
from async_rl.transport.keys import ClientKey
from async_rl.transport.link import ask_status
from async_rl.wire import Status
from tests.warm_start import WarmStart

PAUSE_S = 0.2
START_S = 90.0
"""For processes that import torch, side by side, on two busy cores."""
PACED: dict[str, Any] = {"name": "tests.paced:Paced", "args": {"pace_s": 0.2}}
"""The environment of a run that only has to go on: about a step a second, for most groups of a model that has learned
nothing yet have no signal, and some forty make a batch of four."""
ROOT = Path(__file__).parents[1]


class LocalRun:
    """`settings` are run-file tables; they are laid over small, quick defaults."""

    warm: ClassVar[WarmStart | None] = None
    """What forks the processes, in the tests that ask for it (`forked_starts`); None: each starts for itself."""

    def __init__(self, folder: Path, store_url: str, model: Path, /, **settings: dict[str, Any]) -> None:
        self.folder = folder
        self.store_url = store_url
        self.address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.dial = self.address  # what workers are told; a test may put a proxy between
        self.key: ClientKey | None = None  # to ask for the status with
        self.fleet = Fleet(grace_s=20.0)
        self.trainer_folder = folder / "trainer"
        self.trainer_folder.mkdir(parents=True, exist_ok=True)
        tables: dict[str, dict[str, Any]] = {
            "run": {"store": store_url, "seed": 1},
            "model": {"path": str(model)},
            "environment": {"name": "reverse"},
            "sampling": {"group_size": 4, "max_tokens": 10},
            "orchestrator": {"bind": self.address, "batch_groups": 4, "max_lag": 2},
            "eval": {"every": 0},
            "trainer": {
                "steps": 4,
                "learning_rate": 1e-3,
                "microbatch_tokens": 2048,
                "out": "out",
                "threads": 1,
            },
        }
        for name, table in settings.items():
            tables.setdefault(name, {}).update(table)
        self.run_file = folder / "run.toml"
        self.run_file.write_text("".join(_toml_table(name, table) for name, table in tables.items()))

    def start_trainer(self, *args: str, prefix: tuple[str, ...] = (), name: str = "trainer") -> Child:
        return self._start(name, "trainer", str(self.run_file), *args, prefix=prefix)

    def start_orchestrator(self) -> Child:
        """One of its own, that outlives trainers: start those with "--orchestrator", run.address."""
        return self._start("orchestrator", "orchestrator", str(self.run_file))

    def start_worker(
        self, name: str, *args: str, engine: str = "reference", prefix: tuple[str, ...] = ()
    ) -> Child:
        words = ["rollout", "--store", self.store_url, "--orchestrator", self.dial, "--worker-id", name]
        words += ["--set", f"rollout.engine={engine}"]
        return self._start(name, *words, *args, prefix=prefix)

    def _start(self, name: str, *words: str, prefix: tuple[str, ...] = ()) -> Child:
        """A command of ours in a folder of its own. Its environment may be one of the tests' modules."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        argv = [*prefix, sys.executable, "-m", "async_rl", *words]
        log_path = self.folder / f"{name}.log"
        if self.warm is None or prefix:
            return self.fleet.start(name, argv, env={"PYTHONPATH": path}, cwd=folder, log_path=log_path)
        process = self.warm.start(argv, {**os.environ, "PYTHONPATH": path}, folder, log_path)
        child = Child(name, process, log_path)  # type: ignore[arg-type]
        self.fleet.children.append(child)
        return child

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        path = self.trainer_folder / "out" / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def steps(self) -> int:
        return sum("reward/mean" in row for row in self.metrics())

    def status(self) -> Status | None:
        """None while the orchestrator does not answer."""
        try:
            return ask_status(self.address, timeout_s=2.0, key=self.key)
        except AsyncRLError:
            return None

    def wait(
        self, what: str, condition: Callable[[], bool], limit_s: float, *expect_running: Child
    ) -> None:
        """Until `condition`; fails, with every log's end, after `limit_s` or when an expected child ended."""
        deadline = time.monotonic() + limit_s
        pause = threading.Event()
        while not condition():
            for child in expect_running:
                assert child.running(), f"waiting for {what}: {child.name} has ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited {limit_s} s for {what}\n{self.logs()}"
            pause.wait(PAUSE_S)

    def finish(self, child: Child, limit_s: float) -> int:
        """The exit status of a child that should end by itself."""
        self.wait(f"{child.name} to end", lambda: not child.running(), limit_s)
        return child.process.returncode

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        return "\n".join(f"---- {child.name}\n{child.log_tail(30)}" for child in self.fleet.children)

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.stop()


def cli(
    *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "async_rl", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, **(env or {})}, cwd=cwd
    )


def assert_refused(status: int, output: str, *said: str) -> None:
    """A command has ended with an error of ours that says all of this."""
    assert status not in (0, None), output
    for words in said:
        assert words in output, f"{words!r} is not in:\n{output[-3000:]}"
    assert "Traceback" not in output, output[-4000:]
    assert "error: " in output


def _toml_table(name: str, table: dict[str, Any]) -> str:
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
    return f"[{name}]\n" + "\n".join(lines) + "\n\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
