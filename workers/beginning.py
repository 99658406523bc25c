"""How a trainer begins: it becomes the run's trainer, and publishes where it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from async_rl.log import get_logger
from async_rl.store import ObjectStore
from async_rl.weights.lineage import Claim, claim, list_versions
from async_rl.weights.publisher import Publisher
from async_rl.weights.run import RunInfo, ensure_run
from workers import checkpoints
from workers.checkpoints import Checkpoint, Progress
from workers.learner import Learner
from workers.process_group import RankGroup

__all__ = ["Start", "begin", "take_run"]

log = get_logger(__name__)


class Start(Struct, frozen=True):
    """What rank 0 found and took, for all ranks."""

    run: RunInfo
    claim: Claim
    checkpoint: Checkpoint | None
    parent_version: int  # of the first version to publish; -1 for a new run
    anew: bool  # --resume never: the run begins again


def take_run(store: ObjectStore, model_dir: Path, learner: Learner, resume: str) -> Start:
    """Rank 0: become the run's trainer."""
    tensors = learner.published()
    store.probe()  # a store without conditional puts is used in another way, and warned of
    run = ensure_run(store, model_dir, tensors)
    # What fails must fail before another trainer is fenced.
    checkpoints.choose(store, resume, run.fingerprint, learner.adapters)
    claimed = claim(store)
    # Again: the trainer before us may have committed a newer one meanwhile.
    checkpoint = checkpoints.choose(store, resume, run.fingerprint, learner.adapters)
    # Without one it is the initial weights again: a new branch from the root.
    parent = checkpoint.progress.version if checkpoint else min(list_versions(store), default=-1)
    return Start(run, claimed, checkpoint, parent, resume == "never")


def begin(
    store: ObjectStore,
    group: RankGroup,
    learner: Learner,
    publisher: Publisher,
    start: Start,
) -> Progress:
    """Restore the checkpoint, if any, and publish where we are, so that everybody is on our branch."""
    progress = Progress(0, -1, start.claim.incarnation, 0, 0)
    if start.checkpoint is not None:
        checkpoints.restore(store, start.checkpoint, group.rank, learner.rows())
        progress = start.checkpoint.progress
        learner.restored(progress.updates)
        log.info("resumed", checkpoint=start.checkpoint.name, step=progress.step)
    log.info(
        "publishing where the run begins; a machine's first run compiles kernels for that, for minutes"
    )
    publisher.publish(progress.step)
    publisher.flush()
    return msgspec.structs.replace(
        progress, version=publisher.committed, incarnation=start.claim.incarnation
    )
