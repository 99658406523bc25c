"""The kill matrix of the control plane: real processes, SIGKILL at named points, and what must be true afterwards.

    python -m tests.chaos.lives [--only WORD]

A story is a run in which processes are killed one after another, each at a point of its life, and started again as an
operator's supervisor would. When the trainer has done its last step, the test's own log (hooks/sitecustomize.py) says
what was acknowledged and what was trained:

    every acknowledged group was trained exactly once in the history that survives, or dropped for lag with a count,
    or waits in the buffer; no step is missing; no lag was over the limit; no prompt before the last one trained
    is missing
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from async_rl.cli.orchestrator import spool_folder
from async_rl.procs import Child
from async_rl.store import StoreConfig, open_store
from async_rl.store.local_server import LocalServer
from orchestrator.config import OrchestratorConfig
from tests.chaos.evidence import Versions, failures, history_of, left_in, read_log
from tests.runs import LocalRun

__all__ = ["STORIES", "Outcome", "play"]

STEPS = 24
MAX_LAG = 3
BATCH = 2
LIMIT_S, RESTART_LIMIT_S = 240.0, 120.0
"""Of a story, and on top for each kill: whoever starts again imports torch, for a minute on a busy machine."""
STOP_LIMIT_S = 30.0
HOOKS = Path(__file__).with_name("hooks")
ROOT = Path(__file__).parents[2]

STORIES: dict[str, tuple[str, ...]] = {
    "orchestrator, around its disk": (
        "orchestrator write:before 6",
        "orchestrator write:half 9",
        "orchestrator write:after 4",
        "orchestrator commit:before 7",
        "orchestrator commit:after 5",
        "orchestrator segment:before 1",
        "orchestrator segment:after 1",
    ),
    "orchestrator, around its answers": (
        "orchestrator send-Ack:before 5",
        "orchestrator send-Ack:after 4",
        "orchestrator send-Batch:before 2",
        "orchestrator send-Batch:after 2",
        "orchestrator send-Lease:before 5",
        "orchestrator send-Lease:after 7",
        "orchestrator send-Attached:before 1",
        "orchestrator send-Attached:after 1",
    ),
    "trainer, around a step": (
        "trainer batch:before 8",
        "trainer batch:after 5",
        "trainer optimizer:before 4",
        "trainer optimizer:after 6",
    ),
    "trainer, around its commits": (
        "trainer versions:before 8",
        "trainer versions:after 5",
        "trainer checkpoints:before 2",
        "trainer checkpoints:after 1",
        "trainer incarnations:after 1",
    ),
    "worker": (
        "rollout send-GroupDone:before 6",
        "rollout send-GroupDone:after 5",
        "rollout Ack:after 7",
    ),
    "everybody": (
        "trainer optimizer:after 5",
        "orchestrator commit:after 16",
        "rollout send-GroupDone:after 14",
        "trainer batch:after 4",
        "orchestrator send-Batch:before 6",
    ),
}


class Outcome(NamedTuple):
    failures: list[str]
    counts: dict[str, Any]


class _Life:
    """One run, its processes, and a supervisor that starts again what was killed."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.children: dict[str, Child] = {}
        self.starts: Counter[str] = Counter()

    def start(self, name: str) -> None:
        self.starts[name] += 1
        run = self.run
        if name == "orchestrator":
            self.children[name] = run.start_orchestrator()
        elif name == "trainer":
            self.children[name] = run.start_trainer("--orchestrator", run.address)
        else:
            self.children[name] = run.start_worker(name)

    def until_trained(self, limit_s: float) -> None:
        """Until the run is finished, and the orchestrator has seen everybody off."""
        deadline = time.monotonic() + limit_s
        while True:
            for name, child in self.children.items():
                if not child.running():
                    if name == "trainer" and child.process.returncode == 0:
                        return self.end_orchestrator()
                    if name != "orchestrator" or child.process.returncode:  # or it has seen everybody off
                        self.start(name)
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"---- {child.name}\n{child.log_tail(10)}" for child in self.children.values()
                )
                raise TimeoutError(f"not trained within {limit_s:g} s\n{logs}")
            time.sleep(0.1)

    def end_orchestrator(self) -> None:
        """It may have been started again after the trainer had finished: then it knows of no end."""
        child = self.children["orchestrator"]
        child.signal_group(signal.SIGTERM)
        if not child.wait_group(time.monotonic() + STOP_LIMIT_S):
            raise TimeoutError(
                f"the orchestrator did not stop within {STOP_LIMIT_S:g} s\n{child.log_tail()}"
            )


def play(
    kills: tuple[str, ...],
    folder: Path,
    store_url: str,
    model: Path,
    steps: int = STEPS,
    without: str = "",
) -> Outcome:
    """`without`: a guard (delivery.GUARDS) that the processes are started without."""
    log = folder / "test.log"
    settings: dict[str, dict[str, Any]] = {
        "sampling": {"group_size": 2, "max_tokens": 10},
        "orchestrator": {
            "batch_groups": BATCH,
            "max_lag": MAX_LAG,
            "drop_no_signal": False,
            "lease_s": 10.0,
            "heartbeat_s": 0.5,
            "straggler_hold_s": 0.5,
            "max_attempts": 20,
            "final_eval_s": 0.0,
        },
        "trainer": {"steps": steps, "checkpoint_every": 5, "keep_checkpoints": 2},
    }
    environment = {
        "ASYNC_RL_TEST_LOG": str(log),
        "ASYNC_RL_TEST_KILLS": "; ".join(kills),
        "ASYNC_RL_TEST_WITHOUT": without,
        "PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with LocalRun(folder, store_url, model, **settings) as run:
            life = _Life(run)
            for name in ("orchestrator", "trainer", "w1"):
                life.start(name)
            life.until_trained(LIMIT_S + RESTART_LIMIT_S * len(kills))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return check(read_log(log), kills, settings, folder, store_url)


def check(
    lines: list[dict[str, Any]],
    kills: tuple[str, ...],
    settings: dict[str, dict[str, Any]],
    folder: Path,
    store_url: str,
) -> Outcome:
    """After everybody has ended; see evidence.py."""
    killed = {line["killed"] for line in lines if "killed" in line}
    history = history_of(lines)
    config = msgspec.convert(settings["orchestrator"], OrchestratorConfig)
    left = left_in(folder / "orchestrator" / spool_folder("", "out", store_url), config, len(history.steps))
    found, counts = failures(lines, history, left)
    with closing(open_store(store_url, StoreConfig())) as store:
        found += Versions(store).wrong(lines, history, MAX_LAG)
    found += [f"nobody came to {each}" for each in kills if each not in killed]
    if sorted(history.steps) != list(range(settings["trainer"]["steps"])):
        found.append(f"steps {sorted(history.steps)}")
    return Outcome(found, {"kills": len(killed), **counts})


@click.command()
@click.option("--only", default="", metavar="WORD", help="Stories whose name holds this word.")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Leave the folders of the runs here, with all logs."
)
def main(only: str, keep: Path | None) -> None:
    from workers.tiny_model import TinySettings, make_tiny_model

    failed = 0
    with tempfile.TemporaryDirectory(prefix="lives-") as scratch:
        model = Path(scratch) / "model"
        make_tiny_model(model, TinySettings(steps=0))
        with LocalServer(Path(scratch) / "store", grace_s=0) as server:
            os.environ.update(server.env)
            for index, (name, kills) in enumerate(STORIES.items()):
                if only not in name:
                    continue
                began = time.monotonic()
                folder = (keep or Path(scratch)) / str(index)
                outcome = play(kills, folder, f"{server.url}/lives-{index}", model)
                failed += bool(outcome.failures)
                click.echo(f"{name}: {outcome.counts}, {time.monotonic() - began:.0f} s")
                for failure in outcome.failures:
                    click.echo(f"    FAILED {failure}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
