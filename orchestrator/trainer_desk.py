"""What the orchestrator does with the trainer's messages, and what the trainer waits for. Pure, time passed in.

Attach      ─► a session, and the run taken in the ledger: at once
NextBatch   ─► Batch: when a full batch is buffered, and no straggler is waited for any longer
Published   ─► Announce to the workers, and an evaluation where one is due
Checked     ─► the workers are judged
Finish      ─► Finished: when the last evaluations are done, or their limit is over
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from async_rl.log import get_logger
from async_rl.wire import (
    Announce,
    Attach,
    Attached,
    Batch,
    Checked,
    Drain,
    EvalScore,
    Finish,
    Finished,
    Group,
    NextBatch,
    Published,
)
from orchestrator.config import EvalConfig, OrchestratorConfig
from orchestrator.fair import Emptiest
from orchestrator.handshake import Refusal, refuse_attach, refuse_trainer
from orchestrator.judging import Judging
from orchestrator.ledger import Formed, GroupLedger
from orchestrator.outbox import Outbox
from orchestrator.records import Took, Version
from orchestrator.session import Asked, Session
from orchestrator.tally import Tally

__all__ = ["FINISHED", "TrainerDesk"]

log = get_logger(__name__)

FINISHED = Drain("the run is finished")
FIRST_REPEAT_S, LONGEST_REPEAT_S = 2.0, 60.0
"""Before a batch is sent once more to a trainer that asks for it again; doubled each time."""


class TrainerDesk:
    """`session`: of the trainer that has the run; None before one has attached. `leave_by`: set with Finished; until
    then the workers have time to leave."""

    def __init__(
        self,
        config: OrchestratorConfig,
        evaluation: EvalConfig,
        lease_ids: Iterator[int],
        ledger: GroupLedger,
        emptiest: Emptiest,
        tally: Tally,
        outbox: Outbox,
        judging: Judging,
    ) -> None:
        self.session: Session | None = None
        self.leave_by: float | None = None
        self._config = config
        self._evaluation = evaluation
        self._lease_ids = lease_ids
        self._ledger = ledger
        self._emptiest = emptiest
        self._tally = tally
        self._outbox = outbox
        self._judging = judging

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but to see the workers off."""
        return self.leave_by is not None

    # ---------------------------------------------------------------- in

    def attach(self, peer: bytes, attach: Attach, now: float) -> None:
        old = self.session
        if old is not None and (peer, attach.incarnation) == (old.peer, old.incarnation):
            old.repeat_at = old.repeat_s = 0.0  # it reconnected: what was on its way may be lost
            return self._outbox.send(peer, self._attached(old))
        ledger = self._ledger
        refusal = refuse_attach(
            attach,
            old.attach if old else None,
            ledger.opened,
            ledger.incarnation,
            spool=ledger.spool,
            ended=self.finished,
        )
        if refusal is not None:
            return self._outbox.refuse(peer, refusal)
        if old is not None:
            self._take_evals(old)
            self._outbox.cancel(old.close(), f"trainer incarnation {attach.incarnation} took over")
        if ledger.opened is None:
            ledger.open(attach.run, attach.fingerprint)
        for known in attach.known:  # committed by a trainer that ended before it could tell us
            ledger.publish(Version(*known))
        ledger.publish(Version(attach.version, attach.parent, attach.version_step, attach.digest))
        # One that goes on where we know it to be, after an end of ours, takes nothing anew.
        if attach.incarnation != ledger.incarnation or not 0 <= ledger.next_step - attach.step <= 1:
            took = Took(
                attach.incarnation, attach.step, attach.origin, attach.frontier, attach.open, attach.anew
            )
            self._outbox.cancel(ledger.take(took), "a trainer resumed after the step that used this group")
            ledger.drop_quarantined(now)
        self.session = session = Session(
            attach, peer, self._config, self._evaluation, self._lease_ids, ledger, now
        )
        log.info(
            "trainer attached",
            incarnation=attach.incarnation,
            step=attach.step,
            version=attach.version,
            steps_to_repeat=ledger.replaying,
            buffered=ledger.buffered,
        )
        if session.evals.due(attach.version):
            session.evals.start(attach.version, attach.version_step)
        self._outbox.send(peer, self._attached(session))
        self._announce(session)

    def _attached(self, session: Session) -> Attached:
        return Attached(session.attach.run, self._config.max_lag, self._config.batch_groups)

    def receive(self, peer: bytes, message: NextBatch | Published | Checked | Finish, now: float) -> None:
        session = self.session
        attach, at = (session.attach, session.peer) if session is not None else (None, b"")
        refusal = refuse_trainer(peer, message.incarnation, attach, at)
        if refusal is not None:
            return self._outbox.refuse(peer, refusal)
        assert session is not None, "it was not refused"
        session.heard = now
        match message:
            case NextBatch(step=step, resumable=resumable):
                session.ledger.keep_from(min(resumable, step))
                self._on_next_batch(session, step, now)
            case Published(version=version, step=step):
                parent = message.parent if message.parent >= 0 else session.versions.newest
                if version > session.versions.newest and parent >= version:
                    reason = f"version {version} can't have followed version {parent}: versions only grow"
                    self._outbox.refuse(session.peer, Refusal("malformed", reason))
                elif version > session.versions.newest and step >= session.versions.newest_step:
                    session.ledger.publish(Version(version, parent, step, message.digest))
                    session.versions.add(version, now)
                    if session.evals.due(version):
                        self._outbox.cancel(
                            session.evals.start(version, step), "a newer version is being evaluated"
                        )
                    self._announce(session)
            case Checked(step=step, rows=rows):
                self._judging.checked(session, step, rows, now)
            case Finish():
                self._on_finish(session, message, now)

    def _on_next_batch(self, session: Session, step: int, now: float) -> None:
        if session.last_batch is not None and step == session.last_batch.step:
            return self._repeat(session, session.last_batch, now)  # asked again: the same answer
        if step == session.ledger.next_step - 1 and (formed := session.ledger.formed(step)) is not None:
            return self._send(
                session, self._batch(session, formed, 0.0), now
            )  # asked in an earlier life of ours
        if step != session.ledger.next_step or session.finish_by is not None:
            reason = f"step {step} was asked for, the next batch is for step {session.ledger.next_step}"
            hint = "restart the trainer: it resumes from its checkpoint under a new incarnation"
            return self._outbox.refuse(session.peer, Refusal("step", reason, hint))
        session.step = step
        if session.asked is None:
            session.asked = Asked(step, now)
            log.debug("batch asked for", step=step, buffer=session.ledger.readiness(now).reason)

    def _on_finish(self, session: Session, finish: Finish, now: float) -> None:
        if session.finished is not None:
            return self._outbox.send(session.peer, session.finished)
        if session.finish_by is None:
            session.step, session.asked = finish.step, None
            session.finish_by = now + (self._config.final_eval_s if finish.evaluate else 0.0)
            held = session.ledger.stand_down()
            self._outbox.cancel(held, "training is finished")
            self._emptiest.touch_all({each.worker for each in held})  # for the last evaluation
            if finish.evaluate:
                cancel = session.evals.start(session.versions.newest, session.versions.newest_step)
                self._outbox.cancel(cancel, "the final version is being evaluated")
            log.info("trainer finished", step=finish.step, version=session.versions.newest)

    # ---------------------------------------------------------------- what it waits for

    def answer(self, session: Session, now: float) -> None:
        """The trainer waits for: a full batch, and no straggler (or the end of the hold)."""
        asked = session.asked
        if asked is None:
            return
        session.ledger.sweep(now)
        if not session.ledger.readiness(now).ready:
            return
        formed = session.ledger.form_batch(now)
        self._tally.batch(formed)
        session.waited_s, session.asked = session.waited(now), None
        self._send(session, self._batch(session, formed, now - asked.since), now)

    def _send(self, session: Session, batch: Batch, now: float) -> None:
        session.last_batch, session.repeat_s = batch, FIRST_REPEAT_S
        session.repeat_at = now + session.repeat_s
        self._outbox.send(session.peer, batch)

    def _repeat(self, session: Session, batch: Batch, now: float) -> None:
        """One copy may be lost with a connection. The next is worth its bytes only when the one before had time to
        arrive: the trainer asks every few seconds, and each answer may be on its way for longer, or wait for a disk
        that is full, with the others behind it."""
        if now < session.repeat_at:
            return
        session.repeat_s = min(max(FIRST_REPEAT_S, 2 * session.repeat_s), LONGEST_REPEAT_S)
        session.repeat_at = now + session.repeat_s
        self._outbox.send(session.peer, batch)

    def _batch(self, session: Session, formed: Formed, waited_s: float) -> Batch:
        return Batch(
            incarnation=session.incarnation,
            step=formed.assigned.step,
            groups=cast(tuple[Group, ...], formed.bodies),  # encoded already: they leave as they came
            lags=formed.lags,
            frontier=formed.assigned.frontier,
            dropped=dict(session.ledger.dropped),
            evals=self._take_evals(session),
            waited_s=waited_s,
            open=formed.assigned.open,
            replayed=formed.assigned.replayed,
        )

    def finish(self, session: Session, now: float) -> None:
        """The end waits for: the last evaluations, or their limit. Workers are told first: Finished ends
        us."""
        if session.finish_by is None or (session.evals.open and now < session.finish_by):
            return
        self._outbox.cancel(session.evals.give_up_all(), "the run is finished")
        self._outbox.to_all(FINISHED)
        session.finished = Finished(self._take_evals(session))
        self.leave_by = now + self._config.drain_s
        self._outbox.send(session.peer, session.finished)

    def _take_evals(self, session: Session) -> tuple[EvalScore, ...]:
        scores = session.evals.take_finished()
        self._tally.evals.extend(scores)
        return scores

    def _announce(self, session: Session) -> None:
        self._outbox.to_all(Announce(session.versions.newest, session.versions.newest_step))
