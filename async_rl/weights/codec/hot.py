"""The small mode's hot elements, those whose exponent is below the model's limit: every one's step is told, 0
included, in the sequence of its exponent's group."""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.elements import ordered, put_places
from async_rl.weights.codec.jit import (
    I16_OUT,
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16,
    U32,
    U32_OUT,
    below_64,
    int64,
    kernel,
    uint64,
)
from async_rl.weights.codec.model import EXPONENTS, GROUPS, Model
from async_rl.weights.codec.rans import BAD
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import number_step, step_number

__all__ = ["deal_hot", "find_hot", "tell_hot"]


def find_hot(base: np.ndarray, model: Model) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions uint32 and groups uint8 of the hot elements, in scratch, and how many each group has, int64
    [GROUPS + 1]."""
    sizes = np.zeros(GROUPS + 1, np.int64)
    hot, groups = scratch("hot", len(base), np.uint32), scratch("hot_groups", len(base), np.uint8)
    found = _hot(base, model.limit, model.groups, hot, groups, sizes) if model.limit else 0
    return hot[:found], groups[:found], sizes


@kernel(I64, U16, I64, U8, U32_OUT, U8_OUT, I64_OUT)
def _hot(
    base: np.ndarray,
    limit: int,
    groups: np.ndarray,
    positions: np.ndarray,
    told_by: np.ndarray,
    sizes: np.ndarray,
) -> int:
    """Positions and groups of all elements whose exponent is below the limit, counted in `sizes`; how many."""
    found = at = 0
    while at + 64 <= len(base):
        below = below_64(base, at, limit << 7) if limit < EXPONENTS else ~uint64(0)
        found = put_places(below, at, positions, found)
        at += 64
    for i in range(at, len(base)):
        if (int64(base[i]) >> 7) & 0xFF < limit:
            positions[uint64(found)] = i
            found += 1
    for i in range(found):
        group = groups[(int64(base[uint64(positions[i])]) >> 7) & 0xFF]
        told_by[i] = group
        sizes[uint64(group)] += 1
    return found


@kernel(I64, U16, U16, U32, U8, I64_IN, U32_OUT)
def tell_hot(
    base: np.ndarray,
    new: np.ndarray,
    hot: np.ndarray,
    told_by: np.ndarray,
    starts: np.ndarray,
    told: np.ndarray,
) -> int:
    """The steps of hot elements into `told`, where each group starts."""
    cursors = starts.copy()
    for i in range(len(hot)):
        group = uint64(told_by[i])
        cursor = cursors[group]
        cursors[group] = cursor + 1
        position = uint64(hot[i])
        told[uint64(cursor)] = step_number(ordered(int64(new[position])) - ordered(int64(base[position])))
    return len(hot)


@kernel(I64, U32, U8, U32, I64_IN, U32_OUT, I16_OUT)
def deal_hot(
    hot: np.ndarray,
    told_by: np.ndarray,
    told: np.ndarray,
    starts: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Gives every hot element the next step of its group; those of 0 are left out. The number of changes, or BAD."""
    cursors = starts.copy()
    made = 0
    largest = 0
    for i in range(len(hot)):
        group = uint64(told_by[i])
        cursor = cursors[group]
        cursors[group] = cursor + 1
        number = int64(told[uint64(cursor)])
        largest = max(largest, number)
        positions[uint64(made)] = hot[i]  # overwritten unless something changed: the outputs hold one more
        steps[uint64(made)] = number_step(number)
        made += int64(number != 0)
    return made if largest <= 0xFFFF else BAD
