"""The guards of the product, each of which a process of the matrix can be started without: a guard that nothing
misses is none.

Every entry takes one guard away from this process, and nothing else, by replacing the function that it stands in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from async_rl.errors import StoreUnavailable
from async_rl.store.s3 import S3Store
from async_rl.weights import fetch, follower, full_tiles, lineage, shadow, subscriber
from async_rl.weights.lineage import Manifest
from tests.chaos.points import Points

__all__ = ["GUARDS", "remove", "watch_apply"]


def remove(names: Iterable[str]) -> None:
    for name in names:
        GUARDS[name]()


class _Equal(bytes):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class _EqualText(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class _EqualPair(tuple[int, int]):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = tuple.__hash__


def _pack_hash() -> None:
    """A pack's file is taken for what it is named after: that is the hash it should have."""

    def named(path: Path) -> str:
        match = re.search("[0-9a-f]{64}", path.name)
        return match[0] if match else ""

    fetch.sha256_of = named


def _tile_hash() -> None:
    original = shadow.tile_hash
    shadow.tile_hash = lambda data: _Equal(original(data))
    fetch.tile_hash = shadow.tile_hash


def _full_tile() -> None:
    """That a tile of a full state, read alone, is what its digest says: when it comes, and where it lies."""
    full_tiles.FullTile.right = lambda self, data: True
    follower.Follower._check_tiles = lambda self, hop, tiles, digest: None


def _tile_effect() -> None:
    """That a tile changes as many elements, and moves the digest by as much, as its table says."""
    original = shadow.apply_tile
    shadow.apply_tile = lambda *args: _EqualPair(original(*args))


def _state_digest() -> None:
    """That the state's digest is the manifest's, after a full state was read or deltas were applied."""
    original = lineage.read_manifest

    def read(store: Any, version: int) -> Manifest:
        manifest = original(store, version)
        return msgspec.structs.replace(manifest, digest=_EqualText(manifest.digest))

    for module in (lineage, subscriber):
        module.read_manifest = read


def _cache_rehash() -> None:
    """That a cache folder's files are hashed before they are used again."""
    original = follower.Follower._adopt

    def adopt(self: follower.Follower) -> Any:
        held = shadow.read_held(self._folder)
        hashing = shadow.Mapped.digest
        if held is not None:
            shadow.Mapped.digest = lambda *_: int(held.digest, 16)
        try:
            return original(self)
        finally:
            shadow.Mapped.digest = hashing

    follower.Follower._adopt = adopt


def _torn_mark() -> None:
    """That a shadow which is being changed says so."""
    shadow.Shadow.begin = lambda self: None


def _claims() -> None:
    """That a version of a replaced trainer does not count."""
    lineage.admissible = lambda manifest, claims: True
    subscriber.admissible = lineage.admissible


def _manifest_number() -> None:
    """That a manifest is the one of the version asked for."""

    def read(store: Any, version: int) -> Manifest:
        return msgspec.json.decode(store.get(lineage.version_key(version)), type=Manifest)

    for module in (lineage, subscriber, follower):
        module.read_manifest = read


def _seal() -> None:
    """That a manifest's fields are those that were written."""
    lineage._seal_of = lambda record: record.seal


def _packs_first() -> None:
    """That a version's packs are whole before its manifest is put."""
    later: list[tuple[S3Store, str, bytes]] = []
    put, create = S3Store.put, S3Store.put_if_absent

    class Later:
        def __init__(self, store: S3Store, key: str) -> None:
            self._store, self._key, self._data = store, key, bytearray()

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self._data += data

        def commit(self) -> None:
            later.append((self._store, self._key, bytes(self._data)))

        def __enter__(self) -> Later:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def create_first(self: S3Store, key: str, data: bytes) -> None:
        create(self, key, data)
        while later:
            put(*later.pop(0))

    S3Store.upload = lambda self, key: Later(self, key)
    S3Store.put_if_absent = create_first


def _promotion() -> None:
    """That the publisher's baseline moves only after the commit."""
    from async_rl.weights import publisher

    original = publisher.Publisher._until_committed

    def promote_first(self: Any, version: int, step: int, draft: Any, started: float) -> Any:
        before = self._baseline
        failure = draft.attempt()
        if before is not None and failure is None and draft.finished is not None:
            state = draft._packs._new
            self._baseline = publisher._Baseline(before.version, draft.finished.digest, state.share())
        return original(self, version, step, draft, started)

    publisher.Publisher._until_committed = promote_first


def _conditional_put() -> None:
    """That a manifest never replaces one that is there."""
    create = S3Store.put_if_absent

    def replace(self: S3Store, key: str, data: bytes) -> None:
        if key.startswith("versions/"):
            self.put(key, data)
        else:
            create(self, key, data)

    S3Store.put_if_absent = replace


def _fence() -> None:
    """That a trainer looks for newer claims around its commit."""
    lineage.check_not_fenced = lambda store, ours: None


def _kept_paths() -> None:
    """That garbage collection keeps whole paths."""
    from async_rl.weights import garbage

    garbage._Planner._keep_paths = lambda self, usable, dropped, keep_versions: False


def _everybodys_packs() -> None:
    """That a version is committed only when every rank's packs are whole."""
    from async_rl.weights import drafts

    original = drafts._Written
    drafts._Written = lambda whole, *rest: original(True, *rest)


def _word_of_rank0() -> None:
    """That a rank's baseline moves only when rank 0 says that the version is committed."""
    from async_rl.weights import publisher

    original = publisher.Publisher._until_committed

    def by_itself(self: Any, version: int, step: int, draft: Any, started: float) -> Any:
        try:
            return original(self, version, step, draft, started)
        except StoreUnavailable:
            if self._ranks.rank == 0 or draft.finished is None:
                raise
            return publisher._Outcome(version=version), None

    publisher.Publisher._until_committed = by_itself


def _lost_rank() -> None:
    """That what torch says of a dead peer becomes an error of ours."""
    from async_rl.weights import ranks

    ranks._guard = lambda operation, doing: operation()


GUARDS: dict[str, Callable[[], None]] = {
    "hash of a pack": _pack_hash,
    "hash of a tile": _tile_hash,
    "digest of a full tile": _full_tile,
    "effect of a tile": _tile_effect,
    "digest of the state": _state_digest,
    "rehash of the cache": _cache_rehash,
    "mark of a torn shadow": _torn_mark,
    "claims": _claims,
    "number in a manifest": _manifest_number,
    "seal": _seal,
    "packs before the manifest": _packs_first,
    "promotion after the commit": _promotion,
    "conditional put": _conditional_put,
    "fence": _fence,
    "kept paths": _kept_paths,
    "everybody's packs": _everybodys_packs,
    "word of rank 0": _word_of_rank0,
    "word of a lost rank": _lost_rank,
}


def watch_apply(points: Points) -> None:
    """Points before, in and after every tile that is applied to a reader's shadow. In: half of what it changes stands
    in the file already."""
    original = shadow.apply_tile

    def apply(mode: int, data: Any, values: Any, place: int) -> tuple[int, int]:
        name = f"apply at {place}"
        points.pass_by(name, "before")
        if points.target == f"{name}: in":
            changed = values.copy()
            original(mode, data, changed, place)
            values[: len(values) // 2] = changed[: len(values) // 2]
        points.pass_by(name, "in")
        done: tuple[int, int] = original(mode, data, values, place)
        points.pass_by(name, "after")
        return done

    shadow.apply_tile = apply
