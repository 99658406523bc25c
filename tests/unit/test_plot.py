"""metrics.jsonl as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.plot import Metrics, plot_run, read_metrics
from async_rl.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": number,
        "version": number,
        "reward/mean": 0.1 * number,
        "lag/max": 2,
        "lag/mean": 1.5,
    } | fields


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"step": version, "eval/version": version, "eval/reward": reward, "eval/prompts": 8}


def test_lines_are_told_apart_and_evaluations_stand_in_the_order_of_their_versions(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [step(1), evaluation(3, 0.6), evaluation(0, 0.3), step(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "rew')
    metrics = read_metrics(path)
    assert [row["step"] for row in metrics.steps] == [1, 2], "a line cut off by a kill is passed over"
    assert [row["eval/version"] for row in metrics.evals] == [0, 3]


def test_missing_metrics_are_an_error_of_ours(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "metrics",
    [
        Metrics([step(n) for n in range(1, 6)], [evaluation(0, 0.3), evaluation(5, 0.9)]),
        Metrics([step(1, **{"lag/mean": None, "reward/mean": None})], []),
        Metrics([], []),
    ],
    ids=["whole", "without numbers", "empty"],
)
def test_a_run_becomes_a_png_with_and_without_numbers(tmp_path: Path, metrics: Metrics):
    path = tmp_path / "plot.png"
    plot_run(metrics, path, max_lag=4)
    assert path.read_bytes().startswith(PNG)


def test_the_lines_are_those_of_the_metrics(tmp_path: Path, monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    plot_run(
        Metrics([step(1), step(2)], [evaluation(0, 0.3), evaluation(2, 0.7)]), tmp_path / "p.png", max_lag=4
    )
    rewards, lags = drawn[0].axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in rewards.lines + lags.lines
    }
    assert lines["training batches"] == ([1, 2], [0.1, 0.2])
    assert lines["held-out prompts"] == ([0, 2], [0.3, 0.7])
    assert lines["mean"] == ([1, 2], [1.5, 1.5]) and lines["max"] == ([1, 2], [2, 2])
    assert lines["limit 4"][1] == [4, 4]
