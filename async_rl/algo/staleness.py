"""How old the policy was that sampled a token: lag, in optimizer steps along the lineage of versions.

Versions form a tree, one branch per resume:

    0 ── 1 ── 2 ── 3 ── 4          incarnation 1, steps 0 1 2 3 4
              └─────────── 5 ── 6  incarnation 2, resumed at step 2: steps 2 3

On one branch lag is a difference of steps: from version 2 to version 6 it is 3 - 2 = 1. Across a resume it
is the way back to the common ancestor plus the way forward: version 4 seen from version 6 is (4 - 2) + (3 -
2) = 3. It is never a difference of version numbers, which go on growing when steps are taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["LagSummary", "Node", "sample_lag", "span_lags", "summarise", "version_lag"]

ROOT = -1
"""The parent of version 0."""


class Node(NamedTuple):
    """One version in the tree: the version it grew from and the optimizer steps it holds."""

    parent: int
    step: int


class LagSummary(NamedTuple):
    mean: float
    p50: float
    p95: float
    max: int


def version_lag(lineage: Mapping[int, Node], then: int, now: int, step_now: int) -> int:
    """Steps between policy version `then` and a learner that has done `step_now` steps, `now` its newest
    version.

    Raises KeyError for a version that the lineage does not know.
    """
    there, here = then, now
    # A parent's number is smaller than its child's, so lifting the greater of the two meets at the
    # ancestor.
    while there != here:
        if there > here:
            there = lineage[there].parent
        else:
            here = lineage[here].parent
        if min(there, here) <= ROOT:
            raise KeyError(f"versions {then} and {now} have no common ancestor")
    step_ancestor = lineage[here].step
    return (lineage[then].step - step_ancestor) + (step_now - step_ancestor)


def span_lags(
    spans: Iterable[tuple[int, int]], lineage: Mapping[int, Node], now: int, step_now: int
) -> list[tuple[int, int]]:
    """Version spans (version, tokens) as (lag, tokens)."""
    return [(version_lag(lineage, version, now, step_now), tokens) for version, tokens in spans]


def sample_lag(lags: Sequence[tuple[int, int]]) -> int:
    """Lag of a sample: that of the oldest policy which sampled any of its tokens. 0 for an empty sample."""
    return max((lag for lag, tokens in lags if tokens), default=0)


def summarise(lags: Sequence[int]) -> LagSummary:
    """Of the samples of one batch; zeros where there is none."""
    if not lags:
        return LagSummary(0.0, 0.0, 0.0, 0)
    values = np.asarray(lags, dtype=np.float64)
    p50, p95 = np.percentile(values, [50, 95])
    return LagSummary(float(values.mean()), float(p50), float(p95), int(values.max()))
