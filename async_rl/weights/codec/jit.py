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
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import config
from numba.extending import intrinsic

__all__ = [
    "F64",
    "HAS_SUM_16",
    "HAS_SUM_64",
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
    "U64_OUT",
    "below_64",
    "count_bits",
    "differ_64",
    "helper",
    "high_bit",
    "inlined",
    "int64",
    "kernel",
    "load_u16",
    "load_u32",
    "load_u64",
    "low_bit",
    "prefetch",
    "store_u64",
    "sum_16",
    "sum_64",
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
U8, U16, U32, I16, I64_IN = (
    _read(types.uint8),
    _read(types.uint16),
    _read(types.uint32),
    _read(types.int16),
    _read(types.int64),
)
U8_OUT, U16_OUT, U32_OUT, U64_OUT, I16_OUT, I64_OUT = (
    _write(types.uint8),
    _write(types.uint16),
    _write(types.uint32),
    _write(types.uint64),
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


def inlined(function: F) -> F:
    """A helper for inner loops: a call would pass every array as seven words on the stack."""
    made: F = njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return made


# ---------------------------------------------------------------- instructions


_LANES = 64  # elements in a mask


def _has(feature: str) -> bool:
    return (
        config.CPU_NAME is None
        and config.CPU_FEATURES is None
        and bool(get_host_cpu_features().get(feature))
    )


HAS_SUM_16, HAS_SUM_64 = _has("ssse3"), _has("avx2")
"""Whether kernels are compiled for a machine that has the instructions of sum_16 and sum_64."""


def _pointer(context: Any, builder: Any, array: Any, value: Any, at: Any, kind: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _load(context: Any, builder: Any, signature: Any, values: Any, kind: Any) -> Any:
    return builder.load(_pointer(context, builder, signature.args[0], values[0], values[1], kind), align=1)


@intrinsic  # type: ignore[untyped-decorator]
def load_u16(_: Any, array: Any, at: Any) -> Any:
    """int64: the two bytes from element `at` of an array on. Unaligned, little-endian, unchecked: 0 <= at, inside."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = _load(context, builder, signature, values, ir.IntType(16))
        return builder.zext(loaded, ir.IntType(64))

    return types.int64(array, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_u32(_: Any, array: Any, at: Any) -> Any:
    """uint64: the four bytes from element `at` on, likewise."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = _load(context, builder, signature, values, ir.IntType(32))
        return builder.zext(loaded, ir.IntType(64))

    return types.uint64(array, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_u64(_: Any, array: Any, at: Any) -> Any:
    """uint64: the eight bytes from there on, likewise."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _load(context, builder, signature, values, ir.IntType(64))

    return types.uint64(array, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_u64(_: Any, array: Any, at: Any, value: Any) -> Any:
    """Eight bytes, likewise. `value` is an int64 or uint64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], values[0], values[1], ir.IntType(64))
        builder.store(values[2], place, align=1)
        return context.get_dummy_value()

    return types.void(array, at, value), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, at: Any) -> Any:
    """Asks for the memory around an element, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], values[0], values[1], ir.IntType(8))
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # to read, into all caches, data
        kind = ir.FunctionType(ir.VoidType(), [place.type, *(flag.type for flag in flags)])
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [place, *flags])
        return context.get_dummy_value()

    return types.void(array, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def high_bit(_: Any, value: Any) -> Any:
    """Index of the highest set bit of an int64 > 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        zeros = builder.ctlz(values[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def low_bit(_: Any, mask: Any) -> Any:
    """int64: index of the lowest set bit of a uint64; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def count_bits(_: Any, mask: Any) -> Any:
    """int64: how many bits of a uint64 are set."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def differ_64(_: Any, first: Any, second: Any, at: Any) -> Any:
    """uint64: bit i tells whether first[at + i] != second[at + i], for 64 elements of two uint16 arrays."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), _LANES)
        a, b = (
            builder.load(_pointer(context, builder, array, value, values[2], vector), align=1)
            for array, value in zip(signature.args[:2], values[:2], strict=True)
        )
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), ir.IntType(_LANES))

    return types.uint64(first, second, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_16(_: Any, array: Any, at: Any, count: Any, first: Any, low: Any, high: Any) -> Any:
    """int64: the sum of numbers below 2^16, looked up by the exponents of array[at : at + count]; count <= 16, but
    all 16 must exist. `low` and `high` hold the bytes of 16 numbers, number n for the exponent first + n, the outer
    ones for all beyond. Only if HAS_SUM_16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        i64, shorts = ir.IntType(64), ir.VectorType(ir.IntType(16), 16)
        octets, pair = ir.VectorType(ir.IntType(8), 16), ir.VectorType(i64, 2)

        def splat(value: Any, kind: Any) -> Any:
            value = builder.trunc(value, kind.element)
            one = builder.insert_element(
                ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
            )
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
            return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

        def call(name: str, result: Any, *operands: Any) -> Any:
            kind = ir.FunctionType(result, [operand.type for operand in operands])
            function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            return builder.call(function, operands)

        bits = _load(context, builder, signature, values[:2], shorts)
        exponents = builder.and_(
            builder.lshr(bits, ir.Constant(shorts, [7] * 16)), ir.Constant(shorts, [255] * 16)
        )
        numbers = builder.sub(exponents, splat(values[3], shorts))
        numbers = call("llvm.smax.v16i16", shorts, numbers, ir.Constant(shorts, [0] * 16))
        numbers = call("llvm.smin.v16i16", shorts, numbers, ir.Constant(shorts, [15] * 16))
        numbers = builder.trunc(numbers, octets)
        counted = builder.icmp_unsigned("<", ir.Constant(octets, list(range(16))), splat(values[2], octets))
        counted = builder.sext(counted, octets)
        sums = []
        for array_type, array_value in zip(signature.args[4:], values[4:], strict=True):
            table = builder.load(
                _pointer(context, builder, array_type, array_value, i64(0), octets), align=1
            )
            found = builder.and_(call("llvm.x86.ssse3.pshuf.b.128", octets, table, numbers), counted)
            sums.append(call("llvm.x86.sse2.psad.bw", pair, found, ir.Constant(octets, [0] * 16)))
        both = builder.add(sums[0], builder.shl(sums[1], ir.Constant(pair, [8] * 2)))
        halves = [builder.extract_element(both, ir.Constant(ir.IntType(32), half)) for half in (0, 1)]
        return builder.add(*halves)

    return types.int64(array, at, count, first, low, high), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_64(_: Any, array: Any, at: Any, first: Any, low: Any, high: Any, sums: Any, to: Any) -> Any:
    """Four of such sums, of 16 elements each from array[at] on, into sums[to : to + 4], uint16. Here `first` is not
    below 0. Only if HAS_SUM_64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shorts, octets = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.IntType(8), 32)
        four = ir.VectorType(ir.IntType(64), 4)

        def constants(kind: Any, numbers: Any) -> Any:
            return ir.Constant(kind, list(numbers))

        def shuffle(value: Any, other: Any, places: Any) -> Any:
            kind = ir.VectorType(ir.IntType(32), len(places))
            return builder.shuffle_vector(value, other, constants(kind, places))

        def call(name: str, result: Any, *operands: Any) -> Any:
            kind = ir.FunctionType(result, [operand.type for operand in operands])
            function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            return builder.call(function, operands)

        def load(index: int, place: Any, kind: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[index], values[index], place, kind)
            return builder.load(pointer, align=1)

        half = ir.VectorType(ir.IntType(8), 16)
        nothing = ir.Constant(half, ir.Undefined)
        tables = [
            shuffle(load(index, ir.IntType(64)(0), half), nothing, [*range(16)] * 2) for index in (3, 4)
        ]
        one = builder.insert_element(
            ir.Constant(octets, ir.Undefined), builder.trunc(values[2], ir.IntType(8)), ir.IntType(32)(0)
        )
        least = shuffle(one, ir.Constant(octets, ir.Undefined), [0] * 32)
        found = []
        for pair in (0, 32):
            exponents = []
            for more in (pair, pair + 16):
                bits = load(0, builder.add(values[1], ir.IntType(64)(more)), shorts)
                doubled = builder.shl(bits, constants(shorts, [1] * 16))
                exponents.append(builder.lshr(doubled, constants(shorts, [8] * 16)))
            # 8 of the first, 8 of the second, and again: so are the sums of 8 bytes
            packed = call("llvm.x86.avx2.packuswb", octets, *exponents)
            numbers = call("llvm.usub.sat.v32i8", octets, packed, least)
            numbers = call("llvm.umin.v32i8", octets, numbers, constants(octets, [15] * 32))
            eights = []
            for table in tables:
                looked_up = call("llvm.x86.avx2.pshuf.b", octets, table, numbers)
                eights.append(call("llvm.x86.avx2.psad.bw", four, looked_up, constants(octets, [0] * 32)))
            both = builder.add(eights[0], builder.shl(eights[1], constants(four, [8] * 4)))
            nothing_4 = ir.Constant(four, ir.Undefined)
            found.append(builder.add(shuffle(both, nothing_4, [0, 1]), shuffle(both, nothing_4, [2, 3])))
        together = builder.trunc(
            shuffle(found[0], found[1], [0, 1, 2, 3]), ir.VectorType(ir.IntType(16), 4)
        )
        place = _pointer(context, builder, signature.args[5], values[5], values[6], together.type)
        builder.store(together, place, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, low, high, sums, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def below_64(_: Any, array: Any, at: Any, limit: Any) -> Any:
    """uint64: bit i tells whether array[at + i] without its highest bit is below `limit`, for 64 elements."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), _LANES)
        loaded = _load(context, builder, signature, values, vector)
        plain = builder.and_(loaded, ir.Constant(vector, [0x7FFF] * _LANES))
        one = builder.trunc(values[2], ir.IntType(16))
        limits = builder.insert_element(
            ir.Constant(vector, ir.Undefined), one, ir.Constant(ir.IntType(32), 0)
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        limits = builder.shuffle_vector(limits, ir.Constant(vector, ir.Undefined), zeros)
        return builder.bitcast(builder.icmp_unsigned("<", plain, limits), ir.IntType(_LANES))

    return types.uint64(array, at, limit), generate
