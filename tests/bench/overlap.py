"""Does asynchrony hide the shorter of the two phases behind the longer one?

Real processes on a real bucket, the trainer's family pinned to core 0 and the rollout worker's to core 1:

    T_rollout   a batch of groups from the worker alone: batches are taken as soon as they are ready, by a
                trainer that does not train
    T_train     what a step of the asynchronous run costs the trainer, its wait for rollouts not counted
    async       the step time of the asynchronous run, over max(T_rollout, T_train): 1 is perfect overlap
    sync        the step time with max_lag = 0, over T_rollout + T_train: 1 is no overlap and no overhead

Medians over the steps after the first few (engine warm-up). The synchronous run also pays for every weight
sync.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.store import open_store
from async_rl.store.local_server import LocalServer
from async_rl.transport.link import TrainerLink
from async_rl.weights.lineage import claim, list_versions
from async_rl.weights.run import open_run
from async_rl.wire import PROTOCOL, Attach
from tests.bench.claims import Claim
from tests.runs import LocalRun

__all__ = ["run"]

STEPS = 40
SKIP = 8
"""Steps left out: the engine's first requests are slow, and the asynchronous buffer has to fill."""
LIMIT_S = 240.0

SETTINGS: dict[str, dict[str, Any]] = {
    "environment": {"name": "reverse"},
    "sampling": {"group_size": 8, "max_tokens": 12},
    "orchestrator": {"batch_groups": 16, "max_lag": 4, "drop_no_signal": False},
    "trainer": {
        "steps": STEPS,
        "learning_rate": 1e-4,
        "microbatch_tokens": 512,
        "out": "out",
        "threads": 1,
    },
}


def run(scratch: Path, console: Console) -> list[Claim]:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        console.print("skipped: it needs two cores and Linux to pin to them")
        return []
    cores = sorted(os.sched_getaffinity(0))[:2]
    with LocalServer(scratch / "store") as server:
        os.environ.update(server.env)
        model = scratch / "model"
        subprocess.run([sys.executable, "-m", "async_rl", "model", "tiny", "--out", str(model)], check=True)
        console.print(f"asynchronous, max_lag 4, {STEPS} steps")
        rows, rollout_s = measure(scratch / "async", f"{server.url}/async", model, cores, probe=True)
        console.print("synchronous, max_lag 0")
        sync_rows, _ = measure(
            scratch / "sync", f"{server.url}/sync", model, cores, orchestrator={"max_lag": 0}
        )
    train_s = statistics.median(row["time/step_s"] - row["time/wait_batch_s"] for row in rows)
    async_s = statistics.median(row["time/step_s"] for row in rows)
    sync_s = statistics.median(row["time/step_s"] for row in sync_rows)
    longer, both = max(rollout_s, train_s), rollout_s + train_s
    how = (
        f"T_rollout {rollout_s:.3f} s, T_train {train_s:.3f} s, step: {async_s:.3f} s, sync {sync_s:.3f} s"
    )
    return [
        Claim("async step / max(T_rollout, T_train)", async_s / longer, at_most=1.25, how=how),
        Claim(
            "sync step / (T_rollout + T_train)",
            sync_s / both,
            how="max_lag = 0, the same model and settings",
        ),
        Claim(
            "sync step / async step", sync_s / async_s, unit="x", how="what asynchrony gains on two cores"
        ),
    ]


def measure(
    folder: Path,
    url: str,
    model: Path,
    cores: list[int],
    *,
    probe: bool = False,
    **settings: dict[str, Any],
) -> tuple[list[dict[str, Any]], float]:
    """The steady steps' metrics of one run and, with `probe`, T_rollout of its worker afterwards."""
    tables = {name: {**SETTINGS.get(name, {}), **settings.get(name, {})} for name in {*SETTINGS, *settings}}
    train, roll = (("taskset", "--cpu-list", str(core)) for core in cores)
    with LocalRun(folder, url, model, **tables) as local:
        trainer = local.start_trainer(prefix=train)
        worker = local.start_worker("w1", engine="vllm", prefix=roll)
        local.wait("the run to end", lambda: not trainer.running(), LIMIT_S)
        assert trainer.process.returncode == 0, local.logs()
        rows = [row for row in local.metrics() if "time/step_s" in row][SKIP:]
        local.finish(worker, 60.0)
        return rows, rollout_alone(local, train, roll) if probe else 0.0


def rollout_alone(local: LocalRun, train: tuple[str, ...], roll: tuple[str, ...]) -> float:
    """Seconds per batch of a worker that never waits: an orchestrator and a trainer link, no training."""
    argv = [*train, sys.executable, "-m", "async_rl", "orchestrator", str(local.run_file)]
    argv += ["--set", f"orchestrator.max_lag={STEPS}"]  # nothing is published: admission must not end
    local.fleet.start("orchestrator", argv, log_path=local.folder / "orchestrator.log")
    store = open_store(local.store_url)
    info, mine, newest = open_run(store), claim(store), list_versions(store)[-1]
    link = TrainerLink(local.address)
    link.attach(
        Attach(PROTOCOL, info.run, info.fingerprint, mine.incarnation, 0, newest, 0, info.vocab_size)
    )
    local.start_worker("w2", engine="vllm", prefix=roll)
    marks = []
    for step in range(STEPS):
        link.next_batch(mine.incarnation, step, timeout_s=LIMIT_S)
        marks.append(time.monotonic())
    link.close()
    steady = marks[SKIP:]
    return (steady[-1] - steady[0]) / (len(steady) - 1)
