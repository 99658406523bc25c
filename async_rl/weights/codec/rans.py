"""Entropy coding: numbers -> symbols and raw bits -> table rANS, and back. Helpers for kernels, no kernels.

rANS (Duda 2013, arXiv:1311.2540): states of 32 bits, words of 16, frequencies that add up to TOTAL = 2^12. Long
sequences take turns on four states, so that four symbols are decoded at once. The decoder ends where the encoder
began, with every state at LOW and no word left: most damage shows there.

A number is coded as a symbol and, from 8 on, some of its low bits as they are: log-linear, four symbols an octave.
"""

from __future__ import annotations

import math

import numpy as np

from async_rl.weights.codec.jit import helper, high_bit

__all__ = [
    "BAD",
    "LOW",
    "SYMBOLS",
    "TOTAL",
    "all_used",
    "close_bits",
    "close_symbols",
    "fold",
    "get_bits",
    "get_symbols",
    "get_table",
    "get_varint",
    "open_states",
    "put_bits",
    "put_symbols",
    "put_table",
    "put_varint",
    "spread",
    "unfold",
]

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
SYMBOLS = 128  # of numbers below 2^32
LOW = 1 << 16  # states stay in LOW … 2^32 - 1
BAD = -1  # what a kernel returns for bytes that nobody wrote

_EXPLICIT, _GEOMETRIC, _FALLING, _SINGLE = 0, 1, 2, 3  # kinds of tables
_LEVELS = 45  # of quantised frequencies: symbol_of(TOTAL) + 1


# ---------------------------------------------------------------- numbers as symbols


@helper
def symbol_of(value: int) -> int:
    if value < 4:
        return value
    octave = high_bit(value)
    return ((octave - 1) << 2) + ((value >> (octave - 2)) & 3)


@helper
def low_bits_of(symbol: int) -> int:
    """How many low bits of the number its symbol leaves open."""
    return max((symbol >> 2) - 1, 0)


@helper
def lowest_of(symbol: int) -> int:
    return symbol if symbol < 4 else (4 + (symbol & 3)) << low_bits_of(symbol)


# ---------------------------------------------------------------- bits and bytes


@helper
def put_bits(value: int, bits: int, out: np.ndarray, at: int) -> int:
    """At bit `at` of `out`, which is zero from there; the bit after. For headers: not fast."""
    for bit in range(bits):
        out[(at + bit) >> 3] |= ((value >> bit) & 1) << ((at + bit) & 7)
    return at + bits


@helper
def get_bits(data: np.ndarray, at: int, bits: int) -> int:
    """BAD past the end."""
    if at + bits > 8 * len(data):
        return BAD
    value = 0
    for bit in range(bits):
        value |= ((np.int64(data[(at + bit) >> 3]) >> ((at + bit) & 7)) & 1) << bit
    return value


@helper
def put_varint(value: int, out: np.ndarray, at: int) -> int:
    while value >= 128:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@helper
def get_varint(data: np.ndarray, at: int) -> tuple[int, int]:
    """(value below 2^35 or BAD, the byte after)"""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            return BAD, at
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    return BAD, at


@helper
def _u16(data: np.ndarray, at: int) -> int:
    return np.int64(data[at]) | (np.int64(data[at + 1]) << 8)


@helper
def _u32(data: np.ndarray, at: int) -> int:
    return _u16(data, at) | (_u16(data, at + 2) << 16)


@helper
def _u64(data: np.ndarray, at: int) -> int:
    return _u32(data, at) | (_u32(data, at + 4) << 32)


@helper
def _put_u32(value: int, out: np.ndarray, at: int) -> int:
    """Its low 32 bits."""
    out[at] = value & 0xFF
    out[at + 1] = (value >> 8) & 0xFF
    out[at + 2] = (value >> 16) & 0xFF
    out[at + 3] = (value >> 24) & 0xFF
    return at + 4


# ---------------------------------------------------------------- raw bits


@helper
def fold(
    values: np.ndarray,
    symbols: np.ndarray,
    counts: np.ndarray,
    out: np.ndarray,
    at: int,
    held: int,
    fill: int,
) -> tuple[int, int, int]:
    """Numbers -> symbols, counted, and their low bits, appended to `out` (4 spare bytes). The bit stream is (byte to
    write next, bits not yet counted as written, how many of them); `close_bits` ends it."""
    for i in range(len(values)):
        value = np.int64(values[i])
        symbol = symbol_of(value)
        symbols[i] = symbol
        counts[symbol] += 1
        bits = low_bits_of(symbol)
        held |= (value & ((1 << bits) - 1)) << fill
        fill += bits
        if fill >= 32:
            at = _put_u32(held, out, at)
            held >>= 32
            fill -= 32
    return at, held, fill


@helper
def close_bits(out: np.ndarray, at: int, held: int, fill: int) -> int:
    _put_u32(held, out, at)
    return at + ((fill + 7) >> 3)


@helper
def unfold(symbols: np.ndarray, values: np.ndarray, data: np.ndarray, at: int, end: int) -> int:
    """The inverse of `fold`, into uint32. `at` in bits, `end` in bytes of `data`. The bit after the last, or BAD."""
    for i in range(len(symbols)):
        symbol = np.int64(symbols[i])
        bits = low_bits_of(symbol)
        byte = at >> 3
        if byte + 8 <= end:
            word = _u64(data, byte)
        else:
            word = 0
            for j in range(min(end - byte, 8)):
                word |= np.int64(data[byte + j]) << (8 * j)
        values[i] = lowest_of(symbol) + ((word >> (at & 7)) & ((1 << bits) - 1))
        at += bits
    return at if at <= 8 * end else BAD


# ---------------------------------------------------------------- tables


@helper
def _fit(frequencies: np.ndarray) -> None:
    """Scales to a sum of TOTAL; what is not 0 stays above it. Integers only: both sides must get the same."""
    total = 0
    for symbol in range(SYMBOLS):
        total += frequencies[symbol]
    rest = TOTAL
    for symbol in range(SYMBOLS):
        if frequencies[symbol]:
            frequencies[symbol] = max(1, frequencies[symbol] * TOTAL // total)
            rest -= frequencies[symbol]
    while rest:  # at most SYMBOLS too few or too many, and the largest is far above what is taken from it
        largest = 0
        for symbol in range(SYMBOLS):
            if frequencies[symbol] > frequencies[largest]:
                largest = symbol
        change = max(rest, -(frequencies[largest] >> 2))
        frequencies[largest] += change
        rest -= change


@helper
def _level_frequency(level: int) -> int:
    return lowest_of(level) + ((1 << low_bits_of(level)) >> 1)


@helper
def _power(base: np.uint64, exponent: int) -> np.uint64:
    """In units of 2^-32; base < 1."""
    result = np.uint64(1 << 32)
    while exponent:
        if exponent & 1:
            # 1 * base would not fit
            result = base if result == np.uint64(1 << 32) else (result * base) >> np.uint64(32)
        base = (base * base) >> np.uint64(32)
        exponent >>= 1
    return result


@helper
def _geometric(frequencies: np.ndarray, code: int, span: int) -> None:
    """Of gaps between changes that are independent and each (8 + code % 8) * 2^(code // 8 - 32) probable."""
    stay = np.uint64((1 << 32) - ((8 + (code & 7)) << (code >> 3)))
    last = symbol_of(max(span - 1, 0))
    before = np.uint64(1 << 32)
    for symbol in range(SYMBOLS):
        if symbol > last:
            frequencies[symbol] = 0
            continue
        after = _power(stay, lowest_of(symbol + 1)) if symbol < last else np.uint64(0)
        frequencies[symbol] = max(1, np.int64((before - after) >> np.uint64(12)))
        before = after
    _fit(frequencies)


@helper
def _falling(frequencies: np.ndarray, ratio: int, last: int) -> None:
    """Every second symbol ratio / 16 as frequent as the one before."""
    frequency = 1 << 20
    for symbol in range(SYMBOLS):
        frequencies[symbol] = max(1, frequency) if symbol <= last else 0
        if symbol & 1:
            frequency = (frequency * ratio) >> 4
    _fit(frequencies)


@helper
def _cost(counts: np.ndarray, frequencies: np.ndarray) -> float:
    """Bits."""
    bits = 0.0
    for symbol in range(SYMBOLS):
        if counts[symbol]:
            if frequencies[symbol] == 0:
                return math.inf
            bits += counts[symbol] * (TOTAL_BITS - math.log2(frequencies[symbol]))
    return bits


@helper
def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@helper
def _put_levels(levels: np.ndarray, size: int, out: np.ndarray, at: int) -> int:
    """Rice codes of the differences: neighbours are alike."""
    best, best_bits = 0, 1 << 30
    for low in range(4):
        bits, before = 0, 0
        for symbol in range(size):
            bits += (_zigzag(levels[symbol] - before) >> low) + 1 + low
            before = levels[symbol]
        if bits < best_bits:
            best, best_bits = low, bits
    at = put_bits(size - 1, 7, out, at)
    at = put_bits(best, 2, out, at)
    before = 0
    for symbol in range(size):
        difference = _zigzag(levels[symbol] - before)
        before = levels[symbol]
        for _ in range(difference >> best):
            at = put_bits(1, 1, out, at)
        at = put_bits(0, 1, out, at)
        at = put_bits(difference & ((1 << best) - 1), best, out, at)
    return at


@helper
def put_table(
    counts: np.ndarray, span: int, frequencies: np.ndarray, out: np.ndarray, at: int
) -> tuple[int, float]:
    """Chooses the frequencies for such counts, int64 [SYMBOLS] not all 0, and writes what get_table needs at bit `at`.
    `span`: gaps are counted, among so many elements; 0: anything else. (the bit after, bits of the symbols coded)"""
    total, last, used = 0, 0, 0
    for symbol in range(SYMBOLS):
        if counts[symbol]:
            total += counts[symbol]
            last = symbol
            used += 1
    if used == 1:
        for symbol in range(SYMBOLS):
            frequencies[symbol] = 0
        frequencies[last] = TOTAL
        at = put_bits(_SINGLE, 2, out, at)
        return put_bits(last, 7, out, at), 0.0

    levels = np.zeros(SYMBOLS, np.int64)
    for symbol in range(SYMBOLS):
        frequencies[symbol] = 0
        if counts[symbol]:
            levels[symbol] = symbol_of(max(1, (counts[symbol] * TOTAL + total // 2) // total))
            frequencies[symbol] = _level_frequency(levels[symbol])
    _fit(frequencies)
    start = at
    at = put_bits(_EXPLICIT, 2, out, at)
    at = _put_levels(levels, last + 1, out, at)
    bits = _cost(counts, frequencies)

    # A model with a number or two instead of a table.
    kind, code = _GEOMETRIC, 0
    model = np.zeros(SYMBOLS, np.int64)
    model_bits = math.inf
    if span:
        chance = min(total / (span + 1.0), 0.9) * 2.0**32
        octave = max(int(math.log2(chance)) - 3, 0)
        code = (octave << 3) + min(max(int(chance / 2.0**octave + 0.5) - 8, 0), 7)
        _geometric(model, code, span)
        model_bits = _cost(counts, model) + 8
    elif bits < 64 * (at - start):
        kind = _FALLING
        for ratio in range(1, 16):
            _falling(model, ratio, last)
            trial = _cost(counts, model) + 11
            if trial < model_bits:
                code, model_bits = ratio, trial
        _falling(model, code, last)
    if model_bits + 2 >= bits + (at - start):
        return at, bits
    for byte in range((start >> 3) + 1, (at + 7) >> 3):
        out[byte] = 0
    out[start >> 3] &= (1 << (start & 7)) - 1
    for symbol in range(SYMBOLS):
        frequencies[symbol] = model[symbol]
    at = put_bits(kind, 2, out, start)
    if kind == _GEOMETRIC:
        return put_bits(code, 8, out, at), model_bits - 8
    at = put_bits(code, 4, out, at)
    return put_bits(last, 7, out, at), model_bits - 11


@helper
def get_table(data: np.ndarray, at: int, span: int, frequencies: np.ndarray) -> int:
    """The bit after, or BAD."""
    kind = get_bits(data, at, 2)
    at += 2
    for symbol in range(SYMBOLS):
        frequencies[symbol] = 0
    if kind == _SINGLE:
        symbol = get_bits(data, at, 7)
        if symbol < 0:
            return BAD
        frequencies[symbol] = TOTAL
        return at + 7
    if kind == _GEOMETRIC:
        code = get_bits(data, at, 8)
        if code < 0 or code >= 29 * 8 or span < 1:
            return BAD
        _geometric(frequencies, code, span)
        return at + 8
    if kind == _FALLING:
        code, last = get_bits(data, at, 4), get_bits(data, at + 4, 7)
        if code < 0 or last < 0:
            return BAD
        _falling(frequencies, code, last)
        return at + 11
    size, low = get_bits(data, at, 7), get_bits(data, at + 7, 2)
    at += 9
    if kind != _EXPLICIT or size < 0 or low < 0:
        return BAD
    level = 0
    for symbol in range(size + 1):
        difference = 0
        while True:
            bit = get_bits(data, at, 1)
            at += 1
            if bit == 0:
                break
            difference += 1
            if bit < 0 or difference > 2 * _LEVELS:
                return BAD
        tail = get_bits(data, at, low)
        if tail < 0:
            return BAD
        at += low
        difference = (difference << low) | tail
        level += (difference >> 1) ^ -(difference & 1)
        if level < 0 or level >= _LEVELS:
            return BAD
        frequencies[symbol] = _level_frequency(level)
    if level == 0:
        return BAD  # the last symbol is always used
    _fit(frequencies)
    return at


@helper
def spread(frequencies: np.ndarray, table: np.ndarray) -> None:
    """For the decoder, uint32 [TOTAL]: symbol | frequency - 1 << 7 | rank << 19."""
    slot = 0
    for symbol in range(SYMBOLS):
        frequency = frequencies[symbol]
        for rank in range(frequency):
            table[slot] = symbol | ((frequency - 1) << 7) | (rank << 19)
            slot += 1


# ---------------------------------------------------------------- rANS


@helper
def _put(x: int, frequency: int, start: int, words: np.ndarray, at: int) -> tuple[int, int]:
    words[at] = x & 0xFFFF
    full = np.int64(x >= frequency << (32 - TOTAL_BITS))
    at -= full
    x >>= full << 4
    quotient = np.int64(np.uint64(x) // np.uint64(frequency))
    return (quotient << TOTAL_BITS) + (x - quotient * frequency) + start, at


@helper
def put_symbols(
    symbols: np.ndarray, frequencies: np.ndarray, states: np.ndarray, words: np.ndarray, at: int
) -> int:
    """Backwards, the last symbol first; words are written at `at` and before it. `states` are 1 or 4."""
    starts = np.zeros(SYMBOLS, np.int64)
    for symbol in range(1, SYMBOLS):
        starts[symbol] = starts[symbol - 1] + frequencies[symbol - 1]
    i = len(symbols)
    in_turns = len(states) - 1
    while i & 3 if in_turns else i:
        i -= 1
        symbol = np.int64(symbols[i])
        states[i & in_turns], at = _put(
            states[i & in_turns], frequencies[symbol], starts[symbol], words, at
        )
    if i == 0:
        return at
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    while i:
        i -= 4
        a, b, c, d = (
            np.int64(symbols[i]),
            np.int64(symbols[i + 1]),
            np.int64(symbols[i + 2]),
            np.int64(symbols[i + 3]),
        )
        x3, at = _put(x3, frequencies[d], starts[d], words, at)
        x2, at = _put(x2, frequencies[c], starts[c], words, at)
        x1, at = _put(x1, frequencies[b], starts[b], words, at)
        x0, at = _put(x0, frequencies[a], starts[a], words, at)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return at


@helper
def close_symbols(states: np.ndarray, words: np.ndarray, at: int, out: np.ndarray, to: int) -> int:
    """States and words, as put_symbols left them, to byte `to` of `out`; the byte after."""
    for i in range(len(states)):
        to = _put_u32(states[i], out, to)
    for i in range(at + 1, len(words)):
        out[to] = words[i] & 0xFF
        out[to + 1] = words[i] >> 8
        to += 2
    return to


@helper
def open_states(states: np.ndarray, data: np.ndarray, at: int) -> int:
    """The byte after them, or BAD."""
    if at + 4 * len(states) > len(data):
        return BAD
    for i in range(len(states)):
        states[i] = _u32(data, at + 4 * i)
        if states[i] < LOW:
            return BAD
    return at + 4 * len(states)


@helper
def all_used(states: np.ndarray) -> bool:
    for i in range(len(states)):
        if states[i] != LOW:
            return False
    return True


@helper
def _get(x: int, entry: int, data: np.ndarray, at: int) -> tuple[int, int]:
    x = (((entry >> 7) & 0xFFF) + 1) * (x >> TOTAL_BITS) + (entry >> 19)
    empty = np.int64(x < LOW)
    x = ((x << 16) | _u16(data, at)) if empty else x
    return x, at + 2 * empty


@helper
def get_symbols(
    symbols: np.ndarray, table: np.ndarray, states: np.ndarray, data: np.ndarray, at: int, end: int
) -> int:
    """The byte after the last word read, or BAD."""
    i = 0
    in_turns = len(states) - 1
    if in_turns:
        x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
        while i + 4 <= len(symbols) and at + 8 <= end:
            a, b = np.int64(table[x0 & 0xFFF]), np.int64(table[x1 & 0xFFF])
            c, d = np.int64(table[x2 & 0xFFF]), np.int64(table[x3 & 0xFFF])
            symbols[i], symbols[i + 1], symbols[i + 2], symbols[i + 3] = a & 127, b & 127, c & 127, d & 127
            x0, at = _get(x0, a, data, at)
            x1, at = _get(x1, b, data, at)
            x2, at = _get(x2, c, data, at)
            x3, at = _get(x3, d, data, at)
            i += 4
        states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    while i < len(symbols):
        x = states[i & in_turns]
        entry = np.int64(table[x & 0xFFF])
        symbols[i] = entry & 127
        x = (((entry >> 7) & 0xFFF) + 1) * (x >> TOTAL_BITS) + (entry >> 19)
        if x < LOW:
            if at + 2 > end:
                return BAD
            x = (x << 16) | _u16(data, at)
            at += 2
        states[i & in_turns] = x
        i += 1
    return at
