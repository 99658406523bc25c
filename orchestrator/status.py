"""The one consistent picture that `async-rl lag` and exporters show."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.wire import Standing, Status, WorkerStatus
from orchestrator.conduct import Conduct
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger
from orchestrator.roster import Roster, Worker
from orchestrator.session import Session
from orchestrator.tally import Tally
from orchestrator.versions import Versions

__all__ = ["status_of"]

DEAD_LETTERS_SHOWN = 20


def status_of(
    session: Session | None,
    ledger: GroupLedger,
    tally: Tally,
    roster: Roster,
    conduct: Conduct,
    config: OrchestratorConfig,
    started: float,
    now: float,
    turned_away: Mapping[str, int],
) -> Status:
    """`session`: None before a trainer has attached. `turned_away`: connections, by reason."""
    versions = session.versions if session else None
    step = max(session.step, session.versions.newest_step) if session else 0
    return Status(
        run=session.attach.run if session else "",
        incarnation=session.incarnation if session else -1,
        trainer=session.state(now) if session else "absent",
        step=step,
        newest_version=versions.newest if versions else -1,
        newest_version_step=versions.newest_step if versions else -1,
        newest_version_age_s=(versions.age_s(versions.newest, now) or 0.0) if versions else 0.0,
        max_lag=config.max_lag,
        batch_groups=config.batch_groups,
        buffered=ledger.buffered,
        outstanding=ledger.outstanding,
        admitted_limit=ledger.admitted_limit(session.versions.newest) if session else 0,
        trained_groups=step * config.batch_groups,
        lag_p50=tally.lag(0.5),
        lag_p95=tally.lag(0.95),
        lag_max=max(tally.lag_counts, default=0),
        lag_counts=dict(tally.lag_counts),
        dropped=dict(ledger.dropped),
        reward=tally.reward,
        evals=(*tally.evals, *(session.evals.untold if session else ())),
        workers=tuple(
            _worker_status(worker, session.leases(worker.name) if session else 0, step, versions, now)
            for worker in roster
        ),
        uptime_s=now - started,
        dead_letters=tuple(ledger.dead_letters)[-DEAD_LETTERS_SHOWN:],
        refused=tally.refused | {f"connection_{why}": n for why, n in dict(turned_away).items()},
        standings=_standings(ledger, roster, conduct, now),
        heartbeat_s=config.heartbeat_s,
        trainer_waited_s=session.waited(now) if session else 0.0,
        trainer_here_s=now - session.since if session else 0.0,
        batch_waits_for=ledger.readiness(now).reason if session and session.asked else "",
        leasing_waits_for=_leasing_waits_for(session, ledger, now),
    )


def _standings(ledger: GroupLedger, roster: Roster, conduct: Conduct, now: float) -> tuple[Standing, ...]:
    """Who is in quarantine, whether it is here or not, and what is known about those that are here."""
    quarantine = ledger.quarantine
    kept = [
        Standing(name, "quarantined", quarantine.reason(name), 0, quarantine.left_s(name, now))
        for name in quarantine
    ]
    others = [
        Standing(worker.name, *conduct.verdict(worker.name))
        for worker in roster
        if worker.name not in quarantine
    ]
    return tuple(kept + [each for each in others if each.state != "unjudged" or each.groups])


def _leasing_waits_for(session: Session | None, ledger: GroupLedger, now: float) -> str:
    if session is None:
        return "a trainer"
    if session.finish_by is not None:
        return "nothing: the run has ended"
    return ledger.leasing_waits_for(session.versions.newest, now)


def _worker_status(
    worker: Worker, leases: int, step: int, versions: Versions | None, now: float
) -> WorkerStatus:
    held = versions.step_of(worker.version) if versions is not None else None
    age_s = versions.age_s(worker.version, now) if versions is not None else None
    behind = versions.behind(worker.version, now) if versions is not None else None
    beat, seen = worker.beat, worker.last_seen
    return WorkerStatus(
        worker=worker.name,
        cluster=worker.cluster,
        state=worker.state,
        version=worker.version,
        lag=-1 if held is None else max(0, step - held),
        age_s=-1.0 if age_s is None else age_s,
        fetching_version=beat.fetching_version if beat else -1,
        fetched_fraction=beat.fetched_fraction if beat else 0.0,
        tokens_per_s=beat.tokens_per_s if beat and worker.gone_since is None else 0.0,
        leases=leases,
        running=beat.running if beat else 0,
        queued=beat.queued if beat else 0,
        groups_done=worker.groups_done,
        sync_bytes=beat.sync_bytes if beat else 0,
        pause_s=beat.pause_s if beat else 0.0,
        last_seen_s=now - seen,
        lag_versions=-1 if behind is None else behind[0],
        lag_s=-1.0 if behind is None else behind[1],
        cache_used=beat.cache_used if beat else 0.0,
        oldest_s=beat.oldest_s if beat else 0.0,
        idle_s=beat.idle_s if beat else 0.0,
        capacity=worker.capacity,
        serving_s=0.0 if worker.served_since is None else seen - worker.served_since,
    )
