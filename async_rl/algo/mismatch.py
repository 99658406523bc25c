"""How well the behaviour logprobs of a group fit the policy being trained, in three numbers per token.

pi is the policy being trained, mu what the worker says that it sampled from, d = clamp(log pi - log mu, ±2), H the
entropy of pi at the token's place:

    kl        exp(d) - 1 - d               an estimate of KL(mu || pi), never negative: how far mu is from pi
    ratio     exp(d) - 1                   mean 0 where the token was drawn from mu, at every lag:
                                           the expectation of pi / mu under mu is 1
    surprise  exp(d) (-log pi - H)         mean 0 likewise: weighted by pi / mu, the tokens are as surprising as
                                           samples of pi, whose mean surprise is its entropy

The mean of log pi - log mu is ratio - kl. What each one finds: wrong weights, or logprobs of another temperature
than the one agreed on, are far from pi (kl); logprobs that are not those of the distribution that was sampled
(shifted, made up, of another temperature than the one used) do not weigh to 1 (ratio); a sampler that leaves out the
tail, or is greedy, or picks among samples, and reports the logprobs of the whole policy, draws too likely tokens
(surprise).

The clamp bounds what one token can do: an exact ratio would have a variance without bound, and its mean would mean
nothing over some thousand tokens. It moves the two zeros by less than 0.03 as long as kl is under half a nat.

Legend: K loss tokens; S slots, each a sum of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LOG_RATIO_CLAMP", "token_measures", "totals_by_slot"]

LOG_RATIO_CLAMP = 2.0
"""A ratio of 7: honest engines of every kind stay far below it on nearly every token."""
MOST_SURPRISE = 30.0
"""Nats: a token of probability 1e-13. Keeps -log pi finite where pi is 0 in 32 bits."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


def token_measures(log_pi_K: Any, log_mu_K: Any, entropy_K: Any) -> Floats:
    """[3, K]: kl, ratio and surprise of each token. Logprobs and entropies in nats; mu = 0 counts as the clamp."""
    log_pi_K = np.maximum(np.asarray(log_pi_K, np.float64), -MOST_SURPRISE)
    d_K = np.clip(log_pi_K - np.asarray(log_mu_K, np.float64), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    over_K = np.expm1(d_K)
    surprise_K = (over_K + 1.0) * (-log_pi_K - np.asarray(entropy_K, np.float64))
    measures: Floats = np.stack([over_K - d_K, over_K, surprise_K])
    return measures


def totals_by_slot(slots_K: Any, measures_3K: Floats, slots: int) -> Floats:
    """[S, 4]: tokens, and the sums of the three measures, by slot; tokens of slot -1 count nowhere."""
    chosen_K = np.asarray(slots_K) >= 0
    at_K = np.asarray(slots_K)[chosen_K]
    columns = [np.ones(len(at_K)), *measures_3K[:, chosen_K]]
    return np.stack([np.bincount(at_K, column, minlength=slots)[:slots] for column in columns], axis=1)
