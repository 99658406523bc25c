"""Entropy coding: numbers -> symbols and open bits -> table rANS, and back. Kernels; numbers.py puts them together.

rANS (Duda 2013, arXiv:1311.2540): states of 32 bits, words of 16, frequencies that add up to 2^12, or 2^10 in short
sequences, for which a larger table would take longer than what it is for. Long sequences take turns on four states,
so that four symbols are decoded at once. The decoder ends where the encoder began, with every state at LOW and no
word left: most damage shows there.

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
    "SPARE",
    "SYMBOLS",
    "fold",
    "get_symbols",
    "join_symbols",
    "low_bits_of",
    "lowest_of",
    "put_symbols",
    "slot_bits_of",
    "symbol_of",
    "unfold",
]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
SYMBOLS = 128  # of numbers below 2^32
LOW = 1 << 16  # states stay in LOW … 2^32 - 1
SHORT_BITS = 10
LONG = 4096
"""Numbers of a sequence from which there are TOTAL slots."""

FEW = 4
"""A symbol for so many bits of slots, and a table of all slots is worth its making."""

SPARE = 8  # bytes of symbols, that may be written beyond the last one

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
def slot_bits_of(length: int, span: int) -> int:
    """Of a sequence of `length` numbers; gaps, whose table is long, always have the most."""
    return SHORT_BITS if span == 0 and length < LONG else TOTAL_BITS


@inlined
def _put(x: int, frequency: int, start: int, slot_bits: int, words: np.ndarray, at: int) -> tuple[int, int]:
    words[uint64(at)] = x & 0xFFFF
    full = int64(x >= frequency << (32 - slot_bits))
    x >>= full << 4
    quotient = int64(
        (uint64(x) & uint64(0xFFFFFFFF)) // (uint64(frequency) & uint64(0x1FFF))
    )  # 32 bits: faster
    return (quotient << slot_bits) + (x - quotient * frequency) + start, at - full


@helper
def put_symbols(
    symbols: np.ndarray,
    first: int,
    stop: int,
    frequencies: np.ndarray,
    table_at: int,
    slot_bits: int,
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
        states[i & turns], at = _put(states[i & turns], table[a], table[a + 1], slot_bits, words, at)
    if i == 0:
        return at
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    i += first
    while i > first:
        i -= 4
        a, b = uint64(2) * uint64(symbols[uint64(i)]), uint64(2) * uint64(symbols[uint64(i + 1)])
        c, d = uint64(2) * uint64(symbols[uint64(i + 2)]), uint64(2) * uint64(symbols[uint64(i + 3)])
        x3, at = _put(x3, table[d], table[d + uint64(1)], slot_bits, words, at)
        x2, at = _put(x2, table[c], table[c + uint64(1)], slot_bits, words, at)
        x1, at = _put(x1, table[b], table[b + uint64(1)], slot_bits, words, at)
        x0, at = _put(x0, table[a], table[a + uint64(1)], slot_bits, words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return at


@helper
def join_symbols(symbols: np.ndarray, first: int, stop: int, together: int, last: int) -> int:
    """[first, stop) become one symbol for two of 3 bits or three of 2, from `first` on; the place after. The last one
    is filled up with `last`."""
    made = first
    if together == 2:
        for i in range(first, stop - 1, 2):
            symbols[made] = symbols[i] | (symbols[i + 1] << 3)
            made += 1
    else:
        for i in range(first, stop - 2, 3):
            symbols[made] = symbols[i] | (symbols[i + 1] << 2) | (symbols[i + 2] << 4)
            made += 1
    done = first + (made - first) * together
    if done < stop:
        bits = 6 // together
        group = 0
        for i in range(together):
            symbol = int64(symbols[done + i]) if done + i < stop else last
            group |= symbol << (i * bits)
        symbols[made] = group
        made += 1
    return made


@inlined
def _get(x: int, entry: int, slot_bits: int, data: np.ndarray, at: int) -> tuple[int, int]:
    x = ((entry >> 7) & 0x1FFF) * (x >> slot_bits) + (entry >> 20)
    word = load_u16(data, at)  # wanted or not: a branch could not be predicted
    empty = int64(x < LOW)
    return (x << (empty << 4)) | (word & -empty), at + 2 * empty


@inlined
def _spread(entry: int, together: int) -> int:
    """A symbol's numbers, a byte each."""
    if together == 1:
        return entry & 127
    entry &= 63
    if together == 2:
        return (entry | (entry << 5)) & 0x0707
    return (entry | (entry << 6) | (entry << 12)) & 0x030303


@inlined
def _get_four(
    symbols: np.ndarray,
    first: int,
    count: int,
    together: int,
    table: np.ndarray,
    slot_bits: int,
    states: np.ndarray,
    data: np.ndarray,
    at: int,
) -> tuple[int, int]:
    """Four at a time of `count`, until fewer are left or the words near their end; how many are done, and the next
    byte. What is not wanted of the eight bytes written for each is overwritten."""
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    mask = (1 << slot_bits) - 1
    last = len(data) - 8
    i = 0
    to = first
    while i + 4 <= count and at <= last:
        a, b = int64(table[uint64(x0 & mask)]), int64(table[uint64(x1 & mask)])
        c, d = int64(table[uint64(x2 & mask)]), int64(table[uint64(x3 & mask)])
        store_u64(symbols, to, _spread(a, together))
        store_u64(symbols, to + together, _spread(b, together))
        store_u64(symbols, to + 2 * together, _spread(c, together))
        store_u64(symbols, to + 3 * together, _spread(d, together))
        x0, at = _get(x0, a, slot_bits, data, at)
        x1, at = _get(x1, b, slot_bits, data, at)
        x2, at = _get(x2, c, slot_bits, data, at)
        x3, at = _get(x3, d, slot_bits, data, at)
        i += 4
        to += 4 * together
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return i, at


@helper
def get_symbols(
    symbols: np.ndarray,
    first: int,
    stop: int,
    together: int,
    frequencies: np.ndarray,
    table_at: int,
    slot_bits: int,
    states: np.ndarray,
    data: np.ndarray,
    at: int,
) -> int:
    """The inverse of join_symbols and put_symbols, for symbols [first, stop), words that begin at byte `at` of
    `data`, and frequencies that stand from `table_at` on and add up to 2^slot_bits. `symbols` holds SPARE more. The
    byte after the last word read, or BAD."""
    done = 0
    turns = len(states) - 1
    whole = (stop - first) // together
    if turns and whole >= (1 << slot_bits) >> FEW:
        table = np.empty(TOTAL, np.uint32)  # symbol | frequency << 7 | rank << 20
        slot = 0
        for symbol in range(SYMBOLS):
            frequency = frequencies[uint64(table_at + symbol)]
            entry = symbol | (frequency << 7)
            for rank in range(frequency):
                table[uint64(slot + rank)] = entry | (rank << 20)
            slot += frequency
        if together == 3:
            done, at = _get_four(symbols, first, whole, 3, table, TOTAL_BITS, states, data, at)
        elif together == 2:
            done, at = _get_four(symbols, first, whole, 2, table, TOTAL_BITS, states, data, at)
        else:
            done, at = _get_four(symbols, first, whole, 1, table, slot_bits, states, data, at)
    mask = (1 << slot_bits) - 1
    to = first + done * together
    while to < stop:
        x = states[done & turns]
        symbol = 0
        rank = x & mask
        while rank >= frequencies[table_at + symbol]:
            rank -= frequencies[table_at + symbol]
            symbol += 1
        numbers = _spread(symbol, together)
        for _ in range(together):
            if to < stop:
                symbols[to] = numbers & 127
            numbers >>= 8
            to += 1
        x = frequencies[table_at + symbol] * (x >> slot_bits) + rank
        if x < LOW:
            if at + 2 > len(data):
                return BAD
            x = (x << 16) | load_u16(data, at)
            at += 2
        states[done & turns] = x
        done += 1
    return at
