"""Packs: safetensors files, written as a stream and read with suspicion.

    length of the header, u64 little-endian | header, JSON padded with spaces to 8 bytes | tensors, packed

The format is that of huggingface/safetensors, so any tool can load a pack. All shapes are known before the
first byte is sent: the header comes first and the tensors follow as they arrive, no pack is ever held in
memory.

How a state is cut into packs is a pure function of the tensor table, never of the ranks that write it: the
same weights give the same bytes however many ranks took part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from async_rl.errors import Corrupt

__all__ = [
    "DTYPES",
    "ITEM_BYTES",
    "PackPlan",
    "TensorSpec",
    "Transfer",
    "assign_owners",
    "framed",
    "header",
    "plan_packs",
    "read_header",
    "schedule",
]

DTYPES = {"bfloat16": "BF16", "float16": "F16"}
"""A run's dtype -> its name in a safetensors header. Both have 2 bytes."""

ITEM_BYTES = 2

PACKS_WANTED = 16
"""A state is cut into about this many packs even if fewer would do, so that up to 16 ranks share the upload
and a reader has parallel work …"""

PACK_BYTES_MIN = 16 << 20
"""… but not into smaller ones than a multipart part: below that, requests cost more than bytes."""

_HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors library itself


class TensorSpec(Struct, frozen=True):
    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES


class PackPlan(Struct, frozen=True):
    """What one pack holds: the bytes of the header, then these tensors in order."""

    tensors: tuple[TensorSpec, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


class Transfer(Struct, frozen=True):
    """One tensor on its way to the rank that writes it."""

    tensor: TensorSpec
    pack: int
    owner: int  # rank
    first: bool  # of its pack
    last: bool


def plan_packs(table: Sequence[TensorSpec], dtype: str, pack_bytes: int) -> tuple[PackPlan, ...]:
    """Cut the table, in its order, into packs of at most about `pack_bytes` (a larger tensor stands
    alone)."""
    total = sum(tensor.nbytes for tensor in table)
    limit = min(pack_bytes, max(PACK_BYTES_MIN, math.ceil(total / PACKS_WANTED)))
    plans: list[list[TensorSpec]] = []
    filled = 0
    for tensor in table:
        if not plans or filled + tensor.nbytes > limit:
            plans.append([])
            filled = 0
        plans[-1].append(tensor)
        filled += tensor.nbytes
    return tuple(PackPlan(tuple(tensors), header(tensors, dtype)) for tensors in plans)


def assign_owners(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank that writes each pack: largest first, each to the rank with the least so far."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for pack in sorted(range(len(sizes)), key=lambda pack: (-sizes[pack], pack)):
        owners[pack] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[pack]] += sizes[pack]
    return tuple(owners)


def schedule(plans: Sequence[PackPlan], owners: Sequence[int], ranks: int) -> Iterator[Transfer]:
    """Every tensor once, in the one order all ranks follow. Owners take turns so that all of them have
    about the same number of bytes at any time: their uploads run side by side."""
    queues: list[list[Transfer]] = [[] for _ in range(ranks)]
    for pack, plan in enumerate(plans):
        for place, tensor in enumerate(plan.tensors):
            last = place == len(plan.tensors) - 1
            queues[owners[pack]].append(Transfer(tensor, pack, owners[pack], first=place == 0, last=last))
    sent = [0] * ranks
    waiting = [iter(queue) for queue in queues]
    live = {rank for rank in range(ranks) if queues[rank]}
    while live:
        rank = min(live, key=lambda rank: (sent[rank], rank))
        transfer = next(waiting[rank], None)
        if transfer is None:
            live.remove(rank)
            continue
        sent[rank] += transfer.tensor.nbytes
        yield transfer


def header(tensors: Sequence[TensorSpec], dtype: str) -> bytes:
    """Everything before the tensors' bytes."""
    # Without this entry, transformers refuses the file.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    return framed(entries)


def framed(entries: Mapping[str, object]) -> bytes:
    """A safetensors header: its length, and the JSON of `entries`, padded to 8 bytes."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, dtype: str) -> Mapping[str, TensorSpec]:
    """The tensors a pack says it holds, all checked to be `dtype`, without gaps and filling the file.

    Raises Corrupt: a hash only proves that the bytes are the writer's; this proves that they are loadable.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _HEADER_BYTES_MAX):
            raise Corrupt(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{path} has a broken safetensors header: {error}") from error
    tensors = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        tensor = tensors[name] = TensorSpec(name, entry.shape)
        if entry.dtype != DTYPES[dtype]:
            raise Corrupt(f"{path}: tensor {name} is {entry.dtype}, the run's weights are {DTYPES[dtype]}")
        if entry.data_offsets != (end, end + tensor.nbytes):
            raise Corrupt(
                f"{path}: tensor {name} of shape {entry.shape} lies at {entry.data_offsets}, not at {end}"
            )
        end += tensor.nbytes
    if 8 + length + end != size:
        raise Corrupt(f"{path} has {size} bytes, its header describes {8 + length + end}")
    return tensors
