"""Bring a shadow from whatever it is to the version that is wanted, or say why not.

    plan ─► fetch all packs of all hops, verified ─► check their tables ─► hop by hop: apply ─► compare the digest

No byte of the shadow changes before everything that will change it is on this machine and verified. What can go
wrong, and what then happens:

    a pack is missing, damaged (twice), or its table is inconsistent    that edge is avoided, another path planned
    a tile does not do what its table says, the digest differs          the shadow is dropped; from nothing
    … and it was from nothing                                           the edges of that path are avoided
    no path is left                                                     Corrupt, with all that was found
    the store is away                                                   StoreUnavailable; what was fetched stays
    killed                                                              see shadow.py; packs that are whole stay

Memory: fetch_parallel blocks of 256 KiB (who needs only a part: as many requests for tiles of a delta, or tiles of
2 MiB of a full state), besides the mapped files. Disk: the shadow, and the packs of the path;
another shadow beside it while a full state is fetched (where there is no room for both, the old one goes first).
"""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from async_rl.errors import Corrupt, NotFound, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.codec.digest import MASK
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import pack_tiles, table_of
from async_rl.weights.fetch import BadPack, Fetcher, holds
from async_rl.weights.files import FolderLock, disk_errors
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.gc import dead_edges
from async_rl.weights.lineage import Manifest, Pack, Way, read_manifest
from async_rl.weights.needed import Needed, mapped_bytes
from async_rl.weights.parallel import side_by_side
from async_rl.weights.plan import NOTHING, Hop, find_path
from async_rl.weights.plan import Path as Route
from async_rl.weights.run import RunInfo
from async_rl.weights.shadow import (
    THREADS,
    FetchedTile,
    Mapped,
    Shadow,
    check_contents,
    full_ranges,
    read_held,
    shard_names,
    shards_in,
    tile_ranges,
)
from async_rl.weights.whole import Suspects

__all__ = ["Follower", "Progress"]

log = get_logger(__name__)

Progress = Callable[[float], None]
"""Called with the fraction of the bytes that are on disk, 0 to 1, by the thread that called."""

_CLOSE_S = 5.0
"""How long `close` waits for a get that is in flight."""

Edge = tuple[int, int]


class _BadEdge(Exception):
    """This edge is of no use; the shadow was not touched."""

    def __init__(self, hop: Hop, error: Corrupt) -> None:
        super().__init__(error.message)
        self.edge, self.error = (hop.way.base, hop.version), error


class _Spoilt(Exception):
    """The shadow is of no use any more; the edge is what was being applied, None where it could be any."""

    def __init__(self, reason: str, edge: Edge | None) -> None:
        super().__init__(reason)
        self.edge = edge


class Follower:
    """One shadow folder and its user. Thread-safe; one process at a time, held by a lock from the first use on."""

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        config: WeightsConfig,
        folder: Path,
        incoming: Path,
        needs: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`folder` holds the shadow, `incoming` what is on its way, on the same disk. `needs`: see Subscriber."""
        self._store, self._run, self._config = store, run, config
        self._folder, self._incoming = folder, incoming
        self._needs = None if needs is None else tile_ranges(run, needs)
        self._fetcher = Fetcher(store, config)
        self._part: Needed | None = None
        if self._needs is not None:
            self._part = Needed(store, run, self._fetcher, incoming, self._needs)
        self._mutex = threading.Lock()
        self._lock: FolderLock | None = None
        self._adopted = False
        self._shadow: Shadow | None = None
        self._known: dict[int, Way] = {}  # of manifests that were read for a plan

    @property
    def held(self) -> int | None:
        """The version of the shadow."""
        shadow = self._shadow
        return None if shadow is None else shadow.version

    @property
    def downloaded(self) -> int:
        """Bytes of packs so far, also of attempts that failed."""
        return self._fetcher.downloaded

    def reach(self, manifest: Manifest, progress: Progress | None = None) -> tuple[Shadow, Route]:
        """The shadow as `manifest`'s version, and the last path taken to it.

        Raises Corrupt (naming the objects) where no path is whole, WeightsError, StoreErrors.
        """
        what = f"version {manifest.version} of {self._store.url}"
        if manifest.dtype != self._run.dtype:
            raise Corrupt(f"{what} is {manifest.dtype}, the run is {self._run.dtype}")
        with self._mutex, disk_errors(self._folder, manifest.way.total_bytes):
            self._open()
            avoid: set[Edge] = set()
            gone: frozenset[Edge] = frozenset()  # given up as garbage; asked for when something is missing
            reasons: list[str] = []
            said = _Monotone(progress)
            while True:
                try:
                    route = self._plan(manifest, frozenset(avoid), gone)
                except WeightsError as error:
                    why = "; ".join(reasons or [error.message])
                    raise Corrupt(f"{what} can't be had: {why}", hint=error.hint) from error
                try:
                    self._go(route, manifest, said)
                    break
                except _BadEdge as bad:
                    log.warning("a way is of no use, looking for another", edge=bad.edge, reason=str(bad))
                    avoid.add(bad.edge)
                    self._known.clear()  # what was read may be what is wrong
                    gone = dead_edges(self._store)
                    reasons.append(str(bad))
                except _Spoilt as spoilt:
                    log.error(
                        "the shadow is dropped and fetched anew", path=route.describe(), reason=str(spoilt)
                    )
                    self._drop()
                    self._known.clear()
                    reasons.append(str(spoilt))
                    if route.start == NOTHING:  # else the shadow itself may have been damaged before
                        edges = [(hop.way.base, hop.version) for hop in route.hops]
                        avoid.update(edges if spoilt.edge is None else [spoilt.edge])
            said(1.0)
            self._clear()
            assert self._shadow is not None
            return self._shadow, route

    def _plan(self, manifest: Manifest, avoid: frozenset[Edge], gone: frozenset[Edge]) -> Route:
        """Around what was given up as garbage, where that leaves a path: it may still be there."""
        try:
            return find_path(self._store, manifest, self.held, avoid=avoid | gone, known=self._known)
        except WeightsError:
            if not gone:
                raise
            return find_path(self._store, manifest, self.held, avoid=avoid, known=self._known)

    def scrub(self) -> bool:
        """Hash the whole shadow. False where it is not what it was: it is then dropped, and the next `reach` starts
        from nothing. True also where there is none."""
        with self._mutex:
            if self._shadow is None:
                return True
            found = self._shadow.mapped.digest(self._shadow.ranges)
            if found == self._shadow.digest:
                return True
            log.error(
                "the copy of the weights was damaged on this machine",
                folder=str(self._folder),
                version=self._shadow.version,
                digest=f"{found:016x}",
                wanted=f"{self._shadow.digest:016x}",
            )
            self._drop()
            return False

    def close(self) -> None:
        """End what another thread is fetching, and let others use the folder. The shadow stays. Not to be used any
        more."""
        self._fetcher.stop()
        if not self._mutex.acquire(timeout=_CLOSE_S):
            log.warning("a fetch goes on after its reader was closed", folder=str(self._folder))
            return  # the lock of the folder ends with the process
        try:
            self._shadow = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None
        finally:
            self._mutex.release()

    # ---------------------------------------------------------------- what is there

    def _open(self) -> None:
        if self._lock is None:
            self._lock = FolderLock(self._incoming)
            for part in (*self._incoming.glob(".*.part"), *self._folder.glob(".*.part")):
                part.unlink(missing_ok=True)
        if not self._adopted:
            self._shadow = self._adopt()
            self._adopted = True

    def _adopt(self) -> Shadow | None:
        """What an earlier process left, if it is exactly the version it says."""
        held = read_held(self._folder)
        if held is None or held.run != self._run.run:
            return None
        names = {spec.name for spec in self._run.tensors}
        needs = None
        if self._needs is not None:
            needs = {spec.name: span for spec, span in zip(self._run.tensors, self._needs, strict=True)}
        files = [self._folder / name for name in held.files]
        try:
            if held.needs != needs or held.weight_map.keys() != names:
                raise Corrupt("it holds other tensors than needed")
            wanted = held.digest if needs else read_manifest(self._store, held.version).digest
            check_contents(self._run, files, held.weight_map, str(self._folder))
            mapped = Mapped(self._run, files, held.weight_map)
            digest = mapped.digest(self._needs or full_ranges(self._run))
            if f"{digest:016x}" == wanted:
                log.info("the copy of the weights is whole", version=held.version, folder=str(self._folder))
                told = int(held.whole, 16) if held.whole else None
                whole = self._whole_digest(digest, told)
                return Shadow(self._folder, mapped, held.version, digest, self._needs, whole)
            reason = f"its digest is {digest:016x}, that of version {held.version} is {wanted}"
        except (WeightsError, NotFound, OSError) as error:
            reason = str(error)
        log.warning("the copy of the weights is of no use", folder=str(self._folder), reason=reason)
        return None

    def _drop(self) -> None:
        """The files stay: shards that happen to be what a full way wants are used again."""
        if self._shadow is not None:
            self._shadow.begin()
            self._shadow = None

    def _clear(self) -> None:
        for path in self._incoming.iterdir():
            if self._lock is None or path != self._lock.path:
                path.unlink()

    # ---------------------------------------------------------------- along a path

    def _go(self, route: Route, manifest: Manifest, said: _Monotone) -> None:
        began = time.monotonic()
        before = self.downloaded
        for hop in route.hops:
            self._check_way(hop)
        self._fetch(route, said)
        tiles = {hop.version: self._read_tiles(hop) for hop in route.hops if hop.way.base >= 0}
        fetched = time.monotonic()
        for index, hop in enumerate(route.hops):
            wanted = manifest if hop.version == manifest.version else None
            if hop.way.base < 0:
                self._install(hop, wanted)
            else:
                self._apply(hop, tiles.pop(hop.version), wanted)
            later = {pack.sha256 for each in route.hops[index + 1 :] for pack in each.way.packs}
            for pack in hop.way.packs:
                if pack.sha256 not in later:
                    self._file_of(pack).unlink(missing_ok=True)
        shadow = self._shadow
        if shadow is None or shadow.version != manifest.version:
            raise Corrupt(f"{route.describe()} does not lead to version {manifest.version}")
        if shadow.whole is not None and f"{shadow.whole:016x}" != manifest.digest:
            # Without a hop, that is: a version that was replaced under its number.
            raise _Spoilt(_other_digest(manifest, shadow.whole), None)
        log.info(
            "version in the shadow",
            version=manifest.version,
            path=route.describe(),
            downloaded=self.downloaded - before,
            fetch_s=fetched - began,
            apply_s=time.monotonic() - fetched,
        )

    def _check_way(self, hop: Hop) -> None:
        for pack in hop.way.packs:
            if not re.fullmatch("[0-9a-f]{64}", pack.sha256):  # it becomes the name of a file
                raise _BadEdge(
                    hop, Corrupt(f"{hop.key} gives {pack.key} a hash that is none: {pack.sha256!r}")
                )

    def _file_of(self, pack: Pack) -> Path:
        return self._incoming / pack.sha256

    def _fetch(self, route: Route, said: _Monotone) -> None:
        if route.hops and route.hops[0].way.base < 0 and self._needs is None:
            self._keep_shards(route.hops[0])
        if self._part is not None:
            return self._fetch_part(self._part, route, said)
        packs = list({pack.sha256: pack for hop in route.hops for pack in hop.way.packs}.values())
        there = side_by_side(lambda pack: holds(self._file_of(pack), pack), packs, THREADS)
        missing = {pack.sha256: pack for pack, have in zip(packs, there, strict=True) if not have}
        wanted = sum(pack.size for pack in missing.values())
        self._make_room(route, wanted)
        have = route.nbytes - wanted
        said(have / max(1, route.nbytes))
        with disk_errors(self._folder, wanted):
            try:
                self._fetcher.whole(
                    [(pack, self._file_of(pack)) for pack in missing.values()],
                    lambda done: said((have + done) / max(1, route.nbytes)),
                    self._suspects(route),
                )
            except BadPack as error:
                raise _BadEdge(_hop_with(route, error.key), error) from error

    def _suspects(self, route: Route) -> Suspects | None:
        """What to fetch again of a pack that is not what its hash says, where its tiles can tell."""
        full = next((hop for hop in route.hops if hop.way.base < 0), None)
        if full is None:
            return None
        tiles = self._tiles_of(full)
        numbers = {pack.sha256: number for number, pack in enumerate(full.way.packs)}

        def suspects(pack: Pack, path: Path) -> list[tuple[int, int]]:
            number = numbers.get(pack.sha256)
            if number is None or not tiles.known:
                return []
            return tiles.wrong_in(number, mapped_bytes(path))

        return suspects

    def _fetch_part(self, part: Needed, route: Route, said: _Monotone) -> None:
        done = 0
        for hop in route.hops:

            def report(now: int, done: int = done) -> None:
                said((done + now) / max(1, route.nbytes))

            try:
                part.fetch(hop.way, self._name(hop), report)
            except Corrupt as error:
                raise _BadEdge(hop, error) from error
            done += hop.way.total_bytes
            said(done / max(1, route.nbytes))

    def _tiles_of(self, hop: Hop) -> FullTiles:
        try:
            return FullTiles(self._run, hop.way, self._name(hop))
        except Corrupt as error:
            raise _BadEdge(hop, error) from error

    def _name(self, hop: Hop) -> str:
        return f"{hop.key} in {self._store.url}"

    def _keep_shards(self, hop: Hop) -> None:
        """Files of a shadow that was torn may be packs of this full way all the same."""
        if self._shadow is not None:
            return
        names = shard_names(len(hop.way.packs))
        for pack, name in zip(hop.way.packs, names, strict=True):
            if not self._file_of(pack).exists() and holds(self._folder / name, pack):
                (self._folder / name).replace(self._file_of(pack))
        for path in shards_in(self._folder):
            path.unlink()

    def _make_room(self, route: Route, wanted: int) -> None:
        if self._shadow is not None and route.start == NOTHING:
            free = shutil.disk_usage(self._incoming).free
            if free < wanted:
                log.warning(
                    "no room for two copies of the weights: the old one goes first",
                    folder=str(self._folder),
                    free_mb=free / 1e6,
                    wanted_mb=wanted / 1e6,
                )
                self._drop()
                for path in shards_in(self._folder):
                    path.unlink()

    # ---------------------------------------------------------------- full states

    def _install(self, hop: Hop, wanted: Manifest | None) -> None:
        """The packs become the shadow's files. `wanted`: the manifest, if this is its version."""
        files = [self._file_of(pack) for pack in hop.way.packs]
        try:
            check_contents(self._run, files, hop.way.weight_map, self._name(hop))
            mapped = Mapped(self._run, files, hop.way.weight_map)
            digest = mapped.digest(self._needs or full_ranges(self._run))
            tiles = self._tiles_of(hop)
            if tiles.known:
                self._check_tiles(hop, tiles, digest)
            whole = self._whole_digest(digest, tiles.digest() if tiles.known else None)
            if wanted is not None and whole is not None and f"{whole:016x}" != wanted.digest:
                raise Corrupt(_other_digest(wanted, whole))
        except Corrupt as error:
            raise _BadEdge(hop, error) from error
        self._drop()
        names = shard_names(len(files))
        for path in shards_in(self._folder):
            if path.name not in names:
                path.unlink()
        self._folder.mkdir(parents=True, exist_ok=True)
        mapped.files = [self._folder / name for name in names]
        for file, path in zip(files, mapped.files, strict=True):
            file.replace(path)
        shadow = Shadow(self._folder, mapped, hop.version, digest, self._needs)
        shadow.settle(hop.version, digest, whole)
        self._shadow = shadow

    def _check_tiles(self, hop: Hop, tiles: FullTiles, digest: int) -> None:
        """That what came to lie in the files is what the digests of its tiles say."""
        wanted = tiles.digest(self._needs)
        if wanted != digest:
            raise Corrupt(
                f"what {self._name(hop)} leads to has the digest {digest:016x}, the digests of its tiles make "
                f"{wanted:016x}"
            )

    def _whole_digest(self, held: int, told: int | None) -> int | None:
        """Of the whole state: of what is held, if that is all; else what the tables told; None: it is not known."""
        return held if self._needs is None else told

    # ---------------------------------------------------------------- deltas

    def _read_tiles(self, hop: Hop) -> _Change:
        """All tiles of a hop (those needed), checked to fit the run and one another."""
        found: list[FetchedTile] = []
        changed = moved = 0
        try:
            for pack in hop.way.packs:
                what = f"{pack.key} in {self._store.url}"
                data = mapped_bytes(self._file_of(pack))
                table = bytes(data[table_of(pack, what).start :])
                tiles = pack_tiles(pack, table, self._run.tensors, what)
                changed += sum(tile.changed for tile in tiles)
                moved += sum(tile.moved for tile in tiles)
                found += [
                    FetchedTile(tile, data[tile.offset : tile.offset + tile.size], pack.key)
                    for tile in tiles
                    if self._part is None or self._part.tile(tile)
                ]
            found.sort(key=lambda coded: (coded.tile.tensor, coded.tile.start))
            for left, right in itertools.pairwise(found):
                same = left.tile.tensor == right.tile.tensor
                if same and left.tile.start + left.tile.elements > right.tile.start:
                    name = self._run.tensors[left.tile.tensor].name
                    raise Corrupt(f"{left.pack} and {right.pack} both change {name} at {right.tile.start}")
            if changed != hop.way.changed:
                raise Corrupt(
                    f"{hop.key} says that {hop.way.changed} elements change, its packs change {changed}"
                )
        except Corrupt as error:
            raise _BadEdge(hop, error) from error
        return _Change(found, moved & MASK)

    def _apply(self, hop: Hop, change: _Change, wanted: Manifest | None) -> None:
        shadow = self._shadow
        edge = (hop.way.base, hop.version)
        if shadow is None or shadow.version != hop.way.base:
            raise Corrupt(f"{hop.key} leads from version {hop.way.base}, which is not in the shadow")
        self._shadow = None  # until it is a state again
        shadow.begin()
        try:
            digest = (shadow.digest + shadow.apply(change.tiles)) & MASK
        except Corrupt as error:
            raise _Spoilt(error.message, edge) from error
        told = None if shadow.whole is None else (shadow.whole + change.moved) & MASK
        whole = self._whole_digest(digest, told)
        if wanted is not None and whole is not None and f"{whole:016x}" != wanted.digest:
            raise _Spoilt(_other_digest(wanted, whole), None)
        shadow.settle(hop.version, digest, whole)
        self._shadow = shadow


class _Change(NamedTuple):
    """A delta."""

    tiles: list[FetchedTile]  # those needed
    moved: int  # what all of them add to the digest of the whole state


class _Monotone:
    """Progress that never goes back, though a path that failed is followed by another."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._said = progress, -1.0

    def __call__(self, fraction: float) -> None:
        if self._progress is not None and fraction > self._said:
            self._said = fraction
            self._progress(min(1.0, fraction))


def _hop_with(route: Route, key: str) -> Hop:
    return next(hop for hop in route.hops for pack in hop.way.packs if pack.key == key)


def _other_digest(manifest: Manifest, found: int) -> str:
    return (
        f"version {manifest.version} should have the digest {manifest.digest}, what its packs make has "
        f"{found:016x}"
    )
