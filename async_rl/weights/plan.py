"""The cheapest way, in bytes, from what a reader holds to the version it wants.

Versions are nodes, ways are edges with their bytes as cost; "nothing" is a node too, from which the full
ways lead. One listing of ways/ shows all further ways. A version's own way stands in its manifest, and to
read every manifest would make a late joiner's work linear in the versions it missed. So those that were not
read are guessed (a delta from the version before, as large as the deltas known), and only the manifests on
the best path found are read, newest first, until one is not as guessed or the path stands on facts alone. A wrong
guess costs a few bytes more on the way, never a wrong state.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from msgspec import Struct

from async_rl.errors import Corrupt, NotFound, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.lineage import (
    NOTHING,
    Manifest,
    Way,
    first_version,
    list_versions,
    read_manifest,
    version_key,
)
from async_rl.weights.parallel import side_by_side
from async_rl.weights.ways import Edge, list_edges, read_way

__all__ = ["NOTHING", "Hop", "Path", "find_path"]

log = get_logger(__name__)

_READERS = 8
"""Manifests read side by side."""

_BATCH = 4 * _READERS
"""Manifests read between two looks at whether they are as guessed."""

_KNOWN_MOST = 4096
"""Ways that a planner remembers: a few MB."""


class Hop(Struct, frozen=True):
    """One edge to go along."""

    version: int  # it leads to
    way: Way
    key: str  # of the object that described it


class Path(Struct, frozen=True):
    start: int  # the version the reader holds, or NOTHING
    hops: tuple[Hop, ...]

    @property
    def nbytes(self) -> int:
        return sum(hop.way.total_bytes for hop in self.hops)

    def describe(self) -> str:
        """`from nothing: 256 full 270.1 MB, 272 (+16) 13.9 MB; 284.0 MB in 2 hops`"""
        start = "nothing" if self.start == NOTHING else f"version {self.start}"
        if not self.hops:
            return f"from {start}: nothing to read"
        parts = []
        for hop in self.hops:
            kind = "full" if hop.way.base < 0 else f"(+{hop.version - hop.way.base})"
            parts.append(f"{hop.version} {kind} {hop.way.total_bytes / 1e6:.3g} MB")
        hops = "1 hop" if len(parts) == 1 else f"{len(parts)} hops"
        return f"from {start}: {', '.join(parts)}; {self.nbytes / 1e6:.4g} MB in {hops}"


class _Candidate(Struct, frozen=True):
    """An edge that the search may take."""

    base: int
    version: int
    nbytes: int
    further: Edge | None = None  # None: the version's own way
    guessed: bool = False  # its manifest was not read: base and bytes may be others


def find_path(
    store: ObjectStore,
    manifest: Manifest,
    held: int | None,
    *,
    avoid: frozenset[tuple[int, int]] = frozenset(),
    context_free: bool = False,
    known: dict[int, Way] | None = None,
) -> Path:
    """The cheapest path to `manifest`'s version from `held` (whose exact state the reader has) or from nothing.

    `avoid`: edges (base, version) that turned out to be of no use. `context_free`: only deltas that can be
    read without the weights. Who asks often gives a dict of its own as `known`: manifests never change, so each is
    read once. Raises WeightsError where there is no path, StoreErrors.
    """
    held = NOTHING if held is None else held
    if held == manifest.version:
        return Path(held, ())
    usable = (held, manifest.version) not in avoid and not (context_free and manifest.way.small)
    if held == manifest.way.base != NOTHING and usable:
        # The reader that keeps up: nothing is shorter than the change itself, and no request is needed to know it.
        return Path(held, (Hop(manifest.version, manifest.way, version_key(manifest.version)),))
    search = _Search(store, manifest, avoid, context_free, {} if known is None else known)
    while True:
        path = cheapest(search.candidates(held), manifest.version, held)
        if path is None and search.read_down(held):
            continue
        if path is None:
            raise WeightsError(
                f"no way leads to version {manifest.version} of {store.url}"
                + (f" from version {held} or" if held != NOTHING else "")
                + f" from nothing{', without those that were found damaged or missing' if avoid else ''}",
                hint="`async-rl weights verify` tells what is damaged; a newer version may have a way, and the next "
                "anchor of the trainer certainly has",
            )
        hops = search.hops(path)
        if hops is not None:
            start = path[0].base
            return Path(start, hops)


def cheapest(candidates: Iterable[_Candidate], target: int, held: int) -> list[_Candidate] | None:
    """Dijkstra's search, backwards from `target` until `held` or nothing is reached. Of equal cost: fewer hops."""
    into: dict[int, list[_Candidate]] = {}
    for each in candidates:
        into.setdefault(each.version, []).append(each)
    order = itertools.count()
    queue: list[tuple[int, int, int, int, list[_Candidate]]] = [(0, 0, next(order), target, [])]
    done: set[int] = set()
    while queue:
        cost, hops, _, version, path = heapq.heappop(queue)
        if version in done:
            continue
        done.add(version)
        if version in (held, NOTHING):
            return path
        for each in into.get(version, ()):
            heapq.heappush(queue, (cost + each.nbytes, hops + 1, next(order), each.base, [each, *path]))
    return None


class _Search:
    """What is known of the graph so far."""

    def __init__(
        self,
        store: ObjectStore,
        target: Manifest,
        avoid: frozenset[tuple[int, int]],
        context_free: bool,
        known: dict[int, Way],
    ) -> None:
        self._store, self._target, self._avoid, self._context_free = store, target, avoid, context_free
        self._known = known
        self._edges = {edge for edge in list_edges(store) if edge.version <= target.version}
        self._own: dict[int, Way | None] = {target.version: target.way}  # None: of no use
        self._versions: list[int] | None = None
        self._further: dict[str, Way] = {}
        if not any(edge.base < 0 for edge in self._edges):
            # The oldest version is a full one, wherever nothing was lost.
            self._read([number for number in [first_version(store)] if number is not None])

    def candidates(self, held: int) -> list[_Candidate]:
        found = [_Candidate(edge.base, edge.version, edge.nbytes, edge) for edge in self._edges]
        guess = self._guess()
        listed = self._listed(held)
        for before, version in zip([NOTHING, *listed], listed, strict=False):
            if version in self._own:
                way = self._own[version]
                if way is not None:
                    found.append(_Candidate(way.base, version, way.total_bytes))
            elif before != NOTHING:
                found.append(_Candidate(before, version, guess, guessed=True))
        return [each for each in found if (each.base, each.version) not in self._avoid]

    def hops(self, path: list[_Candidate]) -> tuple[Hop, ...] | None:
        """The path's ways, or None where reading them has changed what is known: search again."""
        guessed = [(each.base, each.version) for each in reversed(path) if each.guessed]
        for start in range(0, len(guessed), _BATCH):
            batch = guessed[start : start + _BATCH]
            self._read(version for _, version in batch)
            if any(self._base(version) != base for base, version in batch):
                break  # a full version, or another branch: what is older may not be needed
        if guessed:
            return None
        further = [each.further for each in path if each.further and each.further.key not in self._further]
        for edge, way in zip(further, side_by_side(self._way_of, further, _READERS), strict=True):
            if way is None:
                self._edges.discard(edge)
            else:
                self._further[edge.key] = way
        hops = []
        for each in path:
            if each.further is None:
                way = self._own[each.version]
                key = version_key(each.version)
            else:
                way, key = self._further.get(each.further.key), each.further.key
            if way is None:
                return None
            hops.append(Hop(each.version, way, key))
        return tuple(hops)

    def read_down(self, held: int) -> bool:
        """There is no path yet: read more manifests, newest first. False where all were read."""
        unread = [version for version in self._listed(held, everything=True) if version not in self._own]
        if not unread:
            return False
        self._read(unread[-_BATCH:])
        return True

    def _listed(self, held: int, everything: bool = False) -> list[int]:
        """Versions that may be on the path: later than `held` or than the newest full way, whichever is
        older, and the rest only on demand."""
        if everything:
            self._versions = [v for v in list_versions(self._store) if v <= self._target.version]
        if self._versions is None:
            full = [edge.version for edge in self._edges if edge.base < 0]
            full += [version for version, way in self._own.items() if way is not None and way.base < 0]
            oldest = min([max(full, default=0), *([held] if held != NOTHING else [])])
            after = list_versions(self._store, oldest - 1) if oldest > 0 else list_versions(self._store)
            self._versions = [version for version in after if version <= self._target.version]
        return self._versions

    def _guess(self) -> int:
        """Bytes of a delta that was not looked at."""
        sizes = [
            way.total_bytes for way in self._own.values() if way is not None and way.base >= 0 and way.packs
        ]
        if sizes:
            return max(1, sum(sizes) // len(sizes))
        return max(1, min((edge.nbytes for edge in self._edges if edge.base >= 0), default=2) // 2)

    def _base(self, version: int) -> int | None:
        """Of the version's own way, which was read; None: it is of no use."""
        way = self._own[version]
        return None if way is None else way.base

    def _read(self, versions: Iterable[int]) -> None:
        unread = [version for version in versions if version not in self._own]
        for version, way in zip(unread, side_by_side(self._own_way, unread, _READERS), strict=True):
            self._own[version] = way if way is not None and self._usable(way) else None
            if way is not None:
                self._known[version] = way
        while len(self._known) > _KNOWN_MOST:
            del self._known[next(iter(self._known))]  # the one read first

    def _own_way(self, version: int) -> Way | None:
        if version in self._known:
            return self._known[version]
        try:
            return read_manifest(self._store, version).way
        except (NotFound, Corrupt) as error:
            log.warning("a version's own way is of no use", version=version, reason=error.message)
            return None

    def _way_of(self, edge: Edge) -> Way | None:
        try:
            way = read_way(self._store, edge).way
        except NotFound:
            return None  # removed meanwhile
        except Corrupt as error:
            log.warning("a further way is of no use", key=edge.key, reason=error.message)
            return None
        return way if self._usable(way) else None

    def _usable(self, way: Way) -> bool:
        return not (self._context_free and way.small)
