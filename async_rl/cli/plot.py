"""metrics.jsonl as a picture: reward and lag over policy versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from async_rl.errors import ConfigError

__all__ = ["Metrics", "plot_run", "read_metrics"]


class Metrics(Struct, frozen=True):
    """The lines of a metrics.jsonl, by kind (workers/metrics.py names the fields)."""

    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]


def read_metrics(path: Path) -> Metrics:
    """A last line that is not whole (a writer was killed) is passed over. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the metrics in {path}: {error.strerror}") from error
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return Metrics(
        steps=[row for row in rows if "reward/mean" in row],
        evals=sorted((row for row in rows if "eval/reward" in row), key=lambda row: row["eval/version"]),
    )


def plot_run(metrics: Metrics, path: Path, *, max_lag: int) -> None:
    """Write a PNG to `path`: above the rewards, below the lag of the samples of each version's step."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    versions = [row["version"] for row in metrics.steps]

    rewards = _column(metrics, "reward/mean")
    above.plot(versions, rewards, color="tab:blue", alpha=0.45, label="training batches")
    above.plot(
        [row["eval/version"] for row in metrics.evals],
        [row["eval/reward"] for row in metrics.evals],
        color="tab:orange",
        marker="o",
        markersize=4,
        label="held-out prompts",
    )
    above.set_ylabel("mean reward")
    above.set_ylim(0, 1)
    above.legend(loc="lower right")
    above.set_title("reward and lag over policy versions")

    below.plot(versions, _column(metrics, "lag/max"), color="tab:red", alpha=0.45, label="max")
    below.plot(versions, _column(metrics, "lag/mean"), color="tab:red", label="mean")
    below.axhline(max_lag, color="black", linewidth=0.8, linestyle=":", label=f"limit {max_lag}")
    below.set_ylabel("lag (optimizer steps)")
    below.set_xlabel("policy version")
    below.set_ylim(0, 1.6 * (max_lag + 1))  # room for the legend above the limit
    below.legend(loc="upper right", ncols=3)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    figure.savefig(path)


def _column(metrics: Metrics, name: str) -> list[float]:
    return [float("nan") if row.get(name) is None else row[name] for row in metrics.steps]
