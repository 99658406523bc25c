"""One tile: coded, decoded, composed.

The 16-bit floats of a tile are mapped to integers in value order by the bijection x ^ ((x >> 15) & 0x7fff) on int16;
the difference of two, modulo 2^16, is a *step*. Steps add, so deltas that are coded without the weights can be
composed without them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from async_rl.errors import Corrupt
from async_rl.weights.codec.scratch import scratch

__all__ = [
    "TILE",
    "CodedTile",
    "Found",
    "Mode",
    "add_steps",
    "apply_tile",
    "encode_found",
    "encode_steps",
    "encode_tile",
    "small_steps",
    "tile_numbers",
    "tile_steps",
]

TILE = 1 << 20
"""Elements. Tiles of a tensor begin at multiples of it; a rank's rows may cut one in two."""

SMALL_FROM = 64
"""Changes in a tile. With fewer, telling the exponents' probabilities costs more than it saves."""

SMALL_GAIN = 0.97
"""The small mode is tried where its entropy is below this part of that without context: it takes twice the time."""

CLUSTERED = 0.95
"""Where the small mode needs less than this part of its entropy, changes are in clusters, and telling those without
context may be shorter still."""

Steps = tuple[np.ndarray, np.ndarray]
"""Positions uint32 [k], ascending, and steps int16 [k], none of them 0."""


class Mode(IntEnum):
    """How a tile's bytes are to be read."""

    STEPS = 1  # gaps and steps
    SMALL = 2  # gaps and steps with contexts from the base's exponents: can't be read without the base
    DENSE = 3  # a step for every element


class CodedTile(NamedTuple):
    mode: Mode
    data: bytes
    changed: int  # elements
    moved: int  # what the change adds to the state's digest, modulo 2^64


class Found(NamedTuple):
    """What a tile changes, at least one element, found where the weights are (tensors.py)."""

    elements: int
    changed: int
    moved: int
    told: (
        Steps | np.ndarray
    )  # or a step of every element: uint16 [elements] as elements.differences numbers them
    exponents: np.ndarray | None = None  # of the base, uint8 [elements]; where the small mode may be tried


def encode_tile(base: np.ndarray, new: np.ndarray, place: int, *, small: bool = False) -> CodedTile | None:
    """The smallest coding of base -> new; None if nothing changed. `place`: of the first element, see digest.py.
    With `small` also the coding that needs the base to be read is tried, where it promises to be smaller."""
    from async_rl.weights.codec import elements
    from async_rl.weights.codec import steps as kernels

    found = scratch("positions", len(base), np.uint32)
    positions = found[: elements.find(base, new, found)]
    changed = len(positions)
    if not changed:
        return None
    if _is_dense(changed, len(base)) and not small:
        numbers = scratch("told", len(base), np.uint32)
        moved = int(elements.differences(base, new, place, numbers))
        return CodedTile(Mode.DENSE, kernels.encode_dense(numbers, changed), changed, moved)
    steps = np.empty(changed, np.int16)
    moved = int(elements.measure(base, new, place, positions, steps))
    return _smallest(base, new, positions, steps, moved, small=small and changed >= SMALL_FROM)


def encode_found(found: Found) -> CodedTile:
    """What encode_tile makes of the same change, byte for byte: of the base, the small mode looks at exponents
    only."""
    from async_rl.weights.codec import steps as kernels

    if isinstance(found.told, tuple):
        positions, steps = found.told
    else:
        numbers = found.told.astype(np.uint32)
        if _is_dense(found.changed, found.elements) and found.exponents is None:
            data = kernels.encode_dense(numbers, found.changed)
            return CodedTile(Mode.DENSE, data, found.changed, found.moved)
        positions, steps = kernels.dense_steps(numbers, found.changed)
    if found.exponents is None:
        return CodedTile(*encode_steps(positions, steps, found.elements), found.changed, found.moved)
    base, new = _stand_in(found.exponents, positions, steps)
    return _smallest(base, new, positions, steps, found.moved, small=True)


def _stand_in(
    exponents: np.ndarray, positions: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weights that have these exponents, and what these steps make of them; in scratch."""
    from async_rl.weights.codec import elements

    base = scratch("stand_in", len(exponents), np.uint16)
    new = scratch("changed_stand_in", len(exponents), np.uint16)
    np.left_shift(exponents, 7, out=base, dtype=np.uint16)
    new[:] = base
    elements.apply(new, positions, steps, 0)
    return base, new


def _smallest(
    base: np.ndarray, new: np.ndarray, positions: np.ndarray, steps: np.ndarray, moved: int, *, small: bool
) -> CodedTile:
    from async_rl.weights.codec.model import plan_small
    from async_rl.weights.codec.small import encode_small

    changed, data = len(positions), None
    if small:
        plan = plan_small(base, positions, steps)
        if plan.bits < SMALL_GAIN * plan.bits_without:
            data = encode_small(base, new, positions, steps, plan)
            if 8 * len(data) > CLUSTERED * plan.bits:
                return CodedTile(Mode.SMALL, data, changed, moved)
    mode, plain = encode_steps(positions, steps, len(base))
    if data is not None and len(data) < len(plain):
        mode, plain = Mode.SMALL, data
    return CodedTile(mode, plain, changed, moved)


def apply_tile(mode: int, data: bytes | memoryview, values: np.ndarray, place: int) -> tuple[int, int]:
    """Change `values` in place; (changed, moved) as found. Raises Corrupt, with `values` as they were."""
    from async_rl.weights.codec import elements

    if mode == Mode.DENSE:
        numbers, changed = tile_numbers(data, len(values))
        return changed, int(elements.apply_all(values, numbers, place))
    if mode == Mode.SMALL:
        return _apply_small(data, values, place)
    positions, steps = tile_steps(mode, data, len(values))
    return len(positions), int(elements.apply(values, positions, steps, place))


def _apply_small(data: bytes | memoryview, values: np.ndarray, place: int) -> tuple[int, int]:
    from async_rl.weights.codec.small import apply_small

    done = apply_small(np.frombuffer(data, np.uint8), values, place)
    if done is None:
        raise Corrupt(
            f"a coded tile of mode {Mode.SMALL:d}, {len(data)} bytes, contradicts itself or its base"
        )
    return done


def small_steps(data: bytes | memoryview, exponents: np.ndarray) -> Steps:
    """What a SMALL tile says, given the exponents of its base: uint8 [count]. Raises Corrupt."""
    from async_rl.weights.codec import elements

    nothing = np.empty(0, np.uint32), np.empty(0, np.int16)
    base, new = _stand_in(exponents, *nothing)
    _apply_small(data, new, 0)
    found = np.empty(len(base), np.uint32)
    positions = found[: elements.find(base, new, found)]
    steps = np.empty(len(positions), np.int16)
    elements.measure(base, new, 0, positions, steps)
    return positions, steps


def tile_steps(mode: int, data: bytes | memoryview, count: int) -> Steps:
    """What a tile of `count` elements says, without the weights. Raises ValueError for SMALL, Corrupt."""
    from async_rl.weights.codec import steps as kernels

    if mode == Mode.SMALL:
        raise ValueError("a small tile can't be read without its base")
    if mode == Mode.DENSE:
        return kernels.dense_steps(*tile_numbers(data, count))
    if mode != Mode.STEPS:
        raise Corrupt(f"a coded tile has the unknown mode {mode}")
    found = kernels.decode_steps(np.frombuffer(data, np.uint8), count)
    if found is None:
        raise Corrupt(f"a coded tile of mode {mode}, {len(data)} bytes, contradicts itself")
    return found


def tile_numbers(data: bytes | memoryview, count: int) -> tuple[np.ndarray, int]:
    """What a DENSE tile says of each of `count` elements, uint32 and in scratch, and how many of them change. Raises
    Corrupt."""
    from async_rl.weights.codec import steps as kernels

    found = kernels.decode_dense(np.frombuffer(data, np.uint8), count)
    if found is None:
        raise Corrupt(f"a coded tile of mode {Mode.DENSE:d}, {len(data)} bytes, contradicts itself")
    return found


def encode_steps(positions: np.ndarray, steps: np.ndarray, count: int) -> tuple[Mode, bytes]:
    """The smallest coding that can be read without the base. Positions ascend below `count`."""
    from async_rl.weights.codec import steps as kernels

    if _is_dense(len(positions), count):
        numbers = kernels.dense_numbers(positions, steps, count)
        return Mode.DENSE, kernels.encode_dense(numbers, len(positions))
    return Mode.STEPS, kernels.encode_steps(positions, steps, count)


def _is_dense(changed: int, count: int) -> bool:
    """Whether a step for every element takes less time than gaps and steps; in bytes there is little between them."""
    return 2 * changed > count


def add_steps(first: Steps, second: Steps) -> Steps:
    """What doing one change after the other does; steps that cancel are left out."""
    from async_rl.weights.codec import elements

    room = len(first[0]) + len(second[0])
    positions, steps = np.empty(room, np.uint32), np.empty(room, np.int16)
    left = elements.merge(*first, *second, positions, steps)
    return positions[:left], steps[:left]
