"""Which losses stay right with lag: reward on the reverse task after so many steps, and steps to a reward of 0.95.

    python -m tests.bench stability                          five losses and none, lag 0, 4, 8, three seeds
    python -m tests.bench.stability --losses all --lags 0,4,8,16 --docs

Whole runs in one process each (simulated.py): a model of 108,000 weights, 16 prompts of 8 samples per step, and every
group trained exactly max_lag steps after it was sampled. All losses have their own defaults, and the same learning
rate, which is high for this model: 6e-4, where plain on-policy training still learns without trouble.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from tests.bench.claims import Claim

__all__ = ["CONTROL", "DEFAULT", "Cell", "Outcome", "cells_of", "picture", "run"]

DEFAULT, CONTROL = "dppo_tv", "reinforce"
LOSSES = (DEFAULT, "ppo_clip", "tis_token", "cispo", "icepop", CONTROL)
ALL_LOSSES = (
    DEFAULT,
    "ppo_clip",
    "decoupled",
    "tis_token",
    "tis_sequence",
    "cispo",
    "gspo",
    "icepop",
    CONTROL,
)
LAGS = (0, 4, 8)
SEEDS = (1, 2, 3)
STEPS = 150
GOAL = 0.95
LEARNING_RATE = 6e-4
MEASURE_EVERY = 10
LIMIT_S = 900.0
"""Of one run."""
WIDTH: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 160, "head_dim": 18}
SETTINGS: dict[str, dict[str, Any]] = {
    "decoupled": {"proximal": "interpolated"},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
}
"""As their documentation asks for where there is lag and one minibatch per step."""


class Outcome(NamedTuple):
    loss: str
    lag: int
    seed: int
    rewards: tuple[float, ...]  # held out, every MEASURE_EVERY steps, from step 0 on
    lag_seen: int  # the greatest
    seconds: float

    @property
    def steps_to_goal(self) -> float:
        """Infinite where it was not reached."""
        reached = (index * MEASURE_EVERY for index, each in enumerate(self.rewards) if each >= GOAL)
        return next(reached, float("inf"))


class Cell(NamedTuple):
    """One loss at one lag, over the seeds."""

    reward: float  # mean at the end
    worst: float
    steps_to_goal: float  # median


def cells_of(outcomes: Iterable[Outcome]) -> dict[tuple[str, int], Cell]:
    by_place: dict[tuple[str, int], list[Outcome]] = {}
    for each in outcomes:
        by_place.setdefault((each.loss, each.lag), []).append(each)
    return {
        place: Cell(
            statistics.fmean(each.rewards[-1] for each in runs),
            min(each.rewards[-1] for each in runs),
            statistics.median(each.steps_to_goal for each in runs),
        )
        for place, runs in by_place.items()
    }


def run(scratch: Path, console: Console) -> list[Claim]:
    outcomes = play(scratch, console, LOSSES, LAGS, SEEDS)
    console.print(table(outcomes))
    cells = cells_of(outcomes)
    deepest = max(LAGS)
    ours, none = cells[DEFAULT, deepest], cells[CONTROL, deepest]
    how = f"{len(SEEDS)} seeds, {STEPS} steps, learning rate {LEARNING_RATE:g}, every group {deepest} steps old"
    return [
        Claim(f"{DEFAULT}: reward at lag {deepest}, mean", ours.reward, at_least=GOAL, how=how),
        Claim(
            f"{DEFAULT}: steps to {GOAL} at lag {deepest}, median",
            ours.steps_to_goal,
            at_most=STEPS,
            how=how,
        ),
        Claim(
            f"no correction: reward at lag {deepest}, mean",
            none.reward,
            at_most=ours.reward - 0.05,
            how=how,
        ),
        Claim(f"{DEFAULT}: reward at lag 0, mean", cells[DEFAULT, 0].reward, how=how),
    ]


def play(
    scratch: Path, console: Console, losses: Sequence[str], lags: Sequence[int], seeds: Sequence[int]
) -> list[Outcome]:
    """All runs, as many at a time as there are cores."""
    model = scratch / "model"
    console.print("making the model")
    _make_model(model)
    runs = [(loss, lag, seed) for seed in seeds for lag in lags for loss in losses]
    outcomes: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=context) as pool:
        waiting = [pool.submit(_one, model, *each) for each in runs]
        for done in as_completed(waiting, timeout=LIMIT_S * len(runs)):
            each = done.result()
            outcomes.append(each)
            console.print(
                f"{len(outcomes)}/{len(runs)}  {each.loss}, lag {each.lag}, seed {each.seed}: "
                f"{each.rewards[-1]:.3f}, {GOAL} at {each.steps_to_goal:g}  ({each.seconds:.0f} s)"
            )
    return outcomes


def _make_model(folder: Path) -> None:
    import torch

    from async_rl.envs import make_environment
    from workers.tiny_model import END, PAD, TASKS, new_model, new_tokenizer
    from workers.warm_up import Task, warm_up

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer, tiny = new_model(**WIDTH), new_tokenizer(), TASKS["reverse"]
    warm_up(
        model,
        Task(make_environment(tiny.environment), tokenizer, END, PAD, tiny.blur),
        3000,
        lambda m: None,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _one(model: Path, loss: str, lag: int, seed: int) -> Outcome:
    import torch

    from async_rl.algo.losses import REGISTRY
    from async_rl.log import setup
    from tests.bench.simulated import Settings, Simulated
    from workers.process_group import rank_group
    from workers.tiny_model import TASKS

    setup("bench", "ERROR")
    torch.set_num_threads(1)
    started = time.monotonic()
    config = REGISTRY[loss].config(name=loss, **SETTINGS.get(loss, {}))
    settings = Settings(
        model, TASKS["reverse"].environment, config, lag, seed, STEPS, LEARNING_RATE, batch_groups=16
    )
    with rank_group(torch.device("cpu"), 60.0) as group:
        simulated = Simulated(settings, group)
        rewards, greatest = [simulated.held_out(0)], 0
        for done in simulated.run():
            greatest = max(greatest, done.lag_max)
            if (done.step + 1) % MEASURE_EVERY == 0:
                rewards.append(simulated.held_out(0))
    return Outcome(loss, lag, seed, tuple(rewards), greatest, time.monotonic() - started)


# ---------------------------------------------------------------- what is shown


def table(outcomes: Sequence[Outcome]) -> Table:
    cells = cells_of(outcomes)
    lags = sorted({lag for _, lag in cells})
    shown = Table(
        "loss",
        *(f"lag {lag}" for lag in lags),
        title=f"held-out reward after {STEPS} steps (worst seed); steps to {GOAL}",
    )
    for loss in dict.fromkeys(loss for loss, _ in cells):
        shown.add_row(loss, *(_text(cells[loss, lag]) for lag in lags))
    return shown


def _text(cell: Cell) -> str:
    steps = "never" if cell.steps_to_goal == float("inf") else f"{cell.steps_to_goal:g}"
    return f"{cell.reward:.3f} ({cell.worst:.3f}); {steps}"


def markdown(outcomes: Sequence[Outcome]) -> str:
    cells = cells_of(outcomes)
    lags = sorted({lag for _, lag in cells})
    lines = [
        "| loss | " + " | ".join(f"lag {lag}" for lag in lags) + " |",
        "| --- |" + " --- |" * len(lags),
    ]
    for loss in dict.fromkeys(loss for loss, _ in cells):
        lines.append(f"| `{loss}` | " + " | ".join(_text(cells[loss, lag]) for lag in lags) + " |")
    return "\n".join(lines) + "\n"


def picture(outcomes: Sequence[Outcome], file: Path) -> None:
    """One panel per lag, one line per loss: the mean over seeds of the held-out reward, over steps."""
    from matplotlib.figure import Figure

    lags = sorted({each.lag for each in outcomes})
    figure = Figure(figsize=(4.2 * len(lags), 3.6), layout="constrained")
    panels = figure.subplots(1, len(lags), sharey=True, squeeze=False)[0]
    for panel, lag in zip(panels, lags, strict=True):
        for loss in dict.fromkeys(each.loss for each in outcomes):
            runs = [each.rewards for each in outcomes if each.lag == lag and each.loss == loss]
            means = [statistics.fmean(at) for at in zip(*runs, strict=True)]
            steps = [MEASURE_EVERY * index for index in range(len(means))]
            panel.plot(steps, means, label=loss, linestyle="--" if loss == CONTROL else "-")
        panel.set(title=f"lag {lag}", xlabel="optimizer steps", ylim=(0, 1))
        panel.axhline(GOAL, color="#ccc", linewidth=0.8)
    panels[0].set_ylabel("held-out reward, mean of the seeds")
    panels[-1].legend(fontsize="small")
    figure.savefig(file)


@click.command()
@click.option("--losses", default=",".join(LOSSES), show_default=True, help="Names, or all.")
@click.option("--lags", default=",".join(map(str, LAGS)), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--docs", is_flag=True, help="Write docs/stability.svg, and show the table as markdown.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Also write every run here.")
def main(losses: str, lags: str, seeds: str, docs: bool, file: Path | None) -> None:
    console = Console()
    names = ALL_LOSSES if losses == "all" else tuple(losses.split(","))
    with tempfile.TemporaryDirectory(prefix="stability-") as scratch:
        outcomes = play(
            Path(scratch),
            console,
            names,
            [int(each) for each in lags.split(",")],
            [int(each) for each in seeds.split(",")],
        )
    order = {name: index for index, name in enumerate(names)}
    outcomes.sort(key=lambda each: (order[each.loss], each.lag, each.seed))
    console.print(table(outcomes))
    if file is not None:
        file.write_text(json.dumps([each._asdict() for each in outcomes], indent=1) + "\n")
    if docs:
        folder = Path(__file__).parents[2] / "docs"
        picture(outcomes, folder / "stability.svg")
        console.print(markdown(outcomes))


if __name__ == "__main__":
    main()
