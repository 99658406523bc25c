"""A recorded run once more, on this machine: the batches of its spool, the same learner, the losses step by step.

The groups of a step decide its loss, together with the state before it: so the first step whose numbers differ from
those that the run wrote down is where something happened that should not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from async_rl.algo.advantages import AdvantageConfig
from async_rl.algo.losses import LossConfig
from async_rl.algo.staleness import Tree
from async_rl.errors import ConfigError
from async_rl.store.base import ObjectStore
from async_rl.weights.run import open_run
from async_rl.wire import Batch
from workers import checkpoints
from workers.adapter_scale import check_scale
from workers.batches import Lineage, prepare
from workers.learner import Learner
from workers.metrics import plain
from workers.process_group import choose_device, rank_group
from workers.settings import ModelConfig, TrainerConfig
from workers.step_metrics import learner_metrics
from workers.trainer import prepare_torch
from workers.updates import train_batch

__all__ = ["COMPARED", "Recording", "first_difference", "read_metrics", "replay"]

COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "tokens", "mismatch/kl_k3", "refused")
"""Of each step, rounded as metrics.jsonl is."""

Line = dict[str, float | int | str | None]


class Recording(Protocol):
    """What is needed of a spool (orchestrator.recorded.Recorded)."""

    @property
    def tree(self) -> Tree: ...

    @property
    def newest(self) -> dict[int, int]: ...

    def batches(self, first: int) -> Iterator[Batch]: ...


def replay(
    store: ObjectStore,
    recording: Recording,
    *,
    begin: str,
    model: ModelConfig,
    trainer: TrainerConfig,
    loss: LossConfig,
    temperature: float,
    seed: int,
    max_lag: int,
    advantage: AdvantageConfig = AdvantageConfig(),  # noqa: B008  # frozen
    max_tokens: int = 0,
) -> Iterator[Line]:
    """The numbers of each step, as it is trained; one rank. Nothing is written to the store. `begin`: `never` for
    the initial weights, `latest` or a step for a checkpoint's.

    Raises CheckpointError, ConfigError, StoreErrors."""
    trainer = msgspec.structs.replace(trainer, replicas=1)  # of one rank there is one copy
    device = choose_device(trainer.device)
    prepare_torch(trainer, device, seed)
    checkpoint = checkpoints.choose(store, begin, open_run(store).fingerprint, model.adapters)
    lineage = Lineage()
    lineage.nodes = recording.tree
    with rank_group(device, trainer.collective_wait_s) as group:
        learner = Learner(
            model,
            trainer,
            loss,
            temperature=temperature,
            group=group,
            device=device,
            max_tokens=max_tokens,
        )
        step = 0
        if checkpoint is not None:
            check_scale(checkpoint.adapters, learner.adapters, checkpoint.name)
            checkpoints.restore(store, checkpoint, 0, learner.rows())
            learner.restored(checkpoint.progress.updates)
            step = checkpoint.progress.step
        for batch in recording.batches(step):
            lineage.pinned = recording.newest.get(batch.incarnation, max(recording.tree, default=-1))
            trained = prepare(
                batch,
                lineage,
                step=batch.step,
                max_lag=max_lag,
                vocab_size=learner.vocab_size,
                longest=learner.longest,
                advantage=advantage,
                max_tokens=max_tokens,
            )
            learning_rate = learner.learning_rate
            updates = train_batch(learner, group, trained.samples, trainer, step=batch.step)
            line = {
                "step": batch.step + 1,
                **learner_metrics(updates.stats, learning_rate),
                "tokens": trained.loss_tokens,
                "refused": int(not updates.made),
            }
            yield {name: plain(line[name]) for name in ("step", *COMPARED)}


def read_metrics(path: Path) -> dict[int, Line]:
    """What metrics.jsonl says about each step, in the history that survives: the last word counts."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as metrics.jsonl: {error}") from error
    return {line["step"]: line for line in lines if "reward/mean" in line}


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """The name of the first number that differs; empty: none does."""
    return next((name for name in COMPARED if ours[name] != theirs.get(name)), "")
