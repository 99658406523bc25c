"""Whether what stands in the store is right: every object by its hash, every way by the state it leads to.

Deltas are decoded against the very weights that they change, so a way is only right if the digest of what comes out
is that of the manifest: two ways to one version lead to the same bits. One state is kept on the disk and moved from
version to version; a further delta is tried out on copies of its tiles, an anchor is hashed as it streams by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path as FilePath

import msgspec
from msgspec import Struct

from async_rl.errors import Corrupt, NotFound, StoreError, StoreUnavailable, WeightsError
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import digest_of
from async_rl.weights.codec.digest import MASK
from async_rl.weights.config import WeightsConfig
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.garbage import Announced, fold
from async_rl.weights.gc import read_tombstones
from async_rl.weights.lineage import (
    Manifest,
    Way,
    admissible,
    list_versions,
    read_claims,
    read_manifest,
    version_key,
)
from async_rl.weights.parallel import Report, side_by_side
from async_rl.weights.plan import NOTHING, find_path
from async_rl.weights.replay import FlatState
from async_rl.weights.run import ModelFile, RunInfo, fetch_model_file
from async_rl.weights.ways import list_edges, read_way

__all__ = ["CheckedWay", "Verified", "verify", "verify_all"]


class CheckedWay(Struct, frozen=True):
    version: int
    base: int  # -1: full
    kind: str  # own or further
    nbytes: int
    key: str  # of the object that describes it
    verdict: str
    """right; wrong; unchecked (its base can't be had); gone (given up as garbage); stranded (the paths to its base
    were: only readers that hold that can use it)."""
    reason: str = ""


class Verified(Struct, frozen=True):
    ways: tuple[CheckedWay, ...]
    paths: tuple[str, ...]  # by which states were put together
    ignored: tuple[int, ...]  # versions of replaced trainers, which nobody reads
    files: tuple[str, ...] = ()  # of the model (config, tokenizer, …): what is wrong with them, in words

    @property
    def wrong(self) -> tuple[CheckedWay, ...]:
        return tuple(way for way in self.ways if way.verdict in ("wrong", "unchecked"))


class _Task(Struct, frozen=True):
    """One way to be checked."""

    version: int
    way: Way
    kind: str
    key: str

    @property
    def edge(self) -> tuple[int, int]:
        return self.way.base, self.version


def verify(
    store: ObjectStore,
    run: RunInfo,
    manifest: Manifest,
    scratch: FilePath,
    config: WeightsConfig | None = None,
    report: Report | None = None,
) -> Verified:
    """One version: its own way and the further ones, each from its base's state. Raises StoreErrors, WeightsError."""
    checker = _Checker(store, run, {manifest.version: manifest}, scratch, config, report)
    own = _Task(manifest.version, manifest.way, "own", version_key(manifest.version))
    checker.add([own])
    checker.add_further(manifest.version, manifest.version)
    return checker.run(())


def verify_all(
    store: ObjectStore,
    run: RunInfo,
    scratch: FilePath,
    config: WeightsConfig | None = None,
    report: Report | None = None,
) -> Verified:
    """Every version's own way, every further way, the model's files. Raises StoreErrors, WeightsError."""
    numbers = list_versions(store)
    found = side_by_side(partial(_read, store), numbers)
    claims = read_claims(store)
    manifests = {each.version: each for each in found if isinstance(each, Manifest)}
    counting = {n: manifest for n, manifest in manifests.items() if admissible(manifest, claims)}
    checker = _Checker(store, run, counting, scratch, config, report)
    for number, each in zip(numbers, found, strict=True):
        if isinstance(each, str):
            checker.note(CheckedWay(number, NOTHING, "own", 0, version_key(number), "wrong", each))
    checker.add(_Task(n, manifest.way, "own", version_key(n)) for n, manifest in counting.items())
    checker.add_further(0, None)
    found_ways = checker.run(tuple(sorted(manifests.keys() - counting.keys())))
    wrong = (_wrong_file(store, file) for file in run.model_files)
    return msgspec.structs.replace(found_ways, files=tuple(each for each in wrong if each))


def _wrong_file(store: ObjectStore, file: ModelFile) -> str:
    try:
        fetch_model_file(store, file)
    except (Corrupt, NotFound) as error:
        return error.message
    return ""


def _read(store: ObjectStore, number: int) -> Manifest | str:
    try:
        return read_manifest(store, number)
    except (Corrupt, NotFound) as error:
        return str(error)


class _Checker:
    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        manifests: dict[int, Manifest],
        scratch: FilePath,
        config: WeightsConfig | None,
        report: Report | None,
    ) -> None:
        self._store, self._manifests, self._report = store, manifests, report
        self._run = run
        self._state = FlatState(store, run, scratch, config)
        self._announced: Announced = fold(read_tombstones(store))
        self._avoid = set(self._announced.edges)  # for paths: given up, or found wrong
        self._tasks: list[_Task] = []
        self._checked: list[CheckedWay] = []
        self._paths: list[str] = []
        self._done = 0

    def add(self, tasks: Iterable[_Task]) -> None:
        for task in tasks:
            if task.kind == "own" and task.version in self._announced.versions:
                self.note(_judged(task, "gone", "given up as garbage"))
            else:
                self._tasks.append(task)

    def add_further(self, first: int, last: int | None) -> None:
        """Further ways to these versions; those of versions that nobody reads are left out."""
        for edge in list_edges(self._store, first - 1):
            if last is not None and edge.version > last:
                break
            if edge.version not in self._manifests:
                continue
            try:
                way = read_way(self._store, edge).way
            except NotFound:  # removed meanwhile
                continue
            except Corrupt as error:
                self.note(
                    CheckedWay(
                        edge.version, edge.base, "further", edge.nbytes, edge.key, "wrong", str(error)
                    )
                )
                self._avoid.add((edge.base, edge.version))
                continue
            self.add([_Task(edge.version, way, "further", edge.key)])

    def note(self, checked: CheckedWay) -> None:
        self._checked.append(checked)

    def run(self, ignored: Sequence[int]) -> Verified:
        """Bases in ascending order; from each, the further ways first: the own way of the next version then takes the
        state along."""
        full = [task for task in self._tasks if task.way.base == NOTHING]
        deltas = [task for task in self._tasks if task.way.base != NOTHING]
        deltas.sort(key=lambda task: (task.way.base, task.kind == "own", task.version))
        # Full ways first: paths then avoid those that are wrong.
        for task in [*full, *deltas]:
            self._check(task)
            self._done += 1
            if self._report is not None:
                self._report("ways", self._done, len(self._tasks))
        self._checked.sort(key=lambda way: (way.version, way.kind == "further", way.base))
        return Verified(tuple(self._checked), tuple(self._paths), tuple(ignored))

    def _check(self, task: _Task) -> None:
        wanted = self._manifests[task.version].digest
        try:
            if task.way.base == NOTHING:
                digest = self._digest_of_full(task)
            else:
                if not self._reach(task):
                    return
                digest = self._digest_after(task)
        except StoreUnavailable:
            raise
        except (Corrupt, NotFound, StoreError) as error:
            self._wrong(task, str(error))
            return
        if f"{digest:016x}" != wanted:
            self._wrong(task, f"it leads to digest {digest:016x}, the manifest says {wanted}")
        else:
            self.note(_judged(task, "right"))

    def _reach(self, task: _Task) -> bool:
        """The state of the way's base."""
        base = task.way.base
        if self._state.version == base:
            return True
        try:
            manifest = self._manifests.get(base) or read_manifest(self._store, base)
            path = self._state.go_to(manifest, frozenset(self._avoid), self._fetching(base))
        except StoreUnavailable:
            raise
        except (WeightsError, StoreError) as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error, StoreError | Corrupt):
                raise  # this machine's disk, which says nothing about the store
            verdict = "stranded" if self._cut_off(base) else "unchecked"
            self.note(_judged(task, verdict, f"version {base} can't be had: {error}"))
            return False
        self._paths.append(f"version {base} {path.describe()}")
        return True

    def _cut_off(self, version: int) -> bool:
        """Whether garbage collection, and not damage, is why there is no path to it."""
        try:
            manifest = self._manifests.get(version) or read_manifest(self._store, version)
        except (Corrupt, NotFound):
            return False
        given_up = self._announced.edges
        return self._has_path(manifest, frozenset()) and not self._has_path(manifest, given_up)

    def _has_path(self, manifest: Manifest, avoid: frozenset[tuple[int, int]]) -> bool:
        try:
            find_path(self._store, manifest, None, avoid=avoid)
        except WeightsError:
            return False
        return True

    def _fetching(self, version: int) -> Callable[[int, int], None] | None:
        report = self._report
        if report is None:
            return None
        return lambda done, of: report(f"version {version}", done, of)

    def _digest_after(self, task: _Task) -> int:
        """In place for an own way, which leads on; on copies for the others."""
        layer = self._state.open(task.way)
        try:
            if task.kind != "own":
                return self._state.try_out(layer, task.key)
            self._state.apply(layer, task.version, task.key)
            digest = self._state.digest
            if f"{digest:016x}" != self._manifests[task.version].digest:
                self._state.version = NOTHING
            return digest
        finally:
            self._state.drop_packs()

    def _digest_of_full(self, task: _Task) -> int:
        """Raises Corrupt also where the bytes are right and what ranged reads are checked by is not."""
        total = 0
        tiles = FullTiles(self._run, task.way, f"{task.key} in {self._store.url}")
        for tensor, start, data in self._state.full_tiles(task.way, task.key):
            digest = digest_of(data, self._state.places[tensor] + start)
            if tiles.known and tiles.at(tensor, start) != digest:
                raise Corrupt(
                    f"the tile of {self._run.tensors[tensor].name} at {start} has the digest {digest:016x}, "
                    f"{task.key} says {tiles.at(tensor, start):016x}"
                )
            total += digest
        return total & MASK

    def _wrong(self, task: _Task, reason: str) -> None:
        self._avoid.add(task.edge)
        self.note(_judged(task, "wrong", reason))


def _judged(task: _Task, verdict: str, reason: str = "") -> CheckedWay:
    return CheckedWay(
        task.version, task.way.base, task.kind, task.way.total_bytes, task.key, verdict, reason
    )
