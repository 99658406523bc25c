"""Why a worker lags, in a word: a pure decision over what is known about it.

    gone             nothing was heard from it for five heartbeats, or its word in the bucket has expired
    silent           late with its heartbeat: stopped, cut off, or overloaded
    draining         it finishes, and leaves
    quarantined      its numbers do not fit: it gets nothing, and says nothing but Hello
    starting         it serves no version yet: the engine is loading, or waits for the first one
    no way           it found no whole way to a newer version in the bucket
    paused           generation stands still while new weights take the place of the old ones
    applying         new weights are on their way into the engine; generation goes on
    fetching         a newer version is being downloaded and verified
    not fetching     a newer version is committed, and it has not begun to fetch it
    long samples     it serves the newest, but its oldest running sequence began under an older one
    current          it does not lag
    unknown          nobody said enough: also where a newer version is so young that the worker need not have told yet
                     that it fetches it

The first that holds is the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.view.model import WorkerView

__all__ = ["REASONS", "why"]

REASONS = (
    "gone",
    "silent",
    "draining",
    "quarantined",
    "starting",
    "no way",
    "paused",
    "applying",
    "fetching",
    "not fetching",
    "long samples",
    "current",
    "unknown",
)

SILENT_HEARTBEATS = 2.5
"""Two in a row are late: one is what a busy loop or a lost packet costs. After five a worker counts as gone."""


def why(worker: WorkerView, heartbeat_s: float | None) -> str:
    """One of REASONS. `heartbeat_s`: how often it should be heard from; None where nothing is promised."""
    if worker.state in ("gone", "draining", "quarantined"):
        return worker.state
    if (
        heartbeat_s
        and worker.last_seen_s is not None
        and worker.last_seen_s > SILENT_HEARTBEATS * heartbeat_s
    ):
        return "silent"
    if worker.state == "starting":
        return "starting"
    behind, fetching = worker.lag_versions, worker.fetching_version is not None
    if worker.lacks is not None and not fetching and behind != 0:
        return "no way"
    if worker.state == "updating":
        return "paused" if worker.running and worker.tokens_per_s == 0 else "applying"
    if fetching:
        return "fetching"
    if behind is None:
        return "unknown"
    if behind > 0:
        young = heartbeat_s and worker.lag_s is not None and worker.lag_s < SILENT_HEARTBEATS * heartbeat_s
        return "unknown" if young else "not fetching"
    if worker.oldest_s is not None and worker.age_s is not None and worker.oldest_s > worker.age_s:
        return "long samples"
    return "current"
