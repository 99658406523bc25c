"""By what the sum over tokens is divided: a number of the whole batch, so the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.inputs import LossInputs, sample_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Totals", "denominator", "totals_of", "weighted"]


class Totals(NamedTuple):
    """Of one optimizer update, over all ranks."""

    tokens: int  # loss tokens
    samples: int  # with at least one


class _HasMask(Protocol):
    @property
    def mask_C(self) -> np.ndarray: ...  # type: ignore[type-arg]


def totals_of(samples: Iterable[_HasMask]) -> Totals:
    counts = [int(np.count_nonzero(sample.mask_C)) for sample in samples]
    return Totals(sum(counts), sum(count > 0 for count in counts))


def weighted(loss_T: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """[T]: each token's loss times its weight within its sample."""
    if config.normalise == "sequence":
        return loss_T / sample_tokens(inputs)[inputs.samples_T]
    return loss_T


def denominator(config: LossConfig, totals: Totals, max_tokens: int) -> float:
    """Never 0. `max_tokens`: of a sample, as sampled. Raises ValueError where "constant" has no length."""
    if config.normalise == "token":
        return float(max(totals.tokens, 1))
    samples = max(totals.samples, 1)
    if config.normalise == "sequence":
        return float(samples)
    length = config.length_budget or max_tokens
    if length < 1:
        raise ValueError(
            'loss.normalise = "constant" needs loss.length_budget, or max_tokens of the sampling'
        )
    return float(samples * length)
