"""A run in bad weather: real processes and a seeded schedule of faults for as long as is asked for.

    python -m tests.chaos.storm --minutes 10 --seed 7

A store (SeaweedFS behind s3_proxy.py), a trainer, its orchestrator as a process of its own, and workers with the
reference engine, that reach the orchestrator through socket_proxy.py; the spool is on a small disk of its own where
one can be mounted. faults.py does to them what the seed says. When the time is over the weather clears, the run must
get on, all are stopped as an operator would, and evidence.py says whether anything was lost, trained twice, too old,
served wrong, or passed over for its length. A run that stands still, or a process that ends by itself, is a failure;
it is shown with the seed and the end of every log.

How the processes share two cores is not in the seed: the same seed gives the same faults in the same order, not the
same run.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import msgspec

from async_rl.procs import stop_signals
from async_rl.store import StoreConfig, open_store
from async_rl.store.local_server import LocalServer
from orchestrator.config import OrchestratorConfig
from tests.chaos.evidence import Line, Versions, failures, history_of, left_in, read_log
from tests.chaos.faults import FAULTS, Site, Still
from tests.chaos.lives import Outcome
from tests.chaos.prompts import LONG_TOKENS, is_flat, is_long
from tests.chaos.s3_proxy import S3Proxy
from tests.chaos.small_disk import SmallDisk
from tests.chaos.socket_proxy import SocketProxy
from tests.runs import LocalRun

__all__ = ["Plan", "play"]

MAX_LAG = 3
BATCH = 2
STEPS_AFTER = 3
"""In fair weather again, so many more show that the run gets on."""
GAP_S = (1.0, 6.0)
"""Of fair weather between two faults: some fall into the start of what the one before has killed."""
STOP_LIMIT_S = 90.0
STILL_S = 120.0
"""Without a step for so long, in fair weather: the starts of all processes, one after another, on busy cores."""


def settings(seed: int, spool: Path) -> dict[str, dict[str, Any]]:
    return {
        "run": {"seed": seed},
        "environment": {"name": "tests.chaos.prompts:Lengths"},
        "sampling": {"group_size": 2, "max_tokens": LONG_TOKENS},
        "orchestrator": {
            "batch_groups": BATCH,
            "max_lag": MAX_LAG,
            "lease_s": 6.0,
            "heartbeat_s": 0.5,
            "straggler_hold_s": 5.0,  # as by default: with less the long ones are dropped
            "max_attempts": 50,
            "final_eval_s": 0.0,
            "spool": str(spool),
        },
        "trainer": {
            "steps": 1_000_000,
            "checkpoint_every": 5,
            "keep_checkpoints": 2,
            "batch_wait_s": 600.0,
        },
        "weights": {"poll_s": 1.0, "keep_versions": 32, "gc_every": 16, "gc_grace_s": 900.0},
        "store": {"read_timeout_s": 10.0},
    }


class Plan(NamedTuple):
    """`only`: of the faults whose names hold this word; one at least. `without`: a guard (delivery.GUARDS) that the
    processes are started without."""

    seed: int
    seconds: float
    workers: int = 2
    only: str = ""
    without: str = ""


class Server(Protocol):
    endpoint: str
    env: dict[str, str]


def play(
    plan: Plan,
    folder: Path,
    url: str,
    server: Server,
    model: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """One storm. Raises Still, with every log's end, where the run does not get on or a process ends by itself."""
    with closing(SmallDisk(folder / "disk")) as disk:
        tables = settings(plan.seed, disk.folder / "spool")
        counts = _rage(plan, tables, folder, url, server, model, disk, say)
        return check(folder / "test.log", tables, server, url, counts)


def _rage(
    plan: Plan,
    tables: dict[str, dict[str, Any]],
    folder: Path,
    url: str,
    server: Server,
    model: Path,
    disk: SmallDisk,
    say: Callable[[str], None],
) -> dict[str, int]:
    """How often each fault was."""
    chance = random.Random(plan.seed)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        run = stack.enter_context(LocalRun(folder, url, model, **tables))
        sockets = stack.enter_context(SocketProxy(run.address))
        root = "/" + url.removeprefix("s3://")
        s3 = stack.enter_context(S3Proxy(server.endpoint, seed=plan.seed, root=root))
        run.dial = sockets.address
        environment = {**server.env, "AWS_ENDPOINT_URL": s3.endpoint}
        site = stack.enter_context(Site(run, chance, folder / "test.log", environment, plan.without))
        site.sockets, site.s3, site.disk = sockets, s3, disk
        names = [f"w{number}" for number in range(1, plan.workers + 1)]
        site.begin(names, STILL_S)
        until = time.monotonic() + plan.seconds
        kinds = [name for name in FAULTS if plan.only in name]
        order: list[str] = []
        while not counts or time.monotonic() < until:
            order = order or chance.sample(kinds, len(kinds))  # each comes up before one comes again
            name = order.pop()
            began = time.monotonic()
            note = FAULTS[name](site)
            counts[note or name] += 1
            say(f"{time.monotonic() - began:6.1f} s  {note or name}")
            site.watch(chance.uniform(*GAP_S), STILL_S)
        site.clear()
        site.get_on(STEPS_AFTER, STILL_S)
        site.stop(STOP_LIMIT_S)
    return dict(counts)


def check(
    log: Path, tables: dict[str, dict[str, Any]], server: Server, url: str, counts: dict[str, int]
) -> Outcome:
    lines = read_log(log)
    history = history_of(lines)
    config = msgspec.convert(tables["orchestrator"], OrchestratorConfig)
    left = left_in(Path(config.spool), config, len(history.steps))
    found, groups = failures(lines, history, left)
    with closing(open_store(url, StoreConfig(endpoint_url=server.endpoint))) as store:
        found += Versions(store).wrong(lines, history, MAX_LAG)
    trained = set(history.trained)
    flat = sorted(filter(is_flat, trained))
    if flat:
        found.append(f"trained without a signal: {flat}")
    killed = Counter(line["killed"].split(" ")[1] for line in lines if "killed" in line)
    return Outcome(
        found, {"faults": counts, "at named points": dict(killed), **groups, **by_length(lines, trained)}
    )


def by_length(lines: list[Line], trained: set[int]) -> dict[str, dict[str, int]]:
    """What became of the prompts with a signal up to the last one trained. That none is lost, evidence.py sees to;
    here it is seen whom the drops fall on."""
    too_old = {line["settled"] for line in lines if line.get("reason") == "lag"} - trained
    reached = {ordinal for ordinal in range(max(trained, default=-1) + 1) if not is_flat(ordinal)}
    return {
        name: {
            "reached": len(those),
            "trained": len(those & trained),
            "dropped for lag": len(those & too_old),
            "in hand": len(those - trained - too_old),
        }
        for name in ("long", "short")
        for those in [{ordinal for ordinal in reached if is_long(ordinal) == (name == "long")}]
    }


@click.command()
@click.option("--minutes", default=2.0, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--only", default="", metavar="WORD", help="Faults whose names hold this word.")
@click.option("--without", default="", metavar="GUARD", help="Start the processes without this guard.")
@click.option(
    "--each", default=10.0, show_default=True, help="Minutes of one storm; the next has the next seed."
)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave the logs here.")
def main(
    minutes: float, seed: int, workers: int, only: str, without: str, each: float, keep: Path | None
) -> None:
    """Exit status 1 where a storm failed; its seed is in its line."""
    from workers.tiny_model import TinySettings, make_tiny_model

    failed = 0
    with stop_signals(), tempfile.TemporaryDirectory(prefix="storm-") as scratch:
        model = Path(scratch) / "model"
        make_tiny_model(model, TinySettings(steps=0))
        with LocalServer(Path(scratch) / "store", grace_s=0) as server:
            os.environ.update(server.env)
            left = minutes * 60
            while left > 0:
                seconds = min(left, each * 60)
                folder = (keep or Path(scratch)) / f"seed-{seed}"
                click.echo(f"seed {seed}: {seconds:.0f} s")
                try:
                    plan = Plan(seed, seconds, workers, only, without)
                    outcome = play(plan, folder, f"{server.url}/storm-{seed}", server, model, click.echo)
                except (Still, AssertionError) as error:
                    outcome = Outcome([str(error)], {})
                for name, count in outcome.counts.items():
                    click.echo(f"    {name}: {count}")
                for failure in outcome.failures:
                    click.echo(f"    FAILED (seed {seed}) {failure}")
                failed += bool(outcome.failures)
                left -= seconds
                seed += 1
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
