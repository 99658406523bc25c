"""A run as its bucket shows it, to somebody who can't reach the orchestrator, or has none.

    versions/       the newest version, its age; how many came after the one that a worker serves
    incarnations/   which trainer has the run, and so which versions count
    workers/        each worker's last word: written every beat_s, and whenever it serves another version
    checkpoints/    the newest

What only the orchestrator knows (the trainer's state, leases, the buffer, drops, the lag of what was trained) is
None. Each look lists only what came after the look before; manifests and claims never change and are read once, a
worker's word only when it is new.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable

import msgspec

from async_rl.algo.staleness import Node, Tree, version_lag
from async_rl.errors import AccessDenied, NotFound
from async_rl.store.base import ObjectStore
from async_rl.view.model import View, WorkerView, clusters_of
from async_rl.view.why import why
from async_rl.weights.lineage import (
    VERSIONS,
    Claim,
    Manifest,
    admissible,
    read_claims,
    read_manifest,
    version_key,
)
from async_rl.weights.readers import Beats, SeenBeat, store_now
from async_rl.weights.run import RunInfo

__all__ = ["BucketWatch"]

CHECKPOINTS = "checkpoints/"
_CHECKPOINT = re.compile(r"[0-9]+-[0-9]+")  # incarnation, step

CLOCK_S = 60.0
"""How long the difference between the store's clock and ours is believed: asking takes an object's put and delete."""
MOST_READ = 64
"""Manifests read in one look to find the lag of a worker on another trainer's branch. With more the lag is unknown
for now; the next look goes on where this one stopped."""


class BucketWatch:
    def __init__(
        self, store: ObjectStore, run: RunInfo, clock: Callable[[], float] = time.time, url: str = ""
    ) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._source = url or store.url
        self._committed: dict[int, float] = {}  # versions, by the store's clock
        self._order: list[int] = []  # the same, ascending
        self._claims: list[Claim] = []
        self._manifests: dict[int, Manifest | None] = {}  # None: it is not there, or not any more
        self._tree = Tree()
        self._beats = Beats(store)
        self._checkpoint: tuple[str, float] | None = None  # name, by the store's clock
        self._ahead_s = 0.0  # of the store's clock, to ours
        self._asked = float("-inf")
        self._note = ""
        self._left = 0  # manifests that this look may still read

    def look(self) -> View:
        """Raises StoreErrors, Corrupt."""
        self._left = MOST_READ
        beats = self._beats.look()
        self._look_for_versions()
        self._look_for_checkpoints()
        newest = self._newest()
        now = self._now(beats)
        workers = tuple(self._worker(seen, newest, now) for seen in beats)
        checkpoint = self._checkpoint
        return View(
            source=self._source,
            run=self._run.run,
            incarnation=self._claims[-1].incarnation if self._claims else None,
            step=newest.step if newest else None,
            newest_version=newest.version if newest else None,
            newest_version_step=newest.step if newest else None,
            newest_version_age_s=max(0.0, now - self._committed[newest.version]) if newest else None,
            checkpoint_step=int(checkpoint[0].partition("-")[2]) if checkpoint else None,
            checkpoint_age_s=max(0.0, now - checkpoint[1]) if checkpoint else None,
            clusters=clusters_of(workers),
            workers=workers,
            note=self._note,
        )

    # ---------------------------------------------------------------- what is there

    def _look_for_versions(self) -> None:
        after = version_key(self._order[-1]) if self._order else ""
        for info in self._store.list_after(VERSIONS, after):
            stem = info.key.removeprefix(VERSIONS).removesuffix(".json")
            if stem.isdecimal() and info.key == version_key(int(stem)):
                self._committed[int(stem)] = info.modified
                self._order.append(int(stem))
        # After the versions, see lineage.py.
        self._claims += read_claims(self._store, self._claims[-1].incarnation if self._claims else -1)

    def _look_for_checkpoints(self) -> None:
        """The commit is `NAME.json`, and greater names are newer; a prune never takes the newest."""
        after = f"{CHECKPOINTS}{self._checkpoint[0]}.json" if self._checkpoint else ""
        for info in self._store.list_after(CHECKPOINTS, after):
            name = info.key.removeprefix(CHECKPOINTS)
            stem = name.removesuffix(".json")
            if stem != name and _CHECKPOINT.fullmatch(stem):
                self._checkpoint = stem, info.modified

    def _newest(self) -> Manifest | None:
        """That counts."""
        for version in reversed(self._order):
            manifest = self._manifest(version)
            if manifest is not None and admissible(manifest, self._claims):
                return manifest
        return None

    def _manifest(self, version: int) -> Manifest | None:
        if version not in self._manifests:
            self._left -= 1
            try:
                manifest = self._manifests[version] = read_manifest(self._store, version)
                self._tree.add(version, Node(manifest.parent, manifest.step, manifest.digest))
            except NotFound:
                self._manifests[version] = None
        return self._manifests[version]

    def _now(self, beats: list[SeenBeat]) -> float:
        """Of the store's clock: never before what lies in the store."""
        ours = self._clock()
        if ours - self._asked >= CLOCK_S or ours < self._asked:
            self._asked = ours
            try:
                self._ahead_s, self._note = store_now(self._store) - ours, ""
            except AccessDenied:  # one who watches need not be allowed to write
                self._ahead_s = 0.0
                self._note = (
                    "ages are by this machine's clock: the store did not take an object to tell its own"
                )
        latest = max((seen.modified for seen in beats), default=0.0)
        return max(ours + self._ahead_s, latest, self._committed[self._order[-1]] if self._order else 0.0)

    # ---------------------------------------------------------------- a worker

    def _worker(self, seen: SeenBeat, newest: Manifest | None, now: float) -> WorkerView:
        beat = seen.beat
        age_s = now - seen.modified
        gone = age_s >= beat.expires_s
        version = beat.version if beat.version is not None and beat.version >= 0 else None
        fetching = beat.fetching if beat.fetching is not None and beat.fetching >= 0 and not gone else None
        later = self._later(version, newest)
        view = WorkerView(
            worker=beat.worker,
            cluster=beat.cluster,
            state="gone" if gone else beat.state,
            version=version,
            lag=self._lag(version, newest),
            lag_versions=None if later is None else len(later),
            lag_s=None if later is None else max(0.0, now - self._committed[later[0]]) if later else 0.0,
            age_s=max(0.0, now - self._committed[version]) if version in self._committed else None,
            fetching_version=fetching,
            fetched_fraction=beat.fetched_fraction if fetching is not None else None,
            tokens_per_s=0.0 if gone else beat.tokens_per_s,
            sync_bytes=beat.sync_bytes,
            last_seen_s=age_s,
            lacks=beat.lacks if beat.lacks >= 0 else None,
        )
        return msgspec.structs.replace(view, why=why(view, None))

    def _later(self, version: int | None, newest: Manifest | None) -> list[int] | None:
        """The versions after `version`, up to the newest, ascending; None where that is unknown."""
        if version is None or newest is None or version not in self._committed:
            return None
        return self._order[bisect_right(self._order, version) : bisect_right(self._order, newest.version)]

    def _lag(self, version: int | None, newest: Manifest | None) -> int | None:
        """In optimizer steps, along the lineage. None: unknown, or too far away to read its way at once."""
        if version is None or newest is None or version not in self._committed:
            return None
        if version > newest.version:  # a zombie's: the beats were read before the versions
            return None
        there = self._manifest(version)
        if there is None:
            return None
        if there.incarnation == newest.incarnation:  # one branch
            return max(0, newest.step - there.step)
        while True:
            try:
                return version_lag(self._tree, version, newest.version, newest.step)
            except KeyError as error:
                missing = error.args[0]
            if not isinstance(missing, int) or missing < 0 or self._left <= 0:
                return None
            if self._manifest(missing) is None:
                return None
