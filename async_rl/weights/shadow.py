"""The shadow: a reader's copy of one version's state, as plain safetensors files that deltas change in place.

    <folder>/model-00001-of-00002.safetensors …     mapped into memory; any tool can load them
    <folder>/.async-rl.json                         Held: which version they are

Held is removed before the first byte changes and written again when all have: a process that is killed in between
leaves files without it, which nobody takes for a state. Where it is there, the files are hashed as a whole before
they are used again (a machine that lost power may have written Held first).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from async_rl.errors import Corrupt
from async_rl.weights.codec import TILE, apply_tile, digest_of
from async_rl.weights.codec.digest import MASK
from async_rl.weights.deltas import Tile, tile_hash
from async_rl.weights.files import write_whole
from async_rl.weights.packs import read_header
from async_rl.weights.parallel import side_by_side
from async_rl.weights.run import RunInfo

__all__ = [
    "HELD",
    "THREADS",
    "FetchedTile",
    "Held",
    "Mapped",
    "Ranges",
    "Shadow",
    "check_contents",
    "full_ranges",
    "read_held",
    "shard_names",
    "shards_in",
    "tile_ranges",
]

HELD = ".async-rl.json"

THREADS = max(2, min(8, len(os.sched_getaffinity(0))))
"""Of decoding and hashing. The kernels release the GIL; more than 8 are waiting for memory."""

Ranges = tuple[tuple[int, int], ...]
"""Per tensor of the run, in its order: first and last + 1 of the elements that are held."""


class Held(Struct, frozen=True):
    """What a folder's files are."""

    run: str
    version: int
    digest: str  # of the elements held, 16 hex digits; of all: that of the version's manifest
    files: tuple[str, ...]
    weight_map: dict[str, int]  # tensor name -> index into files
    needs: dict[str, tuple[int, int]] | None = None  # elements held of each tensor; None: all
    whole: str = ""  # digest of the state that they are a part of; empty: all is held, or it is not known


class FetchedTile(NamedTuple):
    """A tile, and its coded bytes on this machine."""

    tile: Tile
    data: memoryview
    pack: str  # key


class Mapped:
    """A state's tensors in files, as arrays that write through."""

    def __init__(self, run: RunInfo, files: Sequence[Path], weight_map: Mapping[str, int]) -> None:
        """The files have been checked by check_contents."""
        self.run = run
        self.files = list(files)
        self.weight_map = dict(weight_map)
        views: dict[str, np.ndarray] = {}
        for file in self.files:
            content: np.ndarray = np.memmap(file, np.uint8, "r+")
            tensors = read_header(file, run.dtype)
            at = len(content) - sum(spec.nbytes for spec in tensors.values())
            for name, spec in tensors.items():
                views[name] = content[at : at + spec.nbytes].view(np.uint16)
                at += spec.nbytes
        self._views = [views[spec.name] for spec in run.tensors]
        sizes = [math.prod(spec.shape) for spec in run.tensors]
        self._places = [0, *itertools.accumulate(sizes)][:-1]

    def values(self, tensor: int) -> np.ndarray:
        """uint16 [elements]: the bits of the run's tensor of this index."""
        return self._views[tensor]

    def place(self, tensor: int) -> int:
        """Of its first element in the whole state, see codec/digest.py."""
        return self._places[tensor]

    def digest(self, ranges: Ranges) -> int:
        """Read all elements in `ranges` and hash them, in threads."""
        jobs = [
            (tensor, start, min(start + 4 * TILE, stop))
            for tensor, (first, stop) in enumerate(ranges)
            for start in range(first, stop, 4 * TILE)
        ]

        def part(job: tuple[int, int, int]) -> int:
            tensor, start, stop = job
            return digest_of(self.values(tensor)[start:stop], self.place(tensor) + start)

        return sum(side_by_side(part, jobs, THREADS)) & MASK


class Shadow:
    """A folder whose files are the state of `version`."""

    def __init__(
        self,
        folder: Path,
        mapped: Mapped,
        version: int,
        digest: int,
        ranges: Ranges | None,
        whole: int | None = None,
    ) -> None:
        """`digest`: of the elements held. `ranges`: None where that are all. `whole`: the digest of the whole state,
        of which they may be a part; None where it is not known."""
        self.folder, self.mapped = folder, mapped
        self.version, self.digest, self.whole = version, digest, whole
        self.needs = ranges

    @property
    def ranges(self) -> Ranges:
        return self.needs or full_ranges(self.mapped.run)

    def begin(self) -> None:
        """From here on the files are no version's state, until `settle`."""
        (self.folder / HELD).unlink(missing_ok=True)

    def settle(self, version: int, digest: int, whole: int | None) -> None:
        self.version, self.digest, self.whole = version, digest, whole
        run = self.mapped.run
        needs = None
        if self.needs is not None:
            needs = {spec.name: span for spec, span in zip(run.tensors, self.needs, strict=True)}
        held = Held(
            run.run,
            version,
            f"{digest:016x}",
            tuple(file.name for file in self.mapped.files),
            self.mapped.weight_map,
            needs,
            f"{whole:016x}" if needs is not None and whole is not None else "",
        )
        write_whole(self.folder / HELD, msgspec.json.encode(held))

    def apply(self, tiles: Sequence[FetchedTile]) -> int:
        """Change the elements; what that adds to the digest. Between `begin` and `settle`.

        Raises Corrupt where a tile does not do what its table says; the files are then of no use.
        """

        def one(coded: FetchedTile) -> int:
            tile = coded.tile
            what = f"{coded.pack}: the tile at {tile.start} of {self.mapped.run.tensors[tile.tensor].name}"
            if tile_hash(coded.data) != tile.hash:
                raise Corrupt(f"{what} differs from its hash")
            values = self.mapped.values(tile.tensor)[tile.start : tile.start + tile.elements]
            try:
                done = apply_tile(
                    tile.mode, coded.data, values, self.mapped.place(tile.tensor) + tile.start
                )
            except Corrupt as error:
                raise Corrupt(f"{what} can't be read: {error.message}") from error
            if done != (tile.changed, tile.moved):
                raise Corrupt(
                    f"{what} changed {done[0]} elements and moved the digest by {done[1]:016x}, its table says "
                    f"{tile.changed} and {tile.moved:016x}: it was made from another state than the one here"
                )
            return tile.moved

        return sum(side_by_side(one, tiles, THREADS, to_the_end=True)) & MASK


def full_ranges(run: RunInfo) -> Ranges:
    return tuple((0, math.prod(spec.shape)) for spec in run.tensors)


def tile_ranges(run: RunInfo, needs: Mapping[str, tuple[int, int]]) -> Ranges:
    """Whole tiles around the needed elements: a tile can only be decoded as a whole. Raises ValueError for what the
    run does not have."""
    sizes = {spec.name: math.prod(spec.shape) for spec in run.tensors}
    for name, (start, stop) in needs.items():
        if not 0 <= start <= stop <= sizes.get(name, -1):
            raise ValueError(f"the run has no elements {start} to {stop} of {name}")
    ranges = []
    for name, size in sizes.items():
        start, stop = needs.get(name, (0, 0))
        ranges.append(
            (start // TILE * TILE, min(size, -(-stop // TILE) * TILE)) if start < stop else (0, 0)
        )
    return tuple(ranges)


def shard_names(count: int) -> list[str]:
    """As save_pretrained names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def shards_in(folder: Path) -> list[Path]:
    """Files with such names."""
    return sorted({*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")})


def read_held(folder: Path) -> Held | None:
    """None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode((folder / HELD).read_bytes(), type=Held)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def check_contents(run: RunInfo, files: Sequence[Path], weight_map: Mapping[str, int], what: str) -> None:
    """The files hold exactly the run's tensors, each where `weight_map` says. Raises Corrupt, naming `what`."""
    wanted = {spec.name: spec for spec in run.tensors}
    found: set[str] = set()
    for index, file in enumerate(files):
        for name, spec in read_header(file, run.dtype).items():
            if name not in wanted or name in found:
                raise Corrupt(f"{what}: file {index} holds an unexpected tensor {name}")
            if spec.shape != wanted[name].shape:
                raise Corrupt(f"{what}: {name} has shape {spec.shape}, the run's is {wanted[name].shape}")
            if weight_map.get(name) != index:
                raise Corrupt(f"{what}: {name} is not in the pack that the manifest says")
            found.add(name)
    if len(found) < len(wanted):
        raise Corrupt(f"{what} lacks {len(wanted) - len(found)} tensors, e.g. {min(wanted.keys() - found)}")
