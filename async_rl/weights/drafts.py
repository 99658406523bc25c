"""A version before its commit: its packs are being made whole, attempt by attempt, by all ranks together.

    WholeDraft   the first version of a trainer: full, or an empty delta where its weights are its parent's
    DeltaDraft   every later one: what changed since the version this trainer committed last

`attempt` is collective and returns this rank's own failure; once every rank's packs are whole, `finished` says on
every rank what the manifest will say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from msgspec import Struct

from async_rl.errors import AsyncRLError, NotFound, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.changes import ChangedPacks
from async_rl.weights.codec.digest import MASK
from async_rl.weights.full import FullPacks
from async_rl.weights.hashed import sum_of, tiles_of_rows, tiles_of_state, tiles_together
from async_rl.weights.lineage import Pack, Way, admissible, read_claims, read_manifest
from async_rl.weights.parallel import side_by_side
from async_rl.weights.plan import Path, find_path
from async_rl.weights.ranks import Ranks, Report, exchange
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Shards, State

__all__ = ["DeltaDraft", "Draft", "Finished", "WholeDraft", "path_to"]

log = get_logger(__name__)


class Finished(Struct, frozen=True):
    way: Way
    digest: int  # of the whole state


class DeltaDraft:
    def __init__(self, ranks: Ranks, packs: ChangedPacks, base: int, digest: int) -> None:
        """`base`: the version that the packs change, whose state has `digest`."""
        self._ranks, self._packs, self._base, self._digest = ranks, packs, base, digest
        self.finished: Finished | None = None

    @property
    def encode_s(self) -> float:
        return self._packs.encode_s

    @property
    def upload_s(self) -> float:
        return self._packs.upload_s

    def attempt(self) -> AsyncRLError | None:
        mine = self._packs
        failure = mine.attempt()
        said = _Written(failure is None, tuple(mine.packs), mine.changed, mine.moved, mine.small)
        parts = exchange(self._ranks, said)
        if all(part.whole for part in parts):
            packs = tuple(pack for part in parts for pack in part.packs)
            way = Way(
                base=self._base,
                packs=packs,
                total_bytes=sum(pack.size for pack in packs),
                changed=sum(part.changed for part in parts),
                small=any(part.small for part in parts),
            )
            self.finished = Finished(way, (self._digest + sum(part.moved for part in parts)) & MASK)
        return failure


class WholeDraft:
    """`parent`: the version that the weights came from, -1 for none. If it holds the very same weights and can be
    read from the store, nothing is sent but a delta without packs."""

    def __init__(
        self,
        ranks: Ranks,
        store: ObjectStore,
        run: RunInfo,
        shards: Shards,
        full: FullPacks,
        state: State,
        parent: int,
        key: Callable[[int, int], str],
    ) -> None:
        self._ranks, self._store, self._full = ranks, store, full
        self._run, self._shards, self._state = run, shards, state
        self._parent, self._key = parent, key
        self._tiles: np.ndarray | None = None  # the state's tile digests
        self._verdict: _Verdict | None = None
        self._whole: dict[int, str] = {}
        self.finished: Finished | None = None
        self.encode_s = 0.0
        self.upload_s = 0.0

    def attempt(self) -> AsyncRLError | None:
        if self._parent >= 0:
            if self._tiles is None:
                self._tiles = tiles_of_state(self._ranks, self._run, self._shards, self._state)
            if self._verdict is None:
                failure = self._judge(sum_of(self._tiles))
                if self._verdict is None:
                    return failure
            if self._verdict.same:
                way = Way(base=self._parent, packs=(), total_bytes=0)
                self.finished = Finished(way, sum_of(self._tiles))
                return None
        started = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as beside:
            if self._tiles is None:
                rows = beside.submit(tiles_of_rows, self._run, self._shards, self._state)
            failure = self._full.send(self._state, self._whole, self._key)
            if self._tiles is None:
                self._tiles = tiles_together(self._ranks, rows.result())
        self.upload_s += time.monotonic() - started
        full = self._full.way(self._whole, self._key, self._tiles)
        if full is not None:
            self.finished = Finished(full, sum_of(self._tiles))
        return failure

    def _judge(self, digest: int) -> AsyncRLError | None:
        """Rank 0 looks whether the parent is the same; all hear it."""
        failure: AsyncRLError | None = None
        verdict = _Verdict()
        if self._ranks.rank == 0 and self._parent >= 0:
            try:
                verdict = _Verdict(same=_is_same(self._store, self._parent, digest))
            except AsyncRLError as error:
                failure = error
                verdict = _Verdict(report=Report.of(error))
        verdict = exchange(self._ranks, verdict)[0]
        if not verdict.report.kind:
            self._verdict = verdict
        return failure


Draft = DeltaDraft | WholeDraft


class _Written(Struct, frozen=True):
    """What one rank's part of a delta is, so far."""

    whole: bool
    packs: tuple[Pack, ...]
    changed: int
    moved: int
    small: bool


class _Verdict(Struct, frozen=True):
    same: bool = False
    report: Report = Report()


def _is_same(store: ObjectStore, parent: int, digest: int) -> bool:
    """Whether the parent's state has this digest, counts, and can be read. Raises StoreErrors that may pass."""
    try:
        manifest = read_manifest(store, parent)
        if manifest.digest != f"{digest:016x}" or not admissible(manifest, read_claims(store)):
            return False
        path_to(store, parent)
    except (NotFound, WeightsError) as error:
        log.warning(
            "the parent can't be built upon, a full version follows", version=parent, reason=error.message
        )
        return False
    return True


def path_to(store: ObjectStore, version: int) -> Path:
    """The cheapest path from nothing all of whose packs are there: garbage collection may have taken some, and
    manifests stay. Raises WeightsError where there is none, StoreErrors."""
    manifest = read_manifest(store, version)
    avoid: frozenset[tuple[int, int]] = frozenset()
    while True:
        path = find_path(store, manifest, None, avoid=avoid)
        packs = {pack.key: (hop.way.base, hop.version) for hop in path.hops for pack in hop.way.packs}
        there = side_by_side(partial(_is_there, store), packs)
        missing = {edge for edge, found in zip(packs.values(), there, strict=True) if not found}
        if not missing:
            return path
        avoid |= missing


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return False
    return True
