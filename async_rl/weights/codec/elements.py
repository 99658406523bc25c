"""Kernels over the weights themselves: find changes, make them, hash, add changes up.

Weights are uint16 [n] (bits); a change is positions uint32 [k], ascending, and steps int16 [k], never 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from async_rl.weights.codec.jit import (
    I16,
    I16_OUT,
    I64,
    U16,
    U16_OUT,
    U32,
    U32_OUT,
    U64,
    count_bits,
    differ_64,
    inlined,
    int64,
    kernel,
    low_bit,
    uint64,
)

__all__ = [
    "apply",
    "apply_all",
    "differences",
    "digest",
    "find",
    "measure",
    "merge",
    "ordered",
    "put_places",
]


@inlined
def _mix(key: Any) -> Any:
    key ^= key >> uint64(30)
    key *= uint64(0xBF58476D1CE4E5B9)
    key ^= key >> uint64(27)
    key *= uint64(0x94D049BB133111EB)
    return key ^ (key >> uint64(31))


@inlined
def _hash(place: int, bits: int) -> Any:
    return _mix(uint64((place << 16) | bits))


@inlined
def ordered(bits: int) -> int:
    """Sign and magnitude -> two's complement of 16 bits, one to one: -0 is just below +0. Its own inverse."""
    return bits ^ ((bits >> 15) * 0x7FFF)


@kernel(U64, U16, I64)
def digest(values: np.ndarray, place: int) -> Any:
    total = uint64(0)
    for i in range(len(values)):
        total += _hash(place + i, int64(values[i]))
    return total


@inlined
def put_places(mask: Any, at: int, positions: np.ndarray, found: int) -> int:
    """Writes `at` plus the index of every set bit from positions[found] on, where 64 are left; the place after. Four
    are written always, as most masks have no more, and how many can't be predicted."""
    count: int = count_bits(mask)
    end = found + count
    for i in range(4):
        positions[uint64(found + i)] = at + low_bit(mask)
        mask &= mask - uint64(1)
    if count > 4:
        for i in range(4, 8):
            positions[uint64(found + i)] = at + low_bit(mask)
            mask &= mask - uint64(1)
        found += 8
        while found < end:
            positions[uint64(found)] = at + low_bit(mask)
            mask &= mask - uint64(1)
            found += 1
    return end


@kernel(I64, U16, U16, U32_OUT)
def find(base: np.ndarray, new: np.ndarray, positions: np.ndarray) -> int:
    """Fills `positions` (of len(base)) with where the two differ; how many."""
    found = at = 0
    while at + 64 <= len(base):
        found = put_places(differ_64(base, new, at), at, positions, found)
        at += 64
    for i in range(at, len(base)):
        if base[i] != new[i]:
            positions[uint64(found)] = i
            found += 1
    return found


@kernel(U64, U16, U16, I64, U32, I16_OUT)
def measure(base: np.ndarray, new: np.ndarray, place: int, positions: np.ndarray, steps: np.ndarray) -> Any:
    """Fills in the steps at `positions`; what the change adds to the digest."""
    total = uint64(0)
    for j in range(len(positions)):
        i = int64(positions[j])
        before, after = int64(base[i]), int64(new[i])
        steps[j] = ordered(after) - ordered(before)
        total += _hash(place + i, after) - _hash(place + i, before)
    return total


@kernel(U64, U16, U16, I64, U32_OUT)
def differences(base: np.ndarray, new: np.ndarray, place: int, numbers: np.ndarray) -> Any:
    """Fills in the step of every element, as a number: 0, 1, 2, 3, … for 0, -1, 1, -2, …; what the change adds to the
    digest."""
    total = uint64(0)
    for i in range(len(base)):
        before, after = int64(base[i]), int64(new[i])
        step = ordered(after) - ordered(before)
        numbers[i] = ((step << 1) ^ -((step >> 15) & 1)) & 0xFFFF
        total += _hash(place + i, after) - _hash(place + i, before)
    return total


@kernel(U64, U16_OUT, U32, I64)
def apply_all(values: np.ndarray, numbers: np.ndarray, place: int) -> Any:
    """The inverse of differences, in place; what that adds to the digest. Numbers are below 2^16."""
    total = uint64(0)
    for i in range(len(values)):
        number = int64(numbers[i])
        before = int64(values[i])
        after = ordered((ordered(before) + ((number >> 1) ^ -(number & 1))) & 0xFFFF)
        values[i] = after
        total += _hash(place + i, after) - _hash(place + i, before)
    return total


@kernel(U64, U16_OUT, U32, I16, I64)
def apply(values: np.ndarray, positions: np.ndarray, steps: np.ndarray, place: int) -> Any:
    """Changes `values` in place; what that adds to the digest. Positions must lie inside."""
    total = uint64(0)
    for j in range(len(positions)):
        i = int64(positions[j])
        before = int64(values[i])
        after = ordered((ordered(before) + int64(steps[j])) & 0xFFFF)
        values[i] = after
        total += _hash(place + i, after) - _hash(place + i, before)
    return total


@kernel(I64, U32, I16, U32, I16, U32_OUT, I16_OUT)
def merge(
    positions_a: np.ndarray,
    steps_a: np.ndarray,
    positions_b: np.ndarray,
    steps_b: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
) -> int:
    """One change after the other, as one; the number of steps left. Outputs hold len(a) + len(b)."""
    a = b = made = 0
    while a < len(positions_a) and b < len(positions_b):
        at_a, at_b = int64(positions_a[a]), int64(positions_b[b])
        here = min(at_a, at_b)
        step = int64(0)
        if at_a == here:
            step += int64(steps_a[a])
            a += 1
        if at_b == here:
            step += int64(steps_b[b])
            b += 1
        positions[made] = here
        steps[made] = step
        if step & 0xFFFF:
            made += 1
    for i in range(a, len(positions_a)):
        positions[made] = positions_a[i]
        steps[made] = steps_a[i]
        made += 1
    for i in range(b, len(positions_b)):
        positions[made] = positions_b[i]
        steps[made] = steps_b[i]
        made += 1
    return made
