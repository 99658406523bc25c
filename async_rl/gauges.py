"""What a run is measured by, in one table of names: the same in trainer, orchestrator and workers. docs/metrics.md is
written from it, and a test compares the two.

Every sample has the label `run`; those of a worker also `cluster` and `worker`. What a process does not know, it does
not show: there is no -1 and no 0 in the place of a number that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from async_rl.view.model import View, WorkerView

__all__ = ["METRICS", "Metric", "Reading", "by_reason", "of_view", "of_worker", "present"]

STATES = ("starting", "serving", "updating", "draining", "quarantined", "gone")


class Metric(NamedTuple):
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()  # beside run
    by: str = "trainer, orchestrator"  # who shows it


class Reading(NamedTuple):
    """`value`: of a histogram, samples by value."""

    name: str
    value: float | Mapping[int, int]
    labels: Mapping[str, str] = {}


_WORKER = ("cluster", "worker")
_BOTH, _ORCHESTRATOR, _TRAINER = "orchestrator, rollout", "orchestrator", "trainer"

METRICS: tuple[Metric, ...] = (
    Metric("async_rl_step", "gauge", "Optimizer steps done"),
    Metric("async_rl_version", "gauge", "Newest committed policy version"),
    Metric("async_rl_version_step", "gauge", "Optimizer steps that the newest version holds"),
    Metric("async_rl_version_age_seconds", "gauge", "Since the newest version was committed"),
    Metric("async_rl_incarnation", "gauge", "Of the trainer that has the run"),
    Metric("async_rl_max_lag_steps", "gauge", "The limit on the lag of a trained sample"),
    Metric("async_rl_trained_lag_steps", "histogram", "Samples handed to the trainer, by lag"),
    Metric("async_rl_reward", "gauge", "Mean reward of the last batch"),
    Metric("async_rl_groups_dropped", "counter", "Groups that were not trained", ("reason",)),
    Metric("async_rl_trainer_waited_seconds", "counter", "For which the trainer waited for batches"),
    Metric("async_rl_trainer_up_seconds", "counter", "Of this time: since it attached"),
    Metric(
        "async_rl_refused",
        "counter",
        "Messages, groups and connections refused",
        ("reason",),
        _ORCHESTRATOR,
    ),
    Metric("async_rl_groups_buffered", "gauge", "Groups that wait to be trained", (), _ORCHESTRATOR),
    Metric("async_rl_groups_outstanding", "gauge", "Groups that are leased", (), _ORCHESTRATOR),
    Metric("async_rl_groups_admitted_limit", "gauge", "Groups that may be in use now", (), _ORCHESTRATOR),
    Metric("async_rl_workers", "gauge", "Rollout workers that are not gone", ("cluster",), _ORCHESTRATOR),
    Metric("async_rl_loss", "gauge", "Of the last step, as minimised", (), _TRAINER),
    Metric("async_rl_grad_norm", "gauge", "Of the last step, before clipping", (), _TRAINER),
    Metric("async_rl_entropy", "gauge", "Of the policy, nats per token", (), _TRAINER),
    Metric("async_rl_mismatch_kl", "gauge", "k3 estimate of KL between engines and learner", (), _TRAINER),
    Metric("async_rl_mismatch_kl_max", "gauge", "The same, of the worst token", (), _TRAINER),
    Metric(
        "async_rl_ratio_mean", "gauge", "Of pi / mu over the loss tokens, each at most 20", (), _TRAINER
    ),
    Metric("async_rl_ratio_max", "gauge", "The greatest of them", (), _TRAINER),
    Metric("async_rl_ess_token_ratio", "gauge", "Effective sample size over tokens", (), _TRAINER),
    Metric("async_rl_ess_sequence_ratio", "gauge", "Effective sample size over samples", (), _TRAINER),
    Metric(
        "async_rl_chi_square", "gauge", "Divergence of the policy from the behaviour policy", (), _TRAINER
    ),
    Metric("async_rl_truncated_ratio", "gauge", "Samples that were cut off at max_tokens", (), _TRAINER),
    Metric("async_rl_completion_tokens", "gauge", "Mean length of the samples trained", (), _TRAINER),
    Metric("async_rl_mfu_ratio", "gauge", "Model FLOPs over the devices' peak", (), _TRAINER),
    Metric("async_rl_alerts", "counter", "Steps at which an alert held", ("reason",), _TRAINER),
    Metric("async_rl_steps_refused", "counter", "Updates refused as not finite", (), _TRAINER),
    Metric("async_rl_trained_tokens", "counter", "Loss tokens", (), _TRAINER),
    Metric(
        "async_rl_trained_tokens_per_second",
        "gauge",
        "Loss tokens of the last step over its time",
        (),
        _TRAINER,
    ),
    Metric(
        "async_rl_step_seconds", "gauge", "The last step, the wait for its batch included", (), _TRAINER
    ),
    Metric("async_rl_checkpoint_step", "gauge", "Of the newest checkpoint", (), _TRAINER),
    Metric(
        "async_rl_checkpoint_age_seconds", "gauge", "Since it was committed, as far as seen", (), _TRAINER
    ),
    Metric("async_rl_publish_seconds", "gauge", "For the last version: snapshot to commit", (), _TRAINER),
    Metric("async_rl_published_bytes", "counter", "Of packs, in committed versions", (), _TRAINER),
    Metric("async_rl_worker_state", "gauge", "1 for the state that it is in", (*_WORKER, "state"), _BOTH),
    Metric("async_rl_worker_version", "gauge", "Policy version served", _WORKER, _BOTH),
    Metric(
        "async_rl_worker_lag_steps", "gauge", "Optimizer steps behind the newest version", _WORKER, _BOTH
    ),
    Metric(
        "async_rl_worker_lag_versions",
        "gauge",
        "Versions committed after the served one",
        _WORKER,
        _ORCHESTRATOR,
    ),
    Metric(
        "async_rl_worker_lag_seconds",
        "gauge",
        "Since the first of them was committed",
        _WORKER,
        _ORCHESTRATOR,
    ),
    Metric("async_rl_worker_fetching_version", "gauge", "Version being fetched", _WORKER, _BOTH),
    Metric("async_rl_worker_fetched_ratio", "gauge", "Share of it that is here", _WORKER, _BOTH),
    Metric(
        "async_rl_worker_tokens_per_second", "gauge", "Generated, between two heartbeats", _WORKER, _BOTH
    ),
    Metric("async_rl_worker_leases", "gauge", "Groups being generated", _WORKER, _BOTH),
    Metric("async_rl_worker_lease_capacity", "gauge", "Groups that it can take at once", _WORKER, _BOTH),
    Metric("async_rl_worker_running_sequences", "gauge", "In the engine", _WORKER, _BOTH),
    Metric("async_rl_worker_queued_sequences", "gauge", "Before the engine", _WORKER, _BOTH),
    Metric("async_rl_worker_cache_used_ratio", "gauge", "Of the KV cache", _WORKER, _BOTH),
    Metric(
        "async_rl_worker_oldest_sequence_seconds", "gauge", "Age of the oldest running one", _WORKER, _BOTH
    ),
    Metric(
        "async_rl_worker_idle_seconds", "counter", "In which the engine had nothing to do", _WORKER, _BOTH
    ),
    Metric("async_rl_worker_pause_seconds", "gauge", "The last pause for an update", _WORKER, _BOTH),
    Metric("async_rl_worker_sync_bytes", "counter", "Downloaded for versions", _WORKER, _BOTH),
    Metric("async_rl_worker_groups", "counter", "Groups accepted from it", _WORKER, _ORCHESTRATOR),
    Metric("async_rl_worker_last_seen_seconds", "gauge", "Since its last message", _WORKER, _ORCHESTRATOR),
)
"""Counters are scraped with `_total` behind their names, as Prometheus wants it."""

_OF_WORKER = {
    "version": "version",
    "lag_steps": "lag",
    "lag_versions": "lag_versions",
    "lag_seconds": "lag_s",
    "fetching_version": "fetching_version",
    "fetched_ratio": "fetched_fraction",
    "tokens_per_second": "tokens_per_s",
    "leases": "leases",
    "lease_capacity": "capacity",
    "running_sequences": "running",
    "queued_sequences": "queued",
    "cache_used_ratio": "cache_used",
    "oldest_sequence_seconds": "oldest_s",
    "idle_seconds": "idle_s",
    "pause_seconds": "pause_s",
    "sync_bytes": "sync_bytes",
    "groups": "groups_done",
    "last_seen_seconds": "last_seen_s",
}


def present(values: Mapping[str, float | None]) -> Iterator[Reading]:
    """Of the names without their prefix, those with a value."""
    for name, value in values.items():
        if value is not None:
            yield Reading(f"async_rl_{name}", float(value))


def of_worker(worker: WorkerView) -> Iterator[Reading]:
    """What is known of one worker; of one that is gone only that it is."""
    labels = {"cluster": worker.cluster or "", "worker": worker.worker}
    for state in STATES if worker.state is not None else ():
        value = float(state == worker.state)
        yield Reading("async_rl_worker_state", value, {**labels, "state": state})
    for name, field in _OF_WORKER.items():
        value = getattr(worker, field)
        if value is not None and (
            worker.state != "gone" or field in ("last_seen_s", "groups_done", "sync_bytes")
        ):
            yield Reading(f"async_rl_worker_{name}", float(value), labels)


def of_view(view: View) -> Iterator[Reading]:
    """The orchestrator's readings."""
    yield from present(
        {
            "step": view.step,
            "version": view.newest_version,
            "version_step": view.newest_version_step,
            "version_age_seconds": view.newest_version_age_s,
            "incarnation": view.incarnation,
            "max_lag_steps": view.max_lag,
            "reward": view.reward,
            "trainer_waited_seconds": view.trainer_waited_s,
            "trainer_up_seconds": view.trainer_here_s,
            "groups_buffered": view.buffered,
            "groups_outstanding": view.outstanding,
            "groups_admitted_limit": view.admitted_limit,
        }
    )
    yield Reading("async_rl_trained_lag_steps", view.lag_counts or {})
    yield from by_reason("async_rl_groups_dropped", view.dropped or {})
    yield from by_reason("async_rl_refused", view.refused or {})
    for cluster in view.clusters:
        yield Reading("async_rl_workers", float(cluster.workers), {"cluster": cluster.cluster})
    for worker in view.workers:
        yield from of_worker(worker)


def by_reason(name: str, counts: Mapping[str, float]) -> Iterable[Reading]:
    return [Reading(name, float(count), {"reason": reason}) for reason, count in sorted(counts.items())]
