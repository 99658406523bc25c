"""What a worker says of itself, in one place: to the orchestrator in each heartbeat, to the store for whoever watches
from there, and to an exporter."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from async_rl.view.model import WorkerView
from async_rl.weights.readers import ReaderBeat
from async_rl.wire import Heartbeat, LeaseProgress

__all__ = ["Figures", "Speed"]


class Figures(Struct, frozen=True, kw_only=True):
    """At one moment. -1 for versions: none; as wire.Heartbeat has them."""

    worker: str
    cluster: str
    state: Literal["starting", "serving", "updating", "draining"]
    version: int  # served
    lag: int | None  # optimizer steps behind the newest that was announced; None: unknown
    fetching: int
    fetched_fraction: float
    tokens_per_s: float
    leases: int
    capacity: int | None  # leases that it can hold; None: not known yet
    running: int
    queued: int
    sync_bytes: int
    pause_s: float
    cache_used: float
    oldest_s: float
    idle_s: float

    def heartbeat(self, progress: tuple[LeaseProgress, ...], finished: tuple[int, ...]) -> Heartbeat:
        return Heartbeat(
            version=self.version,
            state=self.state,
            progress=progress,
            fetching_version=self.fetching,
            fetched_fraction=self.fetched_fraction,
            tokens_per_s=self.tokens_per_s,
            running=self.running,
            queued=self.queued,
            sync_bytes=self.sync_bytes,
            pause_s=self.pause_s,
            cache_used=self.cache_used,
            oldest_s=self.oldest_s,
            idle_s=self.idle_s,
            finished=finished,
        )

    def reader_beat(self, needed: tuple[int, ...], expires_s: float, lacks: int) -> ReaderBeat:
        """`needed`: versions that must not be deleted; `lacks`: one to which there is no whole way; -1: none."""
        return ReaderBeat(
            self.worker,
            needed,
            expires_s,
            lacks,
            cluster=self.cluster,
            state=self.state,
            version=self.version,
            fetching=self.fetching,
            fetched_fraction=self.fetched_fraction,
            tokens_per_s=self.tokens_per_s,
            sync_bytes=self.sync_bytes,
        )

    def view(self) -> WorkerView:
        """As the orchestrator would show it."""
        fetching = self.fetching >= 0
        return WorkerView(
            worker=self.worker,
            cluster=self.cluster,
            state=self.state,
            version=self.version if self.version >= 0 else None,
            lag=self.lag,
            fetching_version=self.fetching if fetching else None,
            fetched_fraction=self.fetched_fraction if fetching else None,
            tokens_per_s=self.tokens_per_s,
            leases=self.leases,
            capacity=self.capacity,
            running=self.running,
            queued=self.queued,
            sync_bytes=self.sync_bytes,
            pause_s=self.pause_s,
            cache_used=self.cache_used,
            oldest_s=self.oldest_s,
            idle_s=self.idle_s,
        )


class Speed:
    """Tokens per second between two heartbeats."""

    def __init__(self, now: float) -> None:
        self._tokens, self._at, self.rate = 0, now, 0.0

    def measure(self, tokens: int, now: float) -> float:
        if now - self._at > 0.5:  # a heartbeat out of turn comes too soon after another to measure by
            self.rate = max(0, tokens - self._tokens) / (now - self._at)
            self._tokens, self._at = tokens, now
        return self.rate
