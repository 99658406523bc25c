"""Reading safetensors headers: what tensors a set of shards holds, without loading one.

An engine swaps weights in place and has no way back from a swap that fails halfway. So before it pauses anything
it compares the tables here: same names, same shapes as the model it serves, every byte there.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_rl.errors import EngineError

__all__ = ["Table", "check_same_model", "find_shards", "read_table"]

Table = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "I8": 1,
    "U8": 1,
}


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, in order. Raises EngineError where there are none."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise EngineError(
            f"{folder} holds no *.safetensors", hint="an engine starts from a Hugging Face folder"
        )
    return shards


def read_table(shards: Sequence[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor's dtype and shape. Raises EngineError for a file that is cut short or no safetensors."""
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in shards:
        for name, entry in _header(path).items():
            if name in table:
                raise EngineError(f"tensor {name} stands in two shards, the second is {path}")
            table[name] = entry
    return table


def check_same_model(served: Table, offered: Table, what: str) -> None:
    """Raises EngineError where `offered` is not a new state of the model that is served."""
    missing, unknown = sorted(served.keys() - offered.keys()), sorted(offered.keys() - served.keys())
    if missing or unknown:
        raise EngineError(
            f"{what} is of another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}"
        )
    for name, (_, shape) in offered.items():
        if shape != served[name][1]:
            raise EngineError(
                f"{what} is of another model: {name} has shape {shape}, served is {served[name][1]}"
            )


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        table = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if end > size - 8 - length:
                raise ValueError(f"{name} ends at byte {end} of {size - 8 - length}: the file is cut short")
            if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
                raise ValueError(f"{name}: {end - start} bytes for {dtype} {shape}")
            table[name] = (dtype, shape)
        return table
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise EngineError(
            f"{path} can't be read as safetensors: {error}", hint="fetch this version again"
        ) from error
