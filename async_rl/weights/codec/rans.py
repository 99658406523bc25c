"""Entropy coding: numbers -> symbols and open bits -> table rANS, and back. Kernels; numbers.py puts them together.

rANS (Duda 2013, arXiv:1311.2540): states of 32 bits, words of 16, frequencies that add up to TOTAL = 2^12. Long
sequences take turns on four states, so that four symbols are decoded at once. The decoder ends where the encoder
began, with every state at LOW and no word left: most damage shows there.

A number is coded as a symbol and, from 8 on, some of its low bits as they are: log-linear, four symbols an octave.
"""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.jit import (
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16_OUT,
    U32,
    helper,
    high_bit,
    int64,
    kernel,
    load_u16,
    load_u64,
    store_u64,
    uint64,
)

__all__ = [
    "BAD",
    "LOW",
    "SYMBOLS",
    "fold",
    "get_symbols",
    "low_bits_of",
    "lowest_of",
    "put_symbols",
    "symbol_of",
    "unfold",
]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
SYMBOLS = 128  # of numbers below 2^32
LOW = 1 << 16  # states stay in LOW … 2^32 - 1
BAD = -1  # what a kernel returns for bytes that nobody wrote


# ---------------------------------------------------------------- numbers as symbols


@helper
def symbol_of(value: int) -> int:
    bits: int = high_bit(value | 4) - 2
    return (bits << 2) + (value >> bits)


@helper
def low_bits_of(symbol: int) -> int:
    """How many low bits of the number its symbol leaves open."""
    return max((symbol >> 2) - 1, 0)


@helper
def lowest_of(symbol: int) -> int:
    bits = low_bits_of(symbol)
    return (symbol - (bits << 2)) << bits


@kernel(I64, U32, U8_OUT, I64_OUT, U8_OUT, I64)
def fold(values: np.ndarray, symbols: np.ndarray, counts: np.ndarray, low: np.ndarray, at: int) -> int:
    """Numbers -> symbols, counted in `counts`, and their open bits, from byte `at` of `low` (4 bytes a number and 8
    to spare); the byte after."""
    largest = np.uint32(0)
    for i in range(len(values)):
        largest = max(largest, values[i])
    if largest < 8:  # often; nothing is left open
        for i in range(len(values)):
            symbols[i] = values[i]
            counts[values[i]] += 1
        return at
    held = fill = 0
    for i in range(len(values)):
        value = int64(values[i])
        symbol = symbol_of(value)
        symbols[i] = symbol
        counts[uint64(symbol)] += 1
        bits = low_bits_of(symbol)
        held |= (value & ((1 << bits) - 1)) << fill
        fill += bits
        store_u64(low, at, held)  # whatever is full: a branch could not be predicted
        at += fill >> 3
        held >>= fill & 0x38
        fill &= 7
    store_u64(low, at, held)
    return at + (fill > 0)


@helper
def unfold(
    symbols: np.ndarray, first: int, stop: int, data: np.ndarray, at: int, values: np.ndarray
) -> int:
    """The inverse, for [first, stop) of both; the byte after the open bits, or BAD."""
    largest = np.uint8(0)
    for i in range(first, stop):
        largest = max(largest, symbols[i])
    if largest < 8:
        for i in range(first, stop):
            values[i] = symbols[i]
        return at
    at *= 8
    end = len(data)
    for i in range(first, stop):
        symbol = int64(symbols[uint64(i)])
        bits = low_bits_of(symbol)
        byte = at >> 3
        if byte + 8 <= end:
            word = int64(load_u64(data, byte))
        else:
            word = 0
            for j in range(byte, end):
                word |= int64(data[j]) << (8 * (j - byte))
        values[i] = lowest_of(symbol) + ((word >> (at & 7)) & ((1 << bits) - 1))
        at += bits
    at = (at + 7) >> 3
    return at if at <= end else BAD


# ---------------------------------------------------------------- states and words


@helper
def _put(x: int, frequency: int, start: int, words: np.ndarray, at: int) -> tuple[int, int]:
    words[uint64(at)] = x & 0xFFFF
    full = int64(x >= frequency << (32 - TOTAL_BITS))
    x >>= full << 4
    quotient = int64(
        (uint64(x) & uint64(0xFFFFFFFF)) // (uint64(frequency) & uint64(0x1FFF))
    )  # 32 bits: faster
    return (quotient << TOTAL_BITS) + (x - quotient * frequency) + start, at - full


@kernel(I64, U8, I64_IN, I64_OUT, U16_OUT, I64)
def put_symbols(
    symbols: np.ndarray, frequencies: np.ndarray, states: np.ndarray, words: np.ndarray, at: int
) -> int:
    """Backwards, the last symbol first; words are written at `at` and before it. `states` are 1 or 4. The place of
    the next word."""
    starts = np.zeros(SYMBOLS, np.int64)
    for symbol in range(1, SYMBOLS):
        starts[symbol] = starts[symbol - 1] + frequencies[symbol - 1]
    i = len(symbols)
    turns = len(states) - 1
    while i & 3 if turns else i:
        i -= 1
        symbol = int64(symbols[uint64(i)])
        states[i & turns], at = _put(states[i & turns], frequencies[symbol], starts[symbol], words, at)
    if i == 0:
        return at
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while i:
        i -= 4
        a, b = int64(symbols[uint64(i)]), int64(symbols[uint64(i + 1)])
        c, d = int64(symbols[uint64(i + 2)]), int64(symbols[uint64(i + 3)])
        x3, at = _put(x3, frequencies[d], starts[d], words, at)
        x2, at = _put(x2, frequencies[c], starts[c], words, at)
        x1, at = _put(x1, frequencies[b], starts[b], words, at)
        x0, at = _put(x0, frequencies[a], starts[a], words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return at


@helper
def _get(x: int, entry: int, data: np.ndarray, at: int) -> tuple[int, int]:
    x = (((entry >> 7) & 0xFFF) + 1) * (x >> TOTAL_BITS) + (entry >> 19)
    word = load_u16(data, at)  # wanted or not: a branch could not be predicted
    empty = int64(x < LOW)
    return (x << (empty << 4)) | (word & -empty), at + 2 * empty


@helper
def get_symbols(
    symbols: np.ndarray,
    first: int,
    stop: int,
    frequencies: np.ndarray,
    table_at: int,
    states: np.ndarray,
    data: np.ndarray,
    at: int,
) -> int:
    """The inverse of put_symbols, for symbols [first, stop), words that begin at byte `at` of `data`, and frequencies
    that stand from `table_at` on and add up to TOTAL.
    The byte after the last word read, or BAD."""
    table = np.empty(TOTAL, np.uint32)  # symbol | frequency - 1 << 7 | rank << 19
    slot = 0
    for symbol in range(SYMBOLS):
        for rank in range(frequencies[table_at + symbol]):
            table[slot] = symbol | ((frequencies[table_at + symbol] - 1) << 7) | (rank << 19)
            slot += 1
    end = len(data)
    turns = len(states) - 1
    i = first
    if turns:
        x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
        while i + 4 <= stop and at + 8 <= end:
            a, b = int64(table[x0 & 0xFFF]), int64(table[x1 & 0xFFF])
            c, d = int64(table[x2 & 0xFFF]), int64(table[x3 & 0xFFF])
            symbols[uint64(i)], symbols[uint64(i + 1)] = a & 127, b & 127
            symbols[uint64(i + 2)], symbols[uint64(i + 3)] = c & 127, d & 127
            x0, at = _get(x0, a, data, at)
            x1, at = _get(x1, b, data, at)
            x2, at = _get(x2, c, data, at)
            x3, at = _get(x3, d, data, at)
            i += 4
        states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while i < stop:
        x = states[(i - first) & turns]
        entry = int64(table[x & 0xFFF])
        symbols[i] = entry & 127
        x = (((entry >> 7) & 0xFFF) + 1) * (x >> TOTAL_BITS) + (entry >> 19)
        if x < LOW:
            if at + 2 > end:
                return BAD
            x = (x << 16) | load_u16(data, at)
            at += 2
        states[(i - first) & turns] = x
        i += 1
    return at
