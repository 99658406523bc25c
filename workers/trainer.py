"""The trainer: one loop, the same in every rank process.

    while step < steps:
        batch    waits for: enough fresh groups, which rollout workers make and the orchestrator hands out
        trained  advantages, lag of every token
        updates  packed without padding, forward and backward, optimizer: once, or for several minibatches; an
                 update that is not finite is refused before the optimizer
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from async_rl.algo.advantages import AdvantageConfig
from async_rl.algo.losses import LossConfig
from async_rl.errors import TrainingError
from async_rl.exporter import MetricsConfig
from async_rl.heap import settle_heap
from async_rl.log import get_logger
from async_rl.store import StoreConfig, open_store
from async_rl.transport.keys import ClientKey
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest, check_not_fenced
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.wire import Attached
from workers.batches import BatchFeed, Lineage, Prepared, prepare
from workers.beginning import Start, begin, take_run
from workers.checkpoints import Progress
from workers.lead import Lead
from workers.learner import Learner
from workers.process_group import RankGroup, choose_device, rank_group
from workers.saver import Saver
from workers.settings import ModelConfig, TrainerConfig
from workers.step_metrics import batch_metrics, learner_metrics, speed_metrics
from workers.updates import train_batch

__all__ = ["prepare_torch", "run_rank"]

log = get_logger(__name__)


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
    advantage: AdvantageConfig = AdvantageConfig(),  # noqa: B008  # frozen
    max_tokens: int = 0,
    key: ClientKey | None = None,
    metrics_config: MetricsConfig | None = None,
) -> None:
    """One rank of the trainer, from its start to the run's last step. `resume`: latest, never, or a step.
    `temperature` and `max_tokens` (per sample): the sampling's. `key`: for an orchestrator that asks for one.
    `metrics_config`: where rank 0 answers Prometheus; None: nowhere.

    Under torchrun every process calls it; without torchrun's environment it is the only rank.
    """
    device = choose_device(trainer.device)
    prepare_torch(trainer, device, seed)
    with ExitStack() as stack:
        stopping = stack.enter_context(_stop_requests())
        group = stack.enter_context(rank_group(device, trainer.collective_wait_s))
        bucket = open_store(store_url, store)
        stack.callback(bucket.close)
        learner = Learner(
            model,
            trainer,
            loss,
            temperature=temperature,
            group=group,
            device=device,
            max_tokens=max_tokens,
        )
        start = from_rank0(lambda: take_run(bucket, Path(model.path), learner, resume), Start)
        lineage = Lineage()
        lead = None
        if group.rank == 0:
            lead = Lead(
                bucket,
                start,
                lineage,
                trainer,
                weights,
                orchestrator_address=orchestrator_address,
                key=key,
                metrics=metrics_config,
            )
            stack.callback(lead.close)
        publisher = stack.enter_context(
            Publisher(
                bucket,
                start.run,
                start.claim,
                learner.published(),
                weights,
                parent=start.parent_version,
                on_commit=lambda manifest: _committed(manifest, lead, publisher),
            )
        )
        progress = begin(bucket, group, learner, publisher, start)
        attached = from_rank0(
            lambda: _lead(lead).attach(progress, learner.vocab_size, learner.longest), Attached
        )
        ready = partial(
            prepare,
            max_lag=attached.max_lag,
            vocab_size=learner.vocab_size,
            longest=learner.longest,
            advantage=advantage,
            max_tokens=max_tokens,
        )
        feed = BatchFeed(
            group,
            lead.link if lead is not None else None,
            bucket if lead is not None else None,
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
                adapters=learner.adapters,
            )
        )
        settle_heap()
        progress = _train(
            _Parts(group, learner, publisher, feed, lineage, saver, lead),
            trainer,
            ready,
            progress,
        )
        publisher.flush(step=progress.step)
        if lead is not None:
            lead.finish(progress)


def _committed(manifest: Manifest, lead: Lead | None, publisher: Publisher) -> None:
    _lead(lead).committed(manifest, publisher.publish_s)


def _lead(lead: Lead | None) -> Lead:
    assert lead is not None, "only rank 0 does this"
    return lead


# ---------------------------------------------------------------- the loop


class _Parts(NamedTuple):
    """What a step goes through, on each rank; `lead` on rank 0 alone."""

    group: RankGroup
    learner: Learner
    publisher: Publisher
    feed: BatchFeed
    lineage: Lineage
    saver: Saver
    lead: Lead | None


def _train(
    parts: _Parts, trainer: TrainerConfig, ready: Callable[..., Prepared], progress: Progress
) -> Progress:
    """Steps until the last one or a stop; where the run is then."""
    group, learner, publisher, feed, lineage, saver, lead = parts
    step, version = progress.step, progress.version
    # Of the lives before, too: a run whose every step is refused ends, however often it is resumed between them.
    refused, refused_in_a_row = progress.refused, progress.refused_in_a_row
    while step < trainer.steps:
        clock = _Stopwatch()
        batch = feed.next(step)
        clock.lap("wait_batch")
        if batch is None:
            log.info("stopping: a signal asked for it, or who started this rank is gone", step=step)
            break
        if lead is not None:
            lead.took(batch)
        trained = ready(batch, lineage, step=step)

        learning_rate = learner.learning_rate
        updates = train_batch(learner, group, trained.samples, trainer, len(trained.slots), clock.lap, step)
        feed.checked(step, trained.slots, updates.stats.measured)
        applied = updates.made > 0
        if 0 < updates.made < updates.wanted:
            log.warning(
                "some of the step's updates were refused: loss or gradient not finite, or no loss token",
                step=step + 1,
                made=updates.made,
                wanted=updates.wanted,
            )

        # A refused step is a step all the same: its groups are consumed, or a replay would meet them for
        # ever.
        step += 1
        refused_in_a_row = 0 if applied else refused_in_a_row + 1
        refused += not applied
        if step % trainer.publish_every == 0 or step == trainer.steps:
            publisher.publish(step)
        version = publisher.newest
        clock.lap("publish")
        progress = Progress(
            step,
            version,
            batch.incarnation,
            batch.frontier,
            learner.updates,
            batch.open,
            refused=refused,
            refused_in_a_row=refused_in_a_row,
        )
        saver.step(progress)
        clock.lap("checkpoint")
        line = {
            "step": step,
            "version": version,
            "incarnation": batch.incarnation,
            **batch_metrics(trained, batch),
            **learner_metrics(updates.stats, learning_rate),
            "updates": updates.made,
            "refused": int(not applied),
            "refused/total": refused,
            "checkpoint/late": saver.late,
            "checkpoint/failed": saver.failed,
            **(times := clock.metrics()),
            **speed_metrics(trained, times, learner.utilisation),
        }
        if lead is not None:
            lead.stepped(line, trained.lags, saver.saved)
        if refused_in_a_row >= trainer.max_refused_steps:
            raise _too_many_refused(refused_in_a_row, step)
    saver.finish()
    return progress


def _between_slices(publisher: Publisher, saver: Saver, step: int) -> bool:
    """Whether anything waits for the next one: then slices are short."""
    on_its_way = saver.advance()
    return publisher.catch_up(step) or on_its_way


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
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        laps = {f"time/{name}_s": seconds for name, seconds in self._laps.items()}
        return {"time/step_s": time.monotonic() - self._start, **laps}


def _too_many_refused(count: int, step: int) -> TrainingError:
    return TrainingError(
        f"{count} steps in a row were refused, the last one step {step}: loss or gradient was not finite, "
        "or every group was left out",
        hint="see metrics.jsonl (loss, grad_norm, dropped/…); a lower learning_rate is the usual cure",
    )
