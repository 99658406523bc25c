"""The small mode's hot elements, those whose exponent is below the model's limit: every one's step is told, 0
included, in the sequence of its exponent's group."""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.elements import ordered
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
    int64,
    kernel,
    uint64,
)
from async_rl.weights.codec.model import GROUPS, Model
from async_rl.weights.codec.rans import BAD
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import number_step, step_number

__all__ = ["deal_hot", "group_hot", "group_into", "tell_hot"]

_ROW = 32  # more than GROUPS


def group_hot(base: np.ndarray, hot: np.ndarray, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Groups, uint8 and in scratch, of the elements at positions `hot`, and their sizes, int64 [GROUPS + 1]."""
    sizes = np.zeros(GROUPS + 1, np.int64)
    groups = scratch("hot_groups", len(hot), np.uint8)
    group_into(base, hot, model.groups, groups, sizes)
    return groups, sizes


@kernel(I64, U16, U32, U8, U8_OUT, I64_OUT)
def group_into(
    base: np.ndarray, hot: np.ndarray, groups: np.ndarray, told_by: np.ndarray, sizes: np.ndarray
) -> int:
    """Fills in the group of each hot element; adds to their sizes, [GROUPS + 1]."""
    tallies = np.zeros(4 * _ROW, np.int64)  # four, so that no sum waits for itself
    for i in range(len(hot)):
        group = groups[(int64(base[uint64(hot[i])]) >> 7) & 0xFF]
        told_by[i] = group
        tallies[uint64((i & 3) * _ROW + int64(group))] += 1
    for group in range(GROUPS + 1):
        for turn in range(4):
            sizes[group] += tallies[turn * _ROW + group]
    return len(hot)


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
