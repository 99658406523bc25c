"""What stands in a run's store, for people: its versions, one of them in detail, and what takes the space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, Struct

from async_rl.errors import Corrupt, NotFound, WeightsError
from async_rl.store.base import ObjectStore
from async_rl.weights import gc
from async_rl.weights.codec import Mode
from async_rl.weights.deltas import Tile, pack_tiles
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.garbage import PACKS, fold
from async_rl.weights.lineage import (
    Manifest,
    Pack,
    Way,
    admissible,
    list_versions,
    read_claims,
    read_manifest,
)
from async_rl.weights.parallel import Report, side_by_side
from async_rl.weights.plan import NOTHING, find_path
from async_rl.weights.run import RunInfo
from async_rl.weights.ways import list_edges, read_way

__all__ = [
    "PackBytes",
    "Row",
    "Shown",
    "TensorBytes",
    "Usage",
    "UsagePart",
    "WayTo",
    "full_bytes",
    "list_rows",
    "show",
    "usage",
]

_STEPS_BACK = (1, 4, 16, 64, 256)  # where `show` plans paths from, beside nothing


class Row(Struct, frozen=True):
    """One version in the list."""

    version: int
    step: int
    parent: int
    incarnation: int
    kind: str  # full, delta, or unreadable
    nbytes: int  # of its own way
    packs: int
    changed: int | None  # weights that its own way changes; None: full
    changed_part: float | None  # of all weights
    bytes_per_changed: float | None
    bases: tuple[int, ...]
    """Where its own way begins (-1: nothing) unless that is gone, then where the further ones do."""
    gone: bool  # its own way was given up as garbage
    ignored: bool  # a replaced trainer wrote it
    digest: str
    created: float
    error: str = ""


class WayTo(Struct, frozen=True):
    base: int
    kind: str  # own or further
    nbytes: int
    packs: int
    changed: int
    key: str  # of the object that describes it
    gone: bool


class PackBytes(Struct, frozen=True):
    key: str
    nbytes: int
    tiles: int  # that can be read and verified by themselves


class TensorBytes(Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    nbytes: int  # coded
    changed: int
    changed_part: float


class ModeBytes(Struct, frozen=True):
    mode: str
    tiles: int
    nbytes: int
    changed: int


class PathTo(Struct, frozen=True):
    start: int  # -1: from nothing
    nbytes: int
    hops: int
    describes: str


class Shown(Struct, frozen=True):
    """One version in detail; tiles and tensors are those of the way that was asked for."""

    manifest: Manifest
    ignored: bool
    ways: tuple[WayTo, ...]
    paths: tuple[PathTo, ...]
    base: int  # of the way whose packs follow
    packs: tuple[PackBytes, ...]
    modes: tuple[ModeBytes, ...]
    tensors: tuple[TensorBytes, ...]  # by bytes, largest first
    table_bytes: int  # packs without their tiles


class UsagePart(Struct, frozen=True):
    kind: str
    objects: int
    nbytes: int


class Usage(Struct, frozen=True):
    parts: tuple[UsagePart, ...]
    nbytes: int
    versions: int
    weights_nbytes: int  # full versions, anchors, deltas and skips
    as_full_nbytes: int  # what every version as a full one would take

    @property
    def saved_part(self) -> float:
        return 1 - self.weights_nbytes / self.as_full_nbytes if self.as_full_nbytes else 0.0


def full_bytes(run: RunInfo) -> int:
    return sum(spec.nbytes for spec in run.tensors)


def weights_of(run: RunInfo) -> int:
    return sum(math.prod(spec.shape) for spec in run.tensors)


# ---------------------------------------------------------------- ls


def list_rows(
    store: ObjectStore, run: RunInfo, last: int | None = None, report: Report | None = None
) -> list[Row]:
    """The newest `last` versions (None: all), ascending. One that can't be read is listed as such."""
    numbers = list_versions(store)
    if last is not None:
        numbers = numbers[-last:] if last else []
    found = side_by_side(
        lambda number: _manifest_or_why(store, number), numbers, what="manifests", report=report
    )
    claims = read_claims(store)
    bases: dict[int, list[int]] = {}
    for edge in list_edges(store, numbers[0] - 1) if numbers else ():
        bases.setdefault(edge.version, []).append(edge.base)
    gone = fold(gc.read_tombstones(store)).versions
    weights = weights_of(run)
    rows = []
    for number, manifest in zip(numbers, found, strict=True):
        further = sorted(bases.get(number, ()), reverse=True)
        if isinstance(manifest, str):
            rows.append(_unreadable(number, tuple(further), manifest))
            continue
        way = manifest.way
        changed = way.changed if way.base >= 0 else None
        rows.append(
            Row(
                version=number,
                step=manifest.step,
                parent=manifest.parent,
                incarnation=manifest.incarnation,
                kind=way.kind,
                nbytes=way.total_bytes,
                packs=len(way.packs),
                changed=changed,
                changed_part=None if changed is None else changed / max(1, weights),
                bytes_per_changed=way.total_bytes / changed if changed else None,
                bases=tuple(further) if number in gone else (way.base, *further),
                gone=number in gone,
                ignored=not admissible(manifest, claims),
                digest=manifest.digest,
                created=manifest.created,
            )
        )
    return rows


def _manifest_or_why(store: ObjectStore, number: int) -> Manifest | str:
    try:
        return read_manifest(store, number)
    except (Corrupt, NotFound) as error:
        return error.message


def _unreadable(number: int, bases: tuple[int, ...], why: str) -> Row:
    return Row(number, -1, -1, -1, "unreadable", 0, 0, None, None, None, bases, False, True, "", 0.0, why)


# ---------------------------------------------------------------- show


def show(store: ObjectStore, run: RunInfo, manifest: Manifest, base: int | None = None) -> Shown:
    """A version, its ways, the cheapest paths to it, and what is in the packs of its own way, or of the one from
    `base` (-1: a full one). Reads tables only. Raises WeightsError, Corrupt, StoreErrors."""
    version = manifest.version
    dead = gc.dead_edges(store)
    announced = fold(gc.read_tombstones(store))
    ways: list[tuple[WayTo, Way]] = [
        (
            _way_to(manifest.way, "own", f"versions/{version:010}.json", version in announced.versions),
            manifest.way,
        )
    ]
    for edge in list_edges(store, version - 1):
        if edge.version != version:
            break
        way = read_way(store, edge).way
        ways.append((_way_to(way, "further", edge.key, edge.key in announced.ways), way))
    if base is None:
        chosen = manifest.way
    else:
        matching = [way for _, way in ways if way.base == base]
        if not matching:
            there = ", ".join("nothing (-1)" if way.base < 0 else str(way.base) for _, way in ways)
            raise WeightsError(
                f"no way leads from {'nothing' if base < 0 else f'version {base}'} straight to version {version} of "
                f"{store.url}",
                hint=f"there are ways from {there}",
            )
        chosen = matching[-1]
    tables = side_by_side(lambda pack: _tiles(store, run, pack), chosen.packs)
    counts = [len(tiles) for tiles in tables] if chosen.base >= 0 else _full_tiles(store, run, chosen)
    # They are of no use to people, and longer than all the rest.
    own = msgspec.structs.replace(manifest.way, tile_digests=UNSET)
    return Shown(
        manifest=msgspec.structs.replace(manifest, way=own),
        ignored=not admissible(manifest, read_claims(store)),
        ways=tuple(way for way, _ in ways),
        paths=tuple(_paths(store, manifest, dead)),
        base=chosen.base,
        packs=tuple(
            PackBytes(pack.key, pack.size, count) for pack, count in zip(chosen.packs, counts, strict=True)
        ),
        modes=tuple(_modes(tables)),
        tensors=tuple(_by_tensor(run, chosen, tables)),
        table_bytes=chosen.total_bytes - sum(tile.size for tiles in tables for tile in tiles)
        if chosen.base >= 0
        else chosen.total_bytes - full_bytes(run),
    )


def _way_to(way: Way, kind: str, key: str, gone: bool) -> WayTo:
    return WayTo(way.base, kind, way.total_bytes, len(way.packs), way.changed, key, gone)


def _paths(store: ObjectStore, manifest: Manifest, dead: frozenset[tuple[int, int]]) -> Iterable[PathTo]:
    before = [number for number in list_versions(store) if number < manifest.version]
    starts: list[int] = [NOTHING]
    for back in _STEPS_BACK:
        older = [number for number in before if number <= manifest.version - back]
        if older and older[-1] not in starts:
            starts.append(older[-1])
    for start in starts:
        try:
            path = find_path(store, manifest, None if start == NOTHING else start, avoid=dead)
        except WeightsError as error:
            yield PathTo(start, 0, 0, error.message)
        else:
            yield PathTo(start, path.nbytes, len(path.hops), path.describe())


def _tiles(store: ObjectStore, run: RunInfo, pack: Pack) -> list[Tile]:
    """A pack's table by a ranged read, verified. Full packs have none."""
    if pack.table is None:
        return []
    data = store.get(pack.key, pack.table.start, pack.table.size)
    try:
        return pack_tiles(pack, data, run.tensors, f"{pack.key} in {store.url}")
    except Corrupt as error:
        hint = "the object is damaged: async-rl weights verify tells what depends on it"
        raise Corrupt(error.message, hint=hint) from error


def _full_tiles(store: ObjectStore, run: RunInfo, way: Way) -> list[int]:
    """How many of each pack can be read by themselves."""
    tiles = FullTiles(run, way, f"a full way of {store.url}")
    packs = range(len(way.packs))
    return [len(list(tiles.in_pack(number))) if tiles.known else 0 for number in packs]


def _modes(tables: Sequence[Sequence[Tile]]) -> Iterable[ModeBytes]:
    for mode in Mode:
        tiles = [tile for table in tables for tile in table if tile.mode == mode]
        if tiles:
            yield ModeBytes(
                mode.name.lower(),
                len(tiles),
                sum(tile.size for tile in tiles),
                sum(tile.changed for tile in tiles),
            )


def _by_tensor(run: RunInfo, way: Way, tables: Sequence[Sequence[Tile]]) -> list[TensorBytes]:
    if way.base < 0:
        found = [TensorBytes(s.name, s.shape, s.nbytes, math.prod(s.shape), 1.0) for s in run.tensors]
    else:
        sums: dict[int, list[int]] = {}
        for tile in (tile for table in tables for tile in table):
            each = sums.setdefault(tile.tensor, [0, 0])
            each[0] += tile.size
            each[1] += tile.changed
        found = []
        for tensor, (nbytes, changed) in sums.items():
            spec = run.tensors[tensor]
            part = changed / max(1, math.prod(spec.shape))
            found.append(TensorBytes(spec.name, spec.shape, nbytes, changed, part))
    return sorted(found, key=lambda each: -each.nbytes)


# ---------------------------------------------------------------- du


def usage(store: ObjectStore, run: RunInfo, report: Report | None = None) -> Usage:
    """Objects and bytes by kind. Raises StoreErrors, Corrupt."""
    facts = gc.look(store, report)
    announced = fold(facts.tombstones)
    kinds: dict[str, str] = {}
    for way in facts.ways:
        if not way.counts:
            kind = "of replaced trainers"
        elif way.base == NOTHING:
            kind = "anchors" if way.key else "full versions"
        else:
            kind = "skip deltas" if way.key else "deltas"
        kinds.update(dict.fromkeys(way.packs, kind))
    sums: dict[str, list[int]] = {kind: [0, 0] for kind in _KINDS}
    for info in store.list_after(""):
        if info.key.startswith(PACKS):
            kind = kinds.get(info.key, "of no version")
            if info.key in announced.keys:
                kind = "announced as garbage"
        else:
            kind = _OTHERS.get(info.key.split("/")[0], "other")
        each = sums.setdefault(kind, [0, 0])
        each[0] += 1
        each[1] += info.size
    parts = tuple(UsagePart(kind, objects, nbytes) for kind, (objects, nbytes) in sums.items() if objects)
    weights = sum(part.nbytes for part in parts if part.kind in _KINDS[:4])
    versions = len(list_versions(store))
    return Usage(parts, sum(part.nbytes for part in parts), versions, weights, versions * full_bytes(run))


_KINDS = (
    "full versions",
    "anchors",
    "deltas",
    "skip deltas",
    "announced as garbage",
    "of replaced trainers",
    "of no version",
)
_OTHERS = {
    "checkpoints": "checkpoints",
    "model": "model files",
    "run.json": "model files",
    "versions": "records",
    "ways": "records",
    "incarnations": "records",
    "gc": "records",
    "workers": "records",
    "clock": "records",
}
