"""How far pi is from mu on the tokens of a batch, and what the loss did about it: sums that add up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from async_rl.algo.losses.extras import reference_kl
from async_rl.algo.losses.inputs import LOG_RATIO_LIMIT, LossInputs, TokenLoss, log_ratio, sample_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SHOWN_RATIO_CAP", "Greatest", "TokenSums", "statistics"]

SHOWN_RATIO_CAP = 20.0
"""Of the ratios in `ratio` and Greatest.ratio: one token must not be the mean of a batch."""


class TokenSums(NamedTuple):
    """Sums over loss tokens, scalar tensors without gradient: they add over micro-batches and ranks.

    `fresh_*` are over the tokens with lag 0: the very policy that is being trained sampled them and all tokens
    before them. There pi and mu differ only by the arithmetic of learner and engine. (After an update in mid-sample
    the engine goes on from the old policy's KV cache: not fresh.)

    Weights are r, for a sample the product over its loss tokens, within exp(±20).
    """

    loss: Tensor  # with its weights, not yet divided
    tokens: Tensor
    ratio: Tensor  # min(r, SHOWN_RATIO_CAP)
    abs_logprob: Tensor  # |d|
    kl_k3: (
        Tensor  # r - 1 - log r, an estimate of KL(mu || pi) (Schulman, "Approximating KL divergence", k3)
    )
    positive: Tensor  # tokens with A > 0
    positive_masked: Tensor  # of them, outside
    negative: Tensor  # tokens with A < 0
    negative_masked: Tensor
    fresh_tokens: Tensor
    fresh_abs_logprob: Tensor
    fresh_kl_k3: Tensor
    weights: Tensor
    weight_squares: Tensor
    chi_square: Tensor  # (r - 1)²: its mean under mu is the chi-square divergence of pi from mu
    samples: Tensor  # with a loss token
    sample_weights: Tensor
    sample_weight_squares: Tensor
    reference_kl: Tensor  # k3 to the reference; 0 without one


class Greatest(NamedTuple):
    """Over loss tokens, scalar tensors without gradient; 0 without tokens."""

    ratio: Tensor  # at most SHOWN_RATIO_CAP
    kl_k3: Tensor


def statistics(total: Tensor, inputs: LossInputs, token_loss: TokenLoss) -> tuple[TokenSums, Greatest]:
    """`inputs` cleaned, `total` the loss summed."""
    mask_T, advantages_T = inputs.mask_T, inputs.advantages_T
    # In 64 bits: r² reaches exp(40), and expm1(d) - d would lose every digit of a small d.
    log_pi_T, log_mu_T = inputs.logprobs_T.detach().double(), inputs.behaviour_T.double()
    d_T = log_ratio(log_pi_T, log_mu_T).where(mask_T, 0.0)
    over_T = d_T.expm1()
    weight_T = over_T + 1.0
    shown_T = weight_T.clamp(max=SHOWN_RATIO_CAP).where(mask_T, 0.0)
    k3_T = over_T - d_T
    fresh_T = (inputs.lags_T == 0) & mask_T
    positive_T, negative_T = advantages_T > 0, advantages_T < 0
    outside_T = token_loss.outside_T & mask_T
    present_S = sample_sums(mask_T.double(), inputs) > 0
    log_weight_S = sample_sums(d_T, inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight_S = log_weight_S.exp().where(present_S, 0.0)
    reference = d_T.sum() * 0.0
    if inputs.reference_T is not None:
        each_T = reference_kl(log_pi_T, inputs.reference_T.double(), "k3")
        reference = each_T.where(mask_T, 0.0).sum()
    sums = TokenSums(
        loss=total.detach(),
        tokens=mask_T.sum(),
        ratio=shown_T.sum(),
        abs_logprob=d_T.abs().sum(),
        kl_k3=k3_T.sum(),
        positive=positive_T.sum(),
        positive_masked=(positive_T & outside_T).sum(),
        negative=negative_T.sum(),
        negative_masked=(negative_T & outside_T).sum(),
        fresh_tokens=fresh_T.sum(),
        fresh_abs_logprob=d_T.abs().where(fresh_T, 0.0).sum(),
        fresh_kl_k3=k3_T.where(fresh_T, 0.0).sum(),
        weights=weight_T.where(mask_T, 0.0).sum(),
        weight_squares=weight_T.square().where(mask_T, 0.0).sum(),
        chi_square=over_T.square().sum(),
        samples=present_S.sum(),
        sample_weights=weight_S.sum(),
        sample_weight_squares=weight_S.square().sum(),
        reference_kl=reference,
    )
    if not d_T.numel():
        return sums, Greatest(reference, reference)
    return sums, Greatest(shown_T.amax(), k3_T.amax())
