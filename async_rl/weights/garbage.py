"""What garbage is: a pure plan over everything that stands in the store. gc.py gathers that and carries the plan out.

A way is kept where a path that somebody may need goes over it; packs are kept with their ways. Everything else is
given up, but for what may still be on its way to the store and what can't be told.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from async_rl.store.base import ObjectInfo
from async_rl.weights.lineage import NOTHING

__all__ = [
    "PACKS",
    "Announced",
    "Doomed",
    "Facts",
    "Kept",
    "Plan",
    "Reachable",
    "StoredTombstone",
    "Tombstone",
    "fold",
    "pack_group",
    "plan",
]

PACKS = "packs/"

Cost = tuple[int, int, int]
"""Of a path: bytes, ways that were given up already, ways."""


class Tombstone(Struct, frozen=True):
    """What one gc announced. A later one may take things off the list again."""

    number: int
    keys: tuple[str, ...] = ()  # packs that will be deleted
    ways: tuple[str, ...] = ()  # records of further ways, deleted at once
    edges: tuple[tuple[int, int], ...] = ()  # (base, version) that lose their packs
    versions: tuple[int, ...] = ()  # whose own way is among the edges
    rescued_keys: tuple[str, ...] = ()
    rescued_edges: tuple[tuple[int, int], ...] = ()
    rescued_versions: tuple[int, ...] = ()
    created: float = 0.0  # seconds since the epoch, by the writer's clock: for people


class StoredTombstone(Struct, frozen=True):
    """A tombstone as it stands in the store."""

    tombstone: Tombstone
    modified: float  # by the store's clock


class Reachable(Struct, frozen=True):
    """A way to a version that stands in the store, with what decides whether it is kept."""

    base: int
    version: int
    nbytes: int
    packs: tuple[str, ...]
    modified: float  # of the object that describes it, by the store's clock
    key: str = ""  # of a further way's record; empty: the version's own way
    counts: bool = True  # False: a zombie wrote it

    @property
    def edge(self) -> tuple[int, int]:
        return self.base, self.version


class Facts(Struct, frozen=True):
    """Everything in the store that the plan depends on."""

    now: float  # by the store's clock
    newest: int  # version that counts; -1: none
    ways: tuple[Reachable, ...]
    packs: Mapping[str, ObjectInfo]
    readers: tuple[tuple[int, ...], ...] = ()  # versions that each live reader names
    checkpoints: tuple[int, ...] = ()  # versions that checkpoints name
    tombstones: tuple[StoredTombstone, ...] = ()
    next_tombstone: int = 0  # number
    unreadable: frozenset[int] = frozenset()  # versions with a record that can't be read


class Doomed(Struct, frozen=True):
    """A pack that is deleted, now or later, and why."""

    key: str
    size: int  # bytes
    reason: str


class Kept(Struct, frozen=True):
    """A way, and why it is kept (in Plan.drop: why it is not)."""

    way: Reachable
    reason: str


class Plan(Struct, frozen=True):
    keep: tuple[Kept, ...]
    drop: tuple[Kept, ...]  # ways given up now, with the reason
    doomed: tuple[Doomed, ...]  # packs to announce
    rescued: tuple[Kept, ...]  # ways announced earlier and needed after all
    waiting: tuple[Doomed, ...]  # packs announced less than the grace ago
    sweep: tuple[Doomed, ...]  # packs to delete now
    notes: tuple[str, ...]  # what stood in the way

    def tombstone(self, number: int, created: float) -> Tombstone | None:
        """What is to be announced, None for nothing."""
        if not (self.doomed or self.drop or self.rescued):
            return None
        alive = {kept.way.edge for kept in self.keep}
        edges = {kept.way.edge for kept in self.drop} - alive
        return Tombstone(
            number,
            keys=tuple(doomed.key for doomed in self.doomed),
            ways=tuple(sorted(kept.way.key for kept in self.drop if kept.way.key)),
            edges=tuple(sorted(edges)),
            versions=tuple(sorted(kept.way.version for kept in self.drop if not kept.way.key)),
            rescued_keys=tuple(sorted({key for kept in self.rescued for key in kept.way.packs})),
            rescued_edges=tuple(sorted({kept.way.edge for kept in self.rescued})),
            rescued_versions=tuple(sorted({kept.way.version for kept in self.rescued})),
            created=created,
        )


# ---------------------------------------------------------------- tombstones, folded


class Announced(NamedTuple):
    """All tombstones together."""

    keys: dict[str, float]  # packs -> when they were announced
    edges: frozenset[tuple[int, int]]
    versions: frozenset[int]  # whose own way is given up
    ways: frozenset[str]


def fold(tombstones: Iterable[StoredTombstone]) -> Announced:
    keys: dict[str, float] = {}
    edges: set[tuple[int, int]] = set()
    versions: set[int] = set()
    ways: set[str] = set()
    for found in sorted(tombstones, key=lambda found: found.tombstone.number):
        each = found.tombstone
        keys.update(dict.fromkeys(each.keys, found.modified))
        edges.update(each.edges)
        versions.update(each.versions)
        ways.update(each.ways)
        for key in each.rescued_keys:
            keys.pop(key, None)
        edges.difference_update(each.rescued_edges)
        versions.difference_update(each.rescued_versions)
    return Announced(keys, frozenset(edges), frozenset(versions), frozenset(ways))


# ---------------------------------------------------------------- the plan


def plan(facts: Facts, *, keep_versions: int, grace_s: float, keep_anchors: int | None = None) -> Plan:
    """What to keep and what to give up. `keep_anchors`: that many of the newest (and the first); None: all."""
    return _Planner(facts, grace_s).plan(keep_versions, keep_anchors)


class _Planner:
    def __init__(self, facts: Facts, grace_s: float) -> None:
        self._facts = facts
        self._young = facts.now - grace_s  # what was written after this
        self._grace_s = grace_s
        self._announced = fold(facts.tombstones)
        self._reasons: dict[Reachable, str] = {}
        self._from_nothing: Mapping[int, tuple[int, Reachable]] = {}
        self._notes: list[str] = []
        # A group is what one trainer wrote for one version: while its packs still arrive, all are young.
        self._groups: dict[tuple[int, int], float] = {}
        for info in facts.packs.values():
            group = pack_group(info.key)
            if group is not None:
                self._groups[group] = max(self._groups.get(group, 0.0), info.modified)

    def plan(self, keep_versions: int, keep_anchors: int | None) -> Plan:
        facts = self._facts
        # A further way that was given up is gone with its record; an own way can come back.
        usable = [w for w in facts.ways if w.counts and self._whole(w) and not (w.key and self._dead(w))]
        for way in usable:
            if self._is_young(way):
                self._keep([way], "young, or of the newest version")
        anchors = [way for way in usable if way.base == NOTHING and not self._dead(way)]
        anchors.sort(key=lambda way: way.version)
        dropped = set() if keep_anchors is None else set(anchors[1 : max(1, len(anchors) - keep_anchors)])
        for way in anchors:
            if way not in dropped:
                self._keep([way], "anchor")
        blocked = self._keep_paths(usable, dropped, keep_versions)
        self._keep_for_readers(usable)
        return self._sorted_out(blocked)

    def _keep_paths(self, usable: list[Reachable], dropped: set[Reachable], keep_versions: int) -> bool:
        """Whole paths from nothing. True where one of the newest versions has none: then no way may be given up,
        an unreadable record may be all that is wrong."""
        facts = self._facts
        versions = sorted({way.version for way in facts.ways if way.counts and not way.key})
        newest = versions[-keep_versions:]
        young = [w.version for w in facts.ways if w.counts and not w.key and w.modified > self._young]
        lean = self._cheapest([way for way in usable if way not in dropped and not self._dead(way)])
        everything = self._cheapest(usable)
        self._from_nothing = lean
        targets = [
            *((version, "one of the newest versions") for version in newest),
            *((version, "young") for version in young),
            *((version, "a checkpoint's version") for version in facts.checkpoints),
            *((version, "the first version") for version in versions[:1]),
            *((version, "named by a reader") for reader in facts.readers for version in reader),
        ]
        blocked = False
        for version, reason in targets:
            path = _from_nothing(version, lean)
            if path is None:
                path = _from_nothing(version, everything)
            if path is not None:
                self._keep(path, reason)
            elif version in newest:
                blocked = True
                self._notes.append(
                    f"version {version} can't be reached from any anchor: no way is given up"
                )
        return blocked

    def _keep_for_readers(self, usable: list[Reachable]) -> None:
        """From each version that a live reader holds (or fetches) to the others it names, and to the newest: unless
        the path from nothing, which is kept, is cheaper."""
        holders: dict[int, set[int]] = {}  # target -> versions held
        for reader in self._facts.readers:
            for held, target in product(reader, (*reader, self._facts.newest)):
                if held < target:
                    holders.setdefault(target, set()).add(held)
        onward: dict[int, list[Reachable]] = {}
        for way in usable:
            if way.base != NOTHING:
                onward.setdefault(way.base, []).append(way)
        bases = sorted(onward)
        for target, held_ones in sorted(holders.items()):
            between = bases[bisect_left(bases, min(held_ones)) : bisect_left(bases, target)]
            cost, first = self._cheapest_to(target, onward, between)
            limit = self._from_nothing[target][0] if target in self._from_nothing else None
            for held in sorted(held_ones):
                if held not in cost or (limit is not None and cost[held][0] > limit):
                    continue
                at = held
                while at != target:
                    self._keep([first[at]], f"a reader's way from version {held}")
                    at = first[at].version

    def _cheapest_to(
        self, target: int, onward: Mapping[int, list[Reachable]], between: Sequence[int]
    ) -> tuple[dict[int, Cost], dict[int, Reachable]]:
        """From each of the versions `between` (ascending, below `target`): what the cheapest path to `target` costs,
        and its first way."""
        cost: dict[int, Cost] = {target: (0, 0, 0)}
        first: dict[int, Reachable] = {}
        for base in reversed(between):
            choices = [
                (self._along(cost[way.version], way), way.version, way)
                for way in onward[base]
                if way.version in cost
            ]
            if choices:
                cost[base], _, first[base] = min(choices, key=lambda choice: choice[:2])
        return cost, first

    def _sorted_out(self, blocked: bool) -> Plan:
        facts, announced = self._facts, self._announced
        keep: list[Kept] = []
        drop: list[Kept] = []
        rescued: list[Kept] = []
        for way in facts.ways:
            reason = self._reasons.get(way)
            if reason is None:
                reason = self._must_stay(way, blocked)
            if reason is None:
                if not self._dead(way):
                    why = "not on a path that is kept" if way.counts else "a replaced trainer's"
                    drop.append(Kept(way, why))
                continue
            keep.append(Kept(way, reason))
            if self._dead(way):
                rescued.append(Kept(way, reason))
        kept_packs = {key for kept in keep for key in kept.way.packs}
        reasons = {key: kept.reason for kept in drop for key in kept.way.packs}
        known = {key for way in facts.ways for key in way.packs}
        doomed: list[Doomed] = []
        waiting: list[Doomed] = []
        sweep: list[Doomed] = []
        for key, info in sorted(facts.packs.items()):
            if key in kept_packs or self._protected(key):
                continue
            if key in announced.keys:
                over = announced.keys[key] + self._grace_s <= facts.now
                (sweep if over else waiting).append(Doomed(key, info.size, "announced"))
            elif key in reasons:
                doomed.append(Doomed(key, info.size, reasons[key]))
            elif key not in known:
                doomed.append(Doomed(key, info.size, "of no version"))
        return Plan(
            tuple(keep),
            tuple(drop),
            tuple(doomed),
            tuple(rescued),
            tuple(waiting),
            tuple(sweep),
            tuple(self._notes),
        )

    def _must_stay(self, way: Reachable, blocked: bool) -> str | None:
        """Why a way that no path needs is left alone."""
        if self._dead(way):
            return None
        if self._is_young(way):
            return "young, or of the newest version"
        if not way.counts:
            return None
        if blocked:
            return "a newest version can't be reached"
        if not self._whole(way):
            return "packs of it are missing"  # nothing that could be explained: for a person to look at
        return None

    def _cheapest(self, ways: Iterable[Reachable]) -> dict[int, tuple[int, Reachable]]:
        """Version -> (bytes, last way) of the cheapest path from nothing. Ways lead upwards only: one pass in the
        order of the versions."""
        into: dict[int, list[Reachable]] = {}
        for way in ways:
            into.setdefault(way.version, []).append(way)
        cost: dict[int, Cost] = {NOTHING: (0, 0, 0)}
        best: dict[int, tuple[int, Reachable]] = {}
        for version in sorted(into):
            choices = [
                (self._along(cost[way.base], way), way.base, way)
                for way in into[version]
                if way.base in cost
            ]
            if choices:
                cost[version], _, way = min(choices, key=lambda choice: choice[:2])
                best[version] = cost[version][0], way
        return best

    def _along(self, cost: Cost, way: Reachable) -> Cost:
        return cost[0] + way.nbytes, cost[1] + self._dead(way), cost[2] + 1

    def _keep(self, path: Iterable[Reachable], reason: str) -> None:
        for way in path:
            self._reasons.setdefault(way, reason)

    def _dead(self, way: Reachable) -> bool:
        """Given up by an earlier gc; whole as long as it was not swept."""
        return way.key in self._announced.ways if way.key else way.version in self._announced.versions

    def _whole(self, way: Reachable) -> bool:
        return all(key in self._facts.packs for key in way.packs)

    def _is_young(self, way: Reachable) -> bool:
        if self._dead(way):
            return False
        return way.modified > self._young or any(self._protected(key) for key in way.packs)

    def _protected(self, key: str) -> bool:
        """Packs that may belong to something on its way, or whose record can't be read."""
        group = pack_group(key)
        if group is None or group[0] >= self._facts.newest or group[0] in self._facts.unreadable:
            return True
        return self._groups.get(group, 0.0) > self._young


def _from_nothing(version: int, best: Mapping[int, tuple[int, Reachable]]) -> tuple[Reachable, ...] | None:
    """The ways to `version` from nothing; None where it can't be reached."""
    path = []
    while version != NOTHING:
        if version not in best:
            return None
        way = best[version][1]
        path.append(way)
        version = way.base
    return tuple(reversed(path))


def pack_group(key: str) -> tuple[int, int] | None:
    """(version, incarnation) of a pack's key, None for a key that is not one of ours."""
    parts = key.removeprefix(PACKS).split("-")
    if not key.startswith(PACKS) or len(parts) < 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])
