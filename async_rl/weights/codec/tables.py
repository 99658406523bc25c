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

from async_rl.weights.codec.jit import I64, I64_IN, I64_OUT, U8_OUT, helper, int64, kernel, uint64
from async_rl.weights.codec.rans import BAD, SYMBOLS, TOTAL, TOTAL_BITS, low_bits_of, lowest_of, symbol_of

__all__ = ["AS_SYMBOLS", "IN_LIST", "IN_PLANES", "TABLE_BITS", "get_tables", "put_form", "put_table"]

TABLE_BITS = 2048
"""More than one takes: 128 levels, at most 11 + 1 + 3 bits each."""

AS_SYMBOLS, IN_LIST, IN_PLANES = 0, SYMBOLS - 2, SYMBOLS - 1
"""What a sequence stands as; the latter two instead of symbols that no number has."""

_EXPLICIT, _GEOMETRIC, _FALLING, _SINGLE = 0, 1, 2, 3
_LEVELS = 45  # symbol_of(TOTAL) + 1
_CODES = 29 * 8  # of geometric models
_FALLING_BITS = 1024  # of coded symbols: with more, a table pays


@helper
def _put(value: int, size: int, bits: np.ndarray, at: int) -> int:
    for i in range(size):
        bits[at + i] = (value >> i) & 1
    return at + size


@helper
def _get(data: np.ndarray, at: int, size: int) -> int:
    """Bits of bytes; zeros past the end."""
    value = 0
    for i in range(size):
        byte = (at + i) >> 3
        if byte < len(data):
            value |= ((int64(data[byte]) >> ((at + i) & 7)) & 1) << i
    return value


@helper
def _fit(frequencies: np.ndarray) -> None:
    """Scales to a sum of TOTAL; what is not 0 stays above it."""
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
def _cost(counts: np.ndarray, frequencies: np.ndarray) -> float:
    """Bits."""
    bits = 0.0
    for symbol in range(SYMBOLS):
        if counts[symbol]:
            bits += counts[symbol] * (TOTAL_BITS - math.log2(max(frequencies[symbol], 1e-300)))
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
def _geometric(code: int, span: int, frequencies: np.ndarray) -> None:
    """Of gaps where each of `span` elements changes with a probability of (8 + code % 8) * 2^(code // 8 - 32)."""
    stay = uint64((1 << 32) - ((8 + (code & 7)) << (code >> 3)))
    last = symbol_of(max(span - 1, 0))
    before = uint64(1 << 32)
    for symbol in range(SYMBOLS):
        frequencies[symbol] = 0
        if symbol <= last:
            after = _power(stay, lowest_of(symbol + 1)) if symbol < last else uint64(0)
            frequencies[symbol] = max(1, int64((before - after) >> uint64(12)))
            before = after
    _fit(frequencies)


@helper
def _fall(ratio: int, last: int, frequencies: np.ndarray) -> None:
    """Every second symbol ratio / 16 as frequent as the one before."""
    frequency = 1 << 20
    for symbol in range(SYMBOLS):
        frequencies[symbol] = max(1, frequency) if symbol <= last else 0
        if symbol & 1:
            frequency = (frequency * ratio) >> 4
    _fit(frequencies)


@helper
def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@helper
def _put_levels(levels: np.ndarray, size: int, bits: np.ndarray, at: int) -> int:
    """The first `size` of them; the bit after."""
    best, best_size = 0, 1 << 30
    for low in range(4):
        needed, before = 0, 0
        for symbol in range(size):
            needed += (_zigzag(levels[symbol] - before) >> low) + 1 + low
            before = levels[symbol]
        if needed < best_size:
            best, best_size = low, needed
    at = _put((size - 1) | (best << 7), 9, bits, at)
    before = 0
    for symbol in range(size):
        difference = _zigzag(levels[symbol] - before)
        before = levels[symbol]
        for _ in range(difference >> best):
            bits[at] = 1
            at += 1
        at = _put(difference & ((1 << best) - 1), best, bits, at + 1)
    return at


def put_form(form: int, bits: np.ndarray, at: int) -> int:
    """IN_PLANES, instead of a table; IN_LIST, before one."""
    kind = _SINGLE | (form << 2)
    bits[at : at + 9] = [(kind >> bit) & 1 for bit in range(9)]
    return at + 9


@kernel(I64, I64_IN, I64, I64_OUT, U8_OUT, I64)
def put_table(counts: np.ndarray, span: int, frequencies: np.ndarray, bits: np.ndarray, at: int) -> int:
    """Chooses the frequencies, [SYMBOLS], for such counts, [SYMBOLS], not all 0, and writes them at bit `at`; the bit
    after. `span`: gaps are counted, among so many elements; 0: anything else."""
    total = last = used = 0
    for symbol in range(SYMBOLS):
        frequencies[symbol] = 0
        if counts[symbol]:
            total += counts[symbol]
            last = symbol
            used += 1
    if used == 1:
        frequencies[last] = TOTAL
        return _put(_SINGLE | (last << 2), 9, bits, at)

    levels = np.zeros(SYMBOLS, np.int64)
    for symbol in range(SYMBOLS):
        if counts[symbol]:
            levels[symbol] = symbol_of(max(1, (counts[symbol] * TOTAL + total // 2) // total))
            frequencies[symbol] = _level_frequency(levels[symbol])
    _fit(frequencies)
    explicit_bits = _cost(counts, frequencies)
    end = _put_levels(levels, last + 1, bits, _put(_EXPLICIT, 2, bits, at))

    model = np.zeros(SYMBOLS, np.int64)
    best, best_bits = 0, explicit_bits + (end - at)
    if span:
        chance = min(total / (span + 1.0), 0.9) * 2.0**32
        octave = max(int64(math.log2(chance)) - 3, 0)
        code = (octave << 3) + min(max(int64(chance / 2.0**octave + 0.5) - 8, 0), 7)
        _geometric(code, span, model)
        if _cost(counts, model) + 10 < best_bits:
            best = _GEOMETRIC | (code << 2)
    elif explicit_bits < _FALLING_BITS:
        for ratio in range(1, 16):
            _fall(ratio, last, model)
            model_bits = _cost(counts, model) + 13
            if model_bits < best_bits:
                best, best_bits = _FALLING | (ratio << 2) | (last << 6), model_bits
    if best == 0:
        return end
    for bit in range(at, end):
        bits[bit] = 0
    if best & 3 == _GEOMETRIC:
        _geometric(best >> 2, span, frequencies)
        return _put(best, 10, bits, at)
    _fall((best >> 2) & 15, last, frequencies)
    return _put(best, 13, bits, at)


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
    for index in range(len(lengths)):
        mine = frequencies[index * SYMBOLS : (index + 1) * SYMBOLS]
        for symbol in range(SYMBOLS):
            mine[symbol] = 0
        if lengths[index] == 0:
            continue
        forms[index] = AS_SYMBOLS
        kind = _get(data, at, 2)
        if kind == _SINGLE and _get(data, at + 2, 7) >= IN_LIST:
            forms[index] = _get(data, at + 2, 7)
            at += 9
            if forms[index] == IN_PLANES:
                continue
            kind = _get(data, at, 2)
        at += 2
        if kind == _SINGLE:
            mine[_get(data, at, 7)] = TOTAL
            at += 7
        elif kind == _GEOMETRIC:
            code = _get(data, at, 8)
            at += 8
            if code >= _CODES or spans[index] < 1:
                return BAD
            _geometric(code, spans[index], mine)
        elif kind == _FALLING:
            _fall(_get(data, at, 4), _get(data, at + 4, 7), mine)
            at += 11
        else:
            size, low = _get(data, at, 7), _get(data, at + 7, 2)
            at += 9
            level = 0
            for symbol in range(size + 1):
                difference = 0
                while _get(data, at, 1):
                    difference += 1
                    at += 1
                    if difference > 2 * _LEVELS:
                        return BAD
                difference = (difference << low) | _get(data, at + 1, low)
                at += 1 + low
                level += (difference >> 1) ^ -(difference & 1)
                if level < 0 or level >= _LEVELS:
                    return BAD
                mine[symbol] = _level_frequency(level)
            if level == 0:
                return BAD  # the last symbol is always used
            _fit(mine)
    return at
