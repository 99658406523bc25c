"""What can be read without the weights: STEPS and DENSE.

    STEPS   varint changes | gaps, steps
    DENSE   varint changes | steps of all elements

A gap is the number of unchanged elements before a change. A step is sent as 0, 1, 2, … for -1, +1, -2, …, and in
DENSE one more, with 0 for no step.
"""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.jit import I16, I16_OUT, I64, U32, U32_OUT, inlined, int64, kernel, uint64
from async_rl.weights.codec.numbers import get_varint, pack, put_varint, unpack
from async_rl.weights.codec.rans import BAD
from async_rl.weights.codec.scratch import scratch

__all__ = [
    "decode_dense",
    "decode_steps",
    "dense_numbers",
    "dense_steps",
    "encode_dense",
    "encode_steps",
    "number_step",
    "step_number",
]

Steps = tuple[np.ndarray, np.ndarray]


def encode_steps(positions: np.ndarray, steps: np.ndarray, count: int) -> bytes:
    changes = len(positions)
    told = scratch("told", 2 * changes, np.uint32)
    _to_numbers(positions, steps, told[:changes], told[changes:])
    return put_varint(changes) + pack(told, np.array((changes, changes)), np.array((count, 0)))


def decode_steps(data: np.ndarray, count: int) -> Steps | None:
    """Of a tile of `count` elements; None for bytes that nobody wrote."""
    changes, at = get_varint(data, 0)
    if not 0 <= changes <= count:
        return None
    found = unpack(data, at, np.array((changes, changes)), np.array((count, 0)))
    if found is None:
        return None
    positions, steps = found[:changes], np.empty(changes, np.int16)
    return (positions, steps) if _from_numbers(positions, found[changes:], count, steps) != BAD else None


def encode_dense(numbers: np.ndarray, changes: int) -> bytes:
    """`numbers`: of every element, uint32, as elements.differences gives them."""
    return put_varint(changes) + pack(numbers, np.array((len(numbers),)), np.zeros(1, np.int64))


def decode_dense(data: np.ndarray, count: int) -> tuple[np.ndarray, int] | None:
    """Numbers below 2^16, and how many of them are not 0; None for bytes that nobody wrote."""
    changes, at = get_varint(data, 0)
    found = unpack(data, at, np.array((count,)), np.zeros(1, np.int64), keep=False)
    if found is None or count == 0 or _changes_in(found) != changes:
        return None
    return found, changes


def dense_numbers(positions: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    numbers = np.zeros(count, np.uint32)
    _scatter(positions, steps, numbers)
    return numbers


def dense_steps(numbers: np.ndarray, changes: int) -> Steps:
    positions, steps = np.empty(changes + 1, np.uint32), np.empty(changes + 1, np.int16)
    _gather(numbers, positions, steps)
    return positions[:changes], steps[:changes]


@kernel(I64, U32)
def _changes_in(numbers: np.ndarray) -> int:
    """How many are not 0, or BAD where one is 2^16 or more."""
    found, all_bits = 0, np.uint32(0)
    for i in range(len(numbers)):
        found += int64(numbers[i] != 0)
        all_bits |= numbers[i]
    return found if all_bits <= np.uint32(0xFFFF) else BAD


@inlined
def step_number(step: int) -> int:
    """A step, of which 16 bits count -> 0 … 65535: 0, -1, 1, -2, 2, …"""
    return ((step << 1) ^ -((step >> 15) & 1)) & 0xFFFF


@inlined
def number_step(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


@kernel(I64, U32, I16, U32_OUT, U32_OUT)
def _to_numbers(positions: np.ndarray, steps: np.ndarray, gaps: np.ndarray, numbers: np.ndarray) -> int:
    before = -1
    for i in range(len(positions)):
        position = int64(positions[i])
        gaps[i] = position - before - 1
        before = position
        numbers[i] = step_number(int64(steps[i])) - 1
    return 0


@kernel(I64, U32_OUT, U32, I64, I16_OUT)
def _from_numbers(gaps: np.ndarray, numbers: np.ndarray, count: int, steps: np.ndarray) -> int:
    """Gaps become positions, in place. Positions only grow, and 2^31 gaps below 2^32 don't overflow."""
    position, largest = -1, 0
    for i in range(len(gaps)):
        position += int64(gaps[i]) + 1
        gaps[i] = position
        number = int64(numbers[i])
        largest = max(largest, number)
        steps[i] = number_step(number + 1)
    return 0 if position < count and largest < 0xFFFF else BAD


@kernel(I64, U32, I16, U32_OUT)
def _scatter(positions: np.ndarray, steps: np.ndarray, numbers: np.ndarray) -> int:
    for i in range(len(positions)):
        numbers[positions[i]] = step_number(int64(steps[i]))
    return 0


@kernel(I64, U32, U32_OUT, I16_OUT)
def _gather(numbers: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> int:
    """The outputs hold one more than there are changes."""
    found = 0
    for i in range(len(numbers)):
        number = int64(numbers[i])
        positions[uint64(found)] = i  # overwritten unless something changed
        steps[uint64(found)] = number_step(number)
        found += int64(number != 0)
    return found
