"""Sequences of numbers below 2^32 -> bytes near their entropy, and back.

    header, in bits: four states? a form and a table for each sequence
    states | words, sequence by sequence | open bits, likewise
    of sequences in byte planes: varint bytes, zstd-1 of the two planes
    of sequences in a list: varint different numbers, the differences between them, ascending, as varints

Long sequences of numbers below 8 are coded two or three as one symbol. A list is for few different numbers, too large
for symbols to tell them apart: NaNs' payloads, weights that had been quantised. Planes are for noise, which zstd
leaves as it is.
"""

from __future__ import annotations

import numpy as np
import zstandard

from async_rl.weights.codec.jit import (
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16_OUT,
    U32,
    U32_OUT,
    int64,
    kernel,
    load_u16,
)
from async_rl.weights.codec.rans import (
    BAD,
    LOW,
    SPARE,
    SYMBOLS,
    fold,
    get_symbols,
    join_symbols,
    put_symbols,
    slot_bits_of,
    unfold,
)
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.tables import (
    AS_SYMBOLS,
    IN_LIST,
    IN_PLANES,
    TABLE_BITS,
    get_tables,
    group_table,
    put_form,
    put_table,
)

__all__ = ["get_varint", "pack", "put_varint", "read_other_forms", "read_symbols", "unpack"]

IN_TURNS = 2048
"""Symbols from which four states are worth their 8 bytes."""

OPEN_FROM = 1024
"""Bytes of open bits, beyond two bits a number, from which other forms are tried."""

SAMPLE = 1 << 10
"""Numbers that tell whether to try."""

NOISE = 13
"""Bits a number as symbols, below which planes are tried only where numbers repeat: to them open bits are noise."""

PLANES_GAIN = 1.005
"""Planes may be a little longer: they are read five times as fast."""


def pack(values: np.ndarray, sizes: np.ndarray, spans: np.ndarray) -> bytes:
    """Of sequences that follow one another in `values`, uint32 [sum of sizes]; `sizes`, int64. `spans`, likewise, as
    in put_table; empty sequences take nothing."""
    total = len(values)
    if not total:
        return b""
    symbols = scratch("symbols", total + SPARE, np.uint8)[:total]
    low = scratch("open", 4 * total + len(sizes) + 16, np.uint8)
    counts, low_sizes = np.zeros(len(sizes) * SYMBOLS, np.int64), np.empty(len(sizes), np.int64)
    ends = np.zeros(4, np.int64)
    _fold(values, sizes, spans, symbols, counts, low, low_sizes, ends)
    forms = np.zeros(len(sizes), np.int64)
    kept: list[memoryview] = [low[: ends[2]].data]
    others: list[bytes] = []
    if ends[3]:
        kept, others = _try_other_forms(values, sizes, spans, symbols, counts, low, low_sizes, forms)
    head = scratch("head", len(sizes) * TABLE_BITS // 8 + 32, np.uint8)
    words = scratch("symbol_words", total + 8, np.uint16)
    _write(symbols, sizes, spans, forms, counts, head, words, ends)
    used = words[ends[1] :].astype("<u2", copy=False)
    return b"".join((head[: ends[0]].data, used.data, *kept, *others))


def _try_other_forms(
    values: np.ndarray,
    sizes: np.ndarray,
    spans: np.ndarray,
    symbols: np.ndarray,
    counts: np.ndarray,
    low: np.ndarray,
    low_sizes: np.ndarray,
    forms: np.ndarray,
) -> tuple[list[memoryview], list[bytes]]:
    """Fills in the forms and changes what stands in another one. Open bits that are left, what follows."""
    others: list[bytes] = []
    for index in np.flatnonzero((spans == 0) & (low_sizes > OPEN_FROM + sizes // 4)).tolist():
        first = int(sizes[:index].sum())
        here, row = slice(first, first + int(sizes[index])), slice(index * SYMBOLS, (index + 1) * SYMBOLS)
        form, symbols[here], counts[row], data = _in_another_form(
            values[here], symbols[here], counts[row], int(low_sizes[index])
        )
        if form != AS_SYMBOLS:
            forms[index] = form
            others.append(data)
    kept = [
        low[end - size : end].data
        for end, size, form in zip(np.cumsum(low_sizes), low_sizes, forms, strict=True)
        if form == AS_SYMBOLS
    ]
    return kept, others


@kernel(I64, U32, I64_IN, I64_IN, U8_OUT, I64_OUT, U8_OUT, I64_OUT, I64_OUT)
def _fold(
    values: np.ndarray,
    lengths: np.ndarray,
    spans: np.ndarray,
    symbols: np.ndarray,
    counts: np.ndarray,
    low: np.ndarray,
    low_sizes: np.ndarray,
    ends: np.ndarray,
) -> int:
    """All sequences' symbols, counts (zeros before), and open bits with their bytes. `ends`, zeros before: [2] is the
    byte after the open bits, [3] counts sequences that another form might suit."""
    tallies = np.zeros(4 * SYMBOLS, np.int64)
    first = at = 0
    for index in range(len(lengths)):
        stop = first + lengths[index]
        before = at
        if stop > first:
            at = fold(values, first, stop, symbols, tallies, low, at)
            for i in range(len(tallies)):
                counts[index * SYMBOLS + (i & (SYMBOLS - 1))] += tallies[i]
                tallies[i] = 0
        low_sizes[index] = at - before
        ends[3] += int64(spans[index] == 0 and at - before > OPEN_FROM + lengths[index] // 4)
        first = stop
    ends[2] = at
    return 0


@kernel(I64, U8_OUT, I64_IN, I64_IN, I64_IN, I64_IN, U8_OUT, U16_OUT, I64_OUT)
def _write(
    symbols: np.ndarray,
    lengths: np.ndarray,
    spans: np.ndarray,
    forms: np.ndarray,
    counts: np.ndarray,
    head: np.ndarray,
    words: np.ndarray,
    ends: np.ndarray,
) -> int:
    """Tables and states to `head`; words to the end of `words`. `ends`: of the head, and the first word. Symbols are
    lost."""
    frequencies = np.empty(len(counts), np.int64)
    bits = np.zeros(len(lengths) * TABLE_BITS + 1, np.uint8)
    states = np.full(4 if len(symbols) >= IN_TURNS else 1, LOW, np.int64)
    bits[0] = len(states) == 4
    end = 1
    for index in range(len(lengths)):
        if lengths[index]:
            if forms[index] != AS_SYMBOLS:
                end = put_form(forms[index], bits, end)
            if forms[index] != IN_PLANES:
                slot_bits = slot_bits_of(lengths[index], spans[index])
                end = put_table(counts, index * SYMBOLS, spans[index], slot_bits, frequencies, bits, end)
    stop = len(symbols)
    at = len(words) - 1
    for index in range(len(lengths) - 1, -1, -1):
        first = stop - lengths[index]
        if lengths[index] and forms[index] != IN_PLANES:
            slot_bits = slot_bits_of(lengths[index], spans[index])
            row = index * SYMBOLS
            together = group_table(frequencies, row, lengths[index], spans[index])
            if together > 1:
                stop = join_symbols(symbols, first, stop, together, int64(symbols[first]))
            at = put_symbols(symbols, first, stop, frequencies, row, slot_bits, states, words, at)
        stop = first
    size = (end + 7) >> 3
    for byte in range(size):
        value = 0
        for bit in range(8):
            value |= int64(bits[8 * byte + bit]) << bit
        head[byte] = value
    for state in states:
        for _ in range(4):
            head[size] = state & 0xFF
            state >>= 8
            size += 1
    ends[0], ends[1] = size, at + 1
    return 0


def _in_another_form(
    values: np.ndarray, symbols: np.ndarray, counts: np.ndarray, open_bytes: int
) -> tuple[int, np.ndarray, np.ndarray, bytes]:
    """(form, symbols, their counts, what follows); AS_SYMBOLS if no other form is shorter."""
    if values.max() > 0xFFFF:
        return AS_SYMBOLS, symbols, counts, b""
    bytes_now = open_bytes + _entropy_bytes(counts)
    sample = values[:: len(values) // SAMPLE + 1]
    distinct = len(np.unique(sample))
    if distinct <= IN_LIST:
        times = np.bincount(values)
        different = np.flatnonzero(times)
        listed = np.zeros(SYMBOLS, np.int64)
        listed[: min(len(different), SYMBOLS)] = times[different[:SYMBOLS]]
        if len(different) <= IN_LIST and _entropy_bytes(listed) + 4 * len(different) < bytes_now:
            places = np.zeros(len(times), np.uint8)
            places[different] = np.arange(len(different))
            ascending = b"".join(map(put_varint, np.diff(different, prepend=0).tolist()))
            return IN_LIST, places[values], listed, put_varint(len(different)) + ascending
    most = PLANES_GAIN * bytes_now
    if 8 * bytes_now < NOISE * len(values) and 2 * distinct > len(sample):
        return AS_SYMBOLS, symbols, counts, b""
    if len(_planes(sample)) * len(values) <= most * len(sample) * 1.04:  # a short frame is a little longer
        planes = _planes(values)
        if len(planes) <= most:
            return IN_PLANES, symbols, counts, put_varint(len(planes)) + planes
    return AS_SYMBOLS, symbols, counts, b""


def _planes(values: np.ndarray) -> bytes:
    both = np.empty(2 * len(values), np.uint8)
    both[: len(values)] = values & 0xFF
    both[len(values) :] = values >> 8
    return zstandard.ZstdCompressor(level=1).compress(both.data)


def _entropy_bytes(counts: np.ndarray) -> float:
    used = counts[counts > 0]
    return float(np.sum(used * np.log2(used.sum() / used))) / 8


def unpack(
    data: np.ndarray, at: int, sizes: np.ndarray, spans: np.ndarray, *, keep: bool = True
) -> np.ndarray | None:
    """The sequences in `data` (uint8) from byte `at` to its end, one after another, given their lengths and spans
    (int64); in scratch unless they are to `keep`. None for bytes that nobody wrote."""
    total = int(sizes.sum())
    values = np.empty(total, np.uint32) if keep else scratch("told", total, np.uint32)
    if total:
        symbols = scratch("symbols", total + SPARE, np.uint8)
        forms = np.zeros(len(sizes), np.int64)
        at = read_symbols(data, at, sizes, spans, values, symbols, forms)
        if at != BAD and forms.any():
            at = read_other_forms(data, at, sizes, forms, values, symbols)
    return values if at == len(data) else None


def read_other_forms(
    data: np.ndarray, at: int, sizes: np.ndarray, forms: np.ndarray, values: np.ndarray, symbols: np.ndarray
) -> int:
    """What read_symbols has left out, from byte `at` on; the byte after, or BAD."""
    first = 0
    for length, form in zip(sizes.tolist(), forms.tolist(), strict=True):
        here = slice(first, first + length)
        first += length
        if length and form == IN_PLANES:
            at = _from_planes(data, at, values[here])
        elif length and form == IN_LIST:
            at = _from_list(data, at, symbols[here], values[here])
        if at == BAD:
            return BAD
    return at


@kernel(I64, U8, I64, I64_IN, I64_IN, U32_OUT, U8_OUT, I64_OUT)
def read_symbols(
    data: np.ndarray,
    at: int,
    lengths: np.ndarray,
    spans: np.ndarray,
    values: np.ndarray,
    symbols: np.ndarray,
    forms: np.ndarray,
) -> int:
    """What stands as symbols into `values`, the places in lists into `symbols`, which holds SPARE more. The byte
    after, or BAD."""
    if at >= len(data):
        return BAD
    states = np.empty(4 if data[at] & 1 else 1, np.int64)
    frequencies = np.empty(len(lengths) * SYMBOLS, np.int64)
    bit = get_tables(data, 8 * at + 1, lengths, spans, frequencies, forms)
    at = (bit + 7) >> 3
    if bit < 0 or at + 4 * len(states) > len(data):
        return BAD
    for i in range(len(states)):
        states[i] = load_u16(data, at) | (load_u16(data, at + 2) << 16)
        at += 4
        if states[i] < LOW:
            return BAD
    first = 0
    for index in range(len(lengths)):
        end = first + lengths[index]
        if lengths[index] and forms[index] != IN_PLANES:
            row, span = index * SYMBOLS, spans[index]
            slot_bits = slot_bits_of(lengths[index], span)
            together = group_table(frequencies, row, lengths[index], span)
            at = get_symbols(symbols, first, end, together, frequencies, row, slot_bits, states, data, at)
            if at < 0:
                return BAD
        first = end
    for i in range(len(states)):
        if states[i] != LOW:
            return BAD
    first = 0
    for index in range(len(lengths)):
        end = first + lengths[index]
        if lengths[index] and forms[index] == AS_SYMBOLS:
            at = unfold(symbols, first, end, data, at, values)
            if at < 0:
                return BAD
        first = end
    return at


def _from_list(data: np.ndarray, at: int, symbols: np.ndarray, values: np.ndarray) -> int:
    """The byte after, or BAD."""
    size, at = get_varint(data, at)
    numbers = []
    number = 0
    for _ in range(min(size, IN_LIST)):
        difference, at = get_varint(data, at)
        number += difference
        if difference < 0 or number > 0xFFFF:
            return BAD
        numbers.append(number)
    if not numbers or symbols.max() >= len(numbers):
        return BAD
    values[:] = np.array(numbers, np.uint32)[symbols]
    return at


def _from_planes(data: np.ndarray, at: int, values: np.ndarray) -> int:
    """The byte after, or BAD."""
    size, at = get_varint(data, at)
    end = at + size
    if size < 0 or end > len(data):
        return BAD
    try:
        frame = data[at:end].tobytes()
        if zstandard.frame_content_size(frame) != 2 * len(values):  # before anything is allocated
            return BAD
        both = zstandard.ZstdDecompressor().decompress(frame, max_output_size=2 * len(values))
    except zstandard.ZstdError:
        return BAD
    if len(both) != 2 * len(values):
        return BAD
    values[:] = np.frombuffer(both, np.uint8).reshape(2, -1).T.copy().view("<u2")[:, 0]
    return end


def put_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def get_varint(data: np.ndarray, at: int) -> tuple[int, int]:
    """(the number, the byte after); -1 for bytes that nobody wrote."""
    value = 0
    for index, byte in enumerate(data[at : at + 5].tolist()):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    return -1, at
