"""The optimizer updates of one step: one, or several minibatches of the step's batch, one after the other.

A step stays the unit of lag, of versions and of checkpoints whatever the number of its updates: all of them are made
before anything is published, from samples whose lag was counted before the first. What the policy moves within the
step the loss sees as its ratio to mu, or to the proximal policy, which is the one before the first update.

Workers are compared (checks.py) by what that policy, and none after it, says of their samples: their lag is counted
from it, and at lag 0 it is the very one that sampled. Where the loss asks for the proximal policy, it has looked at
all samples; else at the first share alone. A batch comes oldest group first, so each share comes first in its turn:
else a quick worker's groups, always among the last, would never be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.algo.losses import totals_of
from async_rl.algo.packing import MicroBatch, TrainSample, pack
from workers.learner import Learner
from workers.process_group import RankGroup
from workers.row_inputs import measured
from workers.settings import TrainerConfig
from workers.stats import StepStats, merged

__all__ = ["Updates", "in_turn", "minibatches_of", "train_batch"]


class Updates(NamedTuple):
    stats: StepStats
    made: int  # 0: the step is refused
    wanted: int


def train_batch(
    learner: Learner,
    group: RankGroup,
    samples: Sequence[TrainSample],
    trainer: TrainerConfig,
    slots: int = 0,
    lap: Callable[[str], None] = lambda name: None,
    step: int = 0,
) -> Updates:
    """Collective: `samples` of the whole batch, the same on every rank. `slots`: to be measured. `lap` is called
    after each part with its name. `step`: steps done, which says what share comes first."""
    parts = in_turn(minibatches_of(samples, trainer.minibatches), step)
    limit, share = learner.row_tokens(trainer.microbatch_tokens), learner.shares_prompts
    rows = [pack(part, limit, group.size, share=share)[group.rank] for part in parts]
    before = None
    if len(parts) > 1 and learner.wants_proximal:
        before = _before(learner, group, rows, slots)
    lap("forward_backward")
    updates, made = [], 0
    for index, part in enumerate(parts):
        meets_it = index == 0 and before is None
        proximal = before.logprobs[index] if before is not None else None
        stats = learner.forward_backward(rows[index], totals_of(part), slots if meets_it else 0, proximal)
        lap("forward_backward")
        made += learner.optimizer_step(stats)
        lap("optimizer")
        updates.append(stats)
    stats = merged(updates)
    if before is not None:
        stats = replace(stats, measured=before.measured)
    return Updates(stats, made, len(parts))


def minibatches_of(samples: Sequence[TrainSample], count: int) -> list[Sequence[TrainSample]]:
    """At most `count` runs of neighbours, as even as it goes, none empty but that of an empty batch."""
    count = max(1, min(count, len(samples)))
    bounds = [len(samples) * i // count for i in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(bounds)]


def in_turn(parts: list[Sequence[TrainSample]], step: int) -> list[Sequence[TrainSample]]:
    """In their order, but begun with another one at every step."""
    first = step % len(parts)
    return parts[first:] + parts[:first]


class _Before(NamedTuple):
    """What the policy before the first update says."""

    logprobs: list[list[Tensor]]  # of each share, of each of this rank's micro-batches [K]
    measured: tuple[tuple[float, ...], ...]  # as StepStats has it, of all shares


@torch.no_grad()
def _before(learner: Learner, group: RankGroup, rows: list[list[MicroBatch]], slots: int) -> _Before:
    """Collective."""
    logprobs: list[list[Tensor]] = []
    by_slot = np.zeros((slots, 4))
    for share in rows:
        logprobs.append([])
        for row in share:
            logprobs_K, entropy_K, kept_K = learner.logprobs(row)
            logprobs[-1].append(logprobs_K)
            by_slot += measured(row, logprobs_K, entropy_K, kept_K, slots)
    sums = torch.from_numpy(by_slot)
    group.sum(sums)
    return _Before(logprobs, tuple(map(tuple, sums.tolist())))
