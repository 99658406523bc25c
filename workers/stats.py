"""What a step says of itself: plain numbers over all ranks, from sums that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.algo.losses import Greatest, TokenSums

__all__ = ["StepStats", "merged", "stats_of"]


@dataclass(frozen=True)
class StepStats:
    """Of one batch, over all ranks; means are over loss tokens. `fresh_*` see TokenSums, None without such
    tokens."""

    loss: float
    tokens: int
    grad_norm: float  # before clipping
    ratio_mean: float
    ratio_max: float
    abs_logprob: float
    kl_k3: float
    kl_k3_max: float
    chi_square: float  # of pi from mu
    ess_token: (
        float | None
    )  # effective sample size of the tokens' weights as a share of the tokens, in (0, 1]
    ess_sequence: float | None  # of the samples', likewise
    reference_kl: float
    fresh_tokens: int
    fresh_abs_logprob: float | None
    fresh_kl_k3: float | None
    masked_positive: (
        float  # of the tokens with a positive advantage, the part that was masked, clipped or truncated
    )
    masked_negative: float
    entropy: float  # of the policy, nats per token
    sums: TokenSums  # plain numbers
    measured: tuple[tuple[float, ...], ...] = ()
    """Of each slot: tokens, and the sums of kl, ratio and surprise (algo/mismatch.py)."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def stats_of(
    sums: TokenSums, greatest: Greatest, *, loss: float, entropy: float, grad_norm: float, tokens: int
) -> StepStats:
    """`sums` and `greatest` as plain numbers, over all ranks; `loss` as minimised; `entropy` summed over the loss
    tokens; `tokens`: loss tokens."""
    count = max(tokens, 1)
    fresh = int(sums.fresh_tokens)
    return StepStats(
        loss=loss,
        tokens=int(sums.tokens),
        grad_norm=grad_norm,
        ratio_mean=float(sums.ratio) / count,
        ratio_max=float(greatest.ratio),
        abs_logprob=float(sums.abs_logprob) / count,
        kl_k3=float(sums.kl_k3) / count,
        kl_k3_max=float(greatest.kl_k3),
        chi_square=float(sums.chi_square) / count,
        ess_token=_effective(float(sums.weights), float(sums.weight_squares), float(sums.tokens)),
        ess_sequence=_effective(
            float(sums.sample_weights), float(sums.sample_weight_squares), float(sums.samples)
        ),
        reference_kl=float(sums.reference_kl) / count,
        fresh_tokens=fresh,
        fresh_abs_logprob=float(sums.fresh_abs_logprob) / fresh if fresh else None,
        fresh_kl_k3=float(sums.fresh_kl_k3) / fresh if fresh else None,
        masked_positive=float(sums.positive_masked) / max(float(sums.positive), 1.0),
        masked_negative=float(sums.negative_masked) / max(float(sums.negative), 1.0),
        entropy=entropy / count,
        sums=sums,
    )


def _effective(weights: float, squares: float, count: float) -> float | None:
    """(sum w)² / (n sum w²) (Kish 1965): 1 where all weights are equal, 1/n where one is everything."""
    return weights**2 / (count * squares) if count and squares else None


def merged(updates: Sequence[StepStats]) -> StepStats:
    """Of a step of several updates: sums over all, the greatest gradient, the loss by tokens. What was measured, and
    what is fresh, is of the first update, before which the policy had not moved."""
    if len(updates) == 1:
        return updates[0]
    columns = zip(*(each.sums for each in updates), strict=True)
    tokens = sum(each.tokens for each in updates)
    loss = sum(each.loss * each.tokens for each in updates) / max(tokens, 1)
    first = updates[0].sums
    sums = TokenSums(*(sum(column) for column in columns))._replace(
        fresh_tokens=first.fresh_tokens,
        fresh_abs_logprob=first.fresh_abs_logprob,
        fresh_kl_k3=first.fresh_kl_k3,
    )
    both = stats_of(
        sums,
        Greatest(max(e.ratio_max for e in updates), max(e.kl_k3_max for e in updates)),  # type: ignore[arg-type]
        loss=loss,
        entropy=sum(each.entropy * each.tokens for each in updates),
        grad_norm=max(each.grad_norm for each in updates),
        tokens=tokens,
    )
    return StepStats(**{**vars(both), "measured": updates[0].measured})
