"""The policy loss: off-policy by some steps, and by the difference between engine and learner.

pi is the policy being trained, mu the behaviour policy that sampled the token, both at the sampling temperature;
A the sample's advantage; d = clamp(log pi - log mu, ±20), r = exp(d).

    total = sum over loss tokens of  w * ( L(token) + reference_coef * KL(token) - entropy_coef * H(token) )

L is one of the functions of tokens.py and sequences.py, chosen by `[loss] name`; w, and the number by which the
learner divides, are normalisation.py; KL and H are extras.py, both off by default. Everything that a loss may look at
is in `LossInputs`, the same for all. Nothing here needs torch at import: everything is a tensor method.

A sum is returned, never a mean: the learner divides by a number of the whole batch over all ranks, so that a token
weighs the same wherever it was packed.

Legend: T tokens, in any packing; S samples.
"""

from __future__ import annotations

from async_rl.algo.losses.cautions import cautions
from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.inputs import LossInputs, TokenLoss, part_of
from async_rl.algo.losses.normalisation import Totals, denominator, totals_of
from async_rl.algo.losses.registry import LOSSES, REGISTRY, by_token, needs_proximal
from async_rl.algo.losses.statistics import Greatest, TokenSums
from async_rl.algo.losses.tokens import DppoTv
from async_rl.algo.losses.total import LossResult, policy_loss, total_of

__all__ = [
    "LOSSES",
    "REGISTRY",
    "DppoTv",
    "Greatest",
    "LossConfig",
    "LossInputs",
    "LossResult",
    "TokenLoss",
    "TokenSums",
    "Totals",
    "by_token",
    "cautions",
    "denominator",
    "needs_proximal",
    "part_of",
    "policy_loss",
    "total_of",
    "totals_of",
]
