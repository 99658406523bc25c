"""The policy loss, off-policy by a few steps and by the difference between engine and learner.

pi is the policy being trained, mu the behaviour policy that sampled the token, both at the sampling
temperature; A the sample's advantage. Per token, with d = clamp(log pi - log mu, ±20) and r = min(exp(d),
ratio_cap):

    loss = - keep * r * A  +  kl_coef * d^2

    keep = 0  where  A > 0 and pi - mu >  tv_clip      the token was already made likelier by this much,
              or     A < 0 and pi - mu < -tv_clip      or already less likely: no push beyond the trust
              region
    keep = 1  elsewhere

The trust region bounds the change of the token's probability, a binary total variation (arXiv 2602.04879),
not the ratio as PPO does: a ratio of 3 on a token of probability 1e-4 is harmless noise, one of 1.5 on a
token of probability 0.6 is not. The squared log ratio pulls pi back to mu where no advantage speaks for the
distance.

The sum over tokens is returned: the learner divides by the loss tokens of the whole batch over all ranks,
so that a token weighs the same wherever it was packed. Nothing here needs torch at import: everything is a
tensor method.

Legend: T tokens, in any packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossConfig", "TokenSums", "policy_loss"]

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8: far beyond every cap, and finite with its square in float32."""


class LossConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[loss]`: the correction for lag."""

    name: Literal["dppo_tv"] = "dppo_tv"
    """Binary total-variation trust region."""
    tv_clip: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """A token's probability is pushed at most this far from the behaviour policy's. 1 never masks."""
    ratio_cap: Annotated[float, Meta(ge=1)] = 20.0
    """Upper limit of the importance ratio; a token at the limit has no policy gradient."""
    kl_coef: Annotated[float, Meta(ge=0)] = 1e-3
    """Weight of the squared log ratio."""


class TokenSums(NamedTuple):
    """Sums over loss tokens, scalar tensors without gradient: they add over micro-batches and ranks.

    `fresh_*` are the same over the tokens with lag 0: the very policy that is being trained sampled them and
    all tokens before them. There pi and mu differ only by the arithmetic of learner and engine. (After an
    update in mid-sample the engine goes on from the old policy's KV cache: not fresh.)
    """

    loss: Tensor
    tokens: Tensor
    ratio: Tensor
    abs_logprob: Tensor  # |log pi - log mu|
    kl_k3: (
        Tensor  # r - 1 - log r, an estimate of KL(mu || pi) (Schulman, "Approximating KL divergence", k3)
    )
    positive: Tensor  # tokens with A > 0
    positive_masked: Tensor  # of them, outside the trust region
    negative: Tensor  # tokens with A < 0
    negative_masked: Tensor
    fresh_tokens: Tensor
    fresh_abs_logprob: Tensor
    fresh_kl_k3: Tensor


def policy_loss(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    fresh_T: Tensor,
    config: LossConfig,
) -> tuple[Tensor, TokenSums, Tensor]:
    """The loss summed over the tokens where `mask_T` is true, its statistics, and the greatest ratio.

    logprobs_T: log pi, float, with gradient; behaviour_T: log mu; advantages_T; mask_T, fresh_T: bool.
    Whatever stands at a masked position, NaN and inf included, reaches neither the value nor the gradient.
    mu = 0 (log mu = -inf) counts as the limit of the ratio.
    """
    # Masked inputs are replaced before any arithmetic: 0 * inf is NaN, in the backward pass too.
    log_pi_T = logprobs_T.where(mask_T, 0.0)
    log_mu_T = behaviour_T.where(mask_T, 0.0)
    advantages_T = advantages_T.where(mask_T, 0.0)

    log_ratio_T = (log_pi_T - log_mu_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_T = log_ratio_T.exp().clamp(max=config.ratio_cap)

    change_T = log_pi_T.detach().exp() - log_mu_T.exp()
    outside_up_T = (advantages_T > 0) & (change_T > config.tv_clip)
    outside_down_T = (advantages_T < 0) & (change_T < -config.tv_clip)
    policy_T = (ratio_T * advantages_T).where(~(outside_up_T | outside_down_T), 0.0)

    loss = (config.kl_coef * log_ratio_T.square() - policy_T).where(mask_T, 0.0).sum()

    distance_T = log_ratio_T.detach()
    k3_T = distance_T.expm1() - distance_T  # exp(d) - 1 - d would lose every digit of a small d
    fresh_T = fresh_T & mask_T
    sums = TokenSums(
        loss=loss.detach(),
        tokens=mask_T.sum(),
        ratio=ratio_T.detach().where(mask_T, 0.0).sum(),
        abs_logprob=distance_T.abs().sum(),
        kl_k3=k3_T.sum(),
        positive=(advantages_T > 0).sum(),
        positive_masked=outside_up_T.sum(),
        negative=(advantages_T < 0).sum(),
        negative_masked=outside_down_T.sum(),
        fresh_tokens=fresh_T.sum(),
        fresh_abs_logprob=distance_T.abs().where(fresh_T, 0.0).sum(),
        fresh_kl_k3=k3_T.where(fresh_T, 0.0).sum(),
    )
    greatest = ratio_T.detach().where(mask_T, 0.0).amax() if ratio_T.numel() else loss.detach() * 0.0
    return loss, sums, greatest
