"""Anchors: full states of committed versions, written in the background while deltas go on.

A worker that joins reads the newest anchor and the deltas since; anchors bound the second part. An anchor is a
further way to its version (ways.py): until it is there, nobody misses it, so a failed one is only logged, and
tried again when the rule below next says so. The rows are the baseline's own buffers; they go back to the pool
tensor by tensor as they are sent (shards.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from async_rl.errors import AsyncRLError, StoreError, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.threads import give_way
from async_rl.weights.config import WeightsConfig
from async_rl.weights.full import FullPacks
from async_rl.weights.garbage import StoredTombstone
from async_rl.weights.gc import dead_edges
from async_rl.weights.hashed import sum_of, tiles_of_state
from async_rl.weights.lineage import Manifest, Way
from async_rl.weights.plan import Path, find_path
from async_rl.weights.ranks import Ranks
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Shards, State
from async_rl.weights.ways import FurtherWay, write_way

__all__ = ["AnchorWriter", "Anchors", "Spent", "due"]

log = get_logger(__name__)

_EARNED = 0.7
"""Every full state must be earned by deltas of at least this part of its bytes, on the average of all that this
trainer wrote. With the skips (0.5 to 0.6 of the deltas' bytes) everything written then stays near three times the
deltas, and in the median of all moments a worker that joins reads 1.12 (learning rate 1e-6), 1.17 (3e-6) or 1.21
(1e-5) anchors (computed from measured sizes of deltas and skips). Were as much asked of the deltas since the newest
anchor alone, what anchors lose while they wait for a good place would never come back: fewer are written, and a join
after 300 versions reads 1.25 (3e-6) instead of 1.08."""


class Spent(NamedTuple):
    """Bytes of deltas by this trainer, and the full states that it wrote, for which they must pay."""

    deltas: int
    fulls: int


def due(
    versions: int, spent: Spent, path_bytes: Callable[[], int], full_bytes: int, config: WeightsConfig
) -> str:
    """Why a new anchor is due; empty: it is not.

    versions:   since the newest full state
    path_bytes: of the cheapest path from nothing to now; asked only where it matters
    """
    if versions >= config.anchor_every:
        return f"{versions} versions since the last one"
    if spent.deltas < _EARNED * full_bytes * (spent.fulls + 1):
        return ""
    excess = path_bytes() - full_bytes
    if excess > config.anchor_cost * full_bytes:
        return f"the path from the last one costs {excess} bytes"
    return ""


class Anchors:
    """Rank 0's memory of what was written."""

    def __init__(self, store: ObjectStore, config: WeightsConfig, full_bytes: int) -> None:
        self._store, self._config, self._full_bytes = store, config, full_bytes
        self._newest = -1
        self._spent = Spent(0, 0)
        # Skips begin at multiples of their spans: an anchor there is followed by skips, not by single deltas.
        self._every = min(config.skip_spans, default=8)
        self._tombstones: dict[int, StoredTombstone] = {}
        self._known: dict[int, Way] = {}  # of manifests that were read for a path

    def committed(self, manifest: Manifest) -> None:
        if manifest.way.base < 0:
            self.landed(manifest.version)
        elif self._newest < 0:
            self._begin(manifest)
        else:
            self._spent = Spent(self._spent.deltas + manifest.way.total_bytes, self._spent.fulls)

    def landed(self, version: int) -> None:
        """A full state of this version is in the store."""
        self._newest = version
        self._spent = Spent(self._spent.deltas, self._spent.fulls + 1)

    def due(self, manifest: Manifest) -> str:
        """After its commit: why an anchor of the next version is due; empty: it is not. Looked at only where that
        is a good place for one; a look costs one listing and a few small objects."""
        if self._newest < 0 or (manifest.version + 1) % self._every:
            return ""
        try:
            return due(
                manifest.version - self._newest,
                self._spent,
                lambda: self._path(manifest).nbytes,
                self._full_bytes,
                self._config,
            )
        except (StoreError, WeightsError) as error:
            log.warning("what the path costs can't be told", version=manifest.version, reason=error.message)
            return ""

    def _path(self, manifest: Manifest) -> Path:
        """From nothing, as a worker that joins now would go."""
        dead = dead_edges(self._store, self._tombstones)
        return find_path(self._store, manifest, None, avoid=dead, known=self._known)

    def _begin(self, manifest: Manifest) -> None:
        """A trainer that goes on from its parent: the path to it tells."""
        try:
            path = self._path(manifest)
        except (StoreError, WeightsError) as error:
            log.warning("the newest anchor can't be found", version=manifest.version, reason=error.message)
            return
        self._newest = path.hops[0].version


class AnchorWriter:
    """On every rank: writes one anchor at a time, in a thread, with a group of its own."""

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        ranks: Ranks,
        shards: Shards,
        full: FullPacks,
        incarnation: int,
    ) -> None:
        self._store, self._run, self._ranks, self._shards, self._full = store, run, ranks, shards, full
        self._incarnation = incarnation
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._landed = -1

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def landed(self) -> int:
        """The version whose anchor was written since the last call (rank 0); -1: none."""
        version, self._landed = self._landed, -1
        return version

    def start(self, version: int, digest: int, state: State) -> None:
        """All ranks, in the same order. `state` has this digest and is the anchor's from now on: it releases
        it. Returns at once."""
        self._thread = threading.Thread(
            target=self._run_one,
            args=(version, digest, state, self._thread),
            name=f"anchor-{version}",
            daemon=True,
        )
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """An anchor on its way is given up as soon as all ranks have agreed, or after the time left to itself."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("an anchor was still being written at the end", thread=self._thread.name)
                return  # its group must not be taken away under it
        self._ranks.close()

    def _run_one(self, version: int, digest: int, state: State, before: threading.Thread | None) -> None:
        give_way()  # training does not wait for an anchor
        if before is not None:
            before.join()  # rank 0's had ended; here it may be about to
        started = time.monotonic()
        try:
            way_bytes = self._write(version, digest, state)
        except AsyncRLError as error:
            log.warning("anchor not written, tried again later", version=version, reason=error.message)
        except BaseException as error:  # noqa: BLE001  a bug here must not take training along
            log.error("anchor not written", version=version, reason=f"{type(error).__name__}: {error}")
        else:
            if way_bytes and self._ranks.rank == 0:
                self._landed = version
                took = time.monotonic() - started
                log.info("anchor written", version=version, bytes=way_bytes, seconds=took)
        finally:
            state.release()

    def _write(self, version: int, digest: int, state: State) -> int:
        """Bytes of the anchor; 0 where it was given up."""
        tiles = tiles_of_state(self._ranks, self._run, self._shards, state)
        found = sum_of(tiles)
        if found != digest:
            raise WeightsError(
                f"the trainer's copy of version {version} has digest {found:016x}, its manifest says {digest:016x}",
                hint="the memory of a trainer's host is damaged: look there, and start the trainer anew elsewhere",
            )
        whole: dict[int, str] = {}
        failure = self._full.send(
            state, whole, self._key(version), sent=state.release, giving_up=self._closing.is_set
        )
        if failure is not None:
            raise failure
        way = self._full.way(whole, self._key(version), tiles)
        if way is None:
            if not self._closing.is_set():
                log.debug("another rank could not write its part of an anchor", version=version)
            return 0
        if self._ranks.rank == 0:
            write_way(self._store, FurtherWay(version, self._incarnation, way, time.time()))
        return way.total_bytes

    def _key(self, version: int) -> Callable[[int, int], str]:
        prefix = f"packs/{version:010}-{self._incarnation:08}-anchor"
        return lambda owner, pack: f"{prefix}{owner}-{pack}"
