"""How others ship a change of 16-bit weights, written from their description, to measure ours against.

Each format codes a payload of some tensors: (base, new) of each, uint16 [n] -> bytes -> the base changed in
place. All are bit-exact, vectorised or compiled, and as quick as the description allows; what differs is found by
our codec's own kernel. What is coded:

    full            every new value
    int32 + value   position (32 bits) and new value of every changed weight (TRL)
    u32 + value     the same under zstd at its default level, 3 (slime's overwrite)
    xor             base XOR new of every weight, under zstd-1 (slime, SkyRL, ModelExpress)
    packed gaps     gaps between changed weights at the smaller of 2 and 4 bytes that holds the tensor's
                    largest, and base XOR new of each, under zstd-1 (NeMo-RL)
    gaps + steps    gaps and steps in bytes, each a stream of its own under zstd-1: what the two ideas give alone
    class gaps      the same with the gaps counted, and both kept apart, per exponent of the base weight

The streams of a payload run through its tensors, so that zstd sees as much at once as possible. Where a byte holds a
gap, 255 says "255 weights are unchanged, go on"; where it holds a step (zigzag), 255 says "16 bits follow in the
stream of large steps".

Layout: number of streams, their lengths (u32 each), the streams.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from numba import njit

from async_rl.weights.codec.elements import find

__all__ = ["PEERS", "Changes", "Peer", "changed_positions"]

CLASSES = 256
"""Exponents of the base weight: bits 7 … 14, as bfloat16 has them."""

_FRAME_BYTES = 4 << 10
"""A class's stream has a zstd frame of its own (and so its own statistics) unless it is shorter than this: then the
next class joins it."""

Changes = Sequence[tuple[np.ndarray, np.ndarray]]
"""(base, new) of each of the payload's tensors: uint16 [n], the bits."""


class Peer(NamedTuple):
    name: str
    encode: Callable[[Changes], bytes]
    apply: Callable[[bytes, Sequence[np.ndarray]], None]
    """Given what was coded, and the tensors' base values, which it changes in place."""
    entries: int = 0  # tensors that it writes into a safetensors header for one of the model's


def changed_positions(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    """uint32 [k], ascending."""
    positions = np.empty(len(base), np.uint32)  # what is not written is never given memory
    return positions[: find(base, new, positions)]


def _zstd(data: bytes | np.ndarray, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(_view(data))


def _view(data: bytes | np.ndarray) -> memoryview:
    return memoryview(data).cast("B") if len(data) else memoryview(b"")  # type: ignore[arg-type]


def _unzstd(data: memoryview | bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype)


def _join(streams: Sequence[bytes | np.ndarray]) -> bytes:
    views = [_view(stream) for stream in streams]
    count = len(views)
    return struct.pack(f"<{count + 1}I", count, *(view.nbytes for view in views)) + b"".join(views)


def _split(data: bytes) -> list[memoryview]:
    (count,) = struct.unpack_from("<I", data)
    at = 4 * (count + 1)
    parts = []
    for size in struct.unpack_from(f"<{count}I", data, 4):
        parts.append(memoryview(data)[at : at + size])
        at += size
    return parts


def _encode_full(changes: Changes) -> bytes:
    return b"".join(_view(new) for _, new in changes)


def _apply_full(data: bytes, values: Sequence[np.ndarray]) -> None:
    at = 0
    for tensor in values:
        tensor[:] = np.frombuffer(data, np.uint16, len(tensor), at)
        at += tensor.nbytes


def _sparse(changes: Changes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Changed weights of every tensor u32 [tensors], positions u32 [k], new values u16 [k]."""
    positions = [changed_positions(base, new) for base, new in changes]
    values = [new[at] for at, (_, new) in zip(positions, changes, strict=True)]
    counts = np.array([len(at) for at in positions], np.uint32)
    return counts, np.concatenate(positions), np.concatenate(values)


def _overwrite(
    counts: np.ndarray, positions: np.ndarray, news: np.ndarray, values: Sequence[np.ndarray]
) -> None:
    at = 0
    for count, tensor in zip(counts.tolist(), values, strict=True):
        tensor[positions[at : at + count]] = news[at : at + count]
        at += count


def _encode_values(changes: Changes) -> bytes:
    return _join(_sparse(changes))


def _apply_values(data: bytes, values: Sequence[np.ndarray]) -> None:
    counts, positions, news = _split(data)
    _overwrite(
        np.frombuffer(counts, np.uint32),
        np.frombuffer(positions, np.uint32),
        np.frombuffer(news, np.uint16),
        values,
    )


def _encode_values_zstd(changes: Changes) -> bytes:
    return _join([_zstd(b"".join(map(_view, _sparse(changes))), level=3)])


def _apply_values_zstd(data: bytes, values: Sequence[np.ndarray]) -> None:
    (coded,) = _split(data)
    columns = zstandard.ZstdDecompressor().decompress(coded)
    counts = np.frombuffer(columns, np.uint32, len(values))
    changed = int(counts.sum())
    positions = np.frombuffer(columns, np.uint32, changed, counts.nbytes)
    news = np.frombuffer(columns, np.uint16, changed, counts.nbytes + positions.nbytes)
    _overwrite(counts, positions, news, values)


def _encode_xor(changes: Changes) -> bytes:
    return _join([_zstd(base ^ new) for base, new in changes])


def _apply_xor(data: bytes, values: Sequence[np.ndarray]) -> None:
    for part, tensor in zip(_split(data), values, strict=True):
        tensor ^= _unzstd(part, np.uint16)


def _encode_packed(changes: Changes) -> bytes:
    streams: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    for base, new in changes:
        positions = changed_positions(base, new)
        gaps = np.diff(positions, prepend=np.uint32(0))
        packed = gaps.astype(np.uint16) if gaps.max(initial=0) < 1 << 16 else gaps
        streams[0].append(struct.pack("<II", len(positions), packed.itemsize))
        streams[1].append(packed.tobytes())
        streams[2].append((base[positions] ^ new[positions]).tobytes())
    return _join([_zstd(b"".join(stream)) for stream in streams])


def _apply_packed(data: bytes, values: Sequence[np.ndarray]) -> None:
    heads, packed, flips = (zstandard.ZstdDecompressor().decompress(part) for part in _split(data))
    at = done = 0
    for (count, width), tensor in zip(struct.iter_unpack("<II", heads), values, strict=True):
        gaps = np.frombuffer(packed, np.uint16 if width == 2 else np.uint32, count, at)
        positions = np.cumsum(gaps, dtype=np.int64)
        tensor[positions] ^= np.frombuffer(flips, np.uint16, count, done)
        at += count * width
        done += 2 * count


def _encode_steps(changes: Changes) -> bytes:
    payload: list[tuple[np.ndarray, ...]] = []
    for base, new in changes:
        positions = changed_positions(base, new)
        gaps = np.empty(len(positions) + len(base) // 255 + 1, np.uint8)
        steps = np.empty(len(positions), np.uint8)
        large = np.empty(len(positions), np.uint16)
        n_gaps, n_large = _gap_steps(base, new, positions, gaps, steps, large)
        sizes = np.array([n_gaps, len(steps), n_large], np.uint32)
        payload.append((sizes, gaps[:n_gaps], steps, large[:n_large]))
    return _join([_zstd(np.concatenate(stream)) for stream in zip(*payload, strict=True)])


def _apply_steps(data: bytes, values: Sequence[np.ndarray]) -> None:
    sizes, gaps, steps, large = _split(data)
    streams = (_unzstd(gaps, np.uint8), _unzstd(steps, np.uint8), _unzstd(large, np.uint16))
    ends = np.cumsum(_unzstd(sizes, np.uint32).reshape(-1, 3), axis=0, dtype=np.int64)
    start = np.zeros(3, np.int64)
    for end, tensor in zip(ends, values, strict=True):
        mine = [stream[a:b] for stream, a, b in zip(streams, start, end, strict=True)]
        _apply_gap_steps(mine[0], mine[1], mine[2], tensor)
        start = end


def _encode_classes(changes: Changes) -> bytes:
    counts = np.zeros((2, CLASSES), np.int64)
    unchanged = np.zeros(CLASSES, np.int64)
    for base, new in changes:
        _count_classes(base, new, unchanged, counts)
    ends = np.cumsum(counts, axis=1)
    heads = ends - counts
    gaps = np.empty(ends[0, -1], np.uint8)
    steps = np.empty(ends[1, -1], np.uint8)
    large = np.empty(len(steps), np.uint16)
    n_large = 0
    unchanged[:] = 0
    for base, new in changes:
        n_large = _scatter_classes(base, new, unchanged, heads, gaps, steps, large, n_large)
    gap_frames = _frames(gaps, ends[0])
    step_frames = _frames(steps, ends[1])
    sizes = np.concatenate([[len(gap_frames)], counts.ravel()]).astype(np.uint32)
    return _join([_zstd(sizes), _zstd(large[:n_large]), *gap_frames, *step_frames])


def _frames(stream: np.ndarray, ends: np.ndarray) -> list[bytes]:
    frames = []
    start = 0
    for end in ends.tolist():
        if end - start >= _FRAME_BYTES or (end == len(stream) and end > start):
            frames.append(_zstd(stream[start:end]))
            start = end
    return frames


def _apply_classes(data: bytes, values: Sequence[np.ndarray]) -> None:
    parts = _split(data)
    sizes = _unzstd(parts[0], np.uint32)
    large = _unzstd(parts[1], np.uint16)
    frames = [zstandard.ZstdDecompressor().decompress(part) for part in parts[2:]]
    gaps = np.frombuffer(b"".join(frames[: sizes[0]]), np.uint8)
    steps = np.frombuffer(b"".join(frames[sizes[0] :]), np.uint8)
    counts = sizes[1:].reshape(2, CLASSES).astype(np.int64)
    ends = np.cumsum(counts, axis=1)
    heads = ends - counts
    left = np.empty(CLASSES, np.int64)
    _first_gaps(gaps, heads, ends, left)
    n_large = 0
    for tensor in values:
        n_large = _apply_class_steps(gaps, steps, large, n_large, heads, ends, left, tensor)


PEERS = (
    Peer("full", _encode_full, _apply_full, entries=1),
    Peer("int32 + value", _encode_values, _apply_values, entries=2),
    Peer("u32 + value, zstd-3", _encode_values_zstd, _apply_values_zstd),
    Peer("xor, zstd-1", _encode_xor, _apply_xor),
    Peer("packed gaps, zstd-1", _encode_packed, _apply_packed),
    Peer("gaps + steps, zstd-1", _encode_steps, _apply_steps),
    Peer("class gaps + steps, zstd-1", _encode_classes, _apply_classes),
)


@njit(cache=True, nogil=True, inline="always")
def _order(bits):  # type: ignore[no-untyped-def]
    """16 bits -> the float's place in value order, as int32."""
    return np.int32(bits) if bits < 0x8000 else -np.int32(bits & 0x7FFF) - 1


@njit(cache=True, nogil=True, inline="always")
def _zigzag(base, new):  # type: ignore[no-untyped-def]
    step = np.int32(np.int16(_order(new) - _order(base)))
    return np.uint16(((step << 1) ^ (step >> 31)) & 0xFFFF)


@njit(cache=True, nogil=True, inline="always")
def _moved(bits, code):  # type: ignore[no-untyped-def]
    """The bits one step (zigzag) further."""
    step = np.int32(code >> 1) ^ -np.int32(code & 1)
    order = np.int32(np.int16(_order(bits) + step))
    return np.uint16(order) if order >= 0 else np.uint16(0x8000 | (-order - 1))


@njit(cache=True, nogil=True)
def _gap_steps(base, new, positions, gaps, steps, large):  # type: ignore[no-untyped-def]
    n_gaps = 0
    n_large = 0
    last = np.int64(-1)
    for index in range(len(positions)):
        position = np.int64(positions[index])
        gap = position - last - 1
        while gap >= 255:
            gaps[n_gaps] = 255
            n_gaps += 1
            gap -= 255
        gaps[n_gaps] = gap
        n_gaps += 1
        code = _zigzag(base[position], new[position])
        if code >= 255:
            large[n_large] = code
            n_large += 1
            code = np.uint16(255)
        steps[index] = code
        last = position
    return n_gaps, n_large


@njit(cache=True, nogil=True)
def _apply_gap_steps(gaps, steps, large, values):  # type: ignore[no-untyped-def]
    at = np.int64(-1)
    step = 0
    n_large = 0
    for gap in gaps:
        if gap == 255:
            at += 255
            continue
        at += np.int64(gap) + 1
        code = np.uint16(steps[step])
        step += 1
        if code == 255:
            code = large[n_large]
            n_large += 1
        values[at] = _moved(values[at], code)


@njit(cache=True, nogil=True)
def _count_classes(base, new, unchanged, counts):  # type: ignore[no-untyped-def]
    """counts [2, classes] += bytes of gaps, changed weights; unchanged [classes]: since the last change."""
    for index in range(len(base)):
        kind = (base[index] >> 7) & 0xFF
        if base[index] == new[index]:
            unchanged[kind] += 1
        else:
            counts[0, kind] += unchanged[kind] // 255 + 1
            counts[1, kind] += 1
            unchanged[kind] = 0


@njit(cache=True, nogil=True)
def _scatter_classes(base, new, unchanged, heads, gaps, steps, large, n_large):  # type: ignore[no-untyped-def]
    for index in range(len(base)):
        kind = (base[index] >> 7) & 0xFF
        if base[index] == new[index]:
            unchanged[kind] += 1
            continue
        gap = unchanged[kind]
        unchanged[kind] = 0
        while gap >= 255:
            gaps[heads[0, kind]] = 255
            heads[0, kind] += 1
            gap -= 255
        gaps[heads[0, kind]] = gap
        heads[0, kind] += 1
        code = _zigzag(base[index], new[index])
        if code >= 255:
            large[n_large] = code
            n_large += 1
            code = np.uint16(255)
        steps[heads[1, kind]] = code
        heads[1, kind] += 1
    return n_large


@njit(cache=True, nogil=True)
def _first_gaps(gaps, heads, ends, left):  # type: ignore[no-untyped-def]
    for kind in range(CLASSES):
        left[kind] = _next_gap(gaps, heads[0], ends[0], kind)


@njit(cache=True, nogil=True)
def _apply_class_steps(gaps, steps, large, n_large, heads, ends, left, values):  # type: ignore[no-untyped-def]
    """left [classes]: weights of the class before its next change."""
    for index in range(len(values)):
        kind = (values[index] >> 7) & 0xFF
        if left[kind] > 0:
            left[kind] -= 1
            continue
        code = np.uint16(steps[heads[1, kind]])
        heads[1, kind] += 1
        if code == 255:
            code = large[n_large]
            n_large += 1
        values[index] = _moved(values[index], code)
        left[kind] = _next_gap(gaps, heads[0], ends[0], kind)
    return n_large


@njit(cache=True, nogil=True, inline="always")
def _next_gap(gaps, heads, ends, kind):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    while heads[kind] < ends[kind]:
        gap = gaps[heads[kind]]
        heads[kind] += 1
        total += gap
        if gap < 255:
            return total
    return np.int64(1) << 62  # no change is left
