"""What a delta between any two checkpoints would cost: ours in both modes, the others' formats, the entropies.

    state files -> pairs of equal tensors -> payloads of about 32 MiB -> every format: encode, apply, compare

One payload is in memory at a time; the files are mapped. Encoding and applying take one thread, whose processor time
is measured, after the kernels are compiled. A file's float32 tensors can be rounded to bfloat16 first: that is what a
trainer publishes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct, field

from async_rl.errors import WeightsError
from async_rl.weights.codec import TILE, apply_tile, encode_tile
from async_rl.weights.deltas import DeltaPackWriter, read_table
from async_rl.weights.entropy import change_of, given_exponent_bytes, no_context_bytes
from async_rl.weights.peers import PEERS, Changes, Peer
from async_rl.weights.statefiles import StateFiles, Stored

__all__ = [
    "OURS",
    "Cost",
    "Estimate",
    "StepCounts",
    "TensorEstimate",
    "compare",
    "estimate",
    "rehearse",
    "step_counts",
]

PAYLOAD_BYTES = 32 << 20
"""Small tensors are coded together up to this, as every format's system would; a larger tensor alone."""

STEP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 1 << 15)
"""Upper ends, of the step's size."""


def _encode_ours(changes: Changes, *, small: bool) -> bytes:
    """A delta pack, as a publisher's rank makes it."""
    writer = DeltaPackWriter()
    place = 0
    for index, (base, new) in enumerate(changes):
        for start in range(0, len(base), TILE):
            stop = min(start + TILE, len(base))
            coded = encode_tile(base[start:stop], new[start:stop], place + start, small=small)
            if coded is not None:
                writer.add(index, start, stop - start, coded)
        place += len(base)
    if not writer.changed:
        return b""  # a version that changes nothing has no packs
    return b"".join(writer.finish("packs/estimate")[0])


def _apply_ours(data: bytes, values: Sequence[np.ndarray]) -> None:
    """As a reader does it: the hash of the pack, the tiles, what they add to the digest."""
    if not data:
        return
    hashlib.sha256(data).digest()
    view = memoryview(data)
    header = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:header])["table"]["data_offsets"]
    places = np.cumsum([0, *(len(tensor) for tensor in values)]).tolist()
    for tile in read_table(data[header + table[0] : header + table[1]], header):
        part = values[tile.tensor][tile.start : tile.start + tile.elements]
        coded = view[tile.offset : tile.offset + tile.size]
        found = apply_tile(tile.mode, coded, part, places[tile.tensor] + tile.start)
        if found != (tile.changed, tile.moved):
            raise WeightsError(f"a tile says that it changes {tile.changed} weights; it changed {found[0]}")


OURS = (
    Peer("ours, default", lambda c: _encode_ours(c, small=False), _apply_ours),
    Peer("ours, small", lambda c: _encode_ours(c, small=True), _apply_ours),
)


class Cost(Struct):
    """Of one format; seconds of processor time."""

    nbytes: int = 0
    encode_s: float = 0.0
    apply_s: float = 0.0


class StepCounts(Struct):
    """How far changed weights moved, in steps of their 16-bit format; |step| up to `up_to[i]`: `count[i]` weights."""

    up_to: tuple[int, ...] = STEP_BUCKETS
    count: list[int] = field(default_factory=lambda: [0] * len(STEP_BUCKETS))


class TensorEstimate(Struct):
    name: str
    dtype: str
    shape: tuple[int, ...]
    weights: int
    changed: int = 0
    no_context_bytes: float = 0.0  # these two for 16-bit floats only
    given_exponent_bytes: float = 0.0
    steps: StepCounts = field(default_factory=StepCounts)
    formats: dict[str, int] = field(default_factory=dict)  # bytes, coded by itself


class Estimate(Struct):
    """All that `async-rl weights estimate` says. Bytes and seconds of `formats` are of the 16-bit floats alone."""

    weights: int = 0  # 16-bit floats in both states
    changed: int = 0
    no_context_bytes: float = 0.0
    given_exponent_bytes: float = 0.0
    steps: StepCounts = field(default_factory=StepCounts)
    formats: dict[str, Cost] = field(default_factory=dict)
    other_bytes: int = 0  # of tensors of other dtypes, in both states
    other: Cost = field(default_factory=Cost)  # what those cost as byte planes
    tensors: list[TensorEstimate] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in OLD only
    extra: list[str] = field(default_factory=list)  # in NEW only
    unlike: dict[str, str] = field(default_factory=dict)  # name -> in what it differs


def step_counts(steps: np.ndarray) -> StepCounts:
    """int16 [k]."""
    sizes = np.abs(steps.astype(np.int32))
    at = np.searchsorted(np.array(STEP_BUCKETS), sizes)
    return StepCounts(count=np.bincount(at, minlength=len(STEP_BUCKETS)).tolist())


def compare(old: StateFiles, new: StateFiles, *, bfloat16: bool = False) -> tuple[list[str], Estimate]:
    """Names of the tensors that both have alike, in OLD's order; an estimate that names the others."""
    found = Estimate()
    alike = []
    for name, was in old.tensors.items():
        now = new.tensors.get(name)
        if now is None:
            found.missing.append(name)
        elif was.shape != now.shape:
            found.unlike[name] = f"shape {_shape(was)} became {_shape(now)}"
        elif _dtype(was, bfloat16) != _dtype(now, bfloat16):
            found.unlike[name] = f"{was.dtype} became {now.dtype}"
        else:
            alike.append(name)
    found.extra = [name for name in new.tensors if name not in old.tensors]
    return alike, found


def estimate(
    old: StateFiles,
    new: StateFiles,
    *,
    bfloat16: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Estimate:
    """Compare two states. `bfloat16`: round float32 tensors first. `progress` is told the bytes of OLD that are done.

    Raises WeightsError if nothing can be compared, or if any format did not give NEW's bits back.
    """
    names, found = compare(old, new, bfloat16=bfloat16)
    if not names:
        raise WeightsError(
            f"{old.path} and {new.path} have no tensor of the same name, shape and dtype in common",
            hint=_first_difference(found) or "name two checkpoints of one model",
        )
    rehearse()
    found.formats = {each.name: Cost() for each in (*OURS, *PEERS)}
    for group in _groups(old, names, bfloat16):
        sixteen = _dtype(old.tensors[group[0]], bfloat16) in ("BF16", "F16")
        (_estimate_floats if sixteen else _estimate_others)(found, old, new, group, bfloat16)
        progress(sum(old.tensors[name].nbytes for name in group))
    return found


def _groups(old: StateFiles, names: Sequence[str], bfloat16: bool) -> Iterator[list[str]]:
    """Payloads, in order: of 16-bit floats or of others, never both."""
    group: list[str] = []
    filled = 0
    kind = None
    for name in names:
        stored = old.tensors[name]
        mine = _dtype(stored, bfloat16) in ("BF16", "F16")
        if group and (mine != kind or filled + stored.nbytes > PAYLOAD_BYTES):
            yield group
            group, filled = [], 0
        group.append(name)
        filled += stored.nbytes
        kind = mine
    if group:
        yield group


def _estimate_floats(
    found: Estimate, old: StateFiles, new: StateFiles, group: Sequence[str], bfloat16: bool
) -> None:
    changes = [(old.bits(name, bfloat16), new.bits(name, bfloat16)) for name in group]
    rows = []
    for name, (base, after) in zip(group, changes, strict=True):
        change = change_of(base, after)
        row = TensorEstimate(
            name,
            old.tensors[name].dtype,
            old.tensors[name].shape,
            change.weights,
            change.changed,
            no_context_bytes(change),
            given_exponent_bytes(change),
            step_counts(change.steps),
        )
        rows.append(row)
        found.weights += row.weights
        found.changed += row.changed
        found.no_context_bytes += row.no_context_bytes
        found.given_exponent_bytes += row.given_exponent_bytes
        found.steps.count = [a + b for a, b in zip(found.steps.count, row.steps.count, strict=True)]
    for each in (*OURS, *PEERS):
        cost = _cost(each, changes)
        total = found.formats[each.name]
        total.nbytes += cost.nbytes
        total.encode_s += cost.encode_s
        total.apply_s += cost.apply_s
        for row, pair in zip(rows, changes, strict=True):
            row.formats[each.name] = cost.nbytes if len(rows) == 1 else len(each.encode([pair]))
    found.tensors += rows


def _cost(each: Peer, changes: Changes) -> Cost:
    start = time.thread_time()
    coded = each.encode(changes)
    encoded = time.thread_time()
    values = [base.copy() for base, _ in changes]
    copied = time.thread_time()
    each.apply(coded, values)
    applied = time.thread_time()
    for value, (_, new) in zip(values, changes, strict=True):
        if not np.array_equal(value, new):
            raise WeightsError(f"{each.name} did not give the same weights back", hint="report this")
    return Cost(len(coded), encoded - start, applied - copied)


def _estimate_others(
    found: Estimate, old: StateFiles, new: StateFiles, group: Sequence[str], bfloat16: bool
) -> None:
    from async_rl.weights.codec import encode_planes

    for name in group:
        stored = old.tensors[name]
        before, after = old.raw(name), new.raw(name)
        items = [np.frombuffer(part, f"u{stored.item_bytes}") for part in (before, after)]
        start = time.thread_time()
        coded = encode_planes(before, after, stored.item_bytes)
        found.other.encode_s += time.thread_time() - start
        nbytes = len(coded) if coded is not None else 0
        found.other.nbytes += nbytes
        found.other_bytes += stored.nbytes
        found.tensors.append(
            TensorEstimate(
                name,
                stored.dtype,
                stored.shape,
                len(items[0]),
                int(np.count_nonzero(items[0] != items[1])),
                formats={"byte planes": nbytes},
            )
        )


def rehearse() -> None:
    """Every kernel, for arrays like those to come: compiling is not what is measured."""
    rng = np.random.default_rng(0)
    base = rng.integers(0x3C00, 0x3D00, 1 << 16, dtype=np.uint16)
    new = base + (rng.random(1 << 16) < 0.03).astype(np.uint16)
    base.flags.writeable = new.flags.writeable = False
    change_of(base, new)
    for each in (*OURS, *PEERS):
        _cost(each, [(base, new)])


def _dtype(stored: Stored, bfloat16: bool) -> str:
    return "BF16" if bfloat16 and stored.dtype == "F32" else stored.dtype


def _shape(stored: Stored) -> str:
    return "x".join(map(str, stored.shape)) or "scalar"


def _first_difference(found: Estimate) -> str:
    for name, what in found.unlike.items():
        return f"for example {name}: {what}"
    if found.missing and found.extra:
        return f"the first has {found.missing[0]}, the second {found.extra[0]}"
    return ""
