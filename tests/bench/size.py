"""The memory of a whole run with a real model of 135 million weights, all of them trained: a limit of 8 GB.

The run is examples/smollm2, shortened: an S3 server, a trainer with its orchestrator, a
rollout worker with vLLM, each a process of its own. Three optimizer steps, each one a version that the worker takes
over while it generates. All processes' memory is read five times a second (memory_watch.py), from the first one's
start to the last one's end, and added up.

The model is SmolLM2-135M-Instruct, which a package carries in 4 bits (real_models.py); dequantised, it has as many
weights as ever.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from async_rl.cli.demo import last_core, toml_value
from async_rl.store.local_server import LocalServer
from tests.bench.claims import Claim
from tests.bench.memory_watch import MemoryWatch, Reading, highest, pss_bytes
from tests.bench.peers.runs import ROOT
from tests.bench.real_models import INSTALL, missing_packages
from tests.runs import LocalRun

__all__ = ["Phase", "example_tables", "phases_of", "process_name", "run", "served_versions"]

LIMIT_GB = 8.0
STEPS = 3
BATCH_GROUPS = 2
"""Half of the example's: two micro-batches a step are enough to see what a step holds, and take half as long."""
EXAMPLE = ROOT / "examples" / "smollm2" / "run.toml"
MODEL_LIMIT_S = 300.0
"""For reading 100 MB of GGUF and writing 270 MB: seconds, and minutes on a machine that others use."""
START_LIMIT_S = 300.0
"""Of the engine, and of kernels that are compiled on a first run."""
STEP_LIMIT_S = 300.0
END_LIMIT_S = 180.0
"""For the last held-out measurement and for leaving."""


class Phase(NamedTuple):
    name: str
    begin: float  # seconds since the epoch
    end: float


class Measured(NamedTuple):
    rows: list[dict[str, Any]]  # of metrics.jsonl
    readings: list[Reading]
    serving: float  # since the epoch: when the worker began to serve
    served: list[tuple[int, float]]  # the versions that the worker took over, and their pauses in seconds
    deltas: dict[int, tuple[int, float]]  # by step: bytes of its version, part of the weights that changed
    full_bytes: int


def run(scratch: Path, console: Console) -> list[Claim]:
    if missing := missing_packages("smollm2"):
        console.print(f"skipped: {', '.join(missing)} can't be imported ({INSTALL})")
        return []
    if not pss_bytes(os.getpid()):
        console.print(
            "skipped: it needs a Linux that tells what a process's share of memory is (smaps_rollup)"
        )
        return []
    model = scratch / "model"
    argv = [sys.executable, "-m", "tests.bench.real_models", str(model)]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    subprocess.run(argv, check=True, cwd=ROOT, env=quiet, timeout=MODEL_LIMIT_S)
    measured = measure(scratch, model)
    for table in (_memory(measured), _steps(measured)):
        console.print(table)
    return _claims(measured)


# ---------------------------------------------------------------- the run


def measure(scratch: Path, model: Path) -> Measured:
    """Raises AssertionError, with the ends of the logs, where the run does not do what it should."""
    tables = example_tables(model)
    worker_settings = tables.pop("rollout") | {"cpu_bind": last_core()}
    options = [
        arg
        for key, value in worker_settings.items()
        for arg in ("--set", f"rollout.{key}={toml_value(value)}")
    ]
    server = LocalServer(scratch / "store")
    roots: dict[int, str] = {}
    with MemoryWatch(lambda: dict(roots), process_name) as watch, server:
        roots[server.pid] = "S3 server"
        os.environ.update(server.env)
        # The processes start in folders of their own, and find our modules and the example's reward all the same.
        known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), str(EXAMPLE.parent), *known]))
        with LocalRun(scratch / "run", f"{server.url}/size", model, **tables) as local:
            trainer = local.start_trainer()
            roots[trainer.pid] = "trainer"
            worker = local.start_worker("w1", *options, engine="vllm")
            roots[worker.pid] = "worker"
            serving = _serving(local, trainer, worker)
            limit_s = STEPS * STEP_LIMIT_S
            local.wait("the steps", lambda: local.steps() >= STEPS, limit_s, trainer, worker)
            for child in (trainer, worker):
                assert local.finish(child, END_LIMIT_S) == 0, local.logs()
            served = served_versions(local.log("w1"))
            assert served and served[-1][0] == STEPS, f"the worker served {served}\n{local.logs()}"
            deltas, full = _bytes(f"{server.url}/size")
            return Measured(local.metrics(), watch.readings, serving, served, deltas, full)


def example_tables(model: Path) -> dict[str, dict[str, Any]]:
    """The example, but for its places and its length."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    del tables["run"]["store"], tables["orchestrator"]["bind"]  # LocalRun has its own
    tables["model"]["path"] = str(model)
    tables["environment"]["args"]["path"] = str(EXAMPLE.parent / "questions.jsonl")
    tables["trainer"] |= {"steps": STEPS, "out": "out"}
    tables["orchestrator"]["batch_groups"] = BATCH_GROUPS
    tables["eval"]["prompts"] = 8
    return tables


def process_name(parent: str, command: str) -> str:
    """What a process is called in the tables, by its parent's name there and its command line."""
    if parent == "trainer" and " orchestrator " in f"{command} ":
        return "orchestrator"
    if parent == "worker" and ("EngineCore" in command or "spawn_main" in command):
        return "vLLM engine"
    return parent


def _serving(local: LocalRun, trainer: Any, worker: Any) -> float:
    """Waits for: a status in which the worker serves. Seconds since the epoch."""

    def serves() -> bool:
        status = local.status()
        return status is not None and any(each.state in ("serving", "updating") for each in status.workers)

    local.wait("the engine", serves, START_LIMIT_S, trainer, worker)
    return time.time()


def served_versions(log: str) -> list[tuple[int, float]]:
    """(version, seconds of the engine's pause) of every version after the first, from a worker's log."""
    return [
        (int(found[1]), float(found[2]))
        for found in re.finditer(r"version served.*?version=(\d+).*?pause_s=([\d.e-]+)", log)
    ]


def _bytes(url: str) -> tuple[dict[int, tuple[int, float]], int]:
    from async_rl.store import open_store
    from async_rl.weights.report import full_bytes, list_rows
    from async_rl.weights.run import open_run

    store = open_store(url)
    try:
        run = open_run(store)
        deltas = [row for row in list_rows(store, run) if row.kind == "delta"]
        return {row.step: (row.nbytes, row.changed_part or 0.0) for row in deltas}, full_bytes(run)
    finally:
        store.close()


# ---------------------------------------------------------------- what is said of it


def _step_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "reward/mean" in row]


def phases_of(rows: Sequence[dict[str, Any]], serving: float) -> list[Phase]:
    """The start, until the worker serves; each step, until its line was written; the end."""
    bounds = [float("-inf"), serving, *(row["time"] for row in _step_rows(rows)), float("inf")]
    names = ["start", *(f"step {row['step']}" for row in _step_rows(rows)), "end"]
    return [Phase(name, *pair) for name, pair in zip(names, pairwise(bounds), strict=True)]


def _memory(measured: Measured) -> Table:
    names = sorted({name for reading in measured.readings for name in reading.parts})
    table = Table("GB", "sum, at its greatest", *names, title="memory (PSS)")
    for phase in phases_of(measured.rows, measured.serving):
        if (most := highest(measured.readings, phase.begin, phase.end)) is not None:
            parts = [f"{most.parts.get(name, 0) / 1e9:.2f}" for name in names]
            table.add_row(phase.name, f"{most.total / 1e9:.2f}", *parts)
    peaks = [max(reading.parts.get(name, 0) for reading in measured.readings) for name in names]
    table.add_row("each by itself, at its greatest", "", *(f"{peak / 1e9:.2f}" for peak in peaks))
    return table


def _steps(measured: Measured) -> Table:
    table = Table(
        "step", "s", "of it waiting", "samples", "tokens", "reward", "lag", "in flight", "delta", "changed"
    )
    for row in _step_rows(measured.rows):
        nbytes, changed = measured.deltas.get(row["step"], (0, 0.0))  # none where it went with the next one
        table.add_row(
            str(row["step"]),
            f"{row['time/step_s']:.1f}",
            f"{row['time/wait_batch_s']:.1f}",
            str(row["samples"]),
            str(row["tokens"]),
            f"{row['reward/mean']:.2f}",
            f"{row['lag/mean']:.2f}, at most {row['lag/max']}",
            f"at most {row['lag/in_flight_max']}",
            f"{nbytes / 1e6:.1f} MB",
            f"{100 * changed:.1f} %",
        )
    return table


def _claims(measured: Measured) -> list[Claim]:
    peak = max(measured.readings, key=lambda reading: reading.total)
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])
    rows = _step_rows(measured.rows)
    computed = [row["time/step_s"] - row["time/wait_batch_s"] for row in rows]
    each = sum(nbytes for nbytes, _ in measured.deltas.values()) / len(measured.deltas)
    changed = sum(part for _, part in measured.deltas.values()) / len(measured.deltas)
    pauses = [pause for _, pause in measured.served]
    return [
        Claim(
            "memory of a run of 135M weights, all processes",
            peak.total / 1e9,
            unit=" GB",
            at_most=LIMIT_GB,
            how=", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in largest),
        ),
        Claim(
            "computing in a step of it",
            sum(computed) / len(computed),
            unit=" s",
            how=f"{STEPS} steps of {sum(row['samples'] for row in rows) / len(rows):g} samples, "
            f"{sum(row['tokens'] for row in rows) / sum(computed):.1f} loss tokens/s",
        ),
        Claim(
            "a version of it / a full one",
            each / measured.full_bytes,
            how=f"{each / 1e6:.1f} of {measured.full_bytes / 1e6:.1f} MB, {100 * changed:.1f} % of the weights "
            f"change; the engine stands still for {max(pauses):.2f} s at most",
        ),
    ]
