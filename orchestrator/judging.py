"""Workers are judged: what is known of each one (conduct.py) is looked at whenever something was learned of it, and
who is found guilty gets nothing for a while (quarantine.py).

    a step was checked by the trainer ─┐                    ┌─► suspect: said once
    rewards were scored again ─────────┼─► conduct ─► judge ┤
    a group was examined ──────────────┘                    └─► guilty: its leases are cancelled, what it had in the
                                                                buffer is generated again, and it is told why
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from async_rl.envs.base import Environment
from async_rl.log import get_logger
from async_rl.wire import Group, Measured
from orchestrator.conduct import Conduct
from orchestrator.config import VerifyConfig
from orchestrator.handshake import UNKNOWN_WORKER, in_quarantine
from orchestrator.ledger import GroupLedger
from orchestrator.outbox import Outbox
from orchestrator.pool import log_failures
from orchestrator.prompts import prompt_of
from orchestrator.records import decode_group, encode_group
from orchestrator.rescoring import Outcome, Rescoring, chosen
from orchestrator.roster import Roster, Worker
from orchestrator.session import Session
from orchestrator.tally import Tally

__all__ = ["Judging"]

log = get_logger(__name__)


class Judging:
    """`salt`: chooses the groups that are scored again; None: there is nobody to do it. `session`, wherever it is
    asked for: of the trainer that has the run, whose evaluations a worker may hold leases of."""

    def __init__(
        self,
        config: VerifyConfig,
        environment: Environment,
        ledger: GroupLedger,
        roster: Roster,
        tally: Tally,
        outbox: Outbox,
        salt: str | None,
    ) -> None:
        self.conduct = Conduct(config)
        self._config = config
        self._environment = environment
        self._ledger = ledger
        self._roster = roster
        self._tally = tally
        self._outbox = outbox
        self._salt = salt
        self._rescorings: list[Rescoring] = []

    # ---------------------------------------------------------------- what is learned of a worker

    def checked(self, session: Session, step: int, rows: Iterable[Measured], now: float) -> None:
        """The trainer has measured the groups of a step."""
        for name in self.conduct.checked(step, rows, self._ledger.deliverer):
            self._judge(name, session, now)

    def rescored(self, session: Session | None, outcome: Outcome, now: float) -> None:
        if outcome.wrong:
            self._tally.refused["reward_differs"] += 1
            log.warning("rewards do not fit", worker=outcome.worker, found=outcome.wrong)
        if outcome.failed:
            self._tally.refused["reward_fails"] += 1
            log.warning("texts can't be scored again", worker=outcome.worker, found=outcome.failed)
        self.conduct.rescored(outcome.worker, outcome.wrong, outcome.failed)
        self._judge(outcome.worker, session, now)

    def accepted(self, worker: Worker, group: Group) -> None:
        """It may be one of those to score again."""
        self.conduct.examined(worker.name, "")
        if self._salt is not None and chosen(group.key, self._salt, self._config.rescore_share):
            prompt = prompt_of(self._environment, group.key.split, group.key.ordinal)
            # A copy: what came over the socket is a view into its frame, which may hold more than the group.
            kept = decode_group(Raw(encode_group(group)))
            self._rescorings.append(Rescoring(worker.name, prompt, kept))

    def faulty(self, session: Session | None, worker: Worker, fault: str, now: float) -> None:
        """What it sent was refused for what it says."""
        self.conduct.examined(worker.name, fault)
        self._judge(worker.name, session, now)

    def take_rescorings(self) -> list[Rescoring]:
        """Groups accepted since the last call that are to be scored again."""
        taken, self._rescorings = self._rescorings, []
        return taken

    # ---------------------------------------------------------------- and what follows

    def tell_quarantined(self, worker: Worker, now: float) -> None:
        quarantine = self._ledger.quarantine
        left_s = quarantine.left_s(worker.name, now)
        refusal = in_quarantine(worker.name, quarantine.reason(worker.name), left_s)
        self._outbox.refuse(worker.peer, refusal)

    def end_quarantines(self, now: float) -> None:
        """Of those whose time is over."""
        for name in self._ledger.quarantine.over(now):
            log.info("quarantine ended, the worker may try again", worker=name)
            self._ledger.release(name)
            self.conduct.forget(name)  # also what came to light late, of what it had sent before
            worker = self._roster.get(name)
            if worker is not None and worker.state == "quarantined":
                worker.state = "starting"
                self._outbox.refuse(worker.peer, UNKNOWN_WORKER)  # so that it says Hello at once

    def _judge(self, name: str, session: Session | None, now: float) -> None:
        verdict = self.conduct.verdict(name)
        if self.conduct.newly_suspect(name, verdict):
            log.warning("worker suspect", worker=name, reason=verdict.reason)
        if verdict.state == "guilty" and name not in self._ledger.quarantine:
            self._quarantine(name, verdict.reason, session, now)

    def _quarantine(self, name: str, reason: str, session: Session | None, now: float) -> None:
        log.error("worker quarantined", worker=name, reason=reason)
        self.conduct.forget(name)
        held = [*self._ledger.pool.of_worker(name)]
        if session is not None:
            held += session.evals.pool.of_worker(name)
        self._outbox.cancel(held, "its worker is in quarantine")
        log_failures(self._ledger.put_in_quarantine(name, reason, now))
        if session is not None:
            log_failures(session.evals.worker_left(name, "its worker is in quarantine", counted=False))
        worker = self._roster.get(name)
        if worker is not None and worker.gone_since is None:
            worker.state = "quarantined"
            self.tell_quarantined(worker, now)
