"""A run as somebody sees it who watches: the same records whoever was asked, None for what that source can't say.

    Status of the orchestrator ──► of_status ──► View ──► `async-rl lag`, --json, exporters
    the bucket ──► bucket.py ──────────────────►

`async-rl lag --json` prints a View as it stands here (docs/metrics.md): fields are only ever added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from msgspec import Struct

from async_rl.view.why import why
from async_rl.wire import EvalScore, Status, WorkerStatus

__all__ = ["ClusterView", "View", "WorkerView", "clusters_of", "idle_share", "of_status", "over"]

N = TypeVar("N", int, float)

SCHEMA = 1
"""Of the JSON. More only where a field changes its meaning or goes."""


class WorkerView(Struct, frozen=True, kw_only=True):
    """One rollout worker. None: unknown."""

    worker: str
    cluster: str | None = None
    state: str | None = None  # starting, serving, updating, draining, quarantined, gone
    why: str = ""  # why it lags, see why.py
    version: int | None = None  # served; None also while it serves none
    lag: int | None = None  # optimizer steps behind the newest
    lag_versions: int | None = None  # versions committed after the one that it serves
    lag_s: float | None = None  # since the first of them was committed
    age_s: float | None = None  # since the served version was committed
    fetching_version: int | None = None  # None also where it fetches none
    fetched_fraction: float | None = None
    tokens_per_s: float | None = None
    leases: int | None = None
    capacity: int | None = None  # leases that it can hold
    running: int | None = None  # sequences in the engine
    queued: int | None = None
    groups_done: int | None = None
    sync_bytes: int | None = None  # downloaded for the versions so far
    pause_s: float | None = None  # the last pause of generation for an update
    cache_used: float | None = None  # share of the KV cache
    oldest_s: float | None = None  # age of the oldest running sequence
    idle_s: float | None = None  # time in which the engine had nothing to do
    serving_s: float | None = None  # of this time
    last_seen_s: float | None = None  # ago
    lacks: int | None = None  # a version to which it found no whole way


class ClusterView(Struct, frozen=True, kw_only=True):
    """The workers of one cluster that are not gone. One in quarantine generates nothing: versions, lag, speed and
    idle time are those of the others."""

    cluster: str
    workers: int  # those in quarantine included
    gone: int
    oldest_version: int | None
    newest_version: int | None
    lag: int | None  # the worst, in optimizer steps
    lag_versions: int | None
    lag_s: float | None
    tokens_per_s: float | None
    sync_bytes: int | None
    idle: float | None  # share of the time in which engines had nothing to do
    quarantined: int = 0  # of the workers


class View(Struct, frozen=True, kw_only=True):
    """The run. None: unknown, or there is none yet."""

    schema: int = SCHEMA
    source: str  # the orchestrator's address, or the URL of the store
    run: str = ""
    incarnation: int | None = None
    trainer: str | None = None  # absent, waiting (for a batch), training, finishing, finished
    step: int | None = None
    newest_version: int | None = None
    newest_version_step: int | None = None
    newest_version_age_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    max_lag: int | None = None
    batch_groups: int | None = None
    buffered: int | None = None
    outstanding: int | None = None
    admitted_limit: int | None = None
    trained_groups: int | None = None
    lag_p50: float | None = None
    lag_p95: float | None = None
    lag_max: int | None = None
    lag_counts: dict[int, int] | None = None  # trained samples by lag
    dropped: dict[str, int] | None = None
    refused: dict[str, int] | None = None
    reward: float | None = None
    evals: tuple[dict[str, float], ...] | None = None
    dead_letters: tuple[tuple[str, str], ...] | None = None
    standings: tuple[dict[str, object], ...] | None = (
        None  # do workers' numbers fit: wire.Standing, by name
    )
    uptime_s: float | None = None
    trainer_waited_s: float | None = None  # for batches
    trainer_here_s: float | None = None  # of this time
    batch_waits_for: str | None = None
    leasing_waits_for: str | None = None
    clusters: tuple[ClusterView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    note: str = ""  # what the reader should know about the figures


def over(view: View, limit: int) -> list[WorkerView]:
    """The workers whose lag is over `limit` optimizer steps. One that serves a version nobody knows the lag of is:
    nobody can vouch for it. One that is gone, in quarantine, or serves nothing yet, is not: it generates nothing."""
    idle = ("gone", "quarantined")
    serving = (each for each in view.workers if each.state not in idle and each.version is not None)
    return [each for each in serving if each.lag is None or each.lag > limit]


# ---------------------------------------------------------------- from the orchestrator


def of_status(status: Status, source: str = "") -> View:
    known = status.newest_version >= 0
    workers = tuple(_of_worker(worker, status.heartbeat_s) for worker in status.workers)
    return View(
        source=source,
        run=status.run,
        incarnation=_known(status.incarnation),
        trainer=status.trainer,
        step=status.step,
        newest_version=_known(status.newest_version),
        newest_version_step=_known(status.newest_version_step),
        newest_version_age_s=status.newest_version_age_s if known else None,
        max_lag=status.max_lag,
        batch_groups=status.batch_groups,
        buffered=status.buffered,
        outstanding=status.outstanding,
        admitted_limit=status.admitted_limit,
        trained_groups=status.trained_groups,
        lag_p50=status.lag_p50,
        lag_p95=status.lag_p95,
        lag_max=status.lag_max,
        lag_counts=status.lag_counts,
        dropped=status.dropped,
        refused=status.refused,
        reward=None if math.isnan(status.reward) else status.reward,
        evals=tuple(_of_score(score) for score in status.evals),
        dead_letters=status.dead_letters,
        standings=tuple(msgspec.structs.asdict(each) for each in status.standings),
        uptime_s=status.uptime_s,
        trainer_waited_s=status.trainer_waited_s,
        trainer_here_s=status.trainer_here_s,
        batch_waits_for=status.batch_waits_for,
        leasing_waits_for=status.leasing_waits_for,
        clusters=clusters_of(workers),
        workers=workers,
    )


def _of_score(score: EvalScore) -> dict[str, float]:
    return {
        "version": score.version,
        "step": score.step,
        "reward": score.reward,
        "prompts": score.prompts,
    }


def _of_worker(worker: WorkerStatus, heartbeat_s: float) -> WorkerView:
    gone, fetching = worker.state == "gone", worker.fetching_version >= 0
    view = WorkerView(
        worker=worker.worker,
        cluster=worker.cluster,
        state=worker.state,
        version=_known(worker.version),
        lag=_known(worker.lag),
        lag_versions=_known(worker.lag_versions),
        lag_s=None if worker.lag_s < 0 else worker.lag_s,
        age_s=None if worker.age_s < 0 else worker.age_s,
        fetching_version=worker.fetching_version if fetching and not gone else None,
        fetched_fraction=worker.fetched_fraction if fetching and not gone else None,
        tokens_per_s=worker.tokens_per_s,
        leases=worker.leases,
        capacity=worker.capacity,
        running=worker.running,
        queued=worker.queued,
        groups_done=worker.groups_done,
        sync_bytes=worker.sync_bytes,
        pause_s=worker.pause_s,
        cache_used=worker.cache_used,
        oldest_s=worker.oldest_s,
        idle_s=worker.idle_s,
        serving_s=worker.serving_s,
        last_seen_s=worker.last_seen_s,
    )
    return msgspec.structs.replace(view, why=why(view, heartbeat_s))


def _known(number: int) -> int | None:
    return None if number < 0 else number


# ---------------------------------------------------------------- by cluster


def clusters_of(workers: Iterable[WorkerView]) -> tuple[ClusterView, ...]:
    """By name; workers whose cluster is unknown are together under `?`."""
    by_name: dict[str, list[WorkerView]] = {}
    for worker in workers:
        by_name.setdefault(worker.cluster if worker.cluster is not None else "?", []).append(worker)
    return tuple(_cluster(name, members) for name, members in sorted(by_name.items()))


def _cluster(name: str, members: list[WorkerView]) -> ClusterView:
    present = [each for each in members if each.state != "gone"]
    here = [each for each in present if each.state != "quarantined"]
    versions = [each.version for each in here if each.version is not None]
    return ClusterView(
        cluster=name,
        workers=len(present),
        quarantined=len(present) - len(here),
        gone=len(members) - len(present),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        lag=max((each.lag for each in here if each.lag is not None), default=None),
        lag_versions=max(
            (each.lag_versions for each in here if each.lag_versions is not None), default=None
        ),
        lag_s=max((each.lag_s for each in here if each.lag_s is not None), default=None),
        tokens_per_s=_sum(each.tokens_per_s for each in here),
        sync_bytes=_sum(each.sync_bytes for each in members),
        idle=idle_share(here),
    )


def idle_share(workers: Iterable[WorkerView]) -> float | None:
    """Of the time in which these workers served: their engines had nothing to do. None where nobody told."""
    told = [each for each in workers if each.idle_s is not None]
    served_s = sum(each.serving_s or 0.0 for each in told)
    return min(1.0, sum(each.idle_s or 0.0 for each in told) / served_s) if served_s else None


def _sum(values: Iterable[N | None]) -> N | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
