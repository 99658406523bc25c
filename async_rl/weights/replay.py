"""A version's state, put together again outside of any worker: to check it, to compare it, to build on it.

The run's tensors stand one after another in one flat file, in the order of run.json, so that an element's index in
the file is its place in the digest. The file is scratch: whatever goes wrong, it is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path as FilePath

import numpy as np

from async_rl.errors import Corrupt
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import TILE, apply_tile, digest_of
from async_rl.weights.codec.digest import MASK
from async_rl.weights.config import WeightsConfig
from async_rl.weights.fetch import Fetcher
from async_rl.weights.files import disk_errors, reserve
from async_rl.weights.layers import Layer, open_layer
from async_rl.weights.lineage import Manifest, Way
from async_rl.weights.packs import ITEM_BYTES, read_header
from async_rl.weights.plan import NOTHING, Hop, Path, find_path
from async_rl.weights.run import RunInfo

__all__ = ["FlatState", "places_of"]

Progress = Callable[[int, int], None]
"""Called with the bytes fetched so far and those to fetch."""

Bytes = Callable[[int], None]
"""Called with the bytes fetched so far."""


def _silent(done: int) -> None:
    pass


def _from(done: int, report: Bytes) -> Bytes:
    """`report`, counting on from `done`."""
    return lambda got: report(done + got)


def places_of(run: RunInfo) -> list[int]:
    """Where each tensor begins in the state, and at the end where the state ends; elements."""
    return [0, *accumulate(math.prod(spec.shape) for spec in run.tensors)]


class FlatState:
    """`folder` is its own; it needs room for one model and the packs of one hop. One thread at a time."""

    def __init__(
        self, store: ObjectStore, run: RunInfo, folder: FilePath, config: WeightsConfig | None = None
    ) -> None:
        self._store, self._run, self._folder = store, run, folder
        self._config = config or WeightsConfig()
        self.places = places_of(run)
        self.version = NOTHING
        self.digest = 0
        with disk_errors(folder, self.places[-1] * ITEM_BYTES):
            folder.mkdir(parents=True, exist_ok=True)
            elements = max(1, self.places[-1])
            reserve(folder / "state", elements * ITEM_BYTES)
            self.values: np.ndarray = np.memmap(folder / "state", np.uint16, "r+", shape=(elements,))

    def go_to(
        self,
        manifest: Manifest,
        avoid: frozenset[tuple[int, int]] = frozenset(),
        report: Progress | None = None,
    ) -> Path:
        """Make it the state of `manifest`'s version, by the cheapest path, which is returned.

        Raises Corrupt (an object is damaged, or the digest differs), WeightsError, StoreErrors.
        """
        held = None if self.version == NOTHING else self.version
        path = find_path(self._store, manifest, held, avoid=avoid)

        def fetched(got: int) -> None:
            if report is not None:
                report(got, path.nbytes)

        done = 0
        for hop in path.hops:
            self.go(hop, _from(done, fetched))
            done += hop.way.total_bytes
        self.check_digest(manifest, path.describe())
        return path

    def go(self, hop: Hop, report: Bytes = _silent) -> None:
        """Along one edge, from its base's state. Raises as go_to does."""
        if hop.way.base == NOTHING:
            self._load(hop.way, hop.version, hop.key, report)
        else:
            layer = self.open(hop.way, report)
            self.apply(layer, hop.version, hop.key)
            self.drop_packs()

    def open(self, way: Way, report: Bytes = _silent) -> Layer:
        """A delta's packs on this disk, verified."""
        with disk_errors(self._folder, way.total_bytes):
            return open_layer(self._store, self._run, way, self._folder / "packs", self._config, report)

    def drop_packs(self) -> None:
        for path in (self._folder / "packs").glob("*"):
            path.unlink()

    def apply(self, layer: Layer, version: int, what: str) -> None:
        """Raises Corrupt naming `what`; then the state is of no version."""
        self.version = NOTHING
        self.digest = (self.digest + self._run_over(layer, self._in_place, what)) & MASK
        self.version = version

    def try_out(self, layer: Layer, what: str) -> int:
        """The digest after `layer`, found by decoding it against this state, which is not changed."""
        return (self.digest + self._run_over(layer, self._copy, what)) & MASK

    def check_digest(self, manifest: Manifest, how: str) -> None:
        """Raises Corrupt."""
        if f"{self.digest:016x}" != manifest.digest:
            self.version = NOTHING
            raise Corrupt(
                f"the state of version {manifest.version} of {self._store.url}, read {how}, has digest "
                f"{self.digest:016x}, its manifest says {manifest.digest}",
                hint="every object on the way has the right hash: what wrote them was wrong. A path that avoids this "
                "one may be right: async-rl weights verify tells",
            )

    def _in_place(self, start: int, end: int) -> np.ndarray:
        return self.values[start:end]

    def _copy(self, start: int, end: int) -> np.ndarray:
        return np.array(self.values[start:end])

    def _run_over(self, layer: Layer, values: Callable[[int, int], np.ndarray], what: str) -> int:
        total = 0
        for tensor, pieces in layer.pieces.items():
            for tile, data in pieces:
                place = self.places[tensor] + tile.start
                found = apply_tile(tile.mode, data, values(place, place + tile.elements), place)
                if found != (tile.changed, tile.moved):
                    raise Corrupt(
                        f"{what} in {self._store.url}: the tile of {self._run.tensors[tensor].name} at {tile.start} "
                        f"changes {found[0]} weights, its table says {tile.changed}"
                        + (", and the digest by another amount" if found[1] != tile.moved else ""),
                    )
                total += tile.moved
        return total

    def _load(self, way: Way, version: int, what: str, report: Bytes) -> None:
        self.version = NOTHING
        digest = 0
        for tensor, start, data in self.full_tiles(way, what, report):
            place = self.places[tensor] + start
            self.values[place : place + len(data)] = data
            digest += digest_of(data, place)
        self.digest, self.version = digest & MASK, version

    def full_tiles(
        self, way: Way, what: str, report: Bytes = _silent
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """A full way's tensors in pieces (tensor, first element, uint16 [n]), every tensor of the run once.

        Fetched pack by pack, verified, and deleted when read. Raises Corrupt naming `what`.
        """
        names = {spec.name: index for index, spec in enumerate(self._run.tensors)}
        seen: set[str] = set()
        fetcher = Fetcher(self._store, self._config)
        folder = self._folder / "packs"
        done = 0
        with disk_errors(folder, way.total_bytes):
            for number, pack in enumerate(way.packs):
                path = folder / pack.key.replace("/", "-")
                fetcher.whole([(pack, path)], _from(done, report))
                done += pack.size
                header = read_header(path, self._run.dtype)
                offset = path.stat().st_size - sum(spec.nbytes for spec in header.values())
                for name, spec in header.items():
                    if (
                        name in seen
                        or name not in names
                        or self._run.tensors[names[name]].shape != spec.shape
                        or way.weight_map.get(name) != number
                    ):
                        raise Corrupt(
                            f"{pack.key}, which {what} in {self._store.url} names, holds {name} of shape "
                            f"{list(spec.shape)}, which the run has not or has elsewhere"
                        )
                    seen.add(name)
                    count = math.prod(spec.shape)
                    if count:
                        bits = np.memmap(path, np.uint16, "r", offset, (count,))
                        for start in range(0, count, TILE):
                            yield names[name], start, np.array(bits[start : start + TILE])
                    offset += spec.nbytes
                path.unlink()
        if missing := names.keys() - seen:
            raise Corrupt(f"{what} in {self._store.url} lacks {len(missing)} tensors, e.g. {min(missing)}")
