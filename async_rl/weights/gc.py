"""Garbage collection: which ways and packs nobody needs any more, and their removal in two phases.

    look      versions, ways, tombstones, workers, checkpoints; the packs last
    plan      what to keep, what to give up (garbage.py, pure)
    announce  gc/00000007.json by put_if_absent: packs that will be deleted, edges that lose theirs; then the records
              of further ways are deleted
    sweep     what an earlier tombstone named, once that is older than the grace by the store's clock

Kept are: every anchor, the cheapest whole path from an anchor to each of the newest versions, to what checkpoints and
live readers name and to the first version (a restart publishes an empty delta on it), the cheapest path of every live
reader to the newest version, and whatever is younger than the grace. Manifests and checkpoints are never touched, nor
packs of a version that may still be on its way.

Every gc looks anew before it deletes: what was announced and is needed after all (a reader came alive) is taken off
the list by the next tombstone. A crash leaves an announcement that the next gc carries out, or garbage that it
finds again. Readers that meet a missing pack ask `dead_edges` and plan another path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from async_rl.errors import AlreadyExists, Corrupt, NotFound, StoreUnavailable
from async_rl.log import get_logger
from async_rl.store.base import ObjectInfo, ObjectStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.garbage import (
    PACKS,
    Facts,
    Plan,
    Reachable,
    StoredTombstone,
    Tombstone,
    fold,
    pack_group,
    plan,
)
from async_rl.weights.lineage import (
    NOTHING,
    VERSIONS,
    Manifest,
    Way,
    admissible,
    read_claims,
    read_manifest,
)
from async_rl.weights.parallel import Report, side_by_side
from async_rl.weights.readers import live_readers, store_now
from async_rl.weights.ways import Edge, list_edges, read_way

__all__ = [
    "collect",
    "dead_edges",
    "look",
    "read_tombstones",
    "tombstone_key",
]

log = get_logger(__name__)

GC = "gc/"
CHECKPOINTS = "checkpoints/"

_TRIES = 5  # to announce, where others collect at the same time

Item = TypeVar("Item")
Result = TypeVar("Result")


def collect(
    store: ObjectStore,
    config: WeightsConfig,
    *,
    keep_anchors: int | None = None,
    dry_run: bool = False,
    report: Report | None = None,
) -> Plan:
    """One gc: announce what is garbage now, delete what was announced long enough ago. What was planned; with
    `dry_run` nothing more happens. Raises StoreErrors, Corrupt; whatever it had begun, the next one completes."""
    for _ in range(_TRIES):
        facts = look(store, report)
        planned = plan(
            facts,
            keep_versions=config.keep_versions,
            grace_s=config.gc_grace_s,
            keep_anchors=keep_anchors,
        )
        for note in planned.notes:
            log.warning("garbage collection holds back", reason=note)
        if dry_run:
            return planned
        number = facts.next_tombstone
        tombstone = planned.tombstone(number, time.time())
        if tombstone is not None:
            key, data = tombstone_key(number), msgspec.json.encode(tombstone)
            try:
                store.put_if_absent(key, data)
                ours = store.settled(key, data)
            except AlreadyExists:
                ours = store.get(key) == data
            if not ours:
                continue  # somebody else collects: look again, with what was announced there
        _carry_out(store, facts, planned, tombstone, report)
        return planned
    raise StoreUnavailable(
        f"no garbage of {store.url} was collected: others announced theirs {_TRIES} times meanwhile",
        hint="one collector is enough: let it finish",
    )


def _carry_out(
    store: ObjectStore, facts: Facts, planned: Plan, tombstone: Tombstone | None, report: Report | None
) -> None:
    given_up = fold(facts.tombstones).ways | set(tombstone.ways if tombstone else ())
    records = [way.key for way in facts.ways if way.key in given_up]
    side_by_side(store.delete, records, what="deleting ways", report=report)
    side_by_side(store.delete, [each.key for each in planned.sweep], what="deleting packs", report=report)
    log.info(
        "garbage collected",
        announced=len(planned.doomed),
        announced_bytes=sum(each.size for each in planned.doomed),
        deleted=len(planned.sweep),
        deleted_bytes=sum(each.size for each in planned.sweep),
        rescued=len(planned.rescued),
    )


def look(store: ObjectStore, report: Report | None = None) -> Facts:
    """The store as it is. The clock first, so that nothing seems older than it is; the packs last, so that
    whatever was committed before has its packs there."""
    now = store_now(store)
    listed = _numbered_infos(store.list_after(GC), GC)
    tombstones = _read_tombstones(store, listed)
    announced = fold(tombstones)
    manifests = _numbered(store.list_after(VERSIONS), VERSIONS)
    claims = read_claims(store)
    records = {info.key: info.modified for info in store.list_after("ways/")}
    edges = list(list_edges(store))
    readers = tuple(tuple(sorted(set(beat.versions))) for beat in live_readers(store))
    checkpoints = _checkpoint_versions(store)
    packs = {info.key: info for info in store.list_after(PACKS)}

    still_there = {group[0] for group in map(pack_group, packs) if group is not None}
    wanted = [number for number in manifests if number not in announced.versions or number in still_there]
    unreadable: set[int] = set()
    ways: list[Reachable] = []
    newest = NOTHING
    found = side_by_side(
        lambda number: _patiently(read_manifest, store, number), wanted, what="manifests", report=report
    )
    for number, manifest in zip(wanted, found, strict=True):
        if manifest is None:
            unreadable.add(number)
            continue
        counts = admissible(manifest, claims)
        newest = max(newest, number) if counts else newest
        ways.append(_own(manifest, manifests[number], counts))
    read = side_by_side(
        lambda edge: _patiently(_further_way, store, edge), edges, what="ways", report=report
    )
    for edge, way in zip(edges, read, strict=True):
        if way is None:
            unreadable.add(edge.version)
        elif edge.key in records:
            keys = tuple(pack.key for pack in way.packs)
            ways.append(Reachable(edge.base, edge.version, edge.nbytes, keys, records[edge.key], edge.key))
    return Facts(
        now,
        newest,
        tuple(ways),
        packs,
        readers,
        checkpoints,
        tombstones,
        max(listed, default=-1) + 1,
        frozenset(unreadable),
    )


def dead_edges(
    store: ObjectStore, known: dict[int, StoredTombstone] | None = None
) -> frozenset[tuple[int, int]]:
    """Edges (base, version) whose packs are gone or will be soon: no path should be planned over them.

    Who asks often gives a dict of its own as `known`: tombstones never change, so each is read once.
    """
    infos = _numbered_infos(store.list_after(GC), GC)
    if known is None:
        return fold(_read_tombstones(store, infos)).edges
    unread = {number: info for number, info in infos.items() if number not in known}
    known.update({found.tombstone.number: found for found in _read_tombstones(store, unread)})
    return fold(known.values()).edges


def read_tombstones(store: ObjectStore) -> tuple[StoredTombstone, ...]:
    """By number. One that can't be read is left out: then its packs stay, which does no harm."""
    return _read_tombstones(store, _numbered_infos(store.list_after(GC), GC))


def _read_tombstones(store: ObjectStore, infos: Mapping[int, ObjectInfo]) -> tuple[StoredTombstone, ...]:
    def read(info: ObjectInfo) -> StoredTombstone | None:
        try:
            return StoredTombstone(msgspec.json.decode(store.get(info.key), type=Tombstone), info.modified)
        except (NotFound, msgspec.DecodeError, RecursionError) as error:
            log.warning("a tombstone can't be read", key=info.key, reason=str(error))
            return None

    return tuple(found for found in side_by_side(read, infos.values()) if found is not None)


def tombstone_key(number: int) -> str:
    return f"{GC}{number:08}.json"


class _CheckpointProgress(Struct, frozen=True):
    version: int


class _CheckpointCommit(Struct, frozen=True):
    """As much of a checkpoint's commit as matters here."""

    progress: _CheckpointProgress


def _checkpoint_versions(store: ObjectStore) -> tuple[int, ...]:
    """A resume publishes an empty delta on its checkpoint's version: that must stay reachable."""
    versions = set()
    for info in store.list_after(CHECKPOINTS):
        name = info.key.removeprefix(CHECKPOINTS)
        if "/" in name or not name.endswith(".json"):
            continue
        try:
            commit = msgspec.json.decode(store.get(info.key), type=_CheckpointCommit)
        except NotFound:  # pruned meanwhile
            continue
        except (msgspec.DecodeError, RecursionError) as error:
            raise Corrupt(
                f"{info.key} in {store.url} is not a checkpoint's commit: {error}",
                hint="no garbage is collected while it isn't known which version a checkpoint needs: restore the "
                "object or delete it",
            ) from error
        versions.add(commit.progress.version)
    return tuple(sorted(version for version in versions if version >= 0))


def _own(manifest: Manifest, modified: float, counts: bool) -> Reachable:
    way = manifest.way
    keys = tuple(pack.key for pack in way.packs)
    return Reachable(way.base, manifest.version, way.total_bytes, keys, modified, counts=counts)


def _further_way(store: ObjectStore, edge: Edge) -> Way:
    return read_way(store, edge).way


def _patiently(
    read: Callable[[ObjectStore, Item], Result], store: ObjectStore, item: Item
) -> Result | None:
    """None for a record that is gone, or damaged twice: the second try tells a torn read."""
    try:
        try:
            return read(store, item)
        except Corrupt:
            return read(store, item)
    except (NotFound, Corrupt) as error:
        log.warning("a record can't be read", reason=error.message)
        return None


def _numbered(infos: Iterable[ObjectInfo], prefix: str) -> dict[int, float]:
    return {number: info.modified for number, info in _numbered_infos(infos, prefix).items()}


def _numbered_infos(infos: Iterable[ObjectInfo], prefix: str) -> dict[int, ObjectInfo]:
    found = {}
    for info in infos:
        stem, dot, suffix = info.key.removeprefix(prefix).partition(".")
        if stem.isdecimal() and dot + suffix == ".json":
            found[int(stem)] = info
    return found
