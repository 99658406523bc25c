"""The frequencies of symbols: chosen, written, read.

Written are the levels of the frequencies (a quarter of an octave each: 0.002 bits a symbol lost), as Rice codes of
the differences between neighbours; or, where that is shorter in all, a model with a number or two. Both sides make
the frequencies from what is written, with integers only: they must get the same on every machine.

    2 bits kind | explicit: 7 bits symbols - 1, 2 bits of Rice's parameter, the codes
                | geometric: 8 bits                             (gaps among independent changes)
                | falling: 4 bits ratio, 7 bits last symbol
                | single: 7 bits symbol; 127: no symbols, the sequence stands in byte planes; 126: a table of another
                  kind follows, its symbols are places in a list

The writer has bits one to a byte, in an array of zeros; numbers.py packs them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from async_rl.weights.codec.jit import (
    helper,
    high_bit,
    inlined,
    int64,
    uint64,
)
from async_rl.weights.codec.rans import (
    BAD,
    SYMBOLS,
    TOTAL,
    TOTAL_BITS,
    low_bits_of,
    lowest_of,
    slot_bits_of,
    symbol_of,
)

__all__ = [
    "AS_SYMBOLS",
    "IN_LIST",
    "IN_PLANES",
    "TABLE_BITS",
    "get_tables",
    "group_table",
    "put_form",
    "put_table",
]

GROUPED_FROM = 4096
"""Numbers, all below 8, of a sequence from which two or three are coded as one symbol: half or a third of the time,
and up to 0.01 bits a number lost."""

GROUPS = 64

TABLE_BITS = 2048
"""More than one takes: 128 levels, at most 11 + 1 + 3 bits each."""

AS_SYMBOLS, IN_LIST, IN_PLANES = 0, SYMBOLS - 2, SYMBOLS - 1
"""What a sequence stands as; the latter two instead of symbols that no number has."""

_EXPLICIT, _GEOMETRIC, _FALLING, _SINGLE = 0, 1, 2, 3
_LEVELS = 45  # symbol_of(TOTAL) + 1
_CODES = 29 * 8  # of geometric models
_FALLING_BITS = 1024  # of coded symbols: with more, a table pays


@inlined
def _put(value: int, size: int, bits: np.ndarray, at: int) -> int:
    for _ in range(size):
        bits[at] = value & 1
        value >>= 1
        at += 1
    return at


@inlined
def _get(data: np.ndarray, at: int, size: int) -> int:
    """Up to 17 bits of bytes; zeros past the end."""
    byte = at >> 3
    value = 0
    if byte < len(data):
        value = int64(data[byte])
    if byte + 1 < len(data):
        value |= int64(data[byte + 1]) << 8
    if byte + 2 < len(data):
        value |= int64(data[byte + 2]) << 16
    return (value >> (at & 7)) & ((1 << size) - 1)


@helper
def _fit(frequencies: np.ndarray, first: int, size: int, slots: int) -> None:
    """Scales the first `size`, the rest are 0, to a sum of `slots`; what is not 0 stays above it."""
    total = 0
    for symbol in range(size):
        total += frequencies[first + symbol]
    rest = slots
    for symbol in range(size):
        if frequencies[first + symbol]:
            frequencies[first + symbol] = max(1, frequencies[first + symbol] * slots // total)
            rest -= frequencies[first + symbol]
    while rest:  # at most SYMBOLS too few or too many, and the largest is far above what is taken from it
        largest = 0
        for symbol in range(size):
            if frequencies[first + symbol] > frequencies[first + largest]:
                largest = symbol
        change = max(rest, -(frequencies[first + largest] >> 2))
        frequencies[first + largest] += change
        rest -= change


@inlined
def _level_frequency(level: int) -> int:
    return lowest_of(level) + ((1 << low_bits_of(level)) >> 1)


@helper
def _cost(counts: np.ndarray, frequencies: np.ndarray, first: int, size: int, slot_bits: int) -> float:
    """Bits, of the first `size`; the rest are 0."""
    bits = 0.0
    for symbol in range(first, first + size):
        if counts[symbol]:
            bits += counts[symbol] * (slot_bits - math.log2(max(frequencies[symbol], 1e-300)))
    return bits


@helper
def _power(base: Any, exponent: int) -> Any:
    """In units of 2^-32; base < 1."""
    one = uint64(1 << 32)
    result = one
    while exponent:
        if exponent & 1:
            result = base if result == one else (result * base) >> uint64(32)  # 1 * base would not fit
        base = (base * base) >> uint64(32)
        exponent >>= 1
    return result


@helper
def _make(
    kind: int,
    code: int,
    last: int,
    span: int,
    levels: np.ndarray,
    frequencies: np.ndarray,
    first: int,
    slots: int,
) -> None:
    """A table of any kind. One function, called in few places: every call is compiled anew."""
    # Geometric: each of `span` elements changes with a probability of (8 + code % 8) * 2^(code // 8 - 32).
    stay = uint64((1 << 32) - ((8 + (code & 7)) << (code >> 3)))
    before = uint64(1 << 32)
    if kind == _GEOMETRIC:
        last = symbol_of(max(span - 1, 0))
    falling = 1 << 20
    for symbol in range(last + 1, SYMBOLS):
        frequencies[first + symbol] = 0
    for symbol in range(last + 1):
        frequency = 0
        if kind == _EXPLICIT:
            level = levels[symbol]
            frequency = lowest_of(level) + ((1 << low_bits_of(level)) >> 1)
        elif kind == _SINGLE:
            frequency = int64(symbol == last)
        elif kind == _GEOMETRIC:
            after = _power(stay, lowest_of(symbol + 1)) if symbol < last else uint64(0)
            frequency = max(1, int64((before - after) >> uint64(12)))
            before = after
        else:  # every second symbol code / 16 as frequent as the one before
            frequency = max(1, falling)
            if symbol & 1:
                falling = (falling * code) >> 4
        frequencies[first + symbol] = frequency
    _fit(frequencies, first, last + 1, slots)


@helper
def group_table(frequencies: np.ndarray, first: int, length: int, span: int) -> int:
    """How many numbers of such a sequence are coded as one symbol; if more than one, the table becomes that of these
    symbols, as if numbers were independent."""
    if span or length < GROUPED_FROM:
        return 1
    last = 0
    for symbol in range(SYMBOLS):
        if frequencies[first + symbol]:
            last = symbol
    if last >= 8:
        return 1
    together = 3 if last < 4 else 2
    single = np.zeros(8, np.int64)
    for symbol in range(8):
        single[symbol] = frequencies[first + symbol]
    for group in range(GROUPS):
        if together == 3:
            product = single[group & 3] * single[(group >> 2) & 3] * single[group >> 4]
            frequency = product >> (2 * TOTAL_BITS)
        else:
            product = single[group & 7] * single[group >> 3]
            frequency = product >> TOTAL_BITS
        frequencies[first + group] = max(frequency, int64(product > 0))
    _fit(frequencies, first, GROUPS, TOTAL)
    return together


@inlined
def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@helper
def _put_levels(levels: np.ndarray, size: int, bits: np.ndarray, at: int) -> int:
    """The first `size` of them; the bit after."""
    total = before = 0
    for symbol in range(size):
        total += _zigzag(levels[symbol] - before)
        before = levels[symbol]
    low = min(high_bit(max(11 * total // (8 * size), 1)), 3)  # about log2 of the mean
    at = _put((size - 1) | (low << 7), 9, bits, at)
    before = 0
    for symbol in range(size):
        difference = _zigzag(levels[symbol] - before)
        before = levels[symbol]
        for _ in range(difference >> low):
            bits[at] = 1
            at += 1
        at = _put(difference & ((1 << low) - 1), low, bits, at + 1)
    return at


@helper
def put_form(form: int, bits: np.ndarray, at: int) -> int:
    """IN_PLANES, instead of a table; IN_LIST, before one."""
    return _put(_SINGLE | (form << 2), 9, bits, at)


@helper
def put_table(
    counts: np.ndarray,
    first: int,
    span: int,
    slot_bits: int,
    frequencies: np.ndarray,
    bits: np.ndarray,
    at: int,
) -> int:
    """Chooses the frequencies [first : first + SYMBOLS], that add up to 2^slot_bits, for such counts, not all 0, and
    writes them at bit `at`; the bit after. `span`: gaps are counted, among so many elements; 0: anything else."""
    total = last = used = places = 0
    for symbol in range(SYMBOLS):
        if counts[first + symbol]:
            total += counts[first + symbol]
            places += symbol * counts[first + symbol]
            last = symbol
            used += 1
    levels = np.zeros(SYMBOLS, np.int64)
    for symbol in range(last + 1):
        if counts[first + symbol]:
            levels[symbol] = symbol_of(max(1, (counts[first + symbol] * TOTAL + total // 2) // total))
    # The candidates: 0 explicit, then one that is geometric, or three that fall, about as steeply as the counts do;
    # then the best once more.
    chance = min(total / (span + 1.0), 0.9) * 2.0**32
    octave = max(int64(math.log2(chance)) - 3, 0)
    geometric = (octave << 3) + min(max(int64(chance / 2.0**octave + 0.5) - 8, 0), 7)
    best, best_bits = 0, math.inf
    end = at
    candidates = 2 if span else 4
    ratio = places / (places + total)  # of a symbol's frequency to that of the one before
    falling = min(max(int64(16.0 * ratio * ratio + 0.5) - 1, 1), 13)
    for trial in range(candidates + 1):
        number = best if trial == candidates else 0 if trial == 0 else falling + trial - 1
        kind, code = _FALLING, number
        if used == 1:
            kind = _SINGLE
        elif number == 0:
            kind = _EXPLICIT
        elif span:
            kind, code = _GEOMETRIC, geometric
        _make(kind, code, last, span, levels, frequencies, first, 1 << slot_bits)
        if trial == candidates:
            if kind == _SINGLE:
                end = _put(kind | (last << 2), 9, bits, at)
            elif kind == _GEOMETRIC:
                end = _put(kind | (code << 2), 10, bits, at)
            elif kind == _FALLING:
                end = _put(kind | (code << 2) | (last << 6), 13, bits, at)
            break
        if used == 1:
            continue
        cost = _cost(counts, frequencies, first, last + 1, slot_bits) + 13
        if number == 0:
            end = _put_levels(levels, last + 1, bits, _put(_EXPLICIT, 2, bits, at))
            cost += end - at - 13
            if span == 0 and cost > _FALLING_BITS:
                return end
        if cost < best_bits:
            best, best_bits = number, cost
        if trial + 1 == candidates and best:
            for bit in range(at, end):
                bits[bit] = 0
    return end


@helper
def _get_levels(data: np.ndarray, at: int, size: int, low: int, levels: np.ndarray) -> int:
    """The bit after, or BAD."""
    for symbol in range(SYMBOLS):
        levels[symbol] = 0
    level = symbol = difference = 0
    while symbol < size:
        if _get(data, at, 1):
            at += 1
            difference += 1
            if difference > 2 * _LEVELS:
                return BAD
            continue
        difference = (difference << low) | _get(data, at + 1, low)
        at += 1 + low
        level += (difference >> 1) ^ -(difference & 1)
        if level < 0 or level >= _LEVELS:
            return BAD
        levels[symbol] = level
        symbol += 1
        difference = 0
    return at if level else BAD  # the last symbol is always used


@helper
def get_tables(
    data: np.ndarray,
    at: int,
    lengths: np.ndarray,
    spans: np.ndarray,
    frequencies: np.ndarray,
    forms: np.ndarray,
) -> int:
    """The tables, [sequences * SYMBOLS], and forms of all sequences that are not empty, from bit `at` of `data`. The
    bit after, or BAD."""
    levels = np.zeros(SYMBOLS, np.int64)
    for index in range(len(lengths)):
        forms[index] = AS_SYMBOLS
        if lengths[index] == 0:
            continue
        fixed = _get(data, at, 13)
        if fixed & 3 == _SINGLE and (fixed >> 2) & 127 >= IN_LIST:
            forms[index] = (fixed >> 2) & 127
            at += 9
            if forms[index] == IN_PLANES:
                continue
            fixed = _get(data, at, 13)
        kind = fixed & 3
        code, last = 0, (fixed >> 2) & 127
        if kind == _SINGLE:
            at += 9
        elif kind == _GEOMETRIC:
            code = (fixed >> 2) & 255
            at += 10
            if code >= _CODES or spans[index] < 1:
                return BAD
        elif kind == _FALLING:
            code, last = (fixed >> 2) & 15, (fixed >> 6) & 127
            at += 13
        else:
            at = _get_levels(data, at + 11, last + 1, (fixed >> 9) & 3, levels)
            if at < 0:
                return BAD
        slots = 1 << slot_bits_of(lengths[index], spans[index])
        _make(kind, code, last, spans[index], levels, frequencies, index * SYMBOLS, slots)
    return at
