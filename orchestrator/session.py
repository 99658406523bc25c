"""One trainer incarnation's hold on the run: its versions, its evaluations, and what it asked for last.

A newer incarnation gets a new session. The groups stay: they are the ledger's, which outlives every trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from async_rl.wire import Attach, Batch, Finished
from orchestrator.config import EvalConfig, OrchestratorConfig
from orchestrator.evals import Evaluations
from orchestrator.leases import Held
from orchestrator.ledger import GroupLedger
from orchestrator.versions import Versions

__all__ = ["Asked", "Session"]


SILENT_S = 15.0
"""A waiting trainer repeats its request every two seconds (transport/link.py)."""


class Asked(msgspec.Struct):
    """A NextBatch that is not answered yet."""

    step: int
    since: float


class Session:
    def __init__(
        self,
        attach: Attach,
        peer: bytes,
        config: OrchestratorConfig,
        evaluation: EvalConfig,
        ids: Iterator[int],
        ledger: GroupLedger,
        now: float,
    ) -> None:
        self.attach = attach
        self.peer = peer
        self.heard = self.since = now
        self.waited_s = 0.0  # of the requests for batches that were answered
        self.step = attach.step  # optimizer steps done, as far as the trainer has told
        self.ledger = ledger
        self.versions = ledger.versions = Versions(ledger.tree, attach.version, now)
        self.evals = Evaluations(
            evaluation,
            ids,
            lease_s=config.lease_s,
            max_attempts=config.max_attempts,
            dropped=ledger.dropped,
            dead_letters=ledger.dead_letters,
        )
        self._training, self._evaluating = ledger.pool.by_worker, self.evals.pool.by_worker
        self.asked: Asked | None = None
        self.last_batch: Batch | None = None
        self.repeat_at, self.repeat_s = (
            0.0,
            0.0,
        )  # it is sent again then at the earliest; and the pause before that
        self.finish_by: float | None = None  # set by Finish: when the last evaluation is given up
        self.finished: Finished | None = None

    @property
    def incarnation(self) -> int:
        return self.attach.incarnation

    def state(self, now: float) -> str:
        """The trainer, for Status. One that waits asks again every few seconds; one that trains says
        nothing."""
        if self.finished is not None:
            return "finished"
        if (self.asked or self.finish_by is not None) and now - self.heard > SILENT_S:
            return "absent"
        if self.finish_by is not None:
            return "finishing"
        return "waiting" if self.asked is not None else "training"

    def waited(self, now: float) -> float:
        """Seconds for which the trainer has waited for batches, the wait that goes on now included."""
        return self.waited_s + (now - self.asked.since if self.asked is not None else 0.0)

    def leases(self, worker: str) -> int:
        return len(self._training.get(worker, ())) + len(self._evaluating.get(worker, ()))

    def held(self, worker: str, group_size: int) -> int:
        """Its leases, against what it can hold: those of evaluations are of one sample each, so `group_size` of them
        take the place of one. (Else a worker whose engine has room for 64 samples would measure 8 at a time.)"""
        evaluating = len(self._evaluating.get(worker, ()))
        return len(self._training.get(worker, ())) + evaluating // group_size

    def most_leases(self) -> int:
        """That may run at once now, those that do included."""
        ledger = self.ledger
        free = ledger.admitted_limit(self.versions.newest) - ledger.slots_in_use
        return max(0, free) + ledger.outstanding + len(self.evals.pool)

    def wants(self, lease: int, worker: str) -> bool:
        return self.ledger.pool.wants(lease, worker) or self.evals.pool.wants(lease, worker)

    def close(self) -> list[Held]:
        """The leases to cancel when another incarnation takes over: those of evaluations."""
        return self.evals.give_up_all()
