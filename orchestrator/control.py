"""What the orchestrator does with each message, and with the passing of time. No sockets, no clock: a
message or a moment goes in, the messages to send come out, so a whole run can be played in a test.

    receive(peer, message, now) ─┐
                                 ├─► ledgers ─► advance: batch to the trainer, leases to workers ─► outgoing
    tick(now) ───────────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, cast

from async_rl.envs.base import Environment, EnvironmentConfig
from async_rl.errors import Malformed, NotAllowed
from async_rl.log import get_logger
from async_rl.transport.base import Received, printable
from async_rl.wire import (
    PROTOCOL,
    Ack,
    Announce,
    AnyMessage,
    Attach,
    Attached,
    Batch,
    Bye,
    Cancel,
    Checked,
    Credit,
    Drain,
    EvalScore,
    Failed,
    Finish,
    Finished,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Lease,
    Nack,
    NextBatch,
    Published,
    Refused,
    RunSettings,
    Sampling,
    Status,
    StatusRequest,
    Welcome,
)
from orchestrator.acceptance import Fault, Requirements, examine
from orchestrator.conduct import Conduct
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.early import end_early
from orchestrator.handshake import (
    UNKNOWN_WORKER,
    Refusal,
    in_quarantine,
    refuse_attach,
    refuse_hello,
    refuse_trainer,
)
from orchestrator.leases import Held, name_of
from orchestrator.ledger import Formed, GroupLedger, hash_of
from orchestrator.pool import Failure
from orchestrator.prompts import prompt_of
from orchestrator.records import Record, Took, Version, encode_group
from orchestrator.rescoring import Outcome, Rescoring, chosen
from orchestrator.roster import Emptiest, Roster, Worker
from orchestrator.seeds import seeds_of
from orchestrator.session import Asked, Session
from orchestrator.spool import Journal, Place
from orchestrator.status import status_of
from orchestrator.tally import Tally

__all__ = ["Control", "Outgoing"]

log = get_logger(__name__)

REASON_CHARS = 1000
"""Of what a worker says; it is kept with dead letters, and sent with every Status."""

_FINISHED = Drain("the run is finished")

Outgoing: TypeAlias = list[tuple[bytes, AnyMessage]]


class Control:
    def __init__(
        self,
        *,
        environment: Environment,
        environment_config: EnvironmentConfig,
        sampling: SamplingConfig,
        config: OrchestratorConfig,
        evaluation: EvalConfig,
        seed: int,
        lease_ids: Iterator[int],
        now: float,
        journal: Journal,
        rescoring_salt: str | None = None,
        turned_away: Mapping[str, int] | None = None,
    ) -> None:
        """`rescoring_salt`: chooses the groups that are scored again; None: there is nobody to do it. `turned_away`:
        connections that the listener's door refuses, by reason; counted there, shown in Status."""
        self._environment = environment
        self._config = config
        self._evaluation = evaluation
        self._seed = seed
        self._lease_ids = lease_ids
        self._started = now
        self._sampling = Sampling(sampling.temperature, sampling.max_tokens)
        self._settings = RunSettings(
            environment=environment_config.name,
            environment_args=environment_config.args,
            sampling=self._sampling,
            group_size=sampling.group_size,
            max_lag=config.max_lag,
            heartbeat_s=config.heartbeat_s,
        )
        self._roster = Roster(config.heartbeat_s)
        self._emptiest = Emptiest(
            self._roster, lambda name: self._session.leases(name) if self._session else 0
        )
        self._tally = Tally()
        self._conduct = Conduct(config.verify)
        self._rescoring_salt = rescoring_salt
        self._rescorings: list[Rescoring] = []
        self._suspects: set[str] = set()  # so that each is logged once
        self._turned_away = turned_away if turned_away is not None else {}
        self._ledger = GroupLedger(config, journal, lease_ids)
        self._spool = journal.where
        self._session: Session | None = None
        self._leave_by: float | None = None  # set with Finished: workers have until then
        self._out: Outgoing = []

    def restore(self, records: Iterable[tuple[Record, Place]], now: float) -> int:
        """Play the journal of earlier lives, before anything is received. How many records it had."""
        return self._ledger.restore(records, now)

    def rotate(self) -> None:
        """Between two turns: begin a new file of the journal where it is time. Raises StoreUnavailable where the disk
        is full; nothing is lost by it."""
        self._ledger.rotate()

    # ---------------------------------------------------------------- in

    def receive(self, peer: bytes, message: Received, now: float) -> Outgoing:
        return self.receive_all([(peer, message)], now)

    def receive_all(self, arrived: Iterable[tuple[bytes, Received]], now: float) -> Outgoing:
        """Messages that came together: what becomes possible by them is looked at once, after the last."""
        self._out = []
        for peer, message in arrived:
            self._receive(peer, message, now)
        self._advance(now)
        return self._out

    def _receive(self, peer: bytes, message: Received, now: float) -> None:
        match message:
            case NotAllowed():
                self._on_not_allowed(peer, message)
            case Malformed():
                self._refuse(peer, Refusal("malformed", message.message, message.hint))
                self._examined(self._roster.at(peer), "malformed", now)
            case StatusRequest():
                self._send(peer, self.status(now))
            case Attach():
                self._on_attach(peer, message, now)
            case NextBatch() | Published() | Checked() | Finish():
                session = self._trainer(peer, message.incarnation, now)
                if session is not None:
                    self._on_trainer(session, message, now)
            case Hello():
                self._on_hello(peer, message, now)
            case Credit() | Heartbeat() | GroupDone() | Failed() | Bye():
                self._on_worker(peer, message, now)
            case _:
                reason = f"{type(message).__name__} is a message that only the orchestrator sends"
                self._refuse(peer, Refusal("malformed", reason))

    def rescored(self, outcome: Outcome, now: float) -> Outgoing:
        """Rewards of a group were scored again."""
        self._out = []
        if outcome.wrong:
            self._tally.refused["reward_differs"] += 1
            log.warning("rewards do not fit", worker=outcome.worker, found=outcome.wrong)
        self._conduct.rescored(outcome.worker, outcome.wrong)
        self._judge(outcome.worker, now)
        self._advance(now)
        return self._out

    def take_rescorings(self) -> list[Rescoring]:
        """Groups accepted since the last call that are to be scored again."""
        taken, self._rescorings = self._rescorings, []
        return taken

    def tick(self, now: float) -> Outgoing:
        """Time has passed: leases expire, silent workers are gone, holds and limits end."""
        self._out = []
        for worker in self._roster.silent(now):
            log.warning("worker gone", worker=worker.name, silent_s=now - worker.last_seen)
            self._release(worker, "its worker went silent", counted=True)
        for name in self._ledger.quarantine.over(now):
            self._end_quarantine(name)
        if self._session is not None:
            ended = [*self._ledger.expire(now), *self._session.evals.expire(now)]
            self._note(ended)
            for name in {failure.worker for failure in ended}:
                if (expired := self._roster.get(name)) is not None:
                    self._emptiest.touch(expired)
        self._advance(now)
        return self._out

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but to see the workers off."""
        return self._leave_by is not None

    def ended(self, now: float) -> bool:
        """Whether the run is finished and the workers have left (or their time to do so is over)."""
        return self._leave_by is not None and (not self._roster.here or now >= self._leave_by)

    # ---------------------------------------------------------------- the trainer

    def _on_attach(self, peer: bytes, attach: Attach, now: float) -> None:
        old = self._session
        if old is not None and (peer, attach.incarnation) == (old.peer, old.incarnation):
            return self._send(peer, self._attached(old))  # it reconnected
        ledger = self._ledger
        refusal = refuse_attach(
            attach,
            old.attach if old else None,
            ledger.opened,
            ledger.incarnation,
            spool=self._spool,
            ended=self.finished,
        )
        if refusal is not None:
            return self._refuse(peer, refusal)
        if old is not None:
            self._take_evals(old)
            self._cancel(old.close(), f"trainer incarnation {attach.incarnation} took over")
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
            self._cancel(ledger.take(took), "a trainer resumed after the step that used this group")
            ledger.drop_quarantined(now)
        self._session = session = Session(
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
        self._send(peer, self._attached(session))
        self._announce(session)

    def _attached(self, session: Session) -> Attached:
        return Attached(session.attach.run, self._config.max_lag, self._config.batch_groups)

    def _trainer(self, peer: bytes, incarnation: int, now: float) -> Session | None:
        """The session of this trainer; None, and a refusal, where it has none."""
        session = self._session
        attach, at = (session.attach, session.peer) if session is not None else (None, b"")
        refusal = refuse_trainer(peer, incarnation, attach, at)
        if refusal is not None:
            self._refuse(peer, refusal)
            return None
        assert session is not None
        session.heard = now
        return session

    def _on_trainer(
        self, session: Session, message: NextBatch | Published | Checked | Finish, now: float
    ) -> None:
        match message:
            case NextBatch(step=step, resumable=resumable):
                session.ledger.keep_from(min(resumable, step))
                self._on_next_batch(session, step, now)
            case Published(version=version, step=step):
                if version > session.versions.newest and step >= session.versions.newest_step:
                    parent = message.parent if message.parent >= 0 else session.versions.newest
                    session.ledger.publish(Version(version, parent, step, message.digest))
                    session.versions.add(version, now)
                    if session.evals.due(version):
                        self._cancel(
                            session.evals.start(version, step), "a newer version is being evaluated"
                        )
                    self._announce(session)
            case Checked(step=step, rows=rows):
                for name in self._conduct.checked(step, rows, session.ledger.deliverer):
                    self._judge(name, now)
            case Finish():
                self._on_finish(session, message, now)

    def _on_next_batch(self, session: Session, step: int, now: float) -> None:
        if session.last_batch is not None and step == session.last_batch.step:
            return self._send(session.peer, session.last_batch)  # asked again: the same answer
        if step == session.ledger.next_step - 1 and (formed := session.ledger.formed(step)) is not None:
            session.last_batch = self._batch(session, formed, 0.0)  # asked in an earlier life of ours
            return self._send(session.peer, session.last_batch)
        if step != session.ledger.next_step or session.finish_by is not None:
            reason = f"step {step} was asked for, the next batch is for step {session.ledger.next_step}"
            hint = "restart the trainer: it resumes from its checkpoint under a new incarnation"
            return self._refuse(session.peer, Refusal("step", reason, hint))
        session.step = step
        if session.asked is None:
            session.asked = Asked(step, now)
            log.debug("batch asked for", step=step, buffer=session.ledger.readiness(now).reason)

    def _on_finish(self, session: Session, finish: Finish, now: float) -> None:
        if session.finished is not None:
            return self._send(session.peer, session.finished)
        if session.finish_by is None:
            session.step, session.asked = finish.step, None
            session.finish_by = now + (self._config.final_eval_s if finish.evaluate else 0.0)
            held = session.ledger.stand_down()
            self._cancel(held, "training is finished")
            for name in {each.worker for each in held}:
                if (free := self._roster.get(name)) is not None:
                    self._emptiest.touch(free)  # for the last evaluation
            if finish.evaluate:
                cancel = session.evals.start(session.versions.newest, session.versions.newest_step)
                self._cancel(cancel, "the final version is being evaluated")
            log.info("trainer finished", step=finish.step, version=session.versions.newest)

    # ---------------------------------------------------------------- the workers

    def _on_hello(self, peer: bytes, hello: Hello, now: float) -> None:
        session = self._session
        holder = None if self.finished else self._roster.holder(hello.worker, peer)
        refusal = refuse_hello(hello, session.attach if session else None, holder, now)
        if refusal is not None:
            return self._refuse(peer, refusal)
        if self.finished:  # no mistake of the worker's: it ends as those do that were here
            return self._send(peer, _FINISHED)
        assert session is not None, "without a trainer every Hello is refused"
        if self._roster.at(peer) is None:
            log.info("worker joined", worker=hello.worker, cluster=hello.cluster, engine=hello.engine)
        worker = self._roster.join(hello, peer, now)
        if worker.name in self._ledger.quarantine:
            worker.state = "quarantined"
            return self._tell_quarantined(worker, now)
        self._send(peer, Welcome(PROTOCOL, session.attach.run, self._settings, session.versions.newest))

    def _on_not_allowed(self, peer: bytes, refused: NotAllowed) -> None:
        """What its key may not say changes nothing. A worker whose key was revoked gets no more leases, and
        those that it has go back now."""
        worker = self._roster.at(peer)
        if worker is not None and refused.revoked in (worker.name, worker.name.partition("/")[0]):
            log.warning("worker turned away", worker=worker.name, reason=refused.message)
            self._roster.remove(worker)
            self._release(worker, "its worker's key was revoked", counted=False)
        self._refuse(peer, Refusal(refused.code, refused.message, refused.hint, refused.retry))

    def _on_worker(
        self, peer: bytes, message: Credit | Heartbeat | GroupDone | Failed | Bye, now: float
    ) -> None:
        worker = self._roster.at(peer)
        session = self._session
        if worker is None or session is None:
            if not isinstance(message, Bye):
                self._refuse(peer, UNKNOWN_WORKER)
            return
        worker.last_seen = now
        if worker.name in self._ledger.quarantine and not isinstance(message, Bye):
            if isinstance(message, GroupDone):
                fault = Fault("quarantined", self._ledger.quarantine.reason(worker.name))
                self._nack(worker, message.lease, message.group, fault)
            return self._tell_quarantined(worker, now)
        match message:
            case Credit(capacity=capacity, version=version):
                worker.capacity, worker.version = capacity, version
                if worker.state == "starting" and version >= 0:
                    worker.state = "serving"
            case Heartbeat():
                self._on_heartbeat(session, worker, message, now)
            case GroupDone(lease=lease, group=group):
                self._on_group(session, worker, lease, group, now)
            case Failed():
                self._fail(session, worker, message, now)
            case Bye(reason=reason):
                log.info("worker left", worker=worker.name, reason=reason)
                self._roster.remove(worker)
                self._release(worker, "its worker left", counted=False)
        self._emptiest.touch(worker)

    def _on_heartbeat(self, session: Session, worker: Worker, beat: Heartbeat, now: float) -> None:
        self._roster.beat(worker, beat)
        if self.finished and beat.state != "draining":  # it did not get the first one
            self._send(worker.peer, _FINISHED)
        for report in beat.progress:
            session.ledger.progress(report, worker.name, now)
            session.evals.progress(report, worker.name, now)
        # Leases of a former life of this orchestrator, or whose Cancel was lost: nobody waits for them.
        useless = tuple(r.lease for r in beat.progress if not session.wants(r.lease, worker.name))
        if useless:
            self._send(worker.peer, Cancel(useless, "not needed any more"))
        ended, stale = end_early(session, worker.name, beat, now, self._config.heartbeat_s)
        self._note(ended)
        self._cancel(stale, "its group would be too old to be trained")

    def _on_group(self, session: Session, worker: Worker, lease: int, group: Group, now: float) -> None:
        key = group.key
        desk = session.evals if key.split == "eval" else session.ledger
        if desk.settled(key):  # delivered before, by this worker or another: it may forget it
            known = session.ledger.hash_of(key) if key.split == "train" else None
            if known is not None and known != hash_of(encode_group(group)):
                detail = "another result for this group was taken before"
                return self._nack(worker, lease, group, Fault("duplicate", detail))
            return self._send(worker.peer, Ack(lease, key))
        if not desk.pool.expects(lease, key, worker.name):
            return self._nack(worker, lease, group, Fault("lease", "this lease is unknown or was given up"))
        need = Requirements(
            samples=1 if key.split == "eval" else self._settings.group_size,
            max_tokens=self._sampling.max_tokens,
            vocab_size=session.attach.vocab_size,
            reward_range=self._environment.reward_range,
            oldest_version=key.group if key.split == "eval" else 0,
        )
        result = examine(group, need, session.versions)
        if isinstance(result, Fault):
            self._nack(worker, lease, group, result)
            reason = f"{worker.name}: {result.code}: {result.detail}"
            if key.split == "eval":
                self._note(session.evals.fail(lease, worker.name, reason, counted=result.counts))
            else:
                self._note(session.ledger.fail(lease, worker.name, reason, now, counted=result.counts))
            if result.counts:
                self._examined(worker, f"{result.code}: {result.detail}", now)
            return
        if key.split == "eval":
            obsolete = session.evals.deliver(lease, worker.name, group)
        else:
            delivery = session.ledger.deliver(lease, worker.name, group, result, now)
            obsolete = delivery.obsolete
            log.debug("group taken", key=name_of(key), worker=worker.name, outcome=delivery.outcome)
        worker.groups_done += 1
        self._send(worker.peer, Ack(lease, key))
        self._examined(worker, "", now)
        self._maybe_rescore(worker, group)
        if obsolete is not None:
            self._cancel([obsolete], "another worker delivered it")

    # ---------------------------------------------------------------- workers whose numbers do not fit

    def _maybe_rescore(self, worker: Worker, group: Group) -> None:
        share = self._config.verify.rescore_share
        if self._rescoring_salt is not None and chosen(group.key, self._rescoring_salt, share):
            prompt = prompt_of(self._environment, group.key.split, group.key.ordinal)
            self._rescorings.append(Rescoring(worker.name, prompt, group))

    def _examined(self, worker: Worker | None, fault: str, now: float) -> None:
        if worker is not None:
            self._conduct.examined(worker.name, fault)
            if fault:
                self._judge(worker.name, now)

    def _judge(self, name: str, now: float) -> None:
        standing = self._conduct.standing(name)
        if standing.state == "suspect" and name not in self._suspects:
            log.warning("worker suspect", worker=name, reason=standing.reason)
        (self._suspects.add if standing.state == "suspect" else self._suspects.discard)(name)
        if standing.state != "guilty" or name in self._ledger.quarantine:
            return
        log.error("worker quarantined", worker=name, reason=standing.reason)
        self._conduct.forget(name)
        held = [*self._ledger.pool.of_worker(name)]
        if self._session is not None:
            held += self._session.evals.pool.of_worker(name)
        self._cancel(held, "its worker is in quarantine")
        worker, session = self._roster.get(name), self._session
        self._note(self._ledger.put_in_quarantine(name, standing.reason, now))
        if session is not None:
            self._note(session.evals.worker_left(name, "its worker is in quarantine", counted=False))
        if worker is not None and worker.gone_since is None:
            worker.state = "quarantined"
            self._tell_quarantined(worker, now)

    def _tell_quarantined(self, worker: Worker, now: float) -> None:
        quarantine = self._ledger.quarantine
        left_s = quarantine.left_s(worker.name, now)
        self._refuse(worker.peer, in_quarantine(worker.name, quarantine.reason(worker.name), left_s))

    def _end_quarantine(self, name: str) -> None:
        log.info("quarantine ended, the worker may try again", worker=name)
        self._ledger.release(name)
        worker = self._roster.get(name)
        if worker is not None and worker.state == "quarantined":
            worker.state = "starting"
            self._refuse(worker.peer, UNKNOWN_WORKER)  # so that it says Hello at once

    def _nack(self, worker: Worker, lease: int, group: Group, fault: Fault) -> None:
        self._tally.refused[fault.code] += 1
        key = name_of(group.key)
        log.warning("group refused", worker=worker.name, key=key, reason=fault.code, detail=fault.detail)
        self._send(worker.peer, Nack(lease, group.key, f"{fault.code}: {fault.detail}"))

    def _fail(self, session: Session, worker: Worker, failed: Failed, now: float) -> None:
        reason = f"{worker.name}: {failed.reason[:REASON_CHARS]}"
        counted = not failed.returned
        if failed.key.split == "eval":
            self._note(session.evals.fail(failed.lease, worker.name, reason, counted=counted))
        else:
            self._note(session.ledger.fail(failed.lease, worker.name, reason, now, counted=counted))

    def _release(self, worker: Worker, reason: str, *, counted: bool) -> None:
        """A worker is not here any more: its leases go back."""
        if self._session is not None:
            self._note(self._session.ledger.worker_left(worker.name, reason, counted=counted))
            self._note(self._session.evals.worker_left(worker.name, reason, counted=counted))

    def _note(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            write = log.warning if failure.given_up else log.debug
            event = "prompt given up" if failure.given_up else "lease given back"
            write(event, key=name_of(failure.key), worker=failure.worker, reason=failure.reason)

    # ---------------------------------------------------------------- moving on

    def _advance(self, now: float) -> None:
        """Whatever has become possible."""
        session = self._session
        if session is not None and session.finished is None:
            self._answer(session, now)
            self._grant(session, now)
            self._finish(session, now)

    def _answer(self, session: Session, now: float) -> None:
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
        session.last_batch = self._batch(session, formed, now - asked.since)
        self._send(session.peer, session.last_batch)

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

    def _grant(self, session: Session, now: float) -> None:
        """Leases, one at a time to the emptiest worker: evaluation first, then training as admission
        allows."""

        def wanted(version: int) -> bool:
            training = session.finish_by is None and session.ledger.may_lease(version, now)
            return training or session.evals.may_lease(version, session.versions)

        while (worker := self._emptiest.pop(wanted)) is not None:
            held = session.evals.lease(worker.name, worker.version, session.versions, now)
            if held is None:
                held = session.ledger.lease(worker.name, worker.version, now)
            assert held is not None, "it was wanted"
            self._roster.granted(worker)
            self._emptiest.touch(worker)
            self._send(worker.peer, self._lease(session, held))

    def _lease(self, session: Session, held: Held) -> Lease:
        key = held.key
        evaluation = key.split == "eval"
        oldest = (
            key.group
            if evaluation
            else session.versions.oldest_at(session.ledger.next_step - self._config.max_lag)
        )
        return Lease(
            lease=held.lease,
            key=key,
            prompt=prompt_of(self._environment, key.split, key.ordinal),
            seeds=seeds_of(self._seed, key, 1 if evaluation else self._settings.group_size),
            sampling=self._sampling,
            deadline_s=self._config.lease_s,
            oldest_version=oldest,
        )

    def _finish(self, session: Session, now: float) -> None:
        """The end waits for: the last evaluations, or their limit. Workers are told first: Finished ends
        us."""
        if session.finish_by is None or (session.evals.open and now < session.finish_by):
            return
        self._cancel(session.evals.give_up_all(), "the run is finished")
        for worker in self._roster.here:
            self._send(worker.peer, _FINISHED)
        session.finished = Finished(self._take_evals(session))
        self._leave_by = now + self._config.drain_s
        self._send(session.peer, session.finished)

    def _take_evals(self, session: Session) -> tuple[EvalScore, ...]:
        scores = session.evals.take_finished()
        self._tally.evals.extend(scores)
        return scores

    # ---------------------------------------------------------------- out

    def status(self, now: float) -> Status:
        """One consistent picture; changes nothing."""
        return status_of(
            self._session,
            self._ledger,
            self._tally,
            self._roster,
            self._conduct,
            self._config,
            self._started,
            now,
            self._turned_away,
        )

    def _send(self, peer: bytes, message: AnyMessage) -> None:
        self._out.append((peer, message))

    def _announce(self, session: Session) -> None:
        for worker in self._roster.here:
            self._send(worker.peer, Announce(session.versions.newest, session.versions.newest_step))

    def _cancel(self, held: Iterable[Held], reason: str) -> None:
        by_worker: dict[str, list[int]] = defaultdict(list)
        for each in held:
            by_worker[each.worker].append(each.lease)
        for name, leases in by_worker.items():
            worker = self._roster.get(name)
            if worker is not None and worker.gone_since is None:
                self._send(worker.peer, Cancel(tuple(leases), reason))

    def _refuse(self, peer: bytes, refusal: Refusal) -> None:
        self._tally.refused[refusal.code] += 1
        log.debug("refused", peer=printable(peer), code=refusal.code, reason=refusal.reason)
        self._send(peer, Refused(refusal.reason, refusal.hint, refusal.retry))
