"""What the orchestrator does with each message, and with the passing of time. No sockets, no clock: a
message or a moment goes in, the messages to send come out, so a whole run can be played in a test.

    receive(peer, message, now) ─┐
                                 ├─► ledgers ─► advance: batch to the trainer, leases to workers ─► outgoing
    tick(now) ───────────────────┘

Here are the turns, and the workers' messages; the trainer's are in trainer_desk.py, and what becomes of a worker
whose numbers do not fit is in judging.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from async_rl.envs.base import Environment, EnvironmentConfig
from async_rl.errors import Malformed, NotAllowed
from async_rl.log import get_logger
from async_rl.transport.base import Received
from async_rl.wire import (
    MOST_LEASES,
    PROTOCOL,
    Ack,
    Attach,
    Bye,
    Cancel,
    Checked,
    Credit,
    Failed,
    Finish,
    Group,
    GroupDone,
    Heartbeat,
    Hello,
    Key,
    Nack,
    NextBatch,
    Published,
    RunSettings,
    Sampling,
    Status,
    StatusRequest,
    Welcome,
)
from orchestrator.acceptance import Fault, examine, required
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.early import end_early
from orchestrator.fair import Emptiest
from orchestrator.granting import Granting
from orchestrator.handshake import UNKNOWN_WORKER, Refusal, refuse_hello
from orchestrator.judging import Judging
from orchestrator.leases import name_of
from orchestrator.ledger import GroupLedger, hash_of
from orchestrator.outbox import Outbox, Outgoing
from orchestrator.pool import log_failures
from orchestrator.records import Record, encode_group
from orchestrator.rescoring import Outcome, Rescoring
from orchestrator.roster import Roster, Worker
from orchestrator.session import Session
from orchestrator.spool import Journal, Place
from orchestrator.status import status_of
from orchestrator.tally import Tally
from orchestrator.trainer_desk import FINISHED, TrainerDesk

__all__ = ["Control", "Outgoing"]

log = get_logger(__name__)

REASON_CHARS = 1000
"""Of what a worker says; it is kept with dead letters, and sent with every Status."""


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
        self._emptiest = Emptiest(self._roster, self._leases_of)
        self._tally = Tally()
        self._outbox = Outbox(self._roster, self._tally)
        self._turned_away = turned_away if turned_away is not None else {}
        self._granting = Granting(
            config, environment, self._settings, seed, self._roster, self._emptiest, self._outbox
        )
        self._ledger = GroupLedger(config, journal, lease_ids)
        self._judging = Judging(
            config.verify,
            environment,
            self._ledger,
            self._roster,
            self._tally,
            self._outbox,
            rescoring_salt,
        )
        self._trainer = TrainerDesk(
            config,
            evaluation,
            lease_ids,
            self._ledger,
            self._emptiest,
            self._tally,
            self._outbox,
            self._judging,
        )

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
        for peer, message in arrived:
            self._receive(peer, message, now)
        self._advance(now)
        return self._outbox.take()

    def _receive(self, peer: bytes, message: Received, now: float) -> None:
        match message:
            case (
                GroupDone() | Credit() | Heartbeat() | Failed() | Bye()
            ):  # first, because there are most of them
                self._on_worker(peer, message, now)
            case NotAllowed():
                self._on_not_allowed(peer, message)
            case Malformed():
                self._outbox.refuse(peer, Refusal("malformed", message.message, message.hint))
                if (worker := self._roster.at(peer)) is not None:
                    self._judging.faulty(self._session, worker, "malformed", now)
            case StatusRequest():
                self._outbox.send(peer, self.status(now))
            case Attach():
                self._trainer.attach(peer, message, now)
            case NextBatch() | Published() | Checked() | Finish():
                self._trainer.receive(peer, message, now)
            case Hello():
                self._on_hello(peer, message, now)
            case _:
                reason = f"{type(message).__name__} is a message that only the orchestrator sends"
                self._outbox.refuse(peer, Refusal("malformed", reason))

    def rescored(self, outcome: Outcome, now: float) -> Outgoing:
        """Rewards of a group were scored again."""
        self._judging.rescored(self._session, outcome, now)
        self._advance(now)
        return self._outbox.take()

    def take_rescorings(self) -> list[Rescoring]:
        """Groups accepted since the last call that are to be scored again."""
        return self._judging.take_rescorings()

    def tick(self, now: float) -> Outgoing:
        """Time has passed: leases expire, silent workers are gone, holds and limits end."""
        for worker in self._roster.silent(now):
            log.warning("worker gone", worker=worker.name, silent_s=now - worker.last_seen)
            worker.failed(now, self._leases_of(worker.name))
            self._release(worker, "its worker went silent", counted=True)
        self._judging.end_quarantines(now)
        for worker in self._roster.rested(now):
            self._emptiest.touch(worker)
        if self._session is not None:
            ended = [*self._ledger.expire(now), *self._session.evals.expire(now)]
            log_failures(ended)
            self._came_to_nothing((failure.worker for failure in ended), now)
        self._advance(now)
        return self._outbox.take()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but to see the workers off."""
        return self._trainer.finished

    def ended(self, now: float) -> bool:
        """Whether the run is finished and the workers have left (or their time to do so is over)."""
        leave_by = self._trainer.leave_by
        return leave_by is not None and (not self._roster.here or now >= leave_by)

    @property
    def _session(self) -> Session | None:
        return self._trainer.session

    # ---------------------------------------------------------------- the workers

    def _on_hello(self, peer: bytes, hello: Hello, now: float) -> None:
        session = self._session
        holder = None if self.finished else self._roster.holder(hello.worker, peer)
        refusal = refuse_hello(hello, session.attach if session else None, holder, now)
        if refusal is not None:
            return self._outbox.refuse(peer, refusal)
        if self.finished:  # no mistake of the worker's: it ends as those do that were here
            return self._outbox.send(peer, FINISHED)
        assert session is not None, "without a trainer every Hello is refused"
        if self._roster.at(peer) is None:
            log.info("worker joined", worker=hello.worker, cluster=hello.cluster, engine=hello.engine)
        worker = self._roster.join(hello, peer, now)
        if worker.name in self._ledger.quarantine:
            worker.state = "quarantined"
            return self._judging.tell_quarantined(worker, now)
        self._outbox.send(
            peer, Welcome(PROTOCOL, session.attach.run, self._settings, session.versions.newest)
        )

    def _on_not_allowed(self, peer: bytes, refused: NotAllowed) -> None:
        """What its key may not say changes nothing. A worker whose key was revoked gets no more leases, and
        those that it has go back now."""
        worker = self._roster.at(peer)
        if worker is not None and refused.revoked in (worker.name, worker.name.partition("/")[0]):
            log.warning("worker turned away", worker=worker.name, reason=refused.message)
            self._roster.remove(worker)
            self._release(worker, "its worker's key was revoked", counted=False)
        self._outbox.refuse(peer, Refusal(refused.code, refused.message, refused.hint, refused.retry))

    def _on_worker(
        self, peer: bytes, message: Credit | Heartbeat | GroupDone | Failed | Bye, now: float
    ) -> None:
        worker = self._roster.at(peer)
        session = self._session
        if worker is None or session is None:
            if not isinstance(message, Bye):
                self._outbox.refuse(peer, UNKNOWN_WORKER)
            return
        worker.last_seen = now
        if worker.name in self._ledger.quarantine and not isinstance(message, Bye):
            if isinstance(message, GroupDone):
                fault = Fault("quarantined", self._ledger.quarantine.reason(worker.name))
                self._nack(worker, message.lease, message.group, fault)
            return self._judging.tell_quarantined(worker, now)
        match message:
            case GroupDone():
                self._on_group(session, worker, message, now)
            case Credit(capacity=capacity, version=version):
                worker.capacity, worker.version = min(capacity, MOST_LEASES), version
                if worker.state == "starting" and version >= 0:
                    worker.state = "serving"
            case Heartbeat():
                self._on_heartbeat(session, worker, message, now)
            case Failed(lease=lease, key=key, reason=reason, returned=returned):
                self._fail(session, worker, lease, key, reason, now, counted=not returned)
            case Bye(reason=reason):
                log.info("worker left", worker=worker.name, reason=reason)
                self._roster.remove(worker)
                self._release(worker, "its worker left", counted=False)
        self._emptiest.touch(worker)

    def _on_heartbeat(self, session: Session, worker: Worker, beat: Heartbeat, now: float) -> None:
        self._roster.beat(worker, beat)
        if self.finished and beat.state != "draining":  # it did not get the first one
            self._outbox.send(worker.peer, FINISHED)
        for report in beat.progress:
            session.ledger.progress(report, worker.name, now)
            session.evals.progress(report, worker.name, now)
        # Leases of a former life of this orchestrator, or whose Cancel was lost: nobody waits for them.
        useless = tuple(r.lease for r in beat.progress if not session.wants(r.lease, worker.name))
        if useless:
            self._outbox.send(worker.peer, Cancel(useless, "not needed any more"))
        ended, stale = end_early(session, worker.name, beat, now, self._config.heartbeat_s)
        if ended:
            log_failures(ended)
            self._came_to_nothing((failure.worker for failure in ended), now)
            self._outbox.cancel(stale, "its group would be too old to be trained")

    def _on_group(self, session: Session, worker: Worker, done: GroupDone, now: float) -> None:
        lease, group = done.lease, done.group
        key = group.key
        owner = session.evals if key.split == "eval" else session.ledger
        if owner.settled(key):  # delivered before, by this worker or another: it may forget it
            known = session.ledger.hash_of(key) if key.split == "train" else None
            if known is not None and known != hash_of(encode_group(group)):
                detail = "another result for this group was taken before"
                return self._nack(worker, lease, group, Fault("duplicate", detail))
            return self._outbox.send(worker.peer, Ack(lease, key))
        if not owner.pool.expects(lease, key, worker.name):
            return self._nack(worker, lease, group, Fault("lease", "this lease is unknown or was given up"))
        need = required(key, self._settings, session.attach, self._environment.reward_range)
        result = examine(group, need, session.versions)
        if isinstance(result, Fault):
            self._nack(worker, lease, group, result)
            fault = f"{result.code}: {result.detail}"
            self._fail(session, worker, lease, key, fault, now, counted=result.counts)
            if result.counts:
                self._judging.faulty(session, worker, fault, now)
            return
        if key.split == "eval":
            obsolete = session.evals.deliver(lease, worker.name, group)
        else:
            delivery = session.ledger.deliver(lease, worker.name, group, result, now)
            obsolete = delivery.obsolete
            if log.debugs:
                log.debug("group taken", key=name_of(key), worker=worker.name, outcome=delivery.outcome)
        worker.finished(session.leases(worker.name) + 1)
        self._outbox.send(worker.peer, Ack(lease, key))
        self._judging.accepted(worker, group)
        if obsolete is not None:
            self._outbox.cancel([obsolete], "another worker delivered it")

    def _nack(self, worker: Worker, lease: int, group: Group, fault: Fault) -> None:
        self._tally.refused[fault.code] += 1
        key = name_of(group.key)
        log.warning("group refused", worker=worker.name, key=key, reason=fault.code, detail=fault.detail)
        self._outbox.send(worker.peer, Nack(lease, group.key, f"{fault.code}: {fault.detail}"))

    def _fail(
        self,
        session: Session,
        worker: Worker,
        lease: int,
        key: Key,
        reason: str,
        now: float,
        *,
        counted: bool,
    ) -> None:
        """A lease ends without a group."""
        reason = f"{worker.name}: {reason[:REASON_CHARS]}"
        if key.split == "eval":
            log_failures(session.evals.fail(lease, worker.name, reason, counted=counted))
        else:
            log_failures(session.ledger.fail(lease, worker.name, reason, now, counted=counted))

    def _leases_of(self, worker: str) -> int:
        session = self._trainer.session
        return 0 if session is None else session.held(worker, self._settings.group_size)

    def _came_to_nothing(self, workers: Iterable[str], now: float) -> None:
        """Leases of these were held, and ended without a group. One that fails at once keeps nobody waiting."""
        for name, times in Counter(workers).items():
            worker = self._roster.get(name)
            if worker is not None:
                worker.failed(now, times)
                self._emptiest.touch(worker)

    def _release(self, worker: Worker, reason: str, *, counted: bool) -> None:
        """A worker is not here any more: its leases go back."""
        if self._session is not None:
            log_failures(self._session.ledger.worker_left(worker.name, reason, counted=counted))
            log_failures(self._session.evals.worker_left(worker.name, reason, counted=counted))

    # ---------------------------------------------------------------- moving on

    def _advance(self, now: float) -> None:
        """Whatever has become possible."""
        session = self._session
        if session is not None and session.finished is None:
            self._trainer.answer(session, now)
            self._granting.grant(session, now)
            self._trainer.finish(session, now)

    # ---------------------------------------------------------------- out

    def status(self, now: float) -> Status:
        """One consistent picture; changes nothing."""
        return status_of(
            self._session,
            self._ledger,
            self._tally,
            self._roster,
            self._judging.conduct,
            self._config,
            self._started,
            now,
            self._turned_away,
        )
