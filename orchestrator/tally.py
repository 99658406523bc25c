"""Counts over the life of the orchestrator process, and the lag of what was trained."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

from async_rl.wire import EvalScore
from orchestrator.ledger import Formed

__all__ = ["Tally", "percentile"]

LAG_WINDOW = 2048
"""Samples behind the percentiles: some recent batches, so a change of the fleet shows within minutes."""


class Tally:
    """A trainer that takes over does not reset it."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # messages and groups that were not accepted, by reason
        self.lag_counts: Counter[int] = Counter()  # samples handed to the trainer, by lag
        self.evals: list[EvalScore] = []
        self.reward = math.nan  # mean of the last batch
        self._recent: deque[int] = deque(maxlen=LAG_WINDOW)

    def batch(self, batch: Formed) -> None:
        lags = [lag for of_group in batch.lags for lag in of_group]
        self.lag_counts.update(lags)
        self._recent.extend(lags)
        self.reward = sum(batch.rewards) / len(batch.rewards) if batch.rewards else math.nan

    def lag(self, fraction: float) -> float:
        return percentile(self._recent, fraction)


def percentile(values: Iterable[int], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed (nearest rank); 0 for
    none."""
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]) if ordered else 0.0
