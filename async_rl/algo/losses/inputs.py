"""What a loss may look at, and what it gives back. See the package for the legend."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LOGPROB_FLOOR",
    "LOG_RATIO_LIMIT",
    "LossInputs",
    "TokenLoss",
    "cleaned",
    "log_ratio",
    "part_of",
    "sample_sums",
    "sample_tokens",
]

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8: far beyond every cap, and finite with its square in float32."""
LOGPROB_FLOOR = -1e5
"""A probability of exactly 0 (log: -inf) counts as this: 0 in every precision too, but its differences and products
are numbers. Below any that a softmax over finite logits gives."""


class LossInputs(NamedTuple):
    """Of T tokens. Where `mask_T` is false the rest may be anything, NaN included."""

    logprobs_T: Tensor  # log pi, float, with gradient
    behaviour_T: Tensor  # log mu
    advantages_T: Tensor
    mask_T: Tensor  # bool: loss tokens
    lags_T: Tensor  # int: optimizer steps back to the oldest policy with a part in the token
    samples_T: Tensor  # int64: which sample it is of, in [0, samples); a sample is whole in one call
    samples: int
    proximal_T: Tensor | None = (
        None  # log prob under the policy before the step's first update; None: that is pi
    )
    reference_T: Tensor | None = None  # under the frozen reference; needed where reference_coef > 0
    entropy_T: Tensor | None = None  # of pi at the token's place; with gradient where entropy_coef > 0


class TokenLoss(NamedTuple):
    """Of T tokens; finite for cleaned inputs, whatever the mask says."""

    loss_T: Tensor
    outside_T: Tensor  # bool: clipped, masked or truncated: the loss did not follow its ratio here


def cleaned(inputs: LossInputs) -> LossInputs:
    """Masked values replaced before any arithmetic (0 * inf is NaN, in the backward pass too), logprobs of zero
    probabilities by LOGPROB_FLOOR. NaN at a loss token stays: the step must be refused."""
    mask_T = inputs.mask_T

    def logprobs(values_T: Tensor) -> Tensor:
        return values_T.where(mask_T, 0.0).clamp(min=LOGPROB_FLOOR)

    proximal_T, reference_T, entropy_T = inputs.proximal_T, inputs.reference_T, inputs.entropy_T
    return inputs._replace(
        logprobs_T=logprobs(inputs.logprobs_T),
        behaviour_T=logprobs(inputs.behaviour_T),
        advantages_T=inputs.advantages_T.where(mask_T, 0.0),
        lags_T=inputs.lags_T.where(mask_T, 0),
        proximal_T=None if proximal_T is None else logprobs(proximal_T).detach(),
        reference_T=None if reference_T is None else logprobs(reference_T).detach(),
        entropy_T=None if entropy_T is None else entropy_T.where(mask_T, 0.0),
    )


def part_of(inputs: LossInputs, part: slice, logprobs_T: Tensor, entropy_T: Tensor | None) -> LossInputs:
    """The tokens of `part`, with these logprobs and entropies of theirs, for a loss of which `by_token` is true."""
    proximal_T, reference_T = inputs.proximal_T, inputs.reference_T
    return LossInputs(
        logprobs_T,
        inputs.behaviour_T[part],
        inputs.advantages_T[part],
        inputs.mask_T[part],
        inputs.lags_T[part],
        inputs.samples_T[part],
        inputs.samples,
        None if proximal_T is None else proximal_T[part],
        None if reference_T is None else reference_T[part],
        entropy_T,
    )


def log_ratio(over_T: Tensor, under_T: Tensor) -> Tensor:
    """log (over / under), within ±LOG_RATIO_LIMIT; beyond, without gradient."""
    return (over_T - under_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sample_sums(values_T: Tensor, inputs: LossInputs) -> Tensor:
    """[S]: sums of `values_T` over the loss tokens of each sample."""
    kept_T = values_T.where(inputs.mask_T, 0.0)
    return kept_T.new_zeros(inputs.samples).index_add(0, inputs.samples_T, kept_T)


def sample_tokens(inputs: LossInputs) -> Tensor:
    """[S]: loss tokens of each sample, 1 where there is none; of the type of the logprobs."""
    ones_T = inputs.logprobs_T.detach() * 0.0 + 1.0
    return sample_sums(ones_T, inputs).clamp(min=1.0)
