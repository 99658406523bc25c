"""How records stand in the spool's files: one after another, each with a header that says where it ends, and whether
it is right. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["HEADER", "Part", "committed_bodies", "head_of", "left_of", "next_record"]

MAGIC = b"aRL1"
HEADER = struct.Struct("<4sIII")
"""MAGIC, length of the body, CRC-32 of the body, CRC-32 of the 12 bytes before."""
_HEAD, _CRC = struct.Struct("<4sII"), struct.Struct("<I")

Part: TypeAlias = bytes | memoryview
"""Of a body: a group in it is large, and is not copied."""


def head_of(body: Sequence[Part]) -> tuple[int, bytes]:
    """The size of a record's body, and what stands before it in a file."""
    size, crc = 0, 0
    for part in body:
        size, crc = size + len(part), zlib.crc32(part, crc)
    head = _HEAD.pack(MAGIC, size, crc)
    return size, head + _CRC.pack(zlib.crc32(head))


def left_of(parts: list[Part], wrote: int) -> list[Part]:
    """What is not written yet of these."""
    for number, part in enumerate(parts):
        if wrote < len(part):
            return [part[wrote:], *parts[number + 1 :]]
        wrote -= len(part)
    return []


def committed_bodies(data: bytes) -> Iterator[memoryview]:
    """Of the records in a file's bytes that are whole and right; for whoever only reads."""
    at = 0
    while (found := next_record(data, at)) is not None:
        start, size, whole = found
        at = start + HEADER.size + size
        if whole:
            yield memoryview(data)[start + HEADER.size : at]


def next_record(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """Start, size of the body, and whether the body is right, of the first record at or after `at`."""
    while (start := data.find(MAGIC, at)) >= 0:
        head = data[start : start + HEADER.size]
        if len(head) < HEADER.size:
            return None
        _, size, body_crc, head_crc = HEADER.unpack(head)
        if zlib.crc32(head[:-4]) == head_crc:
            body = memoryview(data)[start + HEADER.size : start + HEADER.size + size]
            return start, size, zlib.crc32(body) == body_crc
        at = start + 1
    return None
