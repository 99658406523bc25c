"""Sequences of numbers below 2^32 -> bytes near their entropy, and back.

bits of a header: four states? a table for each sequence | states | words, sequence by sequence | open bits, likewise
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.weights.codec.rans import BAD, LOW, SYMBOLS, fold, get_symbols, put_symbols, unfold
from async_rl.weights.codec.tables import BitReader, BitWriter, get_table, put_table

__all__ = ["get_varint", "pack", "put_varint", "unpack"]

IN_TURNS = 2048
"""Symbols from which four states are worth their 8 bytes."""


def pack(sequences: Sequence[tuple[np.ndarray, int]]) -> bytes:
    """Of (uint32 [n], span) each. `span` as in put_table; empty sequences take nothing."""
    total = sum(len(values) for values, _ in sequences)
    if not total:
        return b""
    states = np.full(4 if total >= IN_TURNS else 1, LOW, np.int64)
    header = BitWriter()
    header.put(int(len(states) == 4), 1)
    low = np.empty(4 * total + len(sequences) + 16, np.uint8)
    low_end = 0
    coded = []
    for values, span in sequences:
        if len(values):
            symbols, counts = np.empty(len(values), np.uint8), np.zeros(SYMBOLS, np.int64)
            low_end = fold(values, symbols, counts, low, low_end)
            coded.append((symbols, put_table(counts, span, header)))
    words = np.empty(total + 8, "<u2")
    last = at = len(words) - 1
    for symbols, frequencies in reversed(coded):
        at = put_symbols(symbols, frequencies, states, words, at)
    return b"".join(
        (header.done(), states.astype("<u4").tobytes(), words[at + 1 : last + 1].data, low[:low_end].data)
    )


def unpack(data: np.ndarray, at: int, wanted: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
    """The sequences in `data` (uint8) from byte `at` to its end, given the (length, span) of each.
    None for bytes that nobody wrote."""
    found = [np.empty(length, np.uint32) for length, _ in wanted]
    if not any(length for length, _ in wanted):
        return found if at == len(data) else None
    header = BitReader(data, at)
    states = np.zeros(4 if header.get(1) else 1, np.int64)
    tables = [get_table(header, span) if length else None for length, span in wanted]
    at = header.byte + 4 * len(states)
    if at > len(data) or any(
        length and table is None for (length, _), table in zip(wanted, tables, strict=True)
    ):
        return None
    states[:] = np.frombuffer(data[header.byte : at].tobytes(), "<u4")
    if states.min() < LOW:
        return None
    coded = []
    for (length, _), table in zip(wanted, tables, strict=True):
        symbols = np.empty(length, np.uint8)
        if table is not None:
            at = get_symbols(symbols, table, states, data, at)
            if at == BAD:
                return None
        coded.append(symbols)
    if (states != LOW).any():
        return None
    for symbols, values in zip(coded, found, strict=True):
        at = unfold(symbols, data, at, values)
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
