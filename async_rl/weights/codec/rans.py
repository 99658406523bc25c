"""Entropy coding: numbers -> symbols and open bits -> table rANS, and back. Kernels; numbers.py puts them together.

rANS (Duda 2013, arXiv:1311.2540): states of 32 bits, words of 16, frequencies that add up to TOTAL = 2^12. Long
sequences take turns on four states, so that four symbols are decoded at once. The decoder ends where the encoder
began, with every state at LOW and no word left: most damage shows there.

A number is coded as a symbol and, from 8 on, some of its low bits as they are: log-linear, four symbols an octave.
"""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.jit import (
    helper,
    high_bit,
    inlined,
    int64,
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
FEW = 500
"""Symbols of a sequence from which a table of all slots is worth its making."""

BAD = -1  # what a kernel returns for bytes that nobody wrote


# ---------------------------------------------------------------- numbers as symbols


@inlined
def symbol_of(value: int) -> int:
    bits: int = high_bit(value | 4) - 2
    return (bits << 2) + (value >> bits)


@inlined
def low_bits_of(symbol: int) -> int:
    """How many low bits of the number its symbol leaves open."""
    return max((symbol >> 2) - 1, 0)


@inlined
def lowest_of(symbol: int) -> int:
    bits = low_bits_of(symbol)
    return (symbol - (bits << 2)) << bits


@helper
def fold(
    values: np.ndarray,
    first: int,
    stop: int,
    symbols: np.ndarray,
    tallies: np.ndarray,
    low: np.ndarray,
    at: int,
) -> int:
    """Numbers [first, stop) -> symbols, counted in `tallies`, [4 * SYMBOLS], by turns, so that no count waits for
    itself; and their open bits, from byte `at` of `low` on (4 bytes a number and 8 to spare). The byte after."""
    largest = np.uint32(0)
    for i in range(first, stop):
        largest = max(largest, values[i])
    if largest < 8:  # often; nothing is left open
        for i in range(first, stop):
            value = values[i]
            symbols[i] = value
            tallies[uint64(((i & 3) * SYMBOLS) + int64(value))] += 1
        return at
    held = fill = 0
    for i in range(first, stop):
        value = int64(values[i])
        symbol = symbol_of(value)
        symbols[i] = symbol
        tallies[uint64(((i & 3) * SYMBOLS) + symbol)] += 1
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


@inlined
def _put(x: int, frequency: int, start: int, words: np.ndarray, at: int) -> tuple[int, int]:
    words[uint64(at)] = x & 0xFFFF
    full = int64(x >= frequency << (32 - TOTAL_BITS))
    x >>= full << 4
    quotient = int64(
        (uint64(x) & uint64(0xFFFFFFFF)) // (uint64(frequency) & uint64(0x1FFF))
    )  # 32 bits: faster
    return (quotient << TOTAL_BITS) + (x - quotient * frequency) + start, at - full


@helper
def put_symbols(
    symbols: np.ndarray,
    first: int,
    stop: int,
    frequencies: np.ndarray,
    table_at: int,
    states: np.ndarray,
    words: np.ndarray,
    at: int,
) -> int:
    """Symbols [first, stop), backwards, the last first, with frequencies that stand from `table_at` on; words are
    written at `at` and before it. `states` are 1 or 4. The place of the next word."""
    table = np.zeros(2 * SYMBOLS, np.int64)  # frequency, start
    start = 0
    for symbol in range(SYMBOLS):
        table[2 * symbol] = frequencies[table_at + symbol]
        table[2 * symbol + 1] = start
        start += frequencies[table_at + symbol]
    turns = len(states) - 1
    i = stop - first
    while i & 3 if turns else i:
        i -= 1
        a = 2 * int64(symbols[uint64(first + i)])
        states[i & turns], at = _put(states[i & turns], table[a], table[a + 1], words, at)
    if i == 0:
        return at
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    i += first
    while i > first:
        i -= 4
        a, b = uint64(2) * uint64(symbols[uint64(i)]), uint64(2) * uint64(symbols[uint64(i + 1)])
        c, d = uint64(2) * uint64(symbols[uint64(i + 2)]), uint64(2) * uint64(symbols[uint64(i + 3)])
        x3, at = _put(x3, table[d], table[d + uint64(1)], words, at)
        x2, at = _put(x2, table[c], table[c + uint64(1)], words, at)
        x1, at = _put(x1, table[b], table[b + uint64(1)], words, at)
        x0, at = _put(x0, table[a], table[a + uint64(1)], words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return at


@inlined
def _get(x: int, entry: int, data: np.ndarray, at: int) -> tuple[int, int]:
    x = ((entry >> 7) & 0x1FFF) * (x >> TOTAL_BITS) + (entry >> 20)
    word = load_u16(data, at)  # wanted or not: a branch could not be predicted
    empty = int64(x < LOW)
    return (x << (empty << 4)) | (word & -empty), at + 2 * empty


@helper
def _get_four(
    symbols: np.ndarray,
    first: int,
    stop: int,
    frequencies: np.ndarray,
    table_at: int,
    states: np.ndarray,
    data: np.ndarray,
    at: int,
) -> tuple[int, int]:
    """Four at a time, until fewer are left or the words near their end; the next symbol and byte."""
    table = np.empty(TOTAL, np.uint32)  # symbol | frequency << 7 | rank << 20
    slot = 0
    for symbol in range(SYMBOLS):
        frequency = frequencies[uint64(table_at + symbol)]
        entry = symbol | (frequency << 7)
        for rank in range(frequency):
            table[uint64(slot + rank)] = entry | (rank << 20)
        slot += frequency
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    last = len(data) - 8
    i = first
    while i + 4 <= stop and at <= last:
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
    return i, at


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
    i = first
    turns = len(states) - 1
    if turns and stop - first >= FEW:
        i, at = _get_four(symbols, first, stop, frequencies, table_at, states, data, at)
    while i < stop:
        x = states[(i - first) & turns]
        symbol = 0
        rank = x & (TOTAL - 1)
        while rank >= frequencies[table_at + symbol]:
            rank -= frequencies[table_at + symbol]
            symbol += 1
        symbols[i] = symbol
        x = frequencies[table_at + symbol] * (x >> TOTAL_BITS) + rank
        if x < LOW:
            if at + 2 > len(data):
                return BAD
            x = (x << 16) | load_u16(data, at)
            at += 2
        states[(i - first) & turns] = x
        i += 1
    return at
