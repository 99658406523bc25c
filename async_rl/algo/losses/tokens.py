"""Losses that look at each token by itself. Each function is the whole of its formula; its settings stand above it.

The `name` of a config is its key in the registry. Formulas are of what is minimised, per token; sg(x) is x without
gradient, clip(x, a, b) is x within [a, b]. See the package for pi, mu, A, d and r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from async_rl.algo.losses.config import Cap, Fraction, LossConfig, NotNegative
from async_rl.algo.losses.inputs import LossInputs, TokenLoss, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Cispo",
    "Decoupled",
    "DppoTv",
    "IcePop",
    "PpoClip",
    "Reinforce",
    "TisToken",
    "cispo",
    "clipped_surrogate",
    "decoupled",
    "dppo_tv",
    "icepop",
    "ppo_clip",
    "proximal_logprobs",
    "reinforce",
    "tis_token",
]


class DppoTv(LossConfig, frozen=True, forbid_unknown_fields=True):
    """The default: a trust region on the change of the token's probability."""

    name: Literal["dppo_tv"] = "dppo_tv"
    tv_clip: Fraction = 0.2
    """A token's probability is pushed at most this far from the behaviour policy's. 1 never masks."""
    ratio_cap: Cap = 20.0
    """Upper limit of the importance ratio; a token at the limit has no policy gradient."""
    kl_coef: NotNegative = 1e-3
    """Weight of the squared log ratio, which pulls pi back to mu where no advantage speaks for the distance."""


def dppo_tv(inputs: LossInputs, config: DppoTv) -> TokenLoss:
    """- keep * min(r, ratio_cap) * A  +  kl_coef * d²

        keep = 0  where  A > 0 and pi - mu >  tv_clip   the token was already made likelier by this much,
                  or     A < 0 and pi - mu < -tv_clip   or already less likely: no push beyond the trust region
        keep = 1  elsewhere

    The trust region bounds the change of the token's probability, a binary total variation (arXiv 2602.04879), not
    the ratio as PPO does: a ratio of 3 on a token of probability 1e-4 is harmless noise, one of 1.5 on a token of
    probability 0.6 is not.
    """
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.behaviour_T)
    ratio_T = log_ratio_T.exp().clamp(max=config.ratio_cap)
    change_T = inputs.logprobs_T.detach().exp() - inputs.behaviour_T.exp()
    up_T = (inputs.advantages_T > 0) & (change_T > config.tv_clip)
    down_T = (inputs.advantages_T < 0) & (change_T < -config.tv_clip)
    policy_T = (ratio_T * inputs.advantages_T).where(~(up_T | down_T), 0.0)
    return TokenLoss(config.kl_coef * log_ratio_T.square() - policy_T, up_T | down_T)


class PpoClip(LossConfig, frozen=True, forbid_unknown_fields=True):
    """PPO's clip, around the behaviour policy."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Fraction = 0.2
    """PPO's own (arXiv 1707.06347)."""
    clip_high: NotNegative = 0.28
    """DAPO's "clip-higher" (arXiv 2503.14476, section 3.1): room for unlikely tokens, so that entropy stays."""
    dual_clip: NotNegative = 3.0
    """Limit of r where A < 0 (arXiv 1912.09729, equation 5; 3 is the paper's and verl's). There min() never clips a
    growing ratio, and one token that lag made a thousand times likelier would be the whole gradient. 0: no limit."""


def ppo_clip(inputs: LossInputs, config: PpoClip) -> TokenLoss:
    """- min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )          and where A < 0 at most - dual_clip * A

    Proximal policy optimization (arXiv 1707.06347, equation 7), with mu in the place of the old policy: one ratio
    corrects for lag and for the engine's arithmetic, and is clipped as a whole.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.behaviour_T).exp()
    return clipped_surrogate(
        ratio_T, inputs.advantages_T, config.clip_low, config.clip_high, config.dual_clip
    )


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual: float = 0.0
) -> TokenLoss:
    """- min(r A, clip(r, 1 - low, 1 + high) A), where A < 0 and `dual` > 0 at most -dual * A. Without gradient
    wherever the bound is taken."""
    too_high_T, too_low_T = ratio_T > 1 + high, ratio_T < 1 - low
    outside_T = ((advantages_T > 0) & too_high_T) | ((advantages_T < 0) & too_low_T)
    bound_T = ratio_T.detach().clamp(1 - low, 1 + high)
    used_T = bound_T.where(outside_T, ratio_T)
    if dual:
        over_T = (advantages_T < 0) & (ratio_T > dual)
        used_T = (ratio_T.detach() * 0.0 + dual).where(over_T, used_T)
        outside_T = outside_T | over_T
    return TokenLoss(-used_T * advantages_T, outside_T)


class Decoupled(LossConfig, frozen=True, forbid_unknown_fields=True):
    """AReaL's decoupled PPO: the clip is around a proximal policy, the weight corrects from it to mu."""

    name: Literal["decoupled"] = "decoupled"
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """recomputed: by the trainer, before the step's first update; with trainer.minibatches = 1 that is pi itself, and
    there is no clip. interpolated: between mu and pi on the way that lag tells, without a further forward pass."""
    clip_low: Fraction = 0.2
    """AReaL's own, on both sides: the proximal policy is one step away, so there is no lag to make room for."""
    clip_high: NotNegative = 0.2
    weight_cap: Cap = 5.0
    """A token whose proximal / mu is above is left out. AReaL's own."""


def decoupled(inputs: LossInputs, config: Decoupled) -> TokenLoss:
    """- sg(w) * min( u A, clip(u, 1 - clip_low, 1 + clip_high) A )

        u = pi / prox        w = prox / mu, 0 where it is above weight_cap

    AReaL (arXiv 2505.24298, equation 5), after "Batch size-invariance for policy optimization" (arXiv 2110.00641).
    """
    proximal_T = proximal_logprobs(inputs, config.proximal)
    ratio_T = log_ratio(inputs.logprobs_T, proximal_T).exp()
    weight_T = log_ratio(proximal_T, inputs.behaviour_T).exp()
    over_T = weight_T > config.weight_cap
    clipped = clipped_surrogate(ratio_T, inputs.advantages_T, config.clip_low, config.clip_high)
    loss_T = (weight_T * clipped.loss_T).where(~over_T, 0.0)
    return TokenLoss(loss_T, clipped.outside_T | over_T)


def proximal_logprobs(inputs: LossInputs, how: str) -> Tensor:
    """[T], without gradient. recomputed: those given, or pi's own where there were no updates since.

    interpolated: log prox = log mu + lag / (lag + 1) (log pi - log mu): the step's update leads from `lag` to
    `lag + 1` steps after mu, and log probabilities are taken to move evenly (A-3PO, arXiv 2512.06547, whose weight
    1/d of mu counts d from the policy that the step makes: d = lag + 1).
    """
    log_pi_T = inputs.logprobs_T.detach()
    if how == "interpolated":
        lags_T = inputs.lags_T.to(log_pi_T.dtype)
        return inputs.behaviour_T + lags_T / (lags_T + 1) * (log_pi_T - inputs.behaviour_T)
    return log_pi_T if inputs.proximal_T is None else inputs.proximal_T


class TisToken(LossConfig, frozen=True, forbid_unknown_fields=True):
    """Truncated importance sampling by token."""

    name: Literal["tis_token"] = "tis_token"
    weight_cap: Cap = 2.0
    """Of the weight. 2 is the authors' own, and what verl and TRL took over: a higher one lets more variance in."""


def tis_token(inputs: LossInputs, config: TisToken) -> TokenLoss:
    """- sg(min(r, weight_cap)) * A * log pi

    Truncated importance sampling (Ionides 2008) by token, for the mismatch of engine and trainer (Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training", 2025). No clip: every token keeps a gradient.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.behaviour_T).detach().exp()
    weight_T = ratio_T.clamp(max=config.weight_cap)
    return TokenLoss(-weight_T * inputs.advantages_T * inputs.logprobs_T, ratio_T > config.weight_cap)


class Cispo(LossConfig, frozen=True, forbid_unknown_fields=True):
    """MiniMax-M1's: the weight is clipped, not the gradient."""

    name: Literal["cispo"] = "cispo"
    clip_low: Fraction = 1.0
    """1, no lower limit: the paper's, which tunes the upper one alone."""
    clip_high: NotNegative = 4.0
    """The weight is at most 5. ScaleRL (arXiv 2510.13786) found no difference between 4 and 8."""


def cispo(inputs: LossInputs, config: Cispo) -> TokenLoss:
    """- sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

    MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), on mu.
    """
    ratio_T = log_ratio(inputs.logprobs_T, inputs.behaviour_T).detach().exp()
    weight_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(-weight_T * inputs.advantages_T * inputs.logprobs_T, ratio_T != weight_T)


class IcePop(LossConfig, frozen=True, forbid_unknown_fields=True):
    """Tokens whose ratio is out of bounds are left out, on both sides."""

    name: Literal["icepop"] = "icepop"
    ratio_low: Fraction = 0.5
    """This one and the next: the authors' own, for mixtures of experts."""
    ratio_high: Cap = 5.0
    clip_low: Fraction = 0.2
    """PPO's clip around the proximal policy, which acts with trainer.minibatches over 1; GRPO's."""
    clip_high: NotNegative = 0.2


def icepop(inputs: LossInputs, config: IcePop) -> TokenLoss:
    """- sg(k) * min( u A, clip(u, 1 - clip_low, 1 + clip_high) A )

        u = pi / prox        k = prox / mu, 0 where it is not in [ratio_low, ratio_high]

    Ring-1T (arXiv 2510.18855, section 3.2). Where prox is pi itself (one minibatch), it is - M(r) A log pi's
    gradient, as in INTELLECT-3 (arXiv 2512.16144, equation 1).
    """
    proximal_T = proximal_logprobs(inputs, "recomputed")
    weight_T = log_ratio(proximal_T, inputs.behaviour_T).exp()
    out_T = (weight_T < config.ratio_low) | (weight_T > config.ratio_high)
    ratio_T = log_ratio(inputs.logprobs_T, proximal_T).exp()
    clipped = clipped_surrogate(ratio_T, inputs.advantages_T, config.clip_low, config.clip_high)
    return TokenLoss((weight_T * clipped.loss_T).where(~out_T, 0.0), clipped.outside_T | out_T)


class Reinforce(LossConfig, frozen=True, forbid_unknown_fields=True):
    """No correction at all: right where nothing lags, and the negative control where something does."""

    name: Literal["reinforce"] = "reinforce"


def reinforce(inputs: LossInputs, config: Reinforce) -> TokenLoss:
    """- A * log pi

    Williams 1992. mu is not looked at.
    """
    return TokenLoss(-inputs.advantages_T * inputs.logprobs_T, inputs.mask_T & False)
