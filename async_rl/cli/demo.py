"""`async-rl demo`: the whole system on this machine, as it would run on several.

    local S3 server          its data stay in <dir>/store
    async-rl model tiny      a model that is right now and then                  -> <dir>/model
    async-rl trainer         in <dir>/trainer, with its own orchestrator         -> <dir>/trainer.log
    async-rl rollout         in <dir>/rollout, with vLLM                         -> <dir>/rollout.log

Each is a process of its own, started by the command a user would type. Trainer and worker share a ZeroMQ
address and a bucket. This process only starts them, asks the orchestrator how it goes, and adds up.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_rl.cli.options import set_option
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed, TrainingError, WaitTimeout
from async_rl.procs import Child, Fleet, stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from async_rl.cli.demo_view import Results
    from async_rl.store.local_server import LocalServer
    from async_rl.wire import Status

__all__ = ["command", "fresh_folder", "run_tables"]

GOAL = 0.90
"""Held-out reward at which the demo has shown what it is for."""

LORA = ("model.lora_rank=16", "trainer.learning_rate=1e-3")
"""What `--lora` stands for. Adapters want a learning rate of their own; this one was found for this model."""

LIMIT_S = 3600.0
"""Of the whole training. Every wait inside the processes has a shorter one of its own."""
MODEL_LIMIT_S = 600.0
LEAVE_LIMIT_S = 30.0
"""For the worker to leave, once the trainer has."""
STOP_GRACE_S = 30.0
POLL_S = 1.0
ANSWER_S = 2.0


@click.command("demo")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Everything is kept there; if it is not empty, in a new folder beside it (demo-2, …).",
)
@click.option("--engine", type=click.Choice(["vllm", "reference"]), default="vllm", show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: as in examples/demo.toml]"
)
@click.option("--lora", is_flag=True, help="Train adapters of rank 16 in the place of the weights.")
@set_option
def command(folder: Path, engine: str, steps: int | None, lora: bool, overrides: tuple[str, ...]) -> None:
    """Run everything on this machine: a language model learns to reverse strings.

    A local S3 server, a trainer and a vLLM rollout worker, as separate processes. About five minutes on two
    cores.
    """
    from rich.console import Console

    from async_rl.log import setup

    if lora:
        overrides = (*LORA, *overrides)
    if steps is not None:
        overrides = (*overrides, f"trainer.steps={steps}")
    setup("demo", "ERROR")  # a store that had to be killed at the end is no news here
    console = Console(highlight=False)
    started = time.monotonic()
    with stop_signals():
        folder = fresh_folder(folder)
        reward = Demo(console, folder, engine, overrides).run(started)
    if reward is None or reward < GOAL:
        found = "was not measured" if reward is None else f"ended at {reward:.3f}"
        raise TrainingError(
            f"the held-out reward {found}: the demo's goal is {GOAL:.2f}",
            hint=f"the logs are in {folder}; more steps may do it: async-rl demo --steps N",
        )


class Demo:
    """The order of things; what they look like stands in demo_view.py."""

    def __init__(self, console: Console, folder: Path, engine: str, overrides: tuple[str, ...]) -> None:
        from async_rl.cli.runfile import read_run_file
        from async_rl.store.local_server import LocalServer, free_ports

        self.console = console
        self.folder = folder
        self.server: LocalServer = LocalServer(folder / "store")
        self.store_url = f"{self.server.url}/demo"
        self.address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.run_file = folder / "run.toml"
        places = {
            "run": {"store": self.store_url},
            "model": {"path": str(folder / "model")},
            "orchestrator": {"bind": self.address},
            "trainer": {"out": str(folder / "trainer")},
            "rollout": {"engine": engine, "cluster": "demo"},
        }
        refuse_places(places, overrides)
        tables = run_tables(places, overrides)
        self.run_file.write_text(run_toml(tables), encoding="utf-8")
        self.worker_settings: dict[str, Any] = tables["rollout"]
        self.config = read_run_file(self.run_file)  # a wrong --set is refused before anything starts

    def run(self, started: float) -> float | None:
        """From nothing to the summary; the held-out reward at the end."""
        from async_rl.cli.demo_view import summary

        self.console.print(f"[bold]async-rl demo[/] in {self.folder}")
        with self.server, Fleet(grace_s=STOP_GRACE_S) as fleet:
            prepare_environment(self.server.env)
            self.console.print(f"S3 server ({self.server.kind}) at {self.server.endpoint}")
            self._make_model(fleet)
            status = self._train(fleet)
            results = self._results(status, time.monotonic() - started)
        self.console.print(summary(results, GOAL))
        return results.reward_end

    def _make_model(self, fleet: Fleet) -> None:
        """The only supervised learning there is: before version 0."""
        argv = [*cli(), "model", "tiny", "--out", str(self.folder / "model")]
        child = fleet.start("tiny model", [*argv, "--task", self.config.environment.name])
        deadline = time.monotonic() + MODEL_LIMIT_S
        while child.running():
            self._check(fleet, deadline, "the tiny model")
            time.sleep(0.1)
        if child.process.returncode:
            raise ProcessFailed("making the tiny model failed", hint="the cause stands above")

    def _train(self, fleet: Fleet) -> Status | None:
        """Trainer and worker until both have left; the last status they were seen in."""
        from async_rl.cli.demo_view import Progress
        from async_rl.transport.link import StatusLink

        trainer = self._start(fleet, "trainer", "trainer", str(self.run_file))
        worker = self._start(fleet, "rollout", "rollout", *self._worker_options())
        status = None
        deadline = time.monotonic() + LIMIT_S
        steps = self.config.trainer.steps
        with StatusLink(self.address) as link, Progress(self.console, steps) as progress:
            while trainer.running():
                self._check(fleet, deadline, "the training")
                try:
                    status = link.ask(ANSWER_S)
                except AsyncRLError:  # not up yet, or gone already: the processes themselves are watched
                    progress.waiting()
                else:
                    progress.show(status)
                    time.sleep(POLL_S)
        self._leave(fleet, trainer, worker)
        return status

    def _leave(self, fleet: Fleet, trainer: Child, worker: Child) -> None:
        fleet.check()
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while worker.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        fleet.check()

    def _start(self, fleet: Fleet, name: str, *argv: str) -> Child:
        """One of our own commands, in a working folder of its own."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return fleet.start(name, [*cli(), *argv], cwd=folder, log_path=self.folder / f"{name}.log")

    def _worker_options(self) -> list[str]:
        """Its [rollout] goes on its command line: a worker never sees the run file."""
        settings = {"cpu_bind": last_core(), **self.worker_settings}
        sets = [
            arg
            for key, value in settings.items()
            for arg in ("--set", f"rollout.{key}={toml_value(value)}")
        ]
        there = ["--store", self.store_url, "--orchestrator", self.address]
        there += ["--key", ""]  # whatever ASYNC_RL_KEY is
        return [*there, "--worker-id", "demo-1", *sets]

    def _check(self, fleet: Fleet, deadline: float, awaited: str) -> None:
        """Raises ProcessFailed where a process ended that should not have, WaitTimeout at the limit."""
        fleet.check()
        if not self.server.running():
            raise ProcessFailed(
                "the local S3 server has ended", hint=f"its log is in {self.folder / 'store'}"
            )
        if time.monotonic() > deadline:
            raise WaitTimeout(f"{awaited} did not end in time", hint=f"the logs are in {self.folder}")

    def _results(self, status: Status | None, wall_s: float) -> Results:
        from async_rl.cli.demo_view import Results, WeightSync
        from async_rl.cli.plot import plot_run, read_metrics
        from async_rl.store import open_store
        from async_rl.weights.report import full_bytes, list_rows
        from async_rl.weights.run import open_run

        metrics = read_metrics(self.folder / "trainer" / "metrics.jsonl")
        plot = self.folder / "reward_and_lag.png"
        plot_run(metrics, plot, max_lag=self.config.orchestrator.max_lag)
        store = open_store(self.store_url, self.config.store)
        try:
            sizes = [info.size for info in store.list_after("")]
            run = open_run(store)
            sync = WeightSync.of(list_rows(store, run), full_bytes(run))
        finally:
            store.close()
        return Results(
            self.folder, self.store_url, plot, metrics, status, wall_s, len(sizes), sum(sizes), sync
        )


def cli() -> list[str]:
    return [sys.executable, "-m", "async_rl"]


def last_core() -> str:
    """Where a CPU engine runs: one core, and not the trainer's. With more, its threads wait for each other at
    every operation of so small a model, and for the one whose core the trainer is using; steps take twice as
    long. Empty where there is only one."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[-1]) if len(cores) > 1 else ""


def prepare_environment(store: dict[str, str]) -> None:
    """What the processes inherit: our store, and nobody else's account or proxy."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        os.environ.pop(name, None)
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1"]))
    os.environ.update({**store, "NO_PROXY": local, "no_proxy": local, "HF_HUB_OFFLINE": "1"})


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, made now, or where it is not empty the first of wanted-2, wanted-3, …; as an absolute
    path."""
    wanted = wanted.absolute()
    for number in range(1, 10_000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                return folder
        except OSError as error:
            raise ConfigError(f"can't use {folder}: {error.strerror}", hint="name another --dir") from error
    raise ConfigError(f"{wanted} and thousands of folders beside it are taken", hint="name another --dir")


# ---------------------------------------------------------------- the run file


def run_tables(places: dict[str, dict[str, Any]], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The demo's run file (demo.toml), `--set` laid over it, and our places over that."""
    import tomllib

    from async_rl.config import merge_tables, parse_overrides

    text = resources.files("async_rl.cli").joinpath("demo.toml").read_text(encoding="utf-8")
    return merge_tables(merge_tables(tomllib.loads(text), parse_overrides(overrides)), places)


def refuse_places(places: dict[str, dict[str, Any]], overrides: tuple[str, ...]) -> None:
    """What the demo decides itself can't be set; taking no notice would be worse than saying so."""
    from async_rl.config import parse_overrides

    for section, table in parse_overrides(overrides).items():
        for key in set(table) & set(places.get(section, {})):
            raise ConfigError(
                f"--set {section}.{key}: the demo decides this itself",
                hint="use --engine"
                if key == "engine"
                else "use --dir, or the commands one by one (README)",
            )


def run_toml(tables: dict[str, Any]) -> str:
    lines = ["# Written by `async-rl demo`; examples/demo.toml is the same with comments."]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Strings, numbers, booleans, lists and tables as TOML writes them."""
    import json

    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items())
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
