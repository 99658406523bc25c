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

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click

from async_rl.procs import Child
from async_rl.store.local_server import LocalServer
from async_rl.wire import Status
from tests.runs import LocalRun

__all__ = ["STORIES", "Outcome", "play"]

STEPS = 24
MAX_LAG = 3
BATCH = 2
LIMIT_S = 240.0
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

    def until_trained(self, limit_s: float) -> Status | None:
        """The last Status before the run was finished."""
        status = None
        deadline = time.monotonic() + limit_s
        while True:
            for name, child in self.children.items():
                if not child.running():
                    if name == "trainer" and child.process.returncode == 0:
                        return status
                    self.start(name)
            status = self.run.status() or status
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"---- {child.name}\n{child.log_tail(10)}" for child in self.children.values()
                )
                raise TimeoutError(f"not trained within {limit_s:g} s\n{logs}")
            time.sleep(0.1)


def play(kills: tuple[str, ...], folder: Path, store_url: str, model: Path, steps: int = STEPS) -> Outcome:
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
        "PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with LocalRun(folder, store_url, model, **settings) as run:
            life = _Life(run)
            for name in ("orchestrator", "trainer", "w1"):
                life.start(name)
            status = life.until_trained(LIMIT_S)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return check(lines, kills, status, steps)


def check(
    lines: list[dict[str, Any]], kills: tuple[str, ...], status: Status | None, steps: int
) -> Outcome:
    failures = []
    killed = {line["killed"] for line in lines if "killed" in line}
    failures += [f"nobody came to {each}" for each in kills if each not in killed]
    history: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}  # what the steps had that a resume repeats
    incarnation = -1
    repeated = 0
    for line in (line for line in lines if "ordinals" in line):
        step = line["step"]
        if line["incarnation"] > incarnation:  # a resume: what came after it did not survive
            expected = {at: had for at, had in history.items() if at >= step}
            history = {at: had for at, had in history.items() if at < step}
            incarnation = line["incarnation"]
        if step in expected:
            repeated += 1
            if expected[step] != line["ordinals"]:
                failures.append(f"step {step} was repeated with {line['ordinals']}, not {expected[step]}")
        history[step] = line["ordinals"]
        if max(line["lags"], default=0) > MAX_LAG:
            failures.append(f"step {step} has lags {line['lags']}")
        if line["left_out"]:
            failures.append(f"step {step} left out {line['left_out']}")
    if sorted(history) != list(range(steps)):
        failures.append(f"steps {sorted(history)}")
    trained = [ordinal for step in sorted(history) for ordinal in history[step]]
    twice = sorted(ordinal for ordinal, count in Counter(trained).items() if count > 1)
    if twice:
        failures.append(f"trained twice: {twice}")
    acknowledged = {line["acknowledged"] for line in lines if "acknowledged" in line}
    missing = acknowledged - set(trained)
    dropped = dict(status.dropped) if status else {}
    stopped = dropped.pop("stale", 0)  # work that was never acknowledged
    allowed = sum(dropped.values()) + (status.buffered if status else 0)
    if len(missing) > allowed + BATCH:  # the last batch was formed after the last look
        failures.append(
            f"acknowledged, not trained: {sorted(missing)}; {dropped}, {status and status.buffered}"
        )
    unseen = set(range(max(trained, default=-1) + 1)) - set(trained)
    in_hand = allowed + (status.outstanding if status else 0)
    if len(unseen) > in_hand + BATCH:
        failures.append(f"prompts that nobody trained: {sorted(unseen)} of {max(trained)}; {status}")
    return Outcome(
        failures,
        {
            "kills": len(killed),
            "lives of the trainer": incarnation + 1,
            "steps repeated": repeated,
            "acknowledged": len(acknowledged),
            "trained": len(trained),
            "dropped": dropped,
            "stopped": stopped,
        },
    )


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
