"""A sample with an advantage of 0 has no gradient: it is counted, and not computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.algo.losses import REGISTRY, DppoTv, totals_of
from async_rl.algo.losses.custom import Custom
from async_rl.algo.packing import MicroBatch, TrainSample, pack
from tests.learner_support import CPU, gradients, make_learner, make_samples, save_tiny_model
from workers.process_group import RankGroup, rank_group
from workers.updates import train_batch, with_signal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    torch.set_num_threads(1)
    with rank_group(CPU, 60.0) as alone:
        yield alone


def half_silent(count: int) -> list[TrainSample]:
    samples = make_samples(count, seed=3)
    return [
        dataclasses.replace(sample, advantage=0.0) if index % 2 else sample
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_gradients_are_those_of_the_whole_batch(model: Path, group: RankGroup, name: str) -> None:
    learner = make_learner(model, group, loss=REGISTRY[name].config())
    samples = half_silent(12)
    assert not learner.every_sample_counts
    found = []
    for computed in (samples, with_signal(samples)):
        stats = learner.forward_backward(pack(computed, 1000, 1)[0], totals_of(samples))
        found.append((stats, gradients(learner)))
    (whole, expected), (half, gradient) = found
    assert half.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-9)
    assert half.tokens < whole.tokens
    for each, value in expected.items():
        torch.testing.assert_close(gradient[each], value, rtol=1e-4, atol=1e-8)


def rows_computed(learner: Any, group: RankGroup, samples: list[TrainSample]) -> int:
    """Samples of the rows that a step goes over."""
    seen: list[MicroBatch] = []
    own = learner.forward_backward

    def noted(rows: list[MicroBatch], *rest: Any) -> Any:
        seen.extend(rows)
        return own(rows, *rest)

    learner.forward_backward = noted
    train_batch(learner, group, samples, learner._trainer)
    return sum(row.samples for row in seen)


def test_a_step_goes_over_the_samples_that_have_one(model: Path, group: RankGroup) -> None:
    assert rows_computed(make_learner(model, group), group, half_silent(12)) == 6


def nothing(inputs: Any, config: Any) -> torch.Tensor:
    return inputs.logprobs_T * inputs.advantages_T


@pytest.mark.parametrize(
    "loss", [DppoTv(entropy_coef=0.1), Custom(custom=f"{__name__}:nothing")], ids=["entropy", "custom"]
)
def test_where_the_loss_has_other_terms_all_are_computed(model: Path, group: RankGroup, loss: Any) -> None:
    assert rows_computed(make_learner(model, group, loss=loss), group, half_silent(12)) == 12


def test_a_step_in_which_none_has_one_is_made_and_not_refused(model: Path, group: RankGroup) -> None:
    learner = make_learner(model, group)
    samples = [dataclasses.replace(sample, advantage=0.0) for sample in make_samples(4)]
    updates = train_batch(learner, group, samples, learner._trainer)
    assert updates.made == 1
    assert updates.stats.grad_norm == 0.0
