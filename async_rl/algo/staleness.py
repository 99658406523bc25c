"""How old the policy was that sampled a token: lag, in optimizer steps along the lineage of versions.

Versions form a tree, one branch per resume:

    0 ── 1 ── 2 ── 3 ── 4          incarnation 1, steps 0 1 2 3 4
              └─────────── 5 ── 6  incarnation 2, resumed at step 2: steps 2 3

On one branch lag is a difference of steps: from version 2 to version 6 it is 3 - 2 = 1. Across a resume it
is the way back to the common ancestor plus the way forward: version 4 seen from version 6 is (4 - 2) + (3 -
2) = 3. It is never a difference of version numbers, which go on growing when steps are taken back.

A resume that repeats its steps with the same groups makes the same weights again. Versions of one step whose
states are equal (by their digests) are one policy: there the branches are one again, and from version 3 to version
6, if they are equal, the lag is 0.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "LagSummary",
    "Node",
    "Tree",
    "newest_lag",
    "sample_lag",
    "span_lags",
    "summarise",
    "version_lag",
]

ROOT = -1
"""The parent of version 0."""


class Node(NamedTuple):
    """One version in the tree: the version it grew from and the optimizer steps it holds."""

    parent: int
    step: int
    digest: str = ""  # of the state; empty where it is not known


class Tree(Mapping[int, Node]):
    """Versions by their numbers, and which of them are one policy."""

    def __init__(self, nodes: Mapping[int, Node] | None = None) -> None:
        self._nodes: dict[int, Node] = {}
        self._first: dict[tuple[int, str], int] = {}  # step, digest: the smallest version
        for version, node in (nodes or {}).items():
            self.add(version, node)

    def add(self, version: int, node: Node) -> None:
        self._nodes[version] = node
        if node.digest:
            policy = (node.step, node.digest)
            self._first[policy] = min(version, self._first.get(policy, version))

    def first_like(self, version: int) -> int:
        """The smallest version that is the same policy. Raises KeyError for one that is not in the tree."""
        node = self._nodes[version]
        return self._first.get((node.step, node.digest), version) if node.digest else version

    def __getitem__(self, version: int) -> Node:
        return self._nodes[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def items(self) -> ItemsView[int, Node]:
        return self._nodes.items()  # one step of the interpreter copies it, while another thread adds


class LagSummary(NamedTuple):
    mean: float
    p50: float
    p95: float
    max: int


def version_lag(tree: Tree, then: int, now: int, step_now: int) -> int:
    """Steps between policy version `then` and a learner that has done `step_now` steps, `now` its newest
    version.

    Raises KeyError for a version that the tree does not know, and for one whose parent is no older version.
    """
    there, here = tree.first_like(then), tree.first_like(now)
    # A parent's number is smaller than its child's, so lifting the greater of the two meets at the
    # ancestor. The first of equal versions is the smallest: what is smaller than its child stays so.
    while there != here:
        child = max(there, here)
        lifted = tree[child].parent
        if lifted <= ROOT:
            raise KeyError(f"versions {then} and {now} have no common ancestor")
        if lifted >= child:  # else this would go round for ever
            raise KeyError(f"version {child} can't have followed version {lifted}")
        lifted = tree.first_like(lifted)
        there, here = min(there, here), lifted
    step_ancestor = tree[here].step
    return (tree[then].step - step_ancestor) + (step_now - step_ancestor)


def span_lags(
    spans: Iterable[tuple[int, int]], tree: Tree, now: int, step_now: int
) -> list[tuple[int, int]]:
    """Version spans (version, tokens) as (lag, tokens)."""
    return [(version_lag(tree, version, now, step_now), tokens) for version, tokens in spans]


def sample_lag(lags: Sequence[tuple[int, int]]) -> int:
    """Lag of a sample: that of the oldest policy which sampled any of its tokens. 0 for an empty sample."""
    return max((lag for lag, tokens in lags if tokens), default=0)


def newest_lag(lags: Sequence[tuple[int, int]]) -> int:
    """Steps since the newest policy that sampled a token of the sample: it then waited, with the whole sample done
    or nearly so. The rest of the sample's lag grew while it was generated. 0 for an empty sample."""
    return min((lag for lag, tokens in lags if tokens), default=0)


def summarise(lags: Sequence[int]) -> LagSummary:
    """Of the samples of one batch; zeros where there is none."""
    if not lags:
        return LagSummary(0.0, 0.0, 0.0, 0)
    values = np.asarray(lags, dtype=np.float64)
    p50, p95 = np.percentile(values, [50, 95])
    return LagSummary(float(values.mean()), float(p50), float(p95), int(values.max()))
