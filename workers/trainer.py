"""The trainer: one loop, the same in every rank process.

    while step < steps:
        batch    waits for: enough fresh groups, which rollout workers make and the orchestrator hands out
        samples  advantages within each group, lag of every token, packed without padding
        stats    forward and backward; a step that is not finite is refused before the optimizer
        publish  in the background of the next step; while the version before is on its way, the weights wait
                 for the next publish, or for the wait for a batch
        checkpoint, in the background too: the loop stands still for a copy of its state in host memory
        metrics

Rank 0 alone talks to the orchestrator; all ranks write weights and checkpoints. The wait for a batch is the
only place where the loop stands still for others, and the place where a stop (SIGTERM, Ctrl-C) is heard:
the step that is running is finished first, then a checkpoint is written and waited for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from async_rl.algo.losses import LossConfig
from async_rl.algo.packing import pack
from async_rl.algo.staleness import summarise
from async_rl.errors import TrainingError
from async_rl.exporter import Exporter, MetricsConfig
from async_rl.log import get_logger
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.transport.keys import ClientKey
from async_rl.transport.link import TrainerLink
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, Manifest, check_not_fenced, claim, list_versions
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.upkeep import Upkeep
from async_rl.wire import PROTOCOL, Attach, Attached, Batch
from workers import checkpoints
from workers.batches import BatchFeed, Lineage, Prepared, prepare
from workers.checkpoints import Checkpoint, Progress
from workers.exported_trainer import ExportedTrainer
from workers.learner import Learner, StepStats
from workers.metrics import MetricsFile
from workers.process_group import RankGroup, choose_device, rank_group
from workers.repeats import Repeats
from workers.saver import Saver
from workers.settings import ModelConfig, TrainerConfig

__all__ = ["learner_metrics", "prepare_torch", "run_rank"]

log = get_logger(__name__)

VERSIONS_TOLD = 8
"""Before the first one of this trainer: its predecessor may have ended between a version's commit and the word
about it to the orchestrator, and workers serve what is committed."""


def run_rank(
    *,
    store_url: str,
    store: StoreConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    loss: LossConfig,
    weights: WeightsConfig,
    temperature: float,
    orchestrator_address: str,
    seed: int,
    resume: str,
    key: ClientKey | None = None,
    metrics_config: MetricsConfig | None = None,
) -> None:
    """One rank of the trainer, from its start to the run's last step. `resume`: latest, never, or a step. `key`: for
    an orchestrator that asks for one. `metrics_config`: where rank 0 answers Prometheus; None: nowhere.

    Under torchrun every process calls it; without torchrun's environment it is the only rank.
    """
    device = choose_device(trainer.device)
    prepare_torch(trainer, device, seed)
    with ExitStack() as stack:
        stopping = stack.enter_context(_stop_requests())
        group = stack.enter_context(rank_group(device, trainer.collective_wait_s))
        bucket = open_store(store_url, store)
        stack.callback(bucket.close)
        learner = Learner(model, trainer, loss, temperature=temperature, group=group, device=device)
        start = from_rank0(lambda: _take_run(bucket, Path(model.path), learner, resume), _Start)

        exported = _export(stack, start, metrics_config) if group.rank == 0 else None
        lineage = Lineage()
        link = (
            TrainerLink(orchestrator_address, connect_timeout_s=trainer.attach_wait_s, key=key)
            if group.rank == 0
            else None
        )
        if link is not None:
            stack.callback(link.close)
        upkeep = stack.enter_context(Upkeep(bucket, start.run, weights)) if group.rank == 0 else None
        repeats = (
            Repeats(bucket, start.claim.first_version, start.parent_version) if group.rank == 0 else None
        )
        publisher = stack.enter_context(
            Publisher(
                bucket,
                start.run,
                start.claim,
                learner.parameters(),
                weights,
                parent=start.parent_version,
                on_commit=lambda manifest: _announce(
                    manifest, lineage, link, upkeep, repeats, exported, publisher.publish_s
                ),
            )
        )
        progress = _begin(bucket, group, learner, publisher, start, trainer)
        attached = from_rank0(
            lambda: _attach(link, bucket, lineage, start, progress, learner.vocab_size), Attached
        )
        if exported is not None:
            exported.attached(progress.step, attached.max_lag)
        feed = BatchFeed(
            group,
            link,
            bucket if group.rank == 0 else None,
            lineage,
            incarnation=start.claim.incarnation,
            limit_s=trainer.batch_wait_s,
            stopping=stopping.is_set,
            check_ours=lambda: check_not_fenced(bucket, start.claim),
            catch_up=lambda step: _between_slices(publisher, saver, step),
        )
        saver = stack.enter_context(
            Saver(
                bucket,
                group,
                trainer,
                learner.rows,
                publisher,
                lineage,
                fingerprint=start.run.fingerprint,
                resumed=start.checkpoint,
                check_ours=lambda: check_not_fenced(bucket, start.claim),
                on_resumable=feed.may_resume_from,
            )
        )
        metrics = stack.enter_context(MetricsFile(Path(trainer.out) if group.rank == 0 else None))
        progress = _train(
            group,
            learner,
            publisher,
            feed,
            lineage,
            saver,
            repeats,
            metrics,
            exported,
            trainer,
            attached,
            progress,
        )
        if exported is not None:
            exported.finished()

        publisher.flush(step=progress.step)
        if link is not None and progress.step >= trainer.steps:
            finished = link.finish(start.claim.incarnation, progress.step, True, trainer.finish_wait_s)
            for score in finished.evals:
                metrics.eval(score)
            log.info("run finished", step=progress.step, version=progress.version)


# ---------------------------------------------------------------- the loop


def _train(
    group: RankGroup,
    learner: Learner,
    publisher: Publisher,
    feed: BatchFeed,
    lineage: Lineage,
    saver: Saver,
    repeats: Repeats | None,
    metrics: MetricsFile,
    exported: ExportedTrainer | None,
    trainer: TrainerConfig,
    attached: Attached,
    progress: Progress,
) -> Progress:
    """Steps until the last one or a stop; where the run is then."""
    step, version = progress.step, progress.version
    refused_in_a_row = refused = 0
    while step < trainer.steps:
        clock = _Stopwatch()
        batch = feed.next(step)
        clock.lap("wait_batch")
        if batch is None:
            log.info("stopping as asked", step=step)
            break
        for score in batch.evals:
            metrics.eval(score)
        if batch.replayed and repeats is not None:
            repeats.expect(step + 1)
        trained = prepare(
            batch, lineage, step=step, max_lag=attached.max_lag, vocab_size=learner.vocab_size
        )
        micro_batches = pack(trained.samples, trainer.microbatch_tokens, group.size)[group.rank]

        stats = learner.forward_backward(micro_batches, trained.loss_tokens, len(trained.slots))
        feed.checked(step, trained.slots, stats.measured)
        clock.lap("forward_backward")
        learning_rate = learner.learning_rate
        applied = learner.optimizer_step(stats)
        clock.lap("optimizer")

        # A refused step is a step all the same: its groups are consumed, or a replay would meet them for
        # ever.
        step += 1
        refused_in_a_row = 0 if applied else refused_in_a_row + 1
        refused += not applied
        if step % trainer.publish_every == 0 or step == trainer.steps:
            publisher.publish(step)
        version = publisher.newest
        clock.lap("publish")
        progress = Progress(step, version, batch.incarnation, batch.frontier, learner.updates, batch.open)
        saver.step(progress)
        clock.lap("checkpoint")
        line = {
            "step": step,
            "version": version,
            "incarnation": batch.incarnation,
            **_batch_metrics(trained, batch),
            **learner_metrics(stats, learning_rate),
            "refused": int(not applied),
            "refused/total": refused,
            "checkpoint/late": saver.late,
            "checkpoint/failed": saver.failed,
            **clock.metrics(),
        }
        metrics.write(line)
        if exported is not None:
            exported.step(line, trained.lags, saver.saved)
        if group.rank == 0:
            _log_step(line)
        if refused_in_a_row >= trainer.max_refused_steps:
            raise _too_many_refused(refused_in_a_row, step)
    saver.finish()
    return progress


def _between_slices(publisher: Publisher, saver: Saver, step: int) -> bool:
    """Whether anything waits for the next one: then slices are short."""
    on_its_way = saver.advance()
    return publisher.catch_up(step) or on_its_way


# ---------------------------------------------------------------- beginning


class _Start(Struct, frozen=True):
    """What rank 0 found and took, for all ranks."""

    run: RunInfo
    claim: Claim
    checkpoint: Checkpoint | None
    parent_version: int  # of the first version to publish; -1 for a new run
    anew: bool  # --resume never: the run begins again


def _take_run(store: ObjectStore, model_dir: Path, learner: Learner, resume: str) -> _Start:
    """Rank 0: become the run's trainer."""
    store.probe()  # a store without conditional puts is used in another way, and warned of
    run = ensure_run(store, model_dir, learner.parameters())
    checkpoints.choose(
        store, resume, run.fingerprint
    )  # what fails must fail before another trainer is fenced
    claimed = claim(store)
    # Again: the trainer before us may have committed a newer one meanwhile.
    checkpoint = checkpoints.choose(store, resume, run.fingerprint)
    # Without one it is the initial weights again: a new branch from the root.
    parent = checkpoint.progress.version if checkpoint else min(list_versions(store), default=-1)
    return _Start(run, claimed, checkpoint, parent, resume == "never")


def _begin(
    store: ObjectStore,
    group: RankGroup,
    learner: Learner,
    publisher: Publisher,
    start: _Start,
    trainer: TrainerConfig,
) -> Progress:
    """Restore the checkpoint, if any, and publish where we are, so that everybody is on our branch."""
    progress = Progress(0, -1, start.claim.incarnation, 0, 0)
    if start.checkpoint is not None:
        checkpoints.restore(store, start.checkpoint, group.rank, learner.rows())
        progress = start.checkpoint.progress
        learner.restored(progress.updates)
        log.info("resumed", checkpoint=start.checkpoint.name, step=progress.step)
    publisher.publish(progress.step)
    publisher.flush()
    return msgspec.structs.replace(
        progress, version=publisher.committed, incarnation=start.claim.incarnation
    )


def _attach(
    link: TrainerLink | None,
    store: ObjectStore,
    lineage: Lineage,
    start: _Start,
    progress: Progress,
    vocab_size: int,
) -> Attached:
    """Rank 0: take the run at the orchestrator."""
    assert link is not None
    node = lineage.nodes[progress.version]
    for version in range(max(0, progress.version - VERSIONS_TOLD), progress.version):
        lineage.look_up(version, store)
    known = [(v, *lineage.nodes[v]) for v in sorted(lineage.nodes) if v < progress.version]
    attached = link.attach(
        Attach(
            protocol=PROTOCOL,
            run=start.run.run,
            fingerprint=start.run.fingerprint,
            incarnation=start.claim.incarnation,
            step=progress.step,
            version=progress.version,
            version_step=progress.step,
            vocab_size=vocab_size,
            frontier=progress.frontier,
            open=progress.open,
            parent=node.parent,
            digest=node.digest,
            origin=start.checkpoint.progress.incarnation if start.checkpoint else -1,
            known=tuple(known),
            anew=start.anew,
        )
    )
    log.info("attached to the orchestrator", max_lag=attached.max_lag, batch_groups=attached.batch_groups)
    return attached


def _announce(
    manifest: Manifest,
    lineage: Lineage,
    link: TrainerLink | None,
    upkeep: Upkeep | None,
    repeats: Repeats | None,
    exported: ExportedTrainer | None,
    publish_s: float,
) -> None:
    """A version is committed (rank 0, in the publisher's thread)."""
    if exported is not None:
        exported.committed(manifest, publish_s)
    lineage.committed(manifest.version, manifest.parent, manifest.step, manifest.digest)
    if link is not None:
        link.published(
            manifest.incarnation, manifest.version, manifest.step, manifest.parent, manifest.digest
        )
    if upkeep is not None:
        upkeep.committed(manifest)
    if repeats is not None:
        repeats.committed(manifest)


def _export(stack: ExitStack, start: _Start, config: MetricsConfig | None) -> ExportedTrainer | None:
    """None where nobody asked for it. Raises ConfigError where the address can't be had."""
    if config is None or not config.trainer:
        return None
    exported = ExportedTrainer(start.run.run, start.claim.incarnation, config.stuck_s)
    stack.enter_context(Exporter(config.trainer, exported))
    return exported


def prepare_torch(trainer: TrainerConfig, device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    if trainer.threads:
        torch.set_num_threads(trainer.threads)
    if device.type == "cuda":
        # Repeated steps must give the same bits, as far as the kernels have a deterministic form.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Set by SIGTERM, or by the first Ctrl-C; a second Ctrl-C ends the process as usual."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(signum: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {each: signal.signal(each, handle) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# ---------------------------------------------------------------- what is written down


class _Stopwatch:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now

    def metrics(self) -> dict[str, float]:
        laps = {f"time/{name}_s": seconds for name, seconds in self._laps.items()}
        return {"time/step_s": time.monotonic() - self._start, **laps}


def _batch_metrics(trained: Prepared, batch: Batch) -> dict[str, float | None]:
    lag = summarise(trained.lags)
    rewards, samples = trained.rewards, len(trained.samples)
    dropped = {**batch.dropped, **trained.dropped}
    return {
        "reward/mean": sum(rewards) / samples if samples else None,
        "reward/min": min(rewards, default=None),
        "reward/max": max(rewards, default=None),
        "groups": trained.groups,
        "samples": samples,
        "tokens": trained.loss_tokens,
        "tokens/mean": trained.loss_tokens / samples if samples else None,
        "finish/length": trained.cut_off / samples if samples else None,
        "lag/mean": lag.mean,
        "lag/p50": lag.p50,
        "lag/p95": lag.p95,
        "lag/max": lag.max,
        **{f"dropped/{reason}": count for reason, count in sorted(dropped.items())},
    }


def learner_metrics(stats: StepStats, learning_rate: float) -> dict[str, float | None]:
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "learning_rate": learning_rate,
        "entropy": stats.entropy,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "clip/positive": stats.masked_positive,
        "clip/negative": stats.masked_negative,
        "mismatch/abs_logprob": stats.abs_logprob,
        "mismatch/kl_k3": stats.kl_k3,
        "mismatch_lag0/tokens": stats.fresh_tokens,
        "mismatch_lag0/abs_logprob": stats.fresh_abs_logprob,
        "mismatch_lag0/kl_k3": stats.fresh_kl_k3,
    }


def _log_step(line: dict[str, float | int | None]) -> None:
    names = {
        "step": "step",
        "version": "version",
        "reward/mean": "reward",
        "loss": "loss",
        "grad_norm": "grad_norm",
        "lag/mean": "lag",
        "lag/max": "lag_max",
        "mismatch/kl_k3": "kl",
        "tokens": "tokens",
        "time/step_s": "step_s",
        "time/wait_batch_s": "wait_s",
    }
    shown = {short: line[name] for name, short in names.items()}
    if line["refused"]:
        log.warning(
            "step refused: its loss or gradient is not finite, or nothing was left to train", **shown
        )
    else:
        log.info("step", **shown)


def _too_many_refused(count: int, step: int) -> TrainingError:
    return TrainingError(
        f"{count} steps in a row were refused, the last one step {step}: loss or gradient was not finite, "
        "or every group was left out",
        hint="see metrics.jsonl (loss, grad_norm, dropped/…); a lower learning_rate is the usual cure",
    )
