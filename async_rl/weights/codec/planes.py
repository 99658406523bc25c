"""Tensors of any other dtype: the XOR of base and new, byte plane by byte plane, under zstd-1.

Not near the entropy, and not composable; for the few tensors of a checkpoint that are not 16 bits wide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from async_rl.errors import Corrupt

__all__ = ["apply_planes", "encode_planes"]

_LEVEL = 1


def encode_planes(base: Any, new: Any, itemsize: int) -> bytes | None:
    """`base`, `new`: contiguous buffers of equally many bytes, a multiple of `itemsize`. None if they are equal."""
    before, after = _flat(base), _flat(new)
    if len(before) != len(after) or itemsize < 1 or len(after) % itemsize:
        raise ValueError(f"no {itemsize}-byte items in {len(before)} and {len(after)} bytes")
    if np.array_equal(before, after):
        return None
    planes = np.ascontiguousarray((before ^ after).reshape(-1, itemsize).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)


def apply_planes(data: bytes | memoryview, values: Any, itemsize: int) -> None:
    """Changes `values`, a writable contiguous buffer, in place. Raises Corrupt, with `values` as they were."""
    found = _flat(values)
    try:
        if zstandard.frame_content_size(bytes(data)) != len(found):  # before anything is allocated
            raise zstandard.ZstdError("of another size")
        planes = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=max(len(found), 1))
    except zstandard.ZstdError as error:
        raise Corrupt(f"the byte planes of a tensor can't be read: {error}") from error
    if len(planes) != len(found) or itemsize < 1 or len(found) % itemsize:
        raise Corrupt(f"{len(planes)} bytes of planes for a tensor of {len(found)} bytes")
    found ^= np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T.reshape(-1)


def _flat(buffer: Any) -> np.ndarray:
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)
