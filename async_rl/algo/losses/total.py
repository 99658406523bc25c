"""The loss put together: one function of the registry, what is added to it, and its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.extras import with_extras
from async_rl.algo.losses.inputs import LossInputs, TokenLoss, cleaned
from async_rl.algo.losses.normalisation import weighted
from async_rl.algo.losses.registry import REGISTRY, LossFunction
from async_rl.algo.losses.statistics import Greatest, TokenSums, statistics

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossResult", "policy_loss", "total_of"]


class LossResult(NamedTuple):
    total: Tensor  # scalar with gradient, to be divided by `denominator`
    sums: TokenSums
    greatest: Greatest


def policy_loss(inputs: LossInputs, config: LossConfig, function: LossFunction | None = None) -> LossResult:
    """The loss summed over the tokens where the mask is true, and its statistics. `function`: of a custom loss; else
    that of the registry.

    Whatever stands at a masked position, NaN and inf included, reaches neither the value nor the gradient. mu = 0
    (log mu = -inf) counts as the limit of the ratio. Raises ValueError as `with_extras` does.
    """
    total, inputs, token_loss = _total(inputs, config, function)
    return LossResult(total, *statistics(total, inputs, token_loss))


def total_of(inputs: LossInputs, config: LossConfig, function: LossFunction | None = None) -> Tensor:
    """The loss of `policy_loss` alone."""
    return _total(inputs, config, function)[0]


def _total(
    inputs: LossInputs, config: LossConfig, function: LossFunction | None
) -> tuple[Tensor, LossInputs, TokenLoss]:
    inputs = cleaned(inputs)
    token_loss = (function or REGISTRY[config.name].function)(inputs, config)
    if not isinstance(token_loss, TokenLoss):  # a custom loss may return the tokens' losses alone
        token_loss = TokenLoss(token_loss, inputs.mask_T & False)
    loss_T = with_extras(token_loss.loss_T, inputs, config)
    total = weighted(loss_T, inputs, config).where(inputs.mask_T, 0.0).sum()
    return total, inputs, token_loss
