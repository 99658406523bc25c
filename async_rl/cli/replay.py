"""`async-rl replay`: train the groups of a recorded run once more, and see whether its losses come out again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from async_rl.cli.options import set_option
from async_rl.errors import ConfigError, TrainingError

__all__ = ["command"]


@click.command("replay")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "begin",
    default="never",
    show_default=True,
    help="never: the initial weights; latest or a step: that checkpoint's.",
)
@click.option(
    "--spool",
    type=click.Path(path_type=Path),
    help="The orchestrator's folder, or a copy of it; by default where the run file has it.",
)
@click.option(
    "--metrics",
    type=click.Path(path_type=Path),
    help="The run's metrics.jsonl: end at the first step that differs from it, with status 1.",
)
@set_option
def command(
    run_file: Path, begin: str, spool: Path | None, metrics: Path | None, overrides: tuple[str, ...]
) -> None:
    """Read the spool of a run, train its batches again on this machine, and write a line per step.

    Nothing is published and nothing is changed; the run may go on meanwhile. The same bits come out on the same kind
    of machine with the run's own settings, from one rank; more ranks differ in the last digits.
    """
    from async_rl.cli.orchestrator import spool_folder
    from async_rl.cli.runfile import read_run_file
    from async_rl.store import open_store
    from orchestrator.recorded import read_recorded
    from workers import replay

    if begin not in ("latest", "never") and not begin.isdigit():
        raise ConfigError(f"--from {begin!r} is neither latest, never nor a step")
    config = read_run_file(run_file, overrides)
    folder = spool or spool_folder(config.orchestrator.spool, config.trainer.out, config.run.store)
    recorded = read_recorded(folder)
    written = replay.read_metrics(metrics) if metrics else {}
    same = 0
    lines = replay.replay(
        open_store(config.run.store, config.store),
        recorded,
        begin=begin,
        model=config.model,
        trainer=config.trainer,
        loss=config.loss,
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        max_lag=config.orchestrator.max_lag,
        advantage=config.advantage,
        max_tokens=config.sampling.max_tokens,
    )
    replayed = 0
    for line in lines:
        click.echo(json.dumps(line))
        replayed += 1
        theirs = written.get(int(line["step"] or 0))
        if theirs is None:
            continue
        name = replay.first_difference(line, theirs)
        if name:
            raise TrainingError(
                f"step {line['step']} is the first that differs: {name} is {line[name]}, it was {theirs.get(name)}",
                hint="same settings, kind of machine and number of ranks? Then look at what happened before it",
            )
        same += 1
    if not replayed:
        there = f"{min(recorded.assigned)} to {max(recorded.assigned)}" if recorded.assigned else "none"
        raise ConfigError(
            f"{folder} does not hold the step to begin with",
            hint=f"steps that it holds: {there}; see --from",
        )
    if metrics:
        click.echo(f"{replayed} steps replayed, {same} compared: identical", err=True)
