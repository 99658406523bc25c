"""Advantages: the reward relative to a baseline; and what becomes of answers that were cut off."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algo.advantages import (
    AdvantageConfig,
    batch_advantages,
    group_advantages,
    overlong_penalty,
)

rewards = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=32)


def test_the_advantage_is_the_distance_from_the_mean_undivided_by_the_deviation():
    assert group_advantages([0.0, 0.0, 0.0, 1.0]).tolist() == [-0.25, -0.25, -0.25, 0.75]


@given(reward=st.floats(-1e30, 1e30), count=st.integers(1, 64))
def test_equal_rewards_have_exactly_no_signal(reward: float, count: int):
    assert group_advantages([reward] * count).tolist() == [0.0] * count


@given(rewards)
def test_they_sum_to_nothing_and_keep_the_differences(values: list[float]):
    advantages = group_advantages(values).astype(np.float64)
    scale = max(1.0, max(map(abs, values)))
    assert abs(advantages.sum()) <= 1e-5 * scale * len(values)
    assert np.allclose(advantages - advantages[0], np.array(values) - values[0], atol=1e-6 * scale)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_has_no_mean_is_refused(values: list[float]):
    with pytest.raises(ValueError):
        group_advantages(values)


# ---------------------------------------------------------------- the other estimators


def advantages(groups: list[list[float]], estimator: str) -> list[list[float]]:
    found = batch_advantages(groups, AdvantageConfig(estimator=estimator))  # type: ignore[arg-type]
    assert all(each.dtype == np.float32 for each in found)
    return [each.tolist() for each in found]


def reference(groups: list[list[float]], estimator: str) -> list[list[float]]:
    """In plain loops."""
    everything = [reward for group in groups for reward in group]
    result = []
    for group in groups:
        mean = math.fsum(group) / len(group)
        row = []
        for i, reward in enumerate(group):
            if estimator == "group_mean":
                row.append(reward - mean)
            elif estimator == "group_mean_std":
                variance = math.fsum((r - mean) ** 2 for r in group) / len(group)
                row.append((reward - mean) / (math.sqrt(variance) + 1e-4))
            elif estimator == "leave_one_out":
                others = group[:i] + group[i + 1 :]
                row.append(reward - math.fsum(others) / len(others) if others else 0.0)
            else:
                row.append(reward - math.fsum(everything) / len(everything))
        result.append(row)
    return result


@pytest.mark.parametrize("estimator", ["group_mean", "group_mean_std", "leave_one_out", "global"])
@settings(max_examples=15)
@given(groups=st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), max_size=5))
def test_each_estimator_is_its_formula(estimator: str, groups: list[list[float]]):
    for found, wanted in zip(advantages(groups, estimator), reference(groups, estimator), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_the_group_mean_is_bit_for_bit_what_it_was():
    group = [0.1, 0.7, 0.30000001, 1.0]
    assert advantages([group], "group_mean") == [group_advantages(group).tolist()]


@pytest.mark.parametrize("estimator", ["group_mean", "group_mean_std", "leave_one_out", "global"])
def test_equal_rewards_have_no_signal_under_any_estimator(estimator: str):
    assert advantages([[0.1] * 3, [0.1] * 5], estimator) == [[0.0] * 3, [0.0] * 5]


def test_with_a_global_baseline_a_group_that_agrees_has_a_signal():
    assert advantages([[1.0, 1.0], [0.0, 0.0]], "global") == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out", "global"])
def test_a_reward_that_is_no_number_is_refused_by_every_estimator(estimator: str):
    with pytest.raises(ValueError):
        advantages([[1.0, float("nan")]], estimator)


def test_the_overlong_penalty_grows_over_the_buffer_only():
    config = AdvantageConfig(truncated="penalty", overlong_buffer=0.2, overlong_penalty=0.5)
    told = [overlong_penalty(tokens, 100, config) for tokens in (1, 80, 85, 90, 100, 120)]
    assert told == pytest.approx([0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert overlong_penalty(100, 100, AdvantageConfig()) == 0.0
    with pytest.raises(ValueError, match="max_tokens"):
        overlong_penalty(100, 0, config)
