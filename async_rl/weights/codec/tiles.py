"""One tile: coded, decoded, composed.

The 16-bit floats of a tile are mapped to integers in value order by the bijection x ^ ((x >> 15) & 0x7fff) on int16;
the difference of two, modulo 2^16, is a *step*. Steps add, so deltas that are coded without the weights can be
composed without them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import zstandard

from async_rl.errors import Corrupt
from async_rl.weights.codec.digest import MASK, mix

__all__ = [
    "TILE",
    "CodedTile",
    "Mode",
    "add_steps",
    "apply_tile",
    "encode_steps",
    "encode_tile",
    "tile_steps",
]

TILE = 1 << 20
"""Elements. Tiles of a tensor begin at multiples of it; a rank's rows may cut one in two."""

Steps = tuple[np.ndarray, np.ndarray]
"""Positions uint32 [k], ascending, and steps int16 [k], none of them 0."""


class Mode(IntEnum):
    """How a tile's bytes are to be read."""

    STEPS = 1  # gaps and steps
    SMALL = 2  # gaps and steps with contexts from the base's exponents: can't be read without the base
    DENSE = 3  # a step for every element, as byte planes


class CodedTile(NamedTuple):
    mode: Mode
    data: bytes
    changed: int  # elements
    moved: int  # what the change adds to the state's digest, modulo 2^64


def ordered(bits: np.ndarray) -> np.ndarray:
    """uint16 bits -> int16 in value order; its own inverse (on the int16's bits)."""
    signed = bits.view(np.int16)
    return signed ^ ((signed >> 15) & 0x7FFF)


def encode_tile(base: np.ndarray, new: np.ndarray, place: int, *, small: bool = False) -> CodedTile | None:
    """The smallest coding of base -> new; None if nothing changed. `place`: of the first element, see digest.py.
    With `small` also the codings that need the base to be read are tried."""
    with np.errstate(over="ignore"):
        all_steps = ordered(new) - ordered(base)
    positions = np.flatnonzero(all_steps).astype(np.uint32)
    if not len(positions):
        return None
    mode, data = encode_steps(positions, all_steps[positions], len(base))
    moved = _moved(base[positions], new[positions], positions, place)
    return CodedTile(mode, data, len(positions), moved)


def apply_tile(mode: int, data: bytes | memoryview, values: np.ndarray, place: int) -> tuple[int, int]:
    """Change `values` in place; (changed, moved) as found. Raises Corrupt, after which `values` is undefined."""
    positions, steps = tile_steps(mode, data, len(values))
    before = values[positions]
    with np.errstate(over="ignore"):
        after = ordered((ordered(before) + steps).view(np.uint16)).view(np.uint16)
    values[positions] = after
    return len(positions), _moved(before, after, positions, place)


def tile_steps(mode: int, data: bytes | memoryview, count: int) -> Steps:
    """What a tile of `count` elements says, without the weights. Raises ValueError for SMALL, Corrupt."""
    if mode == Mode.SMALL:
        raise ValueError("a small tile can't be read without its base")
    try:
        planes = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=2 * count)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a coded tile can't be read: {error}") from error
    if mode != Mode.DENSE or len(planes) != 2 * count:
        raise Corrupt(f"a coded tile of mode {mode} holds {len(planes)} bytes for {count} elements")
    steps = np.frombuffer(planes, np.uint8).reshape(2, count).T.copy().view(np.int16).reshape(count)
    positions = np.flatnonzero(steps).astype(np.uint32)
    return positions, steps[positions]


def encode_steps(positions: np.ndarray, steps: np.ndarray, count: int) -> tuple[Mode, bytes]:
    """The smallest coding that can be read without the base. Positions ascend below `count`."""
    dense = np.zeros(count, np.int16)
    dense[positions] = steps
    planes = dense.view(np.uint8).reshape(count, 2).T.tobytes()
    return Mode.DENSE, zstandard.ZstdCompressor(level=1).compress(planes)


def add_steps(first: Steps, second: Steps) -> Steps:
    """What doing one change after the other does; steps that cancel are left out."""
    positions = np.concatenate([first[0], second[0]])
    steps = np.concatenate([first[1], second[1]])
    order = np.argsort(positions, kind="stable")
    positions, steps = positions[order], steps[order]
    starts = np.flatnonzero(np.diff(positions, prepend=-1))
    with np.errstate(over="ignore"):
        total = np.add.reduceat(steps, starts, dtype=np.int16) if len(steps) else steps
    left = total != 0
    return positions[starts][left].astype(np.uint32), total[left]


def _moved(before: np.ndarray, after: np.ndarray, positions: np.ndarray, place: int) -> int:
    keys = (positions.astype(np.uint64) + np.uint64(place)) << np.uint64(16)
    with np.errstate(over="ignore"):
        change = mix(keys | after).sum(dtype=np.uint64) - mix(keys | before).sum(dtype=np.uint64)
    return int(change) & MASK
