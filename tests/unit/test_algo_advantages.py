"""Advantages: the reward relative to the group's mean, nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algo.advantages import group_advantages

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
