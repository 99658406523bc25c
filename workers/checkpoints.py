"""Checkpoints in the run's store: everything a trainer needs to go on, committed in one object, read by any
number of ranks.

    checkpoints/00000002-0000000040/rank-00000.safetensors   this rank's rows: masters, the optimizer's state; float32
    checkpoints/00000002-0000000040/rank-00000.json          Table: which rows, where they lie, hashes; the RNG
    checkpoints/00000002-0000000040.json                     Checkpoint: THE COMMIT; names the tables by their hashes

Names are incarnation-step: a later incarnation's checkpoints come after an earlier one's in every listing,
so the newest is the last. Every rank writes its own rows from a Snapshot, nothing is gathered; when all have,
rank 0 commits by put_if_absent (saver.py says when what happens). What has no commit does not exist. A rank
that reads takes from all tables the pieces that hold its rows, whatever number of ranks wrote them, and checks
each against its hash.

No pickle: safetensors and JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from async_rl.errors import AlreadyExists, CheckpointError, NotFound, StoreError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from workers.adapter_scale import NO_ADAPTERS, AdapterScale, check_scale
from workers.optimizers import OptimizerRows

__all__ = [
    "Checkpoint",
    "Progress",
    "Snapshot",
    "choose",
    "commit",
    "list_committed",
    "name_of",
    "prune",
    "restore",
    "resumable_step",
    "write_rank",
]

log = get_logger(__name__)

FORMAT = 2
PREFIX = "checkpoints/"
FORMAT_1_TENSORS = ("param", "exp_avg", "exp_avg_sq")
READERS = 8
"""Ranged gets in flight per rank."""


class Progress(Struct, frozen=True):
    """Where the run is, apart from the tensors."""

    step: int  # steps done, refused ones included
    version: int  # newest published version: the parent of the first one after a resume
    incarnation: int
    frontier: int  # next prompt ordinal
    updates: int  # of the optimizer; the warm-up goes by it
    open: tuple[int, ...] = ()  # prompt ordinals below the frontier that no step so far has used
    refused: int = 0  # steps so far; like the next one 0 in checkpoints of releases before
    refused_in_a_row: int = 0  # of them the last ones


class TableRef(Struct, frozen=True):
    key: str
    sha256: str


class Checkpoint(Struct, frozen=True):
    """The commit object."""

    format: int
    name: str
    parent: str  # the checkpoint this one's trainer resumed from or wrote before; empty for the first
    fingerprint: str  # of the run's model
    progress: Progress
    tables: tuple[TableRef, ...]  # by rank
    created: float  # by rank 0's clock, for people
    adapters: AdapterScale | None = None  # None: not said, in checkpoints of releases before


class Piece(Struct, frozen=True):
    """Rows of one parameter in one part: its tensors side by side, so that one ranged get reads all of them."""

    shape: tuple[int, ...]  # of the whole parameter
    first: int  # row
    rows: int
    start: int  # byte in the part
    size: int  # bytes, all tensors
    sha256: str
    tensors: tuple[str, ...] = FORMAT_1_TENSORS  # in their order


class Table(Struct, frozen=True):
    part: str  # key of the safetensors object
    size: int  # bytes
    pieces: dict[str, Piece]  # by parameter name
    rng: str  # torch's state of the CPU generator, base64
    device_rng: str = ""  # and of this rank's CUDA device, where it had one


class _Found(NamedTuple):
    part: str
    piece: Piece


# ---------------------------------------------------------------- writing


def name_of(progress: Progress) -> str:
    return f"{progress.incarnation:08}-{progress.step:010}"


class Snapshot:
    """One rank's rows, and torch's random state, as they were at one moment, in the byte order of its part.

    The memory is taken once and used again by every `take`: with AdamW 12 bytes of host memory per trained weight of
    this rank.
    Where the rows are on a CUDA device it is page-locked, so that the copy runs at the bus's speed; torch rounds
    page-locked memory up to a power of two."""

    def __init__(self, rows: Mapping[str, OptimizerRows]) -> None:
        self.header, self.pieces = _layout(rows)
        self._device = _cuda_device(rows)
        count = sum(piece.size for piece in self.pieces.values()) // 4
        self._floats = torch.empty(count, dtype=torch.float32, pin_memory=self._device is not None)
        self.rng = self.device_rng = b""

    @torch.no_grad()
    def take(self, rows: Mapping[str, OptimizerRows]) -> None:
        """Copy. When it returns, the rows may change again."""
        at = 0
        for row in rows.values():
            for tensor in row.tensors.values() if row.written else ():
                part = self._floats[at : at + tensor.numel()]
                part.view(tensor.shape).copy_(tensor, non_blocking=True)
                at += tensor.numel()
        self.rng = torch.get_rng_state().numpy().tobytes()
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
            self.device_rng = torch.cuda.get_rng_state(self._device).numpy().tobytes()

    def blocks(self) -> Iterator[tuple[str, Piece, memoryview]]:
        """Name, place and bytes of each parameter's tensors, in the order of the part."""
        whole = self._floats.numpy().view(np.uint8).data.toreadonly()
        for name, piece in self.pieces.items():
            at = piece.start - len(self.header)
            yield name, piece, whole[at : at + piece.size]


def write_rank(
    store: ObjectStore, name: str, rank: int, snapshot: Snapshot, go_on: Callable[[], None] = lambda: None
) -> str:
    """This rank's part and table of the checkpoint `name`; the table's SHA-256. `go_on` is called between the
    pieces: what it raises stops the writing, and nothing is left but what a later `prune` deletes.

    Raises StoreErrors."""
    stem = f"{PREFIX}{name}/rank-{rank:05}"
    hashed: dict[str, Piece] = {}
    size = len(snapshot.header)
    with store.upload(f"{stem}.safetensors") as upload:
        upload.write(snapshot.header)
        for parameter, piece, data in snapshot.blocks():
            go_on()
            upload.write(data)
            hashed[parameter] = msgspec.structs.replace(piece, sha256=hashlib.sha256(data).hexdigest())
            size += piece.size
        upload.commit()
    rng, device_rng = (base64.b64encode(state).decode() for state in (snapshot.rng, snapshot.device_rng))
    table = msgspec.json.encode(Table(f"{stem}.safetensors", size, hashed, rng, device_rng))
    store.put(f"{stem}.json", table)
    return hashlib.sha256(table).hexdigest()


def commit(
    store: ObjectStore,
    progress: Progress,
    tables: Sequence[str],
    *,
    fingerprint: str,
    parent: str,
    adapters: AdapterScale = NO_ADAPTERS,
) -> Checkpoint:
    """Rank 0, when every rank has written: THE COMMIT, as it stands in the store. `tables`: the SHA-256 of each
    rank's. `adapters`: of the trainer that wrote. What is there already counts if it is the same (our own put, whose
    answer was lost).

    Raises CheckpointError where another trainer wrote this name, StoreErrors."""
    name = name_of(progress)
    refs = tuple(TableRef(f"{PREFIX}{name}/rank-{rank:05}.json", sha) for rank, sha in enumerate(tables))
    checkpoint = Checkpoint(FORMAT, name, parent, fingerprint, progress, refs, time.time(), adapters)
    key = _commit_key(name)
    try:
        store.put_if_absent(key, msgspec.json.encode(checkpoint))
    except AlreadyExists as error:
        found = _decode(store, key)
        if found.tables != checkpoint.tables:
            raise CheckpointError(
                f"{key} in {store.url} already stands for another checkpoint",
                hint="two trainers hold the same incarnation: stop one of them",
            ) from error
        return found
    return checkpoint


def _layout(rows: Mapping[str, OptimizerRows]) -> tuple[bytes, dict[str, Piece]]:
    """The safetensors header, and where each parameter's pieces lie (hashes still to come)."""
    entries: dict[str, object] = {}
    offsets: dict[str, int] = {}
    at = 0
    written = {name: row for name, row in rows.items() if row.written}
    for name, row in written.items():
        offsets[name] = at
        for piece, tensor in row.tensors.items():
            size = 4 * tensor.numel()
            entries[f"{name}/{piece}"] = {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [at, at + size],
            }
            at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    pieces = {
        name: Piece(
            shape=row.shape,
            first=row.first,
            rows=row.rows,
            start=len(header) + offsets[name],
            size=4 * sum(tensor.numel() for tensor in row.tensors.values()),
            sha256="",
            tensors=tuple(row.tensors),
        )
        for name, row in written.items()
    }
    return header, pieces


def resumable_step(store: ObjectStore) -> int:
    """The oldest step that --resume can go back to; 0 where there is no checkpoint."""
    return min((int(name.partition("-")[2]) for name in list_committed(store)), default=0)


def prune(store: ObjectStore, keep: int, newest: str) -> None:
    """Rank 0 alone, after a commit: delete all but the last `keep` checkpoints up to `newest`, commits
    first, and parts of older ones that were never committed. A failure is logged: the next call tries
    again."""
    try:
        committed = [name for name in list_committed(store) if name <= newest]
        kept = set(committed[-keep:])
        for name in committed:
            if name not in kept:
                store.delete(_commit_key(name))
        for key in [info.key for info in store.list_after(PREFIX)]:
            name, slash, _ = key.removeprefix(PREFIX).partition("/")
            if slash and name < newest and name not in kept:
                store.delete(key)
    except StoreError as error:
        log.warning("old checkpoints could not be deleted yet", reason=error.message)


# ---------------------------------------------------------------- reading


def list_committed(store: ObjectStore) -> list[str]:
    """Names, oldest first."""
    names = (info.key.removeprefix(PREFIX) for info in store.list_after(PREFIX))
    return [name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name]


def choose(
    store: ObjectStore, resume: str, fingerprint: str, adapters: AdapterScale = NO_ADAPTERS
) -> Checkpoint | None:
    """The checkpoint that `resume` means: `latest` (None where there is none), `never` (None), or a step. `adapters`:
    of the trainer that would go on.

    Raises CheckpointError for a step without one, or a checkpoint that can't be used.
    """
    if resume == "never":
        return None
    names = list_committed(store)
    if resume != "latest":
        steps = {int(name.partition("-")[2]): name for name in names}
        if int(resume) not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(
                f"the run {store.url} has no checkpoint of step {resume}", hint=f"steps with one: {there}"
            )
        names = [steps[int(resume)]]
    if not names:
        return None
    checkpoint = _decode(store, _commit_key(names[-1]))
    if checkpoint.fingerprint != fingerprint:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} of {store.url} is of another model",
            hint="start with the run's own model, or with --resume never",
        )
    check_scale(checkpoint.adapters, adapters, f"{checkpoint.name} of {store.url}")
    return checkpoint


def restore(
    store: ObjectStore, checkpoint: Checkpoint, rank: int, rows: Mapping[str, OptimizerRows]
) -> None:
    """Fill this rank's `rows`, bit for bit, and torch's random state (rank 0's where this rank had none).

    Raises CheckpointError for what is missing, damaged or of other shapes.
    """
    tables = [_read_table(store, ref) for ref in checkpoint.tables]
    jobs = [(name, row, list(_holders(name, row, tables))) for name, row in rows.items()]
    _check_nothing_is_left(tables, rows)
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint") as pool:
        # list() re-raises the first error of any thread.
        list(pool.map(lambda job: _fill(store, checkpoint.name, *job), jobs))
    table = tables[rank if rank < len(tables) else 0]
    torch.set_rng_state(_state(table.rng))
    device = _cuda_device(rows)
    if device is not None and table.device_rng:
        torch.cuda.set_rng_state(_state(table.device_rng), device)


def _holders(name: str, row: OptimizerRows, tables: list[Table]) -> Iterator[_Found]:
    """The parts that hold rows of ours. Raises CheckpointError unless they hold all of them."""
    stop = row.first + row.rows
    covered, known = 0, False
    for table in tables:
        piece = table.pieces.get(name)
        if piece is None:
            continue  # that rank held none of it
        if piece.shape != row.shape:
            raise _other_model(name, row, f"in {table.part} it is of shape {list(piece.shape)}")
        if set(piece.tensors) != set(row.tensors):
            raise CheckpointError(
                f"{name}: the checkpoint holds {', '.join(piece.tensors)}, "
                f"this trainer keeps {', '.join(row.tensors)}",
                hint="go on with the trainer.optimizer that it was written with",
            )
        known = True
        overlap = min(stop, piece.first + piece.rows) - max(row.first, piece.first)
        if overlap > 0:
            covered += overlap
            yield _Found(table.part, piece)
    if not known:
        raise _other_model(name, row, "in the checkpoint it is missing")
    if covered != row.rows:
        raise CheckpointError(
            f"{name}: the checkpoint holds {covered} of the rows {row.first} to {stop}",
            hint="its tables are inconsistent: resume from an older step with --resume STEP",
        )


def _check_nothing_is_left(tables: list[Table], rows: Mapping[str, OptimizerRows]) -> None:
    """Raises CheckpointError for what only the checkpoint has: adapters of fewer targets would start from other
    weights than those it stands for, and nobody would notice."""
    left = sorted({name for table in tables for name in table.pieces} - rows.keys())
    if left:
        raise CheckpointError(
            f"the checkpoint holds {left[0]} ({len(left)} such in all), which this trainer does not train",
            hint="go on with the settings of model.lora_… and trainer.optimizer that it was written with",
        )


def _other_model(name: str, row: OptimizerRows, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has shape {list(row.shape)} in this trainer, {found}",
        hint="the checkpoint is of another model, or of other settings of trainer.optimizer or model.lora_…",
    )


@torch.no_grad()
def _fill(
    store: ObjectStore, checkpoint: str, name: str, row: OptimizerRows, holders: list[_Found]
) -> None:
    stop = row.first + row.rows
    for part, piece in holders:
        data = _verified(store, checkpoint, part, piece, name)
        # bytearray: torch wants writable memory to view.
        stored = torch.frombuffer(bytearray(data), dtype=torch.float32)
        first, last = max(row.first, piece.first), min(stop, piece.first + piece.rows)
        at = 0
        for key in piece.tensors:
            tensor = row.tensors[key]
            size = piece.rows * math.prod(tensor.shape[1:])
            rows = stored[at : at + size].view(piece.rows, *tensor.shape[1:])
            tensor[first - row.first : last - row.first] = rows[first - piece.first : last - piece.first]
            at += size


def _verified(store: ObjectStore, checkpoint: str, part: str, piece: Piece, name: str) -> bytes:
    for _ in range(2):  # a second try tells a torn read from a damaged object
        try:
            data = store.get(part, piece.start, piece.size)
        except NotFound as error:
            raise _damaged(checkpoint, f"{part} is gone") from error
        if hashlib.sha256(data).hexdigest() == piece.sha256:
            return data
    raise _damaged(checkpoint, f"the bytes of {name} in {part} differ from their hash")


def _read_table(store: ObjectStore, ref: TableRef) -> Table:
    checkpoint = ref.key.removeprefix(PREFIX).partition("/")[0]
    try:
        data = store.get(ref.key)
    except NotFound as error:
        raise _damaged(checkpoint, f"{ref.key} is gone") from error
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise _damaged(checkpoint, f"{ref.key} differs from its hash")
    return msgspec.json.decode(data, type=Table)


def _decode(store: ObjectStore, key: str) -> Checkpoint:
    try:
        checkpoint = msgspec.json.decode(store.get(key), type=Checkpoint)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{key} in {store.url} is not a valid checkpoint: {error}") from error
    if checkpoint.format > FORMAT:
        raise CheckpointError(
            f"{key} in {store.url} is of format {checkpoint.format}, this async-rl reads up to {FORMAT}",
            hint="upgrade async-rl",
        )
    return checkpoint


def _damaged(checkpoint: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {checkpoint} is damaged: {what}", hint="resume from an older step with --resume STEP"
    )


# ---------------------------------------------------------------- small things


def _commit_key(name: str) -> str:
    return f"{PREFIX}{name}.json"


def _cuda_device(rows: Mapping[str, OptimizerRows]) -> torch.device | None:
    tensors = (tensor for row in rows.values() for tensor in row.tensors.values())
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def _state(rng: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(rng)), dtype=torch.uint8)
