"""The frequencies of symbols: chosen, written, read.

Written are the levels of the frequencies (a quarter of an octave each: 0.002 bits a symbol lost), as Rice codes of
the differences between neighbours; or, where that is shorter in all, a model with a number or two. Both sides make
the frequencies from what is written, with integers only: they must get the same on every machine.

    2 bits kind | explicit: 7 bits symbols - 1, 2 bits of Rice's parameter, the codes
                | geometric: 8 bits                             (gaps among independent changes)
                | falling: 4 bits ratio, 7 bits last symbol
                | single: 7 bits symbol
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from async_rl.weights.codec.jit import F64, I64, I64_IN, I64_OUT, U8, U8_OUT, helper, int64, kernel, uint64
from async_rl.weights.codec.rans import BAD, SYMBOLS, TOTAL, TOTAL_BITS, low_bits_of, lowest_of, symbol_of

__all__ = ["BitReader", "BitWriter", "get_table", "put_table"]

_EXPLICIT, _GEOMETRIC, _FALLING, _SINGLE = 0, 1, 2, 3
_LEVELS = 45  # symbol_of(TOTAL) + 1
_CODES = 29 * 8  # of geometric models
_TABLE_BITS = 2048  # more than one takes: 128 levels, at most 11 + 1 + 3 bits each
_FALLING_BITS = 1024  # of coded symbols: with more, a table pays


class BitWriter:
    """Little-endian bits of a header."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []

    def put(self, value: int, size: int) -> None:
        self._pieces.append(np.array([(value >> bit) & 1 for bit in range(size)], np.uint8))

    def put_array(self, bits: np.ndarray) -> None:
        """One bit to a byte."""
        self._pieces.append(bits)

    def done(self) -> bytes:
        return np.packbits(np.concatenate(self._pieces), bitorder="little").tobytes()


class BitReader:
    """Reads zeros past the end; `BitReader.byte` tells."""

    def __init__(self, data: np.ndarray, at: int) -> None:
        self._data = data
        self._first = at
        self.bit = 0

    def get(self, size: int) -> int:
        start = self._first + (self.bit >> 3)
        value = int.from_bytes(self._data[start : start + 2].tobytes(), "little") >> (self.bit & 7)
        self.bit += size  # up to 9
        return value & ((1 << size) - 1)

    def ahead(self, size: int) -> np.ndarray:
        """The next bits, one to a byte."""
        start = self._first + (self.bit >> 3)
        bits = np.unpackbits(self._data[start : start + size // 8 + 1], bitorder="little")
        bits = bits[self.bit & 7 :]
        return np.concatenate([bits, np.zeros(max(0, size - len(bits)), np.uint8)])

    @property
    def byte(self) -> int:
        """The one after what was read; beyond the end if that was too much."""
        return self._first + ((self.bit + 7) >> 3)


def put_table(counts: np.ndarray, span: int, header: BitWriter) -> np.ndarray:
    """Chooses the frequencies, int64 [SYMBOLS], for such counts, int64 [SYMBOLS], not all 0. `span`: gaps are
    counted, among so many elements; 0: anything else."""
    used = np.flatnonzero(counts)
    last = int(used[-1])
    frequencies = np.zeros(SYMBOLS, np.int64)
    if len(used) == 1:
        header.put(_SINGLE | last << 2, 9)
        frequencies[last] = TOTAL
        return frequencies
    levels = np.zeros(SYMBOLS, np.int64)
    bits = _quantise(counts, levels, frequencies)
    explicit = np.zeros(_TABLE_BITS, np.uint8)
    size = _put_levels(levels, last + 1, explicit)

    model, kind, code = np.zeros(SYMBOLS, np.int64), _GEOMETRIC, 0
    model_bits = math.inf
    if span:
        code = _geometric_code(int(counts.sum()), span)
        model_bits = _model(kind, code, _last_gap(span), counts, model) + 8
    elif bits < _FALLING_BITS:
        kind = _FALLING
        code = _best_ratio(last, counts, model)
        model_bits = _model(kind, code, last, counts, model) + 11
    if model_bits >= bits + size:
        header.put(_EXPLICIT, 2)
        header.put_array(explicit[:size])
        return frequencies
    header.put(kind, 2)
    if kind == _GEOMETRIC:
        header.put(code, 8)
    else:
        header.put(code | last << 4, 11)
    return model


def get_table(header: BitReader, span: int) -> np.ndarray | None:
    """The frequencies; None for bytes that nobody wrote."""
    kind = header.get(2)
    frequencies = np.zeros(SYMBOLS, np.int64)
    if kind == _SINGLE:
        frequencies[header.get(7)] = TOTAL
        return frequencies
    if kind == _EXPLICIT:
        size = _get_levels(header.ahead(_TABLE_BITS), frequencies)
        header.bit += size
        return frequencies if size > 0 else None
    if kind == _GEOMETRIC:
        code, last = header.get(8), _last_gap(span)
        if code >= _CODES or span < 1:
            return None
    else:
        code, last = header.get(4), header.get(7)
    _model(kind, code, last, frequencies, frequencies)
    return frequencies


def _last_gap(span: int) -> int:
    gap = max(span - 1, 0)
    octave = gap.bit_length() - 1
    return gap if gap < 4 else ((octave - 1) << 2) + ((gap >> (octave - 2)) & 3)


def _geometric_code(changes: int, span: int) -> int:
    """Each element changes with a probability of (8 + code % 8) * 2^(code // 8 - 32)."""
    chance = min(changes / (span + 1), 0.9) * 2.0**32
    octave = max(int(math.log2(chance)) - 3, 0)
    return (octave << 3) + min(max(round(chance / 2.0**octave) - 8, 0), 7)


# ---------------------------------------------------------------- kernels


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


@kernel(F64, I64_IN, I64_OUT, I64_OUT)
def _quantise(counts: np.ndarray, levels: np.ndarray, frequencies: np.ndarray) -> float:
    """Levels and frequencies (both zeros) for such counts; bits of all symbols."""
    total = 0
    for symbol in range(SYMBOLS):
        total += counts[symbol]
    for symbol in range(SYMBOLS):
        if counts[symbol]:
            levels[symbol] = symbol_of(max(1, (counts[symbol] * TOTAL + total // 2) // total))
            frequencies[symbol] = _level_frequency(levels[symbol])
    _fit(frequencies)
    return _cost(counts, frequencies)


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
def _fall(ratio: int, last: int, frequencies: np.ndarray) -> None:
    """Every second symbol ratio / 16 as frequent as the one before."""
    frequency = 1 << 20
    for symbol in range(SYMBOLS):
        frequencies[symbol] = max(1, frequency) if symbol <= last else 0
        if symbol & 1:
            frequency = (frequency * ratio) >> 4


@kernel(F64, I64, I64, I64, I64_IN, I64_OUT)
def _model(kind: int, code: int, last: int, counts: np.ndarray, frequencies: np.ndarray) -> float:
    """The frequencies of a model up to the symbol `last`; bits of all symbols."""
    if kind == _GEOMETRIC:
        stay = uint64((1 << 32) - ((8 + (code & 7)) << (code >> 3)))
        before = uint64(1 << 32)
        for symbol in range(SYMBOLS):
            frequencies[symbol] = 0
            if symbol <= last:
                after = _power(stay, lowest_of(symbol + 1)) if symbol < last else uint64(0)
                frequencies[symbol] = max(1, int64((before - after) >> uint64(12)))
                before = after
    else:
        _fall(code, last, frequencies)
    _fit(frequencies)
    return _cost(counts, frequencies)


@kernel(I64, I64, I64_IN, I64_OUT)
def _best_ratio(last: int, counts: np.ndarray, frequencies: np.ndarray) -> int:
    """Of _FALLING; `frequencies` are scratch."""
    best, best_bits = 1, math.inf
    for ratio in range(1, 16):
        _fall(ratio, last, frequencies)
        _fit(frequencies)
        bits = _cost(counts, frequencies)
        if bits < best_bits:
            best, best_bits = ratio, bits
    return best


@helper
def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@kernel(I64, I64_IN, I64, U8_OUT)
def _put_levels(levels: np.ndarray, size: int, bits: np.ndarray) -> int:
    """The first `size` of them, into `bits` (zeros); how many bits."""
    best, best_size = 0, 1 << 30
    for low in range(4):
        needed, before = 0, 0
        for symbol in range(size):
            needed += (_zigzag(levels[symbol] - before) >> low) + 1 + low
            before = levels[symbol]
        if needed < best_size:
            best, best_size = low, needed
    fixed = (size - 1) | (best << 7)
    for at in range(9):
        bits[at] = (fixed >> at) & 1
    at = 9
    before = 0
    for symbol in range(size):
        difference = _zigzag(levels[symbol] - before)
        before = levels[symbol]
        for _ in range(difference >> best):
            bits[at] = 1
            at += 1
        at += 1
        for i in range(best):
            bits[at + i] = (difference >> i) & 1
        at += best
    return at


@kernel(I64, U8, I64_OUT)
def _get_levels(bits: np.ndarray, frequencies: np.ndarray) -> int:
    """From `bits`, of which there are more than a table can take, to frequencies; how many bits, or BAD."""
    fixed = 0
    for at in range(9):
        fixed |= int64(bits[at]) << at
    low = fixed >> 7
    at = 9
    level = 0
    for symbol in range((fixed & 127) + 1):
        difference = 0
        while bits[at + difference]:
            difference += 1
            if difference > 2 * _LEVELS or at + difference + 8 > len(bits):
                return BAD
        at += difference + 1
        for _ in range(low):
            difference <<= 1
        for i in range(low):
            difference |= int64(bits[at + i]) << i
        at += low
        level += (difference >> 1) ^ -(difference & 1)
        if level < 0 or level >= _LEVELS:
            return BAD
        frequencies[symbol] = _level_frequency(level)
    if level == 0:
        return BAD  # the last symbol is always used
    _fit(frequencies)
    return at
