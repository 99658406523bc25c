"""The digests of a state's tiles, made by all ranks together, each from its own rows (full_tiles.py says what for).

A rank's rows may begin and end inside a tile: what the ranks add to it is added up, as digests are sums.
"""

from __future__ import annotations

import os

import numpy as np
from msgspec import Struct

from async_rl.weights.changes import Cut, cut_tiles
from async_rl.weights.codec import TILE, digest_of
from async_rl.weights.codec.digest import MASK
from async_rl.weights.full_tiles import first_tiles
from async_rl.weights.parallel import side_by_side
from async_rl.weights.ranks import Ranks, exchange
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Shards, State
from async_rl.weights.surveys import digests_there

__all__ = ["sum_of", "tiles_of_rows", "tiles_of_state", "tiles_together"]


class _Part(Struct, frozen=True):
    """What one rank's rows add to the tiles in which it has any."""

    numbers: bytes  # int64 of each tile
    digests: bytes  # uint64


def tiles_of_state(ranks: Ranks, run: RunInfo, shards: Shards, state: State) -> np.ndarray:
    """Collective: uint64 [tiles], the digest of each tile of the whole state."""
    return tiles_together(ranks, tiles_of_rows(run, shards, state))


def tiles_of_rows(run: RunInfo, shards: Shards, state: State) -> np.ndarray:
    """uint64 [tiles]: what this rank's rows add to each."""
    first = first_tiles(run)
    cuts = list(cut_tiles(list(shards.parts())))

    def of(cut: Cut) -> int:
        bits = state.bits(run.tensors[cut.tensor].name)
        return digest_of(bits[cut.start - cut.row_start : cut.stop - cut.row_start], cut.place)

    tiles = np.zeros(first[-1], np.uint64)
    if state.on_device:
        found = digests_there(run, cuts, state)
    else:
        found = np.array(side_by_side(of, cuts, len(os.sched_getaffinity(0))), np.uint64)
    numbers = np.array([first[cut.tensor] + cut.start // TILE for cut in cuts], np.int64)
    np.add.at(tiles, numbers, found)
    return tiles


def tiles_together(ranks: Ranks, mine: np.ndarray) -> np.ndarray:
    """Collective: the sum over all ranks. Only tiles with rows of a rank travel: about one rank has each."""
    if ranks.size == 1:
        return mine
    numbers = np.flatnonzero(mine)
    total = np.zeros_like(mine)
    for part in exchange(ranks, _Part(numbers.tobytes(), mine[numbers].tobytes())):
        np.add.at(total, np.frombuffer(part.numbers, np.int64), np.frombuffer(part.digests, np.uint64))
    return total


def sum_of(tiles: np.ndarray) -> int:
    """The digest of the whole state."""
    return int(tiles.sum(dtype=np.uint64)) & MASK
