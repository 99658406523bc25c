"""Deltas on this machine's disk, and what several of them, one after the other, do to the weights.

    open_layers    their packs: fetched, verified, their tables checked
    aligned        tiles of several layers that overlap, directly or through others, as one span of a tensor
    net_steps      what all layers together do to a span: steps add
    recode         the same as one coded tile

Ranks may have cut the same tensor differently in different layers (another number of ranks after a resume), so tiles
are matched by overlap, not by position. A tile never crosses a multiple of codec.TILE, so neither does a span.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from async_rl.errors import Corrupt
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import (
    CodedTile,
    Mode,
    add_steps,
    apply_tile,
    encode_steps,
    encode_tile,
    tile_steps,
)
from async_rl.weights.codec.digest import MASK
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import Tile, pack_tiles, table_of, tile_hash
from async_rl.weights.fetch import Fetcher, holds
from async_rl.weights.lineage import Pack, Way
from async_rl.weights.run import RunInfo

__all__ = [
    "Layer",
    "Piece",
    "Span",
    "aligned",
    "net_steps",
    "open_layer",
    "open_layers",
    "recode",
]

Steps = tuple[np.ndarray, np.ndarray]
"""Positions in a span, uint32 [k], ascending, and steps, int16 [k]."""

_NO_STEPS: Steps = (np.zeros(0, np.uint32), np.zeros(0, np.int16))


class Piece(NamedTuple):
    tile: Tile
    data: memoryview  # the coded bytes


class Layer(NamedTuple):
    """One delta."""

    way: Way
    pieces: dict[int, list[Piece]]  # tensor -> its tiles by start

    @property
    def changed(self) -> int:
        return sum(piece.tile.changed for pieces in self.pieces.values() for piece in pieces)

    @property
    def moved(self) -> int:
        """What the delta adds to the digest, as its tables say."""
        return sum(piece.tile.moved for pieces in self.pieces.values() for piece in pieces) & MASK


class Span(NamedTuple):
    """Consecutive elements of a tensor, and the tiles of each layer that lie in it."""

    tensor: int
    start: int  # element
    elements: int
    layers: tuple[tuple[Piece, ...], ...]

    @property
    def moved(self) -> int:
        return sum(piece.tile.moved for pieces in self.layers for piece in pieces) & MASK


def open_layers(
    store: ObjectStore,
    run: RunInfo,
    ways: Sequence[Way],
    folder: Path,
    config: WeightsConfig,
    report: Callable[[int], None] = lambda done: None,
) -> list[Layer]:
    """Deltas' packs, fetched to `folder` (side by side) where they are not there yet, and mapped into memory.

    `report` is told the bytes that arrived. Raises Corrupt naming the object, StoreErrors, OSError.
    """
    wanted = {pack.key: (pack, _path(folder, pack)) for way in ways for pack in way.packs}
    missing = [(pack, path) for pack, path in wanted.values() if not holds(path, pack)]
    Fetcher(store, config).whole(missing, report)
    return [_mapped(store, run, way, folder) for way in ways]


def open_layer(
    store: ObjectStore,
    run: RunInfo,
    way: Way,
    folder: Path,
    config: WeightsConfig,
    report: Callable[[int], None] = lambda done: None,
) -> Layer:
    """One of them."""
    return open_layers(store, run, [way], folder, config, report)[0]


def _path(folder: Path, pack: Pack) -> Path:
    return folder / pack.key.replace("/", "-")


def _mapped(store: ObjectStore, run: RunInfo, way: Way, folder: Path) -> Layer:
    pieces: dict[int, list[Piece]] = {}
    for pack in way.packs:
        with _path(folder, pack).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        what = f"{pack.key} in {store.url}"
        for tile in pack_tiles(pack, bytes(data[table_of(pack, what).start :]), run.tensors, what):
            coded = data[tile.offset : tile.offset + tile.size]
            if tile_hash(coded) != tile.hash:
                raise Corrupt(f"{what}: the tile at byte {tile.offset} differs from its hash in the table")
            pieces.setdefault(tile.tensor, []).append(Piece(tile, coded))
    layer = Layer(way, {tensor: _in_order(pieces[tensor], run, tensor, store) for tensor in sorted(pieces)})
    if layer.changed != way.changed:
        raise Corrupt(
            f"the delta from version {way.base} ({way.packs[0].key if way.packs else 'no packs'}, …) of {store.url} "
            f"should change {way.changed} weights, its tables say {layer.changed}"
        )
    if not way.small and any(p.tile.mode == Mode.SMALL for each in layer.pieces.values() for p in each):
        raise Corrupt(f"{way.packs[0].key} in {store.url} has small tiles, which its record denies")
    return layer


def _in_order(pieces: list[Piece], run: RunInfo, tensor: int, store: ObjectStore) -> list[Piece]:
    """By start. Raises Corrupt where two packs change the same elements."""
    pieces.sort(key=lambda piece: piece.tile.start)
    for before, after in itertools.pairwise(pieces):
        if before.tile.start + before.tile.elements > after.tile.start:
            raise Corrupt(
                f"two packs of one delta of {store.url} change element {after.tile.start} of "
                f"{run.tensors[tensor].name}"
            )
    return pieces


def aligned(layers: Sequence[Layer]) -> Iterator[Span]:
    """By tensor and start: every tile of every layer once."""
    for tensor in sorted(set().union(*(layer.pieces for layer in layers))):
        entries = [
            (piece.tile.start, depth, piece)
            for depth, layer in enumerate(layers)
            for piece in layer.pieces.get(tensor, ())
        ]
        entries.sort(key=lambda entry: entry[:2])
        group: list[tuple[int, int, Piece]] = []
        end = 0
        for entry in entries:
            if group and entry[0] >= end:
                yield _span(tensor, group, end, len(layers))
                group = []
            group.append(entry)
            end = max(end, entry[0] + entry[2].tile.elements)
        yield _span(tensor, group, end, len(layers))


def _span(tensor: int, group: list[tuple[int, int, Piece]], end: int, depth: int) -> Span:
    start = group[0][0]
    layers = tuple(tuple(piece for _, at, piece in group if at == layer) for layer in range(depth))
    return Span(tensor, start, end - start, layers)


def net_steps(span: Span) -> Steps:
    """What all layers together do. Raises Corrupt, and ValueError for small tiles."""
    total = _NO_STEPS
    for pieces in span.layers:
        if not pieces:
            continue
        parts = [
            (tile_steps(piece.tile.mode, piece.data, piece.tile.elements), piece.tile.start - span.start)
            for piece in pieces
        ]
        positions = [steps[0] + np.uint32(offset) if offset else steps[0] for steps, offset in parts]
        moved = [steps[1] for steps, _ in parts]
        layer = (
            (positions[0], moved[0])
            if len(parts) == 1
            else (np.concatenate(positions), np.concatenate(moved))
        )
        total = layer if not len(total[0]) else add_steps(total, layer)
    return total


def recode(span: Span, place: int = 0, base: np.ndarray | None = None) -> CodedTile | None:
    """The span's net change as one tile; None where the layers cancel out.

    With `base`, the span's weights before the first layer (uint16 [elements], not changed), small tiles are read
    and written too; `place` is then that of the first element. Raises Corrupt.
    """
    if base is not None:
        return _recode_small(span, place, base)
    positions, steps = net_steps(span)
    if not len(positions):
        if span.moved:
            raise Corrupt(f"tiles of tensor {span.tensor} at {span.start} cancel out, their digests don't")
        return None
    mode, data = encode_steps(positions, steps, span.elements)
    return CodedTile(mode, data, len(positions), span.moved)


def _recode_small(span: Span, place: int, base: np.ndarray) -> CodedTile | None:
    after = base.copy()
    for pieces in span.layers:
        for piece in pieces:
            tile = piece.tile
            at = tile.start - span.start
            found = apply_tile(tile.mode, piece.data, after[at : at + tile.elements], place + at)
            if found != (tile.changed, tile.moved):
                raise Corrupt(
                    f"a tile of tensor {span.tensor} at {tile.start} changes {found[0]} weights and the digest by "
                    f"{found[1]:016x}; its table says {tile.changed} and {tile.moved:016x}"
                )
    coded = encode_tile(base, after, place, small=True)
    if (coded.moved if coded else 0) != span.moved:
        raise Corrupt(f"tiles of tensor {span.tensor} at {span.start} don't add up to their digests")
    return coded
