"""Time to a reward of 0.9 against TRL's GRPOTrainer, both on two cores, each with its own generation.

The task is the demo's (reverse four letters), so is the model, 16 prompts times 8 samples a step; in a second pair of
runs the reward takes 0.5 to 1 s, with a tail (peers/slow.py), awaited for all samples at once by both.

    ours   real processes as in the demo: an S3 server, trainer and orchestrator, a rollout worker with vLLM; the
           demo's settings, nearly. One core for the trainer, the other for the engine. The clock begins when the
           worker serves.
    TRL    GRPOTrainer with transformers' generate on both cores. The clock begins with its first step, and stands
           still while the held-out reward is measured (ours goes on: the engine measures between other work).

One rule for both: every 10 steps the mean reward of 128 held-out prompts, sampled at temperature 1; the line between
the first measurement of at least 0.9 and the one before crosses 0.9 somewhere, and that is when. A measurement is as
uncertain as what ten steps bring, so each side runs with three seeds, and the medians are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.cli.demo import last_core
from async_rl.store.local_server import LocalServer
from tests.bench.claims import Claim
from tests.bench.peers.crossing import crossing
from tests.bench.peers.runs import ROOT, run_side
from tests.bench.trl_env import trl_python
from tests.runs import LocalRun

__all__ = ["run"]

GOAL = 0.9
LIMIT_S = 300.0
"""Of one run, engine start not counted: a side that has not reached the goal by then is reported so."""
START_LIMIT_S = 300.0
"""Of the engine, and of kernels that are compiled on a first run."""
ENVIRONMENT = {"min_length": 4, "max_length": 4, "alphabet": "abcdefghij"}
GROUPS, GROUP, MAX_TOKENS = 16, 8, 6
EVAL_EVERY, EVAL_PROMPTS = 10, 128
STEPS = 200
SEEDS = (0, 1, 2)
SLOW_SEEDS = (0,)
"""One: what is compared there differs by much more than seeds do, and a run of TRL's takes minutes."""

TRL_SETTINGS = {"learning_rate": 3e-4, "warmup_steps": 5, "clip_norm": 0.5, "threads": 2}
"""The demo's, as ours: other learning rates were tried for neither side."""

OURS: dict[str, dict[str, Any]] = {
    "environment": {"name": "reverse", "args": ENVIRONMENT},
    "sampling": {"group_size": GROUP, "max_tokens": MAX_TOKENS, "temperature": 1.0},
    "orchestrator": {"batch_groups": GROUPS, "max_lag": 2},
    "eval": {"every": EVAL_EVERY, "prompts": EVAL_PROMPTS},
    "trainer": {
        "steps": STEPS,
        "learning_rate": 3e-4,
        "warmup_steps": 5,
        "clip_norm": 0.5,
        "publish_every": 1,
        "microbatch_tokens": 4096,
        "threads": 1,
        "out": "out",
    },
}
"""examples/demo.toml's, but for the batch in one pass, as TRL's, and for the lag: two steps are what one engine and
one trainer need to keep each other busy (docs/rollout.md). Groups without a signal are left out and others sampled
in their place, as by default, which costs the engine half as many samples again; TRL trains them."""

ROLLOUT: dict[str, Any] = {"max_sequences": GROUPS * GROUP}
"""A step's samples at once: of so small a model, each step of the engine costs about the same."""

SLOW: dict[str, dict[str, Any]] = {
    "environment": {"name": "tests.bench.peers.slow:SlowReverse", "args": ENVIRONMENT},
    "orchestrator": {"verify": {"rescore_share": 0.0}},
}
SLOW_PARALLEL = 512
"""Rewards of ours awaited at once: what four batches of lag leave open."""


def run(scratch: Path, console: Console) -> list[Claim]:
    python = trl_python(console)
    if python is None:
        console.print("skipped: there is nothing to compare with")
        return []
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        console.print("skipped: it needs two cores and Linux to pin to them")
        return []
    model = scratch / "model"
    subprocess.run([sys.executable, "-m", "async_rl", "model", "tiny", "--out", str(model)], check=True)
    claims = []
    for name, slow, seeds, aim in (
        ("", False, SEEDS, 1.0),
        (", rewards of 0.5 to 1 s", True, SLOW_SEEDS, 0.6),
    ):
        ours, theirs = [], []
        for seed in seeds:
            ours.append(our_points(scratch / f"ours-{slow}-{seed}", model, slow=slow, run={"seed": seed}))
            _say(console, f"ours{name}, seed {seed}", ours[-1])
            theirs.append(trl_points(python, scratch / f"trl-{slow}-{seed}", model, slow=slow, seed=seed))
            _say(console, f"TRL{name}, seed {seed}", theirs[-1])
        claims.append(_claim(f"time to reward {GOAL}{name} / TRL's", ours, theirs, aim))
        if not slow:
            small = our_points(
                scratch / "ours-reference", model, slow=False, engine="reference", run={"seed": SEEDS[0]}
            )
            _say(console, f"ours, with the reference engine, seed {SEEDS[0]}", small)
            claims.append(
                _claim(f"time to reward {GOAL}, with the reference engine / TRL's", [small], theirs)
            )
    return claims


def _say(console: Console, who: str, side: dict[str, Any]) -> None:
    points = "  ".join(f"{seconds:.0f} s {reward:.2f}" for seconds, reward in side["points"])
    console.print(f"{who} ({side['versions']}, {side['steps']} steps): {points}")


def _claim(
    name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], aim: float | None = None
) -> Claim:
    """Without an aim: context. Where a side's median has no time, ours counts as infinite and TRL's as the limit,
    with which the ratio comes out larger than it is."""
    mine, peer = (statistics.median(times_of(side)) for side in (ours, theirs))
    texts = [
        ", ".join(f"{time:.1f}" if time < float("inf") else f"over {LIMIT_S:g}" for time in times_of(side))
        for side in (ours, theirs)
    ]
    steps = [", ".join(str(each["steps"]) for each in side) for side in (ours, theirs)]
    how = f"{texts[0]} s and {texts[1]} s; {steps[0]} and {steps[1]} steps until it was seen"
    return Claim(name, mine / min(peer, LIMIT_S), unit="x", at_most=aim, how=how)


def times_of(side: list[dict[str, Any]]) -> list[float]:
    """Seconds to the goal, of each run; infinite where it was not reached."""
    crossings = [crossing(each["points"], GOAL) for each in side]
    return [float("inf") if each is None else each for each in crossings]


# ---------------------------------------------------------------- the two sides


def trl_points(
    python: Path | str, folder: Path, model: Path, *, slow: bool, **changes: Any
) -> dict[str, Any]:
    asked = {
        "model": str(model),
        "environment": ENVIRONMENT,
        "slow": slow,
        "groups": GROUPS,
        "group": GROUP,
        "max_tokens": MAX_TOKENS,
        "goal": GOAL,
        "eval_every": EVAL_EVERY,
        "eval_prompts": EVAL_PROMPTS,
        "steps": STEPS,
        "limit_s": LIMIT_S,
        **TRL_SETTINGS,
        **changes,
    }
    return run_side(python, "tests.bench.peers.reward_trl", asked, folder, 2 * LIMIT_S)


def our_points(
    folder: Path, model: Path, *, slow: bool, engine: str = "vllm", **changes: dict[str, Any]
) -> dict[str, Any]:
    """Until the goal was measured, or the limit; the run is then stopped."""
    tables = {name: dict(table) for name, table in OURS.items()}
    for name, table in [*(SLOW.items() if slow else ()), *changes.items()]:
        tables.setdefault(name, {}).update(table)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
    sets = {"cpu_bind": last_core(), **ROLLOUT}
    if slow:
        sets["reward_parallel"] = SLOW_PARALLEL
    options = [
        arg for key, value in sets.items() for arg in ("--set", f"rollout.{key}={json.dumps(value)}")
    ]
    with LocalServer(folder / "store") as server:
        os.environ.update(server.env)
        with LocalRun(folder / "run", f"{server.url}/reward", model, **tables) as local:
            trainer = local.start_trainer()
            worker = local.start_worker("w1", *options, engine=engine)
            began = _serving(local, trainer, worker)
            there = lambda: not trainer.running() or _reached(local.metrics())  # noqa: E731
            local.wait("the goal or the end", _until(there, began + LIMIT_S), LIMIT_S + 60, worker)
            rows = local.metrics()
    import torch
    import vllm

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return {
        "points": points_of(rows, began),
        "steps": max((row["step"] for row in rows if "reward/mean" in row), default=0),
        "rows": rows,
        "versions": versions,
    }


def _serving(local: LocalRun, trainer: Any, worker: Any) -> float:
    """When the worker began to serve, seconds since the epoch. Waits for: a status that says so."""
    began: list[float] = []

    def serves() -> bool:
        status = local.status()
        for each in status.workers if status is not None else ():
            if each.state in ("serving", "updating"):
                began.append(time.time() - each.serving_s)
                return True
        return False

    local.wait("the engine", serves, START_LIMIT_S, trainer, worker)
    return began[0]


def _until(there: Any, deadline: float) -> Any:
    return lambda: there() or time.time() > deadline


def _reached(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("eval/reward", 0.0) >= GOAL for row in rows)


def points_of(rows: list[dict[str, Any]], began: float) -> list[tuple[float, float]]:
    """(seconds, held-out reward) from the lines of metrics.jsonl. A measurement counts from when its weights were
    there, which is when their step ended, not from when it arrived."""
    ended = {row["step"]: row["time"] for row in rows if "reward/mean" in row}
    measured = sorted((row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row)
    return [
        (max(ended.get(step, began) - began, 0.0), reward)
        for step, reward in measured
        if step in ended or step == 0
    ]
