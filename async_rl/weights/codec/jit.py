"""How the codec's kernels are compiled: once per machine, kept on disk, run without the GIL.

Only modules that are imported inside functions import this one: numba takes a second to load. Signatures are spelled
out, so that one compiled kernel serves arrays of every kind (read-only, unaligned) and nothing is compiled while
weights wait.

Rules inside kernels: int64 for everything but the 64-bit states and hashes (numba turns int64 + uint64 into a float),
no exception (a negative return value is an error), nothing in bytes read is trusted as an index or a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "F64",
    "I16",
    "I16_OUT",
    "I64",
    "I64_IN",
    "I64_OUT",
    "U8",
    "U8_OUT",
    "U16",
    "U16_OUT",
    "U32",
    "U32_OUT",
    "U64",
    "U64_IN",
    "helper",
    "high_bit",
    "int64",
    "kernel",
    "uint64",
]

F = TypeVar("F", bound=Callable[..., Any])


# What mypy shall take kernels' numbers for.
int64 = cast("Callable[[Any], int]", np.int64)
uint64 = cast("Callable[[Any], Any]", np.uint64)


def _read(item: Any) -> Any:
    return types.Array(item, 1, "C", readonly=True, aligned=False)


def _write(item: Any) -> Any:
    return types.Array(item, 1, "C", readonly=False, aligned=False)


F64, I64, U64 = types.float64, types.int64, types.uint64
U8, U16, U32, I16, I64_IN, U64_IN = (
    _read(types.uint8),
    _read(types.uint16),
    _read(types.uint32),
    _read(types.int16),
    _read(types.int64),
    _read(types.uint64),
)
U8_OUT, U16_OUT, U32_OUT, I16_OUT, I64_OUT = (
    _write(types.uint8),
    _write(types.uint16),
    _write(types.uint32),
    _write(types.int16),
    _write(types.int64),
)


def kernel(result: Any, *arguments: Any) -> Callable[[F], F]:
    """Compiled when its module is imported, or loaded from numba's cache."""

    def compiled(function: F) -> F:
        signature = result(*arguments)
        try:
            made: F = njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            # No folder to keep it in (a read-only image without a home): compiled anew by every process.
            made = njit(signature, nogil=True, error_model="numpy")(function)
        return made

    return compiled


def helper(function: F) -> F:
    """Compiled into the kernels that call it."""
    made: F = njit(nogil=True, error_model="numpy")(function)
    return made


@intrinsic  # type: ignore[untyped-decorator]
def high_bit(_: Any, value: Any) -> Any:
    """Index of the highest set bit of an int64 > 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.int64(types.int64), generate
