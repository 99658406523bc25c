"""Skip deltas: one delta over 16, 64, 256 versions, so that a reader far behind goes O(log n) steps.

    chain      the versions of the trainer's branch, by their parents
    wanted     for every span L, between neighbouring multiples of L: chain versions at or just below them
    source     the cheapest path of deltas between the two: single ones, or skips of a lower span
    write      tile range by tile range, steps are added; packs to local files
    publish    if that is smaller than what it replaces: the packs, then the record in ways/

Nothing here needs the weights, but for deltas with small tiles: those are read and written beside the state at the
skip's beginning, which is kept on the disk and moved along from skip to skip.

Packs are named by what they hold, so compactors side by side write the same objects or different ones, never two
contents under one name. Whatever one leaves unfinished is garbage that gc finds.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from async_rl.errors import Corrupt, NotFound
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import Mode
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import DeltaPackWriter
from async_rl.weights.files import disk_errors
from async_rl.weights.garbage import StoredTombstone
from async_rl.weights.gc import dead_edges
from async_rl.weights.layers import Layer, Span, aligned, open_layers, recode
from async_rl.weights.lineage import (
    Manifest,
    Pack,
    Way,
    admissible,
    list_versions,
    read_claims,
    read_manifest,
)
from async_rl.weights.parallel import side_by_side
from async_rl.weights.replay import FlatState, places_of
from async_rl.weights.run import RunInfo
from async_rl.weights.ways import Edge, FurtherWay, list_edges, read_way, write_way

__all__ = ["Compactor", "Report", "Skip", "Written", "branch", "cheapest_source", "skips_wanted"]

log = get_logger(__name__)

WORTH_IT = 0.9
"""A skip is kept if it has fewer than this part of the bytes that it replaces."""


class Skip(NamedTuple):
    span: int
    base: int
    version: int


Report = Callable[[Skip, int, int], None]
"""Called with the skip that is at work, the tile ranges done and those there are."""


class Written(Struct, frozen=True):
    """What became of a skip."""

    span: int
    base: int
    version: int
    nbytes: int
    replaces: int  # bytes of the path it was made from
    key: str  # of its record; empty: it was not written
    error: str = ""  # what stood in the way; empty and no key: it would have saved too little

    @property
    def kept(self) -> bool:
        return bool(self.key)


class Stopped(Exception):
    """Somebody asked the compactor to stop; what it was at is left undone."""


# ---------------------------------------------------------------- what is wanted


def branch(manifests: Mapping[int, Manifest], newest: int) -> list[int]:
    """The versions from which `newest` comes, by their parents, as far as they are known; ascending."""
    versions: list[int] = []
    while newest in manifests and (not versions or newest < versions[-1]):
        versions.append(newest)
        newest = manifests[newest].parent
    return versions[::-1]


def skips_wanted(chain: Sequence[int], spans: Iterable[int], after: int = -1) -> list[Skip]:
    """The skips to multiples of the spans later than `after`: lower spans first, as the higher ones are made of them.

    A number that the chain left out (a resume, a zombie's) is replaced by the nearest older version.
    """
    wanted = []
    for span in sorted(set(spans)):
        if not chain:
            break
        first = -(-(chain[0] + 1) // span) * span
        for number in range(first, chain[-1] + 1, span):
            base = bisect_right(chain, number - span) - 1
            version = bisect_right(chain, number) - 1
            if 0 <= base < version and number > after:
                wanted.append(Skip(span, chain[base], chain[version]))
    return wanted


def cheapest_source(
    ways: Mapping[tuple[int, int], int], skip: Skip, chain: Sequence[int]
) -> list[tuple[int, int]] | None:
    """The deltas (base, version) on the chain that lead from the skip's base to its version with the fewest bytes;
    None where they don't. `ways`: their bytes."""
    inside = [version for version in chain if skip.base <= version <= skip.version]
    cost: dict[int, tuple[int, int]] = {skip.base: (0, 0)}
    last: dict[int, int] = {}
    for version in inside[1:]:
        choices = [
            (cost[base][0] + ways[base, version], cost[base][1] + 1, base)
            for base in inside
            if base in cost and (base, version) in ways and (base, version) != (skip.base, skip.version)
        ]
        if choices:
            nbytes, hops, last[version] = min(choices)
            cost[version] = nbytes, hops
    if skip.version not in last:
        return None
    path = []
    version = skip.version
    while version != skip.base:
        path.append((last[version], version))
        version = last[version]
    return path[::-1]


# ---------------------------------------------------------------- making them


class Compactor:
    """`scratch` is a folder of its own; it needs room for the packs of one skip and of what it is made from, and for
    the small codec a copy of the model for every span. One thread at a time.

    `stopping` is asked between tile ranges; where it says yes, `run` returns what is done.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        config: WeightsConfig,
        scratch: FilePath,
        *,
        stopping: Callable[[], bool] = lambda: False,
        report: Report | None = None,
    ) -> None:
        self._store, self._run, self._config, self._scratch = store, run, config, scratch
        self._stopping, self._report = stopping, report
        self._manifests: dict[int, Manifest] = {}
        self._unread: set[int] = set()
        self._useless: set[Skip] = set()
        self._states: dict[int, FlatState] = {}  # by span
        self._tombstones: dict[int, StoredTombstone] = {}
        self._places = places_of(run)

    def run(self, after: int = -1, newest: Manifest | None = None) -> list[Written]:
        """Every skip that is wanted, leads to a multiple later than `after` and is not there yet; on the branch of
        `newest` (default: the newest version that counts).

        A skip whose sources are damaged is told by its `error`. Raises StoreErrors, WeightsError (the disk).
        """
        spans = self._config.skip_spans
        if newest is not None and not any(newest.version // span > after // span for span in spans):
            return []  # known without asking the store
        oldest = max(-1, after - 2 * max(spans, default=0))
        chain = self._chain(oldest, newest)
        wanted = skips_wanted(chain, spans, after)
        if not wanted:
            return []
        dead = dead_edges(self._store, self._tombstones)
        edges = {(edge.base, edge.version): edge for edge in self._edges(chain)}
        own = {(self._manifests[v].way.base, v): self._manifests[v].way.total_bytes for v in chain}
        sizes = {pair: nbytes for pair, nbytes in own.items() if pair[0] >= 0 and pair not in dead}
        for pair, edge in edges.items():
            if pair not in dead:
                sizes[pair] = min(edge.nbytes, sizes.get(pair, edge.nbytes))
        written: list[Written] = []
        for skip in wanted:
            pair = skip.base, skip.version
            if pair in edges or pair in own or pair in dead or skip in self._useless:
                continue
            ways = self._sources(skip, sizes, chain, edges)
            if ways is None:
                continue
            try:
                result = self._make(skip, ways)
            except Stopped:
                break
            except Corrupt as error:  # the other skips don't suffer from it
                log.warning(
                    "a skip delta can't be made", base=skip.base, version=skip.version, reason=str(error)
                )
                result = Written(*skip, 0, sum(way.total_bytes for way in ways), "", str(error))
            finally:
                shutil.rmtree(self._scratch / "packs", ignore_errors=True)
            written.append(result)
            if result.kept:  # it may be the source of a higher one
                incarnation = self._manifests[skip.version].incarnation
                edges[pair] = Edge(skip.version, skip.base, result.nbytes, incarnation, result.key)
                sizes[pair] = result.nbytes
            else:
                self._useless.add(skip)
        return written

    def _sources(
        self,
        skip: Skip,
        sizes: Mapping[tuple[int, int], int],
        chain: Sequence[int],
        edges: Mapping[tuple[int, int], Edge],
    ) -> list[Way] | None:
        """The deltas to make it from; None where there are none (garbage collection, a full version between) or it
        would be one of them."""
        source = cheapest_source(sizes, skip, chain)
        if source is None or len(source) < 2:
            return None
        ways = [self._way(pair, edges) for pair in source]
        found = [way for way in ways if way is not None]
        return found if len(found) == len(ways) else None

    def _chain(self, oldest: int, newest: Manifest | None) -> list[int]:
        numbers = list_versions(self._store, oldest)
        unread = [n for n in numbers if n not in self._manifests and n not in self._unread]
        if newest is not None:
            self._manifests[newest.version] = newest
        claims = read_claims(self._store)  # after the versions, see lineage.py
        if unread:
            for number, manifest in zip(unread, side_by_side(self._read, unread), strict=True):
                if manifest is None:
                    self._unread.add(number)
                else:
                    self._manifests[number] = manifest
        for number in [number for number in self._manifests if number <= oldest]:
            del self._manifests[number]
        counting = {n: m for n, m in self._manifests.items() if admissible(m, claims)}
        last = newest.version if newest is not None else max(counting, default=-1)
        return branch(counting, last)

    def _read(self, number: int) -> Manifest | None:
        try:
            return read_manifest(self._store, number)
        except (Corrupt, NotFound) as error:
            log.warning("a version is left out of compaction", version=number, reason=error.message)
            return None

    def _edges(self, chain: Sequence[int]) -> list[Edge]:
        on_chain = set(chain)
        return [
            edge
            for edge in list_edges(self._store, chain[0])
            if edge.version in on_chain and edge.base in on_chain
        ]

    def _way(self, pair: tuple[int, int], edges: Mapping[tuple[int, int], Edge]) -> Way | None:
        own = self._manifests[pair[1]].way
        edge = edges.get(pair)
        if edge is None or (own.base == pair[0] and own.total_bytes <= edge.nbytes):
            return own
        try:
            return read_way(self._store, edge).way
        except (Corrupt, NotFound) as error:
            log.warning("a way is left out of compaction", key=edge.key, reason=error.message)
            return None

    # ------------------------------------------------------------ one skip

    def _make(self, skip: Skip, sources: Sequence[Way]) -> Written:
        began = time.monotonic()
        replaces = sum(way.total_bytes for way in sources)
        folder = self._scratch / "packs"
        with disk_errors(folder, 2 * replaces):
            folder.mkdir(parents=True, exist_ok=True)
            layers = open_layers(self._store, self._run, sources, folder, self._config)
            self._check_stop()
            self._check_digests(skip, layers)
            state = self._state_at(skip) if any(way.small for way in sources) else None
            way, files = self._write(skip, layers, state, folder, replaces)
            if way.total_bytes >= WORTH_IT * replaces and replaces:
                log.debug("a skip would save too little", base=skip.base, version=skip.version)
                return Written(*skip, way.total_bytes, replaces, "")
            for pack, file in zip(way.packs, files, strict=True):
                self._check_stop()
                self._upload(pack, file)
        further = FurtherWay(
            skip.version, self._manifests[skip.version].incarnation, way, created=time.time()
        )
        key = write_way(self._store, further)
        log.info(
            "skip delta written",
            base=skip.base,
            version=skip.version,
            bytes=way.total_bytes,
            replaces=replaces,
            seconds=round(time.monotonic() - began, 2),
        )
        return Written(*skip, way.total_bytes, replaces, key)

    def _check_digests(self, skip: Skip, layers: Sequence[Layer]) -> None:
        """What the sources say they change must lead from one manifest's digest to the other's."""
        start, end = (int(self._manifests[v].digest, 16) for v in (skip.base, skip.version))
        moved = sum(layer.moved for layer in layers)
        if (start + moved - end) % (1 << 64):
            raise Corrupt(
                f"the deltas from version {skip.base} to {skip.version} of {self._store.url} don't lead from one "
                "digest to the other",
                hint=f"async-rl weights verify {skip.version} tells which of them is wrong",
            )

    def _write(
        self,
        skip: Skip,
        layers: Sequence[Layer],
        state: FlatState | None,
        folder: FilePath,
        replaces: int,
    ) -> tuple[Way, list[FilePath]]:
        """The skip's packs as local files. Stops early where it turns out too large."""
        spans = list(aligned(layers))
        packs: list[Pack] = []
        files: list[FilePath] = []
        writer = DeltaPackWriter()
        changed, small, nbytes = 0, False, 0
        for done, span in enumerate(spans):
            self._check_stop()
            coded = recode(span, self._places[span.tensor] + span.start, self._base(span, state))
            if coded is not None:
                writer.add(span.tensor, span.start, span.elements, coded)
                changed += coded.changed
                small = small or coded.mode == Mode.SMALL
            full = writer.nbytes >= self._config.delta_pack_bytes
            if writer.nbytes and (full or done == len(spans) - 1):
                pack, file = self._finish(writer, skip, len(packs), folder)
                packs.append(pack)
                files.append(file)
                nbytes += pack.size
                writer = DeltaPackWriter()
            if self._report is not None:
                self._report(skip, done + 1, len(spans))
            if nbytes + writer.nbytes >= WORTH_IT * replaces:
                # Whatever follows, it is not worth it: the number only has to say so.
                return Way(skip.base, (), nbytes + writer.nbytes, {}, changed, small), []
        return Way(skip.base, tuple(packs), nbytes, {}, changed, small), files

    def _finish(
        self, writer: DeltaPackWriter, skip: Skip, number: int, folder: FilePath
    ) -> tuple[Pack, FilePath]:
        pieces, pack = writer.finish("")
        incarnation = self._manifests[skip.version].incarnation
        name = f"{skip.version:010}-{incarnation:08}-skip{skip.span}-{number}-{pack.sha256[:12]}"
        file = folder / name
        with file.open("wb") as out:
            for piece in pieces:
                out.write(piece)
        return msgspec.structs.replace(pack, key=f"packs/{name}"), file

    def _upload(self, pack: Pack, file: FilePath) -> None:
        digest = hashlib.sha256()
        with self._store.upload(pack.key) as upload, file.open("rb") as data:
            while block := data.read(4 << 20):
                digest.update(block)
                upload.write(block)
            if digest.hexdigest() != pack.sha256:
                raise Corrupt(
                    f"{file} changed on the disk before it was uploaded",
                    hint="check the disk of the scratch folder",
                )
            upload.commit()

    def _base(self, span: Span, state: FlatState | None) -> np.ndarray | None:
        if state is None:
            return None
        place = self._places[span.tensor] + span.start
        return state.values[place : place + span.elements]

    def _state_at(self, skip: Skip) -> FlatState:
        """The weights at the skip's beginning. A span's skips begin where the one before ended, so its state is moved
        along by the skip that was made last."""
        state = self._states.get(skip.span)
        if state is None:
            folder = self._scratch / f"state-{skip.span}"
            state = self._states[skip.span] = FlatState(self._store, self._run, folder, self._config)
        path = state.go_to(self._manifests[skip.base], dead_edges(self._store, self._tombstones))
        log.debug("weights for compaction", version=skip.base, path=path.describe())
        return state

    def _check_stop(self) -> None:
        if self._stopping():
            raise Stopped
