"""What rank 0 has besides its share of the model: the line to the orchestrator, the care for the versions in the
store, the look whether repeated steps repeat, and what people are told. The other ranks have nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from async_rl.algo.alerts import Alerts
from async_rl.exporter import Exporter, MetricsConfig
from async_rl.log import get_logger
from async_rl.store import ObjectStore
from async_rl.transport.keys import ClientKey
from async_rl.transport.link import TrainerLink
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest
from async_rl.weights.upkeep import Upkeep
from async_rl.wire import PROTOCOL, Attach, Attached, Batch
from workers.batches import Lineage
from workers.beginning import Start
from workers.checkpoints import Progress
from workers.exported_trainer import ExportedTrainer
from workers.metrics import MetricsFile
from workers.repeats import Repeats
from workers.settings import TrainerConfig

__all__ = ["Lead"]

log = get_logger(__name__)

VERSIONS_TOLD = 8
"""Before the first one of this trainer: its predecessor may have ended between a version's commit and the word
about it to the orchestrator, and workers serve what is committed."""


class Lead:
    """Raises ConfigError where the orchestrator's address can't be one, the metrics' address can't be had, or the
    trainer's folder can't be written."""

    def __init__(
        self,
        store: ObjectStore,
        start: Start,
        lineage: Lineage,
        trainer: TrainerConfig,
        weights: WeightsConfig,
        *,
        orchestrator_address: str,
        key: ClientKey | None,
        metrics: MetricsConfig | None,
    ) -> None:
        """`key`: for an orchestrator that asks for one. `metrics`: where to answer Prometheus; None: nowhere."""
        self._store, self._start, self._lineage, self._trainer = store, start, lineage, trainer
        self._exported: ExportedTrainer | None = None
        with ExitStack() as stack:
            if metrics is not None and metrics.trainer:
                self._exported = ExportedTrainer(start.run.run, start.claim.incarnation, metrics.stuck_s)
                stack.enter_context(Exporter(metrics.trainer, self._exported))
            self.link = stack.enter_context(
                TrainerLink(orchestrator_address, connect_timeout_s=trainer.attach_wait_s, key=key)
            )
            self._upkeep = stack.enter_context(Upkeep(store, start.run, weights))
            self._metrics = stack.enter_context(MetricsFile(Path(trainer.out)))
            self._stack = stack.pop_all()
        self._alerts = Alerts(trainer.alerts)
        self._repeats = Repeats(store, start.claim.first_version, start.parent_version)

    def attach(self, progress: Progress, vocab_size: int, longest: int) -> Attached:
        """Take the run at the orchestrator."""
        start, lineage = self._start, self._lineage
        node = lineage.nodes[progress.version]
        for version in range(max(0, progress.version - VERSIONS_TOLD), progress.version):
            lineage.look_up(version, self._store)
        known = [(v, *lineage.nodes[v]) for v in sorted(lineage.nodes) if v < progress.version]
        attached = self.link.attach(
            Attach(
                protocol=PROTOCOL,
                run=start.run.run,
                fingerprint=start.run.fingerprint,
                incarnation=start.claim.incarnation,
                step=progress.step,
                version=progress.version,
                version_step=progress.step,
                vocab_size=vocab_size,
                longest=longest,
                frontier=progress.frontier,
                open=progress.open,
                parent=node.parent,
                digest=node.digest,
                origin=start.checkpoint.progress.incarnation if start.checkpoint else -1,
                known=tuple(known),
                anew=start.anew,
            )
        )
        log.info(
            "attached to the orchestrator", max_lag=attached.max_lag, batch_groups=attached.batch_groups
        )
        if self._exported is not None:
            self._exported.attached(progress.step, attached.max_lag)
        return attached

    def committed(self, manifest: Manifest, publish_s: float) -> None:
        """A version is committed. In the publisher's thread."""
        if self._exported is not None:
            self._exported.committed(manifest, publish_s)
        self._lineage.committed(manifest.version, manifest.parent, manifest.step, manifest.digest)
        self.link.published(
            manifest.incarnation, manifest.version, manifest.step, manifest.parent, manifest.digest
        )
        self._upkeep.committed(manifest)
        self._repeats.committed(manifest)

    def took(self, batch: Batch) -> None:
        """A batch is about to be trained."""
        for score in batch.evals:
            self._metrics.eval(score)
        if batch.replayed:
            self._repeats.expect(batch.step + 1)

    def stepped(
        self, line: Mapping[str, float | int | None], lags: Sequence[int], checkpoint: int | None
    ) -> None:
        """A step is done. `line`: its metrics; `lags`: of the samples trained; `checkpoint`: step of the newest."""
        for sentence in self._alerts.look(line):
            log.warning(sentence, step=line["step"])
        line = {**line, **{f"alerts/{name}": count for name, count in self._alerts.counts.items()}}
        self._metrics.write(line)
        if self._exported is not None:
            self._exported.step(line, lags, checkpoint)
        _log_step(line)

    def finish(self, progress: Progress) -> None:
        """Training is over, by its last step or by a stop."""
        if self._exported is not None:
            self._exported.finished()
        if progress.step >= self._trainer.steps:
            incarnation, limit_s = self._start.claim.incarnation, self._trainer.finish_wait_s
            for score in self.link.finish(incarnation, progress.step, True, limit_s).evals:
                self._metrics.eval(score)
            log.info("run finished", step=progress.step, version=progress.version)

    def close(self) -> None:
        self._stack.close()


def _log_step(line: Mapping[str, float | int | None]) -> None:
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
