"""What a delta costs, in bytes and in time: ours in both modes, the others' formats, the limits.

    data     every (model, learning rate) of real_models.py; synthetic extremes
    bytes    everything that is stored: headers, tables, hashes; per changed weight, and against the two entropies
    encode   GB/s of weights, of one thread's processor time: find the difference, code, hash
    apply    the same: check the hash, decode, change the weights, keep the digest
    extra    MB of resident memory above what the weights of both states take, the larger of encode and apply
    exact    the new weights' bits came back

The others' formats get the whole state as one payload; ours is cut into tiles and has its table, as published.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from rich.console import Console
from rich.table import Table

from async_rl.weights.entropy import change_of, given_exponent_bytes, no_context_bytes
from async_rl.weights.estimate import OURS, rehearse
from async_rl.weights.packs import TensorSpec, header
from async_rl.weights.peers import PEERS, Changes, Peer
from tests.bench import tensors
from tests.bench.claims import Claim
from tests.bench.real_models import INSTALL, MODELS, RATES, load_pair, make_pairs, missing_packages

__all__ = ["run"]

GOAL_RATES = (1e-6, 3e-6, 1e-5)
REPEATS = 5
REFERENCE = {  # name: bytes per changed weight in the design notes' table at lr 3e-6, and the limit that it goes with
    "int32 + value": (6.06, None),
    "u32 + value, zstd-3": (4.24, None),
    "xor, zstd-1": (2.63, "no context"),
    "packed gaps, zstd-1": (1.73, "no context"),
    "gaps + steps, zstd-1": (1.25, "no context"),
    "class gaps + steps, zstd-1": (0.91, "given exponent"),
}
REFERENCE_LIMITS = {"no context": 1.17, "given exponent": 0.80}
SYNTHETIC = 1 << 21  # weights


class DataSet(NamedTuple):
    name: str
    model: str  # "" for the synthetic ones
    rate: float
    changes: Changes
    names: Sequence[str]


class Figures(NamedTuple):
    """Of one format on one data set."""

    nbytes: int
    encode_s: float
    apply_s: float
    extra_bytes: int


class Result(NamedTuple):
    data: DataSet
    weights: int
    changed: int
    no_context: float  # bytes
    given_exponent: float
    verify_s: dict[str, float]  # of our formats
    figures: dict[str, Figures]


def run(scratch: Path, console: Console) -> list[Claim]:
    rehearse()
    results = []
    for data in data_sets(console):
        results.append(measure(data, repeats=REPEATS if data.model else 1))
        console.print(show(results[-1]))
    measured = [result for result in results if result.data.model]
    made = claims(measured)
    for result in measured:
        if result.data.rate == GOAL_RATES[1]:
            made += tensors.claims(result.data.name, result.data.changes, REPEATS)
    return made


def data_sets(console: Console) -> Iterator[DataSet]:
    for model in MODELS:
        missing = missing_packages(model)
        if missing:
            console.print(f"{model} is left out, it needs {', '.join(missing)}: {INSTALL}")
            continue
        make_pairs(model, console.print)
        for rate in RATES:
            pair = load_pair(model, rate)
            yield DataSet(
                f"{model}, lr {rate:g}", model, rate, list(pair.tensors.values()), list(pair.tensors)
            )
    for name, change in extremes():
        yield DataSet(name, "", 0.0, [change], ["synthetic"])


def extremes() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    rng = np.random.default_rng(7)
    base = bfloat16(rng.normal(0, 0.05, SYNTHETIC))
    yield "nothing changed", (base, base.copy())
    yield "all changed, by one or two steps", (base, base + rng.integers(1, 3, SYNTHETIC, dtype=np.uint16))
    yield "all changed, to anything", (base, base ^ rng.integers(1, 1 << 16, SYNTHETIC, dtype=np.uint16))
    one = base.copy()
    one[SYNTHETIC // 3] ^= 1
    yield "one element", (base, one)
    rows = base.reshape(-1, 2048).copy()
    some = rng.random(len(rows)) < 0.01
    rows[some] += rng.integers(1, 3, rows[some].shape, dtype=np.uint16)
    yield "clustered: one row of a hundred", (base, rows.reshape(-1))
    tiny = rng.normal(0, 1e-6, SYNTHETIC)
    yield "near-zero weights", (bfloat16(tiny), bfloat16(tiny + rng.uniform(-1e-6, 1e-6, SYNTHETIC)))
    nans = rng.choice(np.array([0x7FC0, 0x7F81, 0xFFFF, 0x0000, 0x8000, 0x7F80], np.uint16), (2, SYNTHETIC))
    yield "NaN payloads, infinities, signed zeros", (nans[0], nans[1])


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float64 -> bits, rounded to nearest; no NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def measure(data: DataSet, repeats: int) -> Result:
    """Best of `repeats`, in rounds over all formats: what else the machine does then slows all of them alike."""
    found = [change_of(base, new) for base, new in data.changes]
    formats = (*OURS, *PEERS)
    values = [base.copy() for base, _ in data.changes]
    coded, extra = {}, {}
    for each in formats:
        coded[each.name], extra[each.name] = check(each, data, values)
    encode_s = {each.name: math.inf for each in formats}
    apply_s = dict(encode_s)
    for _ in range(repeats):
        for each in formats:
            reset(values, data.changes)
            start = time.thread_time()
            each.encode(data.changes)
            encoded = time.thread_time()
            each.apply(coded[each.name], values)
            apply_s[each.name] = min(apply_s[each.name], time.thread_time() - encoded)
            encode_s[each.name] = min(encode_s[each.name], encoded - start)
    return Result(
        data,
        sum(change.weights for change in found),
        sum(change.changed for change in found),
        sum(map(no_context_bytes, found)),
        sum(map(given_exponent_bytes, found)),
        {each.name: verify_seconds(data.changes, coded[each.name]) for each in OURS},
        {
            each.name: Figures(
                len(coded[each.name]) + entries(each, data),
                encode_s[each.name],
                apply_s[each.name],
                extra[each.name],
            )
            for each in formats
        },
    )


def check(each: Peer, data: DataSet, values: Sequence[np.ndarray]) -> tuple[bytes, int]:
    """The coded change and the extra memory of making and applying it. Fails where the weights do not come back."""
    reset(values, data.changes)
    coded, encode_extra = extra_memory(lambda: each.encode(data.changes))
    _, apply_extra = extra_memory(lambda: each.apply(coded, values))
    for name, value, (_, new) in zip(data.names, values, data.changes, strict=True):
        if not np.array_equal(value, new):
            raise AssertionError(f"{each.name} did not give {name} back, on {data.name}")
    return coded, max(encode_extra, apply_extra)


def reset(values: Sequence[np.ndarray], changes: Changes) -> None:
    for value, (base, _) in zip(values, changes, strict=True):
        value[:] = base


def entries(each: Peer, data: DataSet) -> int:
    """Bytes of the safetensors header of a format that stores its streams as named tensors."""
    specs = [TensorSpec(f"{name}.{part}", (1,)) for name in data.names for part in range(each.entries)]
    return len(header(specs, "bfloat16")) if specs else 0


def extra_memory(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and how many bytes its process grew by at the most (0 where Linux does not say)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed must not hide what this takes
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
        before = high_water()
    except (OSError, AttributeError):
        return work(), 0
    result = work()
    return result, high_water() - before


def high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def verify_seconds(changes: Changes, coded: bytes) -> float:
    """What verifying costs of applying: SHA-256 of the coded bytes, and the digest of what changed, both alone."""
    changed = [np.flatnonzero(base != new) for base, new in changes]
    parts = [
        (base[at], new[at], at.astype(np.uint64)) for at, (base, new) in zip(changed, changes, strict=True)
    ]
    best = math.inf
    for _ in range(REPEATS):
        start = time.thread_time()
        hashlib.sha256(coded).digest()
        for before, after, places in parts:
            _digest(before, after, places)
        best = min(best, time.thread_time() - start)
    return best


@njit(cache=True, nogil=True)
def _mix(key):  # type: ignore[no-untyped-def]
    key ^= key >> np.uint64(30)
    key *= np.uint64(0xBF58476D1CE4E5B9)
    key ^= key >> np.uint64(27)
    key *= np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@njit(cache=True, nogil=True)
def _digest(before, after, places):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for index in range(len(places)):
        key = places[index] << np.uint64(16)
        total += _mix(key | np.uint64(after[index])) - _mix(key | np.uint64(before[index]))
    return total


def show(result: Result) -> Table:
    weights, changed = result.weights, result.changed
    title = f"{result.data.name}: {weights / 1e6:.1f} M weights, {100 * changed / weights:.3g} % changed"
    table = Table(
        "format",
        "bytes",
        "B / changed",
        "x no context",
        "x given exp.",
        "encode GB/s",
        "apply GB/s",
        "extra MB",
    )
    table.title, table.title_justify = title, "left"
    for column in table.columns[1:]:
        column.justify = "right"
    for name, nbytes in (
        ("entropy, no context", result.no_context),
        ("entropy, given exponent", result.given_exponent),
    ):
        table.add_row(name, f"{nbytes:,.0f}", *ratios(result, nbytes), "", "", "", style="dim")
    for name, got in result.figures.items():
        speeds = [f"{2 * weights / seconds / 1e9:.2f}" for seconds in (got.encode_s, got.apply_s)]
        if not got.nbytes:
            speeds[1] = "-"
        style = "bold" if name.startswith("ours") else ""
        row = [f"{got.nbytes:,}", *ratios(result, got.nbytes), *speeds, f"{got.extra_bytes / 1e6:.1f}"]
        table.add_row(name, *row, style=style)
    return table


def ratios(result: Result, nbytes: float) -> list[str]:
    units = (result.changed, result.no_context, result.given_exponent)
    return [f"{nbytes / unit:.3f}" if unit >= 1 else "-" for unit in units]


def claims(results: list[Result]) -> list[Claim]:
    """The goals, each at its worst model and rate of 1e-6 … 1e-5 (bytes: of every model, to see the difference)."""
    by = {(result.data.model, result.data.rate): result for result in results}
    goals = [result for (_, rate), result in by.items() if rate in GOAL_RATES]
    if not goals:
        return []
    made = []
    for model in dict.fromkeys(result.data.model for result in goals):
        mine = [result for result in goals if result.data.model == model]
        made += [
            worst(
                f"default / entropy without context, {model}",
                mine,
                lambda r: nbytes(r, "ours, default") / r.no_context,
                at_most=1.10,
            ),
            worst(
                f"small / entropy given the exponent, {model}",
                mine,
                lambda r: nbytes(r, "ours, small") / r.given_exponent,
                at_most=1.20,
            ),
            worst(
                f"xor + zstd-1 / default, bytes, {model}",
                mine,
                lambda r: nbytes(r, "xor, zstd-1") / nbytes(r, "ours, default"),
                at_least=1.8,
                unit="x",
            ),
            worst(
                f"xor + zstd-1 / small, bytes, {model}",
                mine,
                lambda r: nbytes(r, "xor, zstd-1") / nbytes(r, "ours, small"),
                at_least=2.5,
                unit="x",
            ),
        ]
    reference = by.get(("minilm", 3e-6))
    if reference is not None:
        for name, most in (("default", 1.25), ("small", 0.95)):
            value = nbytes(reference, f"ours, {name}") / reference.changed
            made.append(Claim(f"{name}, bytes per changed weight, minilm, 3e-6", value, at_most=most))
        made += [against_the_notes(reference, name) for name in REFERENCE]
    for name, least in (("default", 1.0), ("small", 0.4)):
        made.append(
            worst(
                f"encode, {name}",
                goals,
                lambda r, name=name: gb_per_s(r, r.figures[f"ours, {name}"].encode_s),  # type: ignore[misc]
                at_least=least,
                unit=" GB/s",
            )
        )
    for name in ("default", "small"):
        ours = f"ours, {name}"
        made += [
            worst(
                f"decode + apply, {name}",
                goals,
                lambda r, ours=ours: gb_per_s(r, r.figures[ours].apply_s),  # type: ignore[misc]
                at_least=1.5,
                unit=" GB/s",
            ),
            worst(
                f"encode, {name} against xor + zstd-1",
                goals,
                lambda r, ours=ours: r.figures["xor, zstd-1"].encode_s / r.figures[ours].encode_s,  # type: ignore[misc]
                at_least=1.0,
                unit="x",
            ),
            worst(
                f"decode + apply, {name} against xor + zstd-1",
                goals,
                lambda r, ours=ours: r.figures["xor, zstd-1"].apply_s / r.figures[ours].apply_s,  # type: ignore[misc]
                at_least=1.0,
                unit="x",
            ),
            worst(
                f"verify / (decode + apply), {name}",
                goals,
                lambda r, ours=ours: r.verify_s[ours] / r.figures[ours].apply_s,  # type: ignore[misc]
                at_most=0.15,
            ),
        ]
    return made


def against_the_notes(result: Result, name: str) -> Claim:
    """1 where a format costs what the notes measured; as a multiple of the entropy where it follows that."""
    noted, limit = REFERENCE[name]
    here = nbytes(result, name) / result.changed
    how = f"{here:.2f} bytes per changed weight, there {noted:.2f}"
    if limit is None:
        return Claim(f"{name}: here / notes", here / noted, how=how)
    entropy = (result.no_context if limit == "no context" else result.given_exponent) / result.changed
    how += f"; entropy {limit} {entropy:.2f}, there {REFERENCE_LIMITS[limit]:.2f}"
    return Claim(f"{name}: here / notes", here / noted * REFERENCE_LIMITS[limit] / entropy, how=how)


def worst(
    name: str,
    results: Sequence[Result],
    value: Callable[[Result], float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    unit: str = "",
) -> Claim:
    pick = max if at_most is not None else min
    result = pick(results, key=value)
    return Claim(
        name, value(result), unit, at_most, at_least, how=f"worst of {len(results)}: {result.data.name}"
    )


def nbytes(result: Result, name: str) -> int:
    return result.figures[name].nbytes


def gb_per_s(result: Result, seconds: float) -> float:
    return 2 * result.weights / seconds / 1e9
