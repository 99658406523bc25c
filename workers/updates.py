"""The optimizer updates of one step: one, or several minibatches of the step's batch, one after the other.

A step stays the unit of lag, of versions and of checkpoints whatever the number of its updates: all of them are made
before anything is published, from samples whose lag was counted before the first. What the policy moves within the
step the loss sees as its ratio to mu, or to the proximal policy, which is the one before the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from async_rl.algo.losses import totals_of
from async_rl.algo.packing import MicroBatch, TrainSample, pack
from workers.learner import Learner
from workers.process_group import RankGroup
from workers.settings import TrainerConfig
from workers.stats import StepStats, merged

__all__ = ["Updates", "minibatches_of", "train_batch"]


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
) -> Updates:
    """Collective: `samples` of the whole batch, the same on every rank. `slots`: to be measured. `lap` is called
    after each part with its name."""
    parts = minibatches_of(samples, trainer.minibatches)
    limit, share = trainer.microbatch_tokens, learner.shares_prompts
    rows = [pack(part, limit, group.size, share=share)[group.rank] for part in parts]
    proximal = _proximal(learner, rows)
    lap("forward_backward")
    updates, made = [], 0
    for index, part in enumerate(parts):
        # Only the first update meets the policy that the lags were counted from: the others measure nothing.
        measured = slots if index == 0 else 0
        stats = learner.forward_backward(rows[index], totals_of(part), measured, proximal[index])
        lap("forward_backward")
        made += learner.optimizer_step(stats)
        lap("optimizer")
        updates.append(stats)
    return Updates(merged(updates), made, len(parts))


def minibatches_of(samples: Sequence[TrainSample], count: int) -> list[Sequence[TrainSample]]:
    """At most `count` runs of neighbours, as even as it goes, none empty but that of an empty batch."""
    count = max(1, min(count, len(samples)))
    bounds = [len(samples) * i // count for i in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(bounds)]


def _proximal(learner: Learner, rows: list[list[MicroBatch]]) -> list[list[Tensor] | None]:
    """Logprobs before the first update, where the loss reads them and they are not pi's own."""
    if len(rows) == 1 or not learner.wants_proximal:
        return [None] * len(rows)
    return [learner.frozen_logprobs(each) for each in rows]
