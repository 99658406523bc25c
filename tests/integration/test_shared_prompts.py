"""A prompt that is computed once for all samples of its group: the same loss and gradients, of fewer tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from async_rl.algo.losses import DppoTv, LossConfig, totals_of
from async_rl.algo.losses.sequences import Gspo
from async_rl.algo.packing import TrainSample, pack
from tests.learner_support import CPU, gradients, make_learner, make_samples, save_tiny_model
from workers.process_group import RankGroup, rank_group
from workers.updates import train_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    torch.set_num_threads(1)
    with rank_group(CPU, 60.0) as alone:
        yield alone


def in_groups(count: int) -> list[TrainSample]:
    """Four samples of each prompt, of different lengths; prompts of 1 token among them."""
    samples = make_samples(count, seed=5)
    return [
        dataclasses.replace(sample, prompt_P=samples[index - index % 4].prompt_P)
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("loss", [DppoTv(), Gspo()], ids=["by_token", "by_sequence"])
def test_gradients_are_those_of_samples_with_a_prompt_each(model: Path, group: RankGroup, loss: LossConfig):
    samples, found, tokens = in_groups(16), [], []
    for share, limit, ranks in ((False, 1000, 1), (True, 1000, 1), (True, 30, 2)):
        learner = make_learner(model, group, loss=loss)
        # What several ranks would have: their gradients are summed.
        rows = [row for rows in pack(samples, limit, ranks, share=share) for row in rows]
        stats = learner.forward_backward(rows, totals_of(samples))
        found.append((stats, gradients(learner)))
        tokens.append(sum(row.tokens for row in rows))
    assert tokens[1] < 0.8 * tokens[0]
    (expected, reference), *others = found
    for stats, gradient in others:
        assert stats.loss == pytest.approx(expected.loss, rel=1e-5)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        for name, each in reference.items():
            torch.testing.assert_close(gradient[name], each, rtol=1e-4, atol=1e-7)


def test_the_trainer_shares_where_attention_understands_it(
    model: Path, group: RankGroup, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bool] = []

    def noted(samples, limit, ranks, *, share):  # type: ignore[no-untyped-def]
        asked.append(share)
        return pack(samples, limit, ranks, share=share)

    monkeypatch.setattr("workers.updates.pack", noted)
    for changes in ({}, {"share_prompts": "off"}):
        learner = make_learner(model, group, **changes)
        train_batch(learner, group, in_groups(8), learner._trainer)
    monkeypatch.setattr("workers.packed_attention.fits", lambda model: False)
    assert not make_learner(model, group).shares_prompts
    assert asked == [True, False]
