"""Kernels for what can be read without the weights: STEPS and DENSE.

    STEPS   number of changes | flags, tables | states, words of the gaps, then of the steps | their low bits
    DENSE   number of changes | flags, table  | states, words of the steps of all elements   | their low bits

A gap is the number of unchanged elements before a change. A step is sent as 0, 1, 2, … for -1, +1, -2, …, and in
DENSE one more, with 0 for no step. The number is a varint; flags and tables fill whole bytes.
"""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.jit import I16, I16_OUT, I64, U8, U8_OUT, U32, U32_OUT, helper, kernel
from async_rl.weights.codec.rans import (
    BAD,
    LOW,
    SYMBOLS,
    TOTAL,
    all_used,
    close_bits,
    close_symbols,
    fold,
    get_bits,
    get_symbols,
    get_table,
    get_varint,
    open_states,
    put_bits,
    put_symbols,
    put_table,
    put_varint,
    spread,
    unfold,
)

__all__ = ["decode_dense", "decode_steps", "encode_dense", "encode_steps", "room_for"]

IN_TURNS = 2048  # symbols from which four states are worth their 8 bytes
_HEADER = 1024  # bytes, more than two tables can take


def room_for(numbers: int) -> int:
    """Bytes that coding so many numbers can take at most: 12 bits of symbol, 28 left open."""
    return _HEADER + 6 * numbers


@helper
def step_number(step: int) -> int:
    """int16 -> 0 … 65535: 0, -1, 1, -2, 2, …"""
    return ((step << 1) ^ (step >> 15)) & 0xFFFF


@helper
def number_step(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


@kernel(I64, U32, I16, I64, U8_OUT)
def encode_steps(positions: np.ndarray, steps: np.ndarray, count: int, out: np.ndarray) -> int:
    """Bytes written to `out` (zeros, room_for(2 k))."""
    k = len(positions)
    at = put_varint(k, out, 0)
    if k == 0:
        return at
    values = np.empty(k, np.uint32)
    before = -1
    for i in range(k):
        values[i] = np.int64(positions[i]) - before - 1
        before = np.int64(positions[i])
    low = np.empty(8 * k + 8, np.uint8)  # low bits
    gaps, gap_counts = np.empty(k, np.uint8), np.zeros(SYMBOLS, np.int64)
    end, held, fill = fold(values, gaps, gap_counts, low, 0, 0, 0)
    for i in range(k):
        values[i] = step_number(np.int64(steps[i])) - 1
    symbols, counts = np.empty(k, np.uint8), np.zeros(SYMBOLS, np.int64)
    end, held, fill = fold(values, symbols, counts, low, end, held, fill)
    end = close_bits(low, end, held, fill)

    states = np.full(4 if 2 * k >= IN_TURNS else 1, LOW, np.int64)
    bit = put_bits(np.int64(len(states) == 4), 1, out, 8 * at)
    gap_frequencies, frequencies = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.int64)
    bit, _ = put_table(gap_counts, count, gap_frequencies, out, bit)
    bit, _ = put_table(counts, 0, frequencies, out, bit)
    words = np.empty(2 * k + 8, np.uint16)
    first = put_symbols(symbols, frequencies, states, words, len(words) - 1)
    first = put_symbols(gaps, gap_frequencies, states, words, first)
    at = close_symbols(states, words, first, out, (bit + 7) >> 3)
    out[at : at + end] = low[:end]
    return at + end


@kernel(I64, U8, I64, U32_OUT, I16_OUT)
def decode_steps(data: np.ndarray, count: int, positions: np.ndarray, steps: np.ndarray) -> int:
    """Fills both, whose length is the number of changes that `data` begins with; that number, or BAD."""
    k, at = get_varint(data, 0)
    if k != len(positions) or k != len(steps) or k > count:
        return BAD
    if k == 0:
        return 0 if at == len(data) else BAD
    four = get_bits(data, 8 * at, 1)
    gap_frequencies, frequencies = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.int64)
    bit = get_table(data, 8 * at + 1, count, gap_frequencies)
    if bit < 0:
        return BAD
    bit = get_table(data, bit, 0, frequencies)
    if bit < 0:
        return BAD
    states = np.empty(4 if four else 1, np.int64)
    at = open_states(states, data, (bit + 7) >> 3)
    if at < 0:
        return BAD
    table = np.empty(TOTAL, np.uint32)
    gaps, symbols = np.empty(k, np.uint8), np.empty(k, np.uint8)
    spread(gap_frequencies, table)
    at = get_symbols(gaps, table, states, data, at, len(data))
    if at < 0:
        return BAD
    spread(frequencies, table)
    at = get_symbols(symbols, table, states, data, at, len(data))
    if at < 0 or not all_used(states):
        return BAD
    bit = unfold(gaps, positions, data, 8 * at, len(data))
    if bit < 0:
        return BAD
    before = -1
    for i in range(k):
        before += np.int64(positions[i]) + 1
        positions[i] = before
    if before >= count:  # they only grow, and 2^31 gaps of 2^32 don't overflow
        return BAD
    values = np.empty(k, np.uint32)
    bit = unfold(symbols, values, data, bit, len(data))
    if bit < 0 or (bit + 7) >> 3 != len(data):
        return BAD
    largest = np.int64(0)
    for i in range(k):
        largest = max(largest, np.int64(values[i]))
        steps[i] = number_step(np.int64(values[i]) + 1)
    return k if largest < 0xFFFF else BAD


@kernel(I64, U32, I16, I64, U8_OUT)
def encode_dense(positions: np.ndarray, steps: np.ndarray, count: int, out: np.ndarray) -> int:
    """Bytes written to `out` (zeros, room_for(count))."""
    at = put_varint(len(positions), out, 0)
    values = np.zeros(count, np.uint32)
    for i in range(len(positions)):
        values[positions[i]] = step_number(np.int64(steps[i]))
    low = np.empty(4 * count + 8, np.uint8)
    symbols, counts = np.empty(count, np.uint8), np.zeros(SYMBOLS, np.int64)
    end, held, fill = fold(values, symbols, counts, low, 0, 0, 0)
    end = close_bits(low, end, held, fill)
    states = np.full(4 if count >= IN_TURNS else 1, LOW, np.int64)
    bit = put_bits(np.int64(len(states) == 4), 1, out, 8 * at)
    frequencies = np.empty(SYMBOLS, np.int64)
    bit, _ = put_table(counts, 0, frequencies, out, bit)
    words = np.empty(count + 8, np.uint16)
    first = put_symbols(symbols, frequencies, states, words, len(words) - 1)
    at = close_symbols(states, words, first, out, (bit + 7) >> 3)
    out[at : at + end] = low[:end]
    return at + end


@kernel(I64, U8, I64, U32_OUT, I16_OUT)
def decode_dense(data: np.ndarray, count: int, positions: np.ndarray, steps: np.ndarray) -> int:
    """As decode_steps, with an element more in `positions` and in `steps`."""
    k, at = get_varint(data, 0)
    if k + 1 != len(positions) or k + 1 != len(steps) or k > count:
        return BAD
    four = get_bits(data, 8 * at, 1)
    frequencies = np.empty(SYMBOLS, np.int64)
    bit = get_table(data, 8 * at + 1, 0, frequencies)
    if four < 0 or bit < 0:
        return BAD
    states = np.empty(4 if four else 1, np.int64)
    at = open_states(states, data, (bit + 7) >> 3)
    if at < 0:
        return BAD
    table = np.empty(TOTAL, np.uint32)
    spread(frequencies, table)
    symbols = np.empty(count, np.uint8)
    at = get_symbols(symbols, table, states, data, at, len(data))
    if at < 0 or not all_used(states):
        return BAD
    values = np.empty(count, np.uint32)
    bit = unfold(symbols, values, data, 8 * at, len(data))
    if bit < 0 or (bit + 7) >> 3 != len(data):
        return BAD
    found = 0
    for i in range(count):
        number = np.int64(values[i])
        positions[found] = i  # the element more is for the last, overwritten unless something changed
        steps[found] = number_step(number)
        found += number != 0
        if found > k or number > 0xFFFF:
            return BAD
    return k if found == k else BAD
