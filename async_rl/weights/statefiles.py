"""Any checkpoint's tensors, as bits: one safetensors file, or a folder of them, mapped and never loaded whole."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from async_rl.errors import ConfigError, Corrupt

__all__ = ["StateFiles", "Stored", "rounded"]

_HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors library itself
_PART = 1 << 22  # elements rounded at once: bounds the memory
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # those whose size is checked against their shape


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Stored(Struct, frozen=True):
    """Where one tensor lies."""

    dtype: str  # as safetensors says it: BF16, F16, F32, I64, …
    shape: tuple[int, ...]
    file: int
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def item_bytes(self) -> int:
        """1 for what is packed closer than bytes, and for a tensor without elements."""
        size = self.nbytes // max(1, math.prod(self.shape))
        return size if size in (2, 4, 8) and size * math.prod(self.shape) == self.nbytes else 1


class StateFiles:
    """`path`: a safetensors file, or a folder with some. Raises ConfigError (nothing there), Corrupt (not whole)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self._maps: list[memoryview] = []
        for file in _files(path):
            try:
                self._add(file)
            except OSError as error:
                raise ConfigError(
                    f"can't read {file}: {error.strerror or error}",
                    hint="a link to a file that was never downloaded, or one of somebody else's?",
                ) from error

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes as they stand in the file, not copied."""
        stored = self.tensors[name]
        return self._maps[stored.file][stored.offset : stored.offset + stored.nbytes]

    def bits(self, name: str, bfloat16: bool = False) -> np.ndarray:
        """Of a 16-bit tensor, uint16 [n], read-only; with `bfloat16`, of a float32 tensor rounded to it."""
        if self.tensors[name].dtype == "F32" and bfloat16:
            values = np.frombuffer(self.raw(name), np.uint32)
            result = np.empty(len(values), np.uint16)
            for start in range(0, len(values), _PART):
                result[start : start + _PART] = rounded(values[start : start + _PART])
            result.flags.writeable = False
            return result
        found = np.frombuffer(self.raw(name), np.uint16)
        return found if found.flags.aligned else found.copy()

    def _add(self, file: Path) -> None:
        size = file.stat().st_size
        if size < 8:
            raise Corrupt(f"{file} is no safetensors file: it has {size} bytes")
        with file.open("rb") as opened:
            mapped = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(mapped[:8], "little")
        if start - 8 > min(size - 8, _HEADER_BYTES_MAX):
            raise Corrupt(
                f"{file} is no safetensors file: a header of {start - 8} bytes in a file of {size}",
                hint="name *.safetensors files, or a folder that holds some",
            )
        try:
            raw = msgspec.json.decode(mapped[8:start], type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.DecodeError, RecursionError) as error:
            raise Corrupt(f"{file} has a broken safetensors header: {error}") from error
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            if name in self.tensors:
                raise Corrupt(
                    f"{self.path} has the tensor {name} twice, the second time in {file.name}",
                    hint="name one of the files",
                )
            if not 0 <= begin <= end <= size - start:
                raise Corrupt(
                    f"{file}: tensor {name} lies at {entry.data_offsets}, past the end of the file",
                    hint="the file was cut short: copy it again",
                )
            where = Stored(entry.dtype, entry.shape, len(self._maps), start + begin, end - begin)
            if (
                entry.dtype in _ITEM_BYTES
                and where.nbytes != math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
            ):
                raise Corrupt(f"{file}: tensor {name} of shape {entry.shape} has {where.nbytes} bytes")
            self.tensors[name] = where
        self._maps.append(mapped)


def rounded(float32: np.ndarray) -> np.ndarray:
    """uint32 [n], float32 bits -> uint16 [n], bfloat16 bits: nearest, ties to even; a NaN stays a NaN."""
    result: np.ndarray = ((float32 + (np.uint32(0x7FFF) + ((float32 >> 16) & np.uint32(1)))) >> 16).astype(
        np.uint16
    )
    nan = (float32 & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        result[nan] = (float32[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return result


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"there is no {path}", hint="name a safetensors file, or a folder that holds some"
        )
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{path} holds no *.safetensors file", hint="name the folder of a checkpoint")
    return found
