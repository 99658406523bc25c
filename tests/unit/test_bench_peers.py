"""What the benches against other trainers compute by themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_rl.algo.packing import best_fit_decreasing
from tests.bench.peers.crossing import crossing
from tests.bench.peers.runs import SideFailed, run_side
from tests.bench.peers.samples import draw, load, save
from tests.bench.peers.slow import FLOOR_S, LIMIT_S, SlowReverse, latency_s
from tests.bench.reward import _claim, points_of
from tests.bench.throughput import gradient_distance, row_limit


def test_a_reward_is_reached_where_the_line_between_two_measurements_crosses_it() -> None:
    assert crossing([(0, 0.3), (10, 0.8), (20, 1.0), (30, 0.2)], 0.9) == 15
    assert crossing([(0, 0.3), (10, 0.9)], 0.9) == 10
    assert crossing([(4, 0.95)], 0.9) == 4
    assert crossing([(0, 0.3), (10, 0.89)], 0.9) is None


def test_a_measurement_counts_from_the_end_of_its_step_not_from_its_arrival() -> None:
    rows = [
        {"step": 0, "eval/reward": 0.3, "time": 101.0},
        {"step": 9, "reward/mean": 0.5, "time": 108.0},
        {"step": 10, "reward/mean": 0.6, "time": 110.0},
        {"step": 11, "reward/mean": 0.6, "time": 112.0},
        {"step": 10, "eval/reward": 0.7, "time": 119.0},
    ]
    assert points_of(rows, 100.0) == [(0.0, 0.3), (10.0, 0.7)]


def test_samples_have_a_long_tail_and_survive_the_disk(tmp_path: Path) -> None:
    samples = draw(1, groups=8, group=8, vocabulary=32_000, longest=1024)
    again = load(save(samples, tmp_path / "samples.npz"))
    pairs, pairs_again = samples.pairs(), again.pairs()
    assert len(pairs) == 64 and samples.group == again.group == 8
    assert samples.inputs == sum(len(prompt) + len(completion) for prompt, completion in pairs)
    for one, other in zip(pairs, pairs_again, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
    assert np.array_equal(pairs[0][0], pairs[7][0])  # one prompt per group
    assert 3 < samples.rectangle / samples.inputs < 6  # of the padded batch, most is padding


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_limit_of_a_row_makes_as_many_rows_as_the_peer_has(rows: int) -> None:
    samples = draw(1, groups=8, group=8, vocabulary=100, longest=300)
    lengths = (samples.prompts_S + samples.completions_S - 1).tolist()
    assert len(best_fit_decreasing(lengths, row_limit(samples, rows))) == rows


def test_the_distance_of_gradients_is_relative_to_the_peers(tmp_path: Path) -> None:
    one, other = (
        {"a": np.array([3.0, 4.0]), "b": np.array([1.0])},
        {"a": np.array([3.0, 4.0]), "b": np.zeros(1)},
    )
    save_file(one, tmp_path / "one")
    save_file(other, tmp_path / "other")
    assert gradient_distance(tmp_path / "one", tmp_path / "other") == pytest.approx(1 / 5)
    save_file({"a": np.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="different tensors"):
        gradient_distance(tmp_path / "one", tmp_path / "other")


def test_the_judge_is_slow_with_a_tail_and_at_once_with_held_out_prompts() -> None:
    task = SlowReverse()
    train = [latency_s(task.prompt("train", n).messages[-1].content, "abcd") for n in range(1000)]
    assert min(train) >= FLOOR_S and max(train) <= LIMIT_S
    assert 0.8 < np.mean(np.array(train) <= 1.0) < 0.92
    assert max(train) > 1.5
    assert all(latency_s(task.prompt("eval", n).messages[-1].content, "abcd") == 0.0 for n in range(50))


def test_a_side_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match="no_such_module"):
        run_side(sys.executable, "no_such_module", {"threads": 1}, tmp_path / "side", 60.0)


def test_the_medians_of_the_seeds_are_compared_and_a_run_that_never_gets_there_counts() -> None:
    def side(*seconds: float) -> list[dict[str, Any]]:
        return [
            {"points": [(0.0, 0.4), (each, 0.9 if each < 300 else 0.5)], "steps": 10} for each in seconds
        ]

    assert _claim("", side(10, 30, 20), side(40, 10, 20)).value == 1
    assert _claim("", side(10, 300, 20), side(40, 10, 20)).value == 1
    assert _claim("", side(10, 300, 300), side(40, 10, 20)).value == float("inf")
    assert _claim("", side(30), side(300)).value == 30 / 300  # at most: it took longer than the limit
