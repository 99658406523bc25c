"""Sequences of numbers below 2^32 -> bytes near their entropy, and back.

    header, in bits: four states? a table for each sequence
    states | words, sequence by sequence | open bits, likewise
    of sequences in byte planes: varint bytes, zstd-1 of the two planes

Planes are for large numbers that repeat, of which symbols tell only the size: NaNs' payloads, weights that had been
quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from async_rl.weights.codec.rans import BAD, LOW, SYMBOLS, fold, get_symbols, put_symbols, unfold
from async_rl.weights.codec.tables import IN_PLANES, TABLE_BITS, get_tables, put_planes, put_table

__all__ = ["get_varint", "pack", "put_varint", "unpack"]

IN_TURNS = 2048
"""Symbols from which four states are worth their 8 bytes."""

PLANES_FROM = 64
"""Bytes of open bits, beyond two bits a number, from which planes are tried."""

PLANES_GAIN = 1.005
"""Planes may be so much longer: noise stays as it is under zstd, and is copied back."""


def pack(sequences: Sequence[tuple[np.ndarray, int]]) -> bytes:
    """Of (uint32 [n], span) each. `span` as in put_table; empty sequences take nothing."""
    total = sum(len(values) for values, _ in sequences)
    if not total:
        return b""
    states = np.full(4 if total >= IN_TURNS else 1, LOW, np.int64)
    header = np.zeros(len(sequences) * TABLE_BITS + 1, np.uint8)
    header[0] = len(states) == 4
    header_end = 1
    low = np.empty(4 * total + len(sequences) + 16, np.uint8)
    low_end = 0
    coded = []
    planes: list[bytes] = []
    for values, span in sequences:
        if len(values):
            symbols, frequencies = np.empty(len(values), np.uint8), np.empty(SYMBOLS, np.int64)
            counts = np.zeros(SYMBOLS, np.int64)
            before, low_end = low_end, fold(values, symbols, counts, low, low_end)
            if span == 0 and low_end - before > PLANES_FROM + len(values) // 4:
                shorter = _planes(values, counts, low_end - before)
                if shorter:
                    low_end = before
                    header_end = put_planes(header, header_end)
                    planes += [put_varint(len(shorter)), shorter]
                    continue
            header_end = put_table(counts, span, frequencies, header, header_end)
            coded.append((symbols, frequencies))
    words = np.empty(total + 8, "<u2")
    last = at = len(words) - 1
    for symbols, frequencies in reversed(coded):
        at = put_symbols(symbols, frequencies, states, words, at)
    head = np.packbits(header[:header_end], bitorder="little")
    return b"".join(
        (head.data, states.astype("<u4").data, words[at + 1 : last + 1].data, low[:low_end].data, *planes)
    )


def _planes(values: np.ndarray, counts: np.ndarray, low_bytes: int) -> bytes | None:
    """If they are below 2^16, and shorter so."""
    if values.max() > 0xFFFF:
        return None
    both = values.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    data = zstandard.ZstdCompressor(level=1).compress(both)
    used = counts[counts > 0]
    entropy = float(np.sum(used * np.log2(len(values) / used))) / 8
    return data if len(data) <= PLANES_GAIN * (low_bytes + entropy) else None


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


def unpack(data: np.ndarray, at: int, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
    """The sequences in `data` (uint8) from byte `at` to its end, given the (length, span) of each.
    None for bytes that nobody wrote."""
    shapes = np.array(wanted, np.int64)
    lengths, spans = shapes[:, 0].copy(), shapes[:, 1].copy()
    found = [np.empty(length, np.uint32) for length in lengths.tolist()]
    if not lengths.any():
        return found if at == len(data) else None
    most = len(wanted) * TABLE_BITS + 1
    bits = np.zeros(most + TABLE_BITS, np.uint8)  # and zeros past the end of the data
    header = np.unpackbits(data[at : at + (most >> 3) + 1], bitorder="little")
    bits[: len(header)] = header
    frequencies = np.empty(len(wanted) * SYMBOLS, np.int64)
    used = get_tables(bits[1:], lengths, spans, frequencies)
    states = np.empty(4 if bits[0] else 1, np.int64)
    at += (used + 8) >> 3
    if used == BAD or at + 4 * len(states) > len(data):
        return None
    states[:] = data[at : at + 4 * len(states)].copy().view("<u4")
    at += 4 * len(states)
    if states.min() < LOW:
        return None
    coded: list[np.ndarray | None] = []
    for index, values in enumerate(found):
        symbols = np.empty(len(values), np.uint8)
        if len(values):
            if frequencies[index * SYMBOLS] == IN_PLANES:
                coded.append(None)
                continue
            table = frequencies[index * SYMBOLS : (index + 1) * SYMBOLS]
            at = get_symbols(symbols, table, states, data, at)
            if at == BAD:
                return None
        coded.append(symbols)
    if (states != LOW).any():
        return None
    for told, values in zip(coded, found, strict=True):
        if told is not None:
            at = unfold(told, data, at, values)
            if at == BAD:
                return None
    for told, values in zip(coded, found, strict=True):
        if told is None:
            at = _from_planes(data, at, values)
            if at == BAD:
                return None
    return found if at == len(data) else None


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
