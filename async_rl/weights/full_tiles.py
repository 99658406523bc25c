"""The tiles of a full state: where each of them lies in the packs, and what its bytes are checked by.

    Way.tile_digests    u64 little-endian of every tile, tensor by tensor in the order of run.json

A full state is cut as deltas are: at multiples of codec.TILE from the start of each tensor, whatever pack it lies in.
What a tile's elements add to the digest of the state (codec/digest.py) is what a tile that is read alone is checked
by. So nothing is hashed twice: the writer makes the state's digest from just these numbers, and a reader has to hash
what it holds anyway. They are 8 bytes for up to 2 MiB; as a manifest holds them, 5 millionths of the state. The place
of an element is part of its hash: a tile in the place of another is as wrong as one with a flipped bit. And they add
up to the digest of the whole state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from async_rl.errors import Corrupt
from async_rl.weights.codec import TILE, digest_of
from async_rl.weights.codec.digest import MASK
from async_rl.weights.lineage import Way
from async_rl.weights.packs import ITEM_BYTES, header
from async_rl.weights.run import RunInfo

__all__ = ["FullTile", "FullTiles", "first_tiles", "tile_digests"]

_DIGEST = np.dtype("<u8")

_Ranges = Sequence[tuple[int, int]]  # shadow.Ranges


class FullTile(NamedTuple):
    """Elements of one tensor, as they lie in a pack."""

    tensor: int  # index into the run's tensors
    start: int  # element of the tensor
    elements: int
    place: int  # of the first element in the whole state
    offset: int  # bytes from the start of the pack
    digest: int  # what the elements add to the state's

    @property
    def size(self) -> int:
        """Bytes."""
        return ITEM_BYTES * self.elements

    def right(self, data: bytes | bytearray | memoryview) -> bool:
        """Whether these are the tile's bytes."""
        if len(data) != self.size:
            return False
        return digest_of(np.frombuffer(data, np.uint16), self.place) == self.digest


class FullTiles:
    """Of one full way."""

    def __init__(self, run: RunInfo, way: Way, what: str) -> None:
        """Raises Corrupt, naming `what`, for digests of another number of tiles than the run's tensors have."""
        self._run, self._way, self._what = run, way, what
        sizes = [math.prod(spec.shape) for spec in run.tensors]
        self._sizes, self._places = sizes, [0, *accumulate(sizes)]
        self._first = first_tiles(run)
        self._packed: list[list[int]] = [[] for _ in way.packs]  # tensors, as they follow one another
        for tensor, spec in enumerate(run.tensors):
            number = way.weight_map.get(spec.name, len(way.packs))
            if number < len(way.packs):  # else what is put together lacks it: shadow.check_contents
                self._packed[number].append(tensor)
        coded = way.tile_digests
        self._digests: np.ndarray | None = None
        if coded is not UNSET:
            if len(coded) != self._first[-1] * _DIGEST.itemsize:
                raise Corrupt(f"{what} has {len(coded)} bytes of digests for {self._first[-1]} tiles")
            self._digests = np.frombuffer(coded, _DIGEST)

    @property
    def known(self) -> bool:
        """Whether there are digests: without them, a pack can only be checked as a whole."""
        return self._digests is not None

    def digest(self, ranges: _Ranges | None = None) -> int:
        """What the tiles of these elements (whole tiles; None: all) add up to. Only where they are `known`."""
        assert self._digests is not None
        if ranges is None:
            return int(self._digests.sum(dtype=np.uint64)) & MASK
        total = 0
        for first, (start, stop) in zip(self._first, ranges, strict=False):
            part = self._digests[first + start // TILE : first + -(-stop // TILE)]
            total += int(part.sum(dtype=np.uint64))
        return total & MASK

    def at(self, tensor: int, start: int) -> int:
        """The digest of the tile that begins at this element; 0 where none are known."""
        return 0 if self._digests is None else int(self._digests[self._first[tensor] + start // TILE])

    def header(self, number: int) -> bytes:
        """The first bytes of a pack: what it holds stands in the manifest, so they need not be read. Raises Corrupt
        where the manifest says another size than these and the tensors have."""
        specs = [self._run.tensors[tensor] for tensor in self._packed[number]]
        head = header(specs, self._run.dtype)
        pack = self._way.packs[number]
        if len(head) + sum(spec.nbytes for spec in specs) != pack.size:
            raise Corrupt(f"{pack.key} is not laid out as {self._what} says")
        return head

    def in_pack(self, number: int, ranges: _Ranges | None = None) -> Iterator[FullTile]:
        """A pack's tiles, as they follow one another; of these elements only, whole tiles (None: all)."""
        at = len(self.header(number))
        for tensor in self._packed[number]:
            size = self._sizes[tensor]
            begin, end = (0, size) if ranges is None else ranges[tensor]
            for start in range(begin, end, TILE):
                elements = min(start + TILE, end) - start
                place, offset = self._places[tensor] + start, at + ITEM_BYTES * start
                yield FullTile(tensor, start, elements, place, offset, self.at(tensor, start))
            at += ITEM_BYTES * size

    def wrong_in(self, number: int, content: memoryview) -> list[tuple[int, int]]:
        """Of a whole pack that is not what it should be: (start, length) in bytes of what differs; none: it is not
        known."""
        try:
            head = self.header(number)
        except Corrupt:  # nothing is known of where its tiles are
            return []
        wrong = [(0, len(head))] if content[: len(head)] != head else []
        for tile in self.in_pack(number):
            start, end = tile.offset, tile.offset + tile.size
            if not tile.right(content[start:end]):
                wrong.append((start, end - start))
        return wrong


def first_tiles(run: RunInfo) -> list[int]:
    """The number of each tensor's first tile, and at the end how many tiles there are."""
    return [0, *accumulate(-(-math.prod(spec.shape) // TILE) for spec in run.tensors)]


def tile_digests(digests: np.ndarray) -> bytes:
    """uint64 [tiles] as Way.tile_digests."""
    return digests.astype(_DIGEST).tobytes()
