"""Losses that look at a whole sample at once: a sample must never be split over calls. Written as in tokens.py."""

from __future__ import annotations

from typing import Literal

from async_rl.algo.losses.config import Cap, Fraction, LossConfig, NotNegative
from async_rl.algo.losses.inputs import (
    LOG_RATIO_LIMIT,
    LossInputs,
    TokenLoss,
    log_ratio,
    sample_sums,
    sample_tokens,
)
from async_rl.algo.losses.tokens import clipped_surrogate

__all__ = ["Gspo", "TisSequence", "gspo", "tis_sequence"]


class Gspo(LossConfig, frozen=True, forbid_unknown_fields=True):
    """Qwen's: one ratio for a sample, the geometric mean of its tokens'."""

    name: Literal["gspo"] = "gspo"
    normalise: Literal["token", "sequence", "constant"] = "sequence"
    """As in LossConfig. sequence: the paper's objective is a mean over samples."""
    clip_low: Fraction = 3e-4
    """This one and the next: the paper's (section 5.1), for minibatches of a batch that was sampled by the policy of
    one step before. Lag moves the ratio by more: widen both then."""
    clip_high: NotNegative = 4e-4


def gspo(inputs: LossInputs, config: Gspo) -> TokenLoss:
    """- min( s A, clip(s, 1 - clip_low, 1 + clip_high) A )        at each of the sample's n tokens

        s = exp( sum of d over the sample / n )

    Group sequence policy optimization (arXiv 2507.18071, equations 5 to 7), on mu.
    """
    sums_S = sample_sums(log_ratio(inputs.logprobs_T, inputs.behaviour_T), inputs)
    ratio_T = (sums_S / sample_tokens(inputs)).exp()[inputs.samples_T]
    return clipped_surrogate(ratio_T, inputs.advantages_T, config.clip_low, config.clip_high)


class TisSequence(LossConfig, frozen=True, forbid_unknown_fields=True):
    """Truncated importance sampling by sample."""

    name: Literal["tis_sequence"] = "tis_sequence"
    weight_cap: Cap = 2.0
    """Of the sample's weight. As for tis_token."""


def tis_sequence(inputs: LossInputs, config: TisSequence) -> TokenLoss:
    """- sg(min(W, weight_cap)) * A * log pi        at each of the sample's tokens

        W = exp( clamp(sum of d over the sample, ±20) )

    The importance weight of the whole sample, without the bias of weighing tokens one by one, and with the variance
    of a product (Liu et al., "When speed kills stability", 2025, sequence-level TIS).
    """
    sums_S = sample_sums(log_ratio(inputs.logprobs_T, inputs.behaviour_T).detach(), inputs)
    ratio_T = sums_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[inputs.samples_T]
    weight_T = ratio_T.clamp(max=config.weight_cap)
    return TokenLoss(-weight_T * inputs.advantages_T * inputs.logprobs_T, ratio_T > config.weight_cap)
