"""`async-rl model`: models to try things with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from workers.tiny_model import TinyModel

__all__ = ["command"]


@click.group()
def command() -> None:
    """Make a tiny model to try things with."""


@command.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The model's folder.",
)
@click.option(
    "--task",
    type=click.Choice(["reverse", "arithmetic"]),
    default="reverse",
    show_default=True,
    help="The environment it is warmed up on.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of its initial weights."
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=400,
    show_default=True,
    help="Limit of the warm-up, which ends when its goal is reached; 0: none, random weights.",
)
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def tiny(folder: Path, task: str, seed: int, steps: int, force: bool) -> None:
    """Make a language model of one million weights that is right now and then, to be improved by a run.

    It spells in single characters, loads wherever a Qwen3 does, and takes less than a minute on two cores:
    a short supervised warm-up ends when the reward on held-out prompts is 0.30 to 0.45.
    """
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"making a tiny model for {task} in {folder}")
    from workers.tiny_model import TinySettings, finished, make_tiny_model
    from workers.warm_up import Measure

    settings = TinySettings(task, seed, steps)
    known = finished(folder)
    if known is not None and known.settings == settings and not force:
        _report(folder, known, "is there already, with the same settings; it is used again")
        return

    told = False

    def show(measure: Measure) -> None:
        nonlocal told
        if measure.blurred and not told:
            told = True
            console.print(
                "  from here on demonstrations are wrong at random, so that the reward falls: a model that knows the "
                "task and is unsure of it is what reinforcement can work on",
                highlight=False,
            )
        console.print(
            f"  warm-up step {measure.step}  loss {measure.loss:.2f}  held-out reward {measure.reward:.2f}",
            highlight=False,
        )

    _report(folder, make_tiny_model(folder, settings, force=force, on_measure=show), "is ready")


def _report(folder: Path, made: TinyModel, what: str) -> None:
    warm_up = f"{made.steps} warm-up steps" if made.steps else "random weights, no warm-up"
    click.echo(
        f"the tiny model in {folder} {what}: {made.parameters / 1e6:.2f}M weights, {warm_up}, "
        f"held-out reward {made.reward:.2f}"
    )
