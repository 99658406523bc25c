"""The local part of the trainer's parameters, as 16-bit rows: in host memory, or where the parameters lie.

Supported: FSDP2's DTensors sharded by rows (`Shard(0)` over all ranks, with torch.chunk's rule: rank r
holds rows [r*c, min((r+1)*c, rows)), c = ceil(rows / ranks); the last shards may be short or empty); the same in
several copies (HSDP: `Replicate(), Shard(0)` on a mesh [copies, ranks / copies]), of which the first one is written;
plain tensors, which are taken to be equal on every rank; and owned ranges of the rows of such a tensor, under names
of their own (rows.py). Everything else is refused before training starts.

Memory: a State is one 16-bit copy of this rank's rows. The buffers come from a pool, tensor by tensor, and go
back when the last holder lets go; two per tensor are kept. Who compares two states while a third is still being
sent therefore needs three for a while, of those tensors only that were not sent yet.

A State on a device is read by threads beside the training step, on a stream of their own (`State.beside`): on the
step's stream they would wait for everything that it has queued. Whoever reads waits for the end of what it reads
before the rows are released, so that they are never written again too early.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from async_rl.errors import ModelMismatch, WeightsError
from async_rl.weights.codec.tensors import bits_of
from async_rl.weights.packs import TensorSpec
from async_rl.weights.rows import Published, RowsOf, rows_in
from async_rl.weights.run import RunInfo

__all__ = ["Part", "Shards", "State", "no_room", "rows_of"]

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_KEPT = 2
"""Buffers per tensor that stay allocated: the baseline's and the next snapshot's."""


def rows_of(rank: int, rows: int, ranks: int) -> int:
    """How many of `rows` rows a rank holds, by torch.chunk's rule."""
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - rank * chunk))


class Part(NamedTuple):
    """The elements of one tensor that this rank writes into deltas."""

    tensor: int  # index into the run's tensors
    start: int  # element, in the tensor's flat layout
    elements: int
    place: int  # of the tensor's first element in the whole state


class Shards:
    """This rank's part of every tensor, and the pool of buffers for copies of it."""

    def __init__(
        self,
        run: RunInfo,
        parameters: Mapping[str, Published],
        rank: int,
        ranks: int,
        *,
        on_device: bool = False,
    ) -> None:
        """`on_device`: copies lie where the parameters lie (and are read with torch, on a CPU too). Raises
        ModelMismatch if `parameters` are not the run's tensors, WeightsError for an unsupported placement."""
        self.rank, self.ranks = rank, ranks
        self._run = run
        self._parameters = _select(run, parameters)
        # Ranks that hold one copy of the model between them, the first ones of all.
        wholes = {id(each.whole): (name, each.whole) for name, each in self._parameters.items()}
        self._wholes = {key: whole for key, (_, whole) in wholes.items()}
        self.holders = min((_holders(each, ranks) for each in self._wholes.values()), default=ranks)
        for name, whole in wholes.values():
            _check_placement(name, whole, rank, ranks, self.holders)
        self._gpus = {each.device for each in self._wholes.values() if each.device.type == "cuda"}
        self._on_device = on_device
        self._pool = _Pool()

    @torch.no_grad()
    def take(self) -> State:
        """The parameters as they are now, rounded to 16 bit as `.to(dtype)` does. Raises WeightsError where a device
        has no room for the copy."""
        buffers: dict[str, _Buffer] = {}
        try:
            self._fill(buffers)
        except BaseException:
            State(self._pool, buffers).release()
            raise
        if self._on_device:
            return State(self._pool, buffers, {gpu: _now(gpu) for gpu in self._gpus})
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)  # before the optimizer may change what is still being copied
        return State(self._pool, buffers)

    def _fill(self, buffers: dict[str, _Buffer]) -> None:
        dtype = TORCH_DTYPES[self._run.dtype]
        rows_here = {
            key: _local(whole) for key, whole in self._wholes.items()
        }  # experts share one by the hundred
        for name, rows in self._parameters.items():
            local = self._held(rows, rows_here[id(rows.whole)])
            buffer = buffers[name] = self._pool.take(name)
            if buffer.data is None:
                buffer.data = self._room(name, local, dtype)
            # On a GPU it is rounded before it travels; where it stays, copy_ itself rounds, as `.to` does.
            travels = local.is_cuda and not self._on_device
            buffer.data.copy_(local.to(dtype) if travels else local, non_blocking=True)

    def _held(self, rows: RowsOf, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of it, a view of its rows of the trained tensor."""
        if not isinstance(rows.whole, DTensor):
            return rows.of_rows(local, 0)
        if self.rank >= self.holders:
            local = local[:0]  # a further copy: another rank writes these rows
        return rows.of_rows(local, self._row_range(rows, self.rank)[0])

    def _row_range(self, rows: RowsOf, rank: int) -> tuple[int, int]:
        """Of the trained tensor: what a rank holds."""
        total = rows_in(rows.whole)
        start = min(rank * -(-total // self.holders), total)
        return start, start + rows_of(rank, total, self.holders)

    def _room(self, name: str, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._on_device:
            return torch.empty(local.shape, dtype=dtype, pin_memory=local.is_cuda)
        try:
            return torch.empty(local.shape, dtype=dtype, device=local.device)
        except torch.OutOfMemoryError as error:
            raise no_room(f"a copy of {name}", local.device) from error

    def parts(self) -> Iterator[Part]:
        """In the order of the table, empty ones left out. Over all ranks they are every element once: what is
        not sharded is rank 0's."""
        place = 0
        for index, spec in enumerate(self._run.tensors):
            rows = self._parameters[spec.name]
            start, count = (0, rows.count) if self.rank == 0 else (0, 0)
            if isinstance(rows.whole, DTensor):
                start, count = rows.within(*self._row_range(rows, self.rank))
            if count * rows.unit:
                yield Part(index, start * rows.unit, count * rows.unit, place)
            place += math.prod(spec.shape)

    def sources(self, spec: TensorSpec, owner: int) -> Iterator[tuple[int, int]]:
        """(rank, bytes) of the pieces of a tensor in their order; empty pieces are left out."""
        rows = self._parameters[spec.name]
        if not isinstance(rows.whole, DTensor):
            if spec.nbytes:
                yield owner, spec.nbytes
            return
        unit_bytes = spec.nbytes // rows.count if rows.count else 0
        for rank in range(self.holders):
            size = rows.within(*self._row_range(rows, rank))[1] * unit_bytes
            if size:
                yield rank, size

    @property
    def buffers(self) -> int:
        """Bytes that the pool and all states hold."""
        return self._pool.nbytes


class State:
    """One copy of this rank's rows. Its holder calls `release` when it needs them no more."""

    def __init__(
        self,
        pool: _Pool,
        buffers: dict[str, _Buffer],
        ready: Mapping[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        """`ready`: when the copy is made, by GPU, where it lies with the parameters; None: it is in host memory."""
        self._pool, self._buffers, self._ready = pool, buffers, ready

    @property
    def on_device(self) -> bool:
        return self._ready is not None

    def values(self, name: str) -> torch.Tensor:
        """This rank's piece of a tensor, where it lies: int16 [elements], a view. To be read inside `beside`."""
        data = self._buffers[name].data
        assert data is not None
        return bits_of(data)

    def bits(self, name: str) -> np.ndarray:
        """The same in host memory, of a State that is there: uint16 [elements], a view."""
        bits: np.ndarray = self.values(name).numpy().view(np.uint16)
        return bits

    def block(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some of its bytes in host memory: uint8 [stop - start]; a view where the State is there."""
        with self.beside(name):
            return self.values(name).view(torch.uint8)[start:stop].cpu()

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """What reads the values of a tensor on a GPU neither waits for the training step's work nor is waited for."""
        device = self.values(name).device
        event = None if self._ready is None else self._ready.get(device)
        if event is None:
            yield
            return
        with torch.cuda.stream(_side_stream(device)):
            event.wait(torch.cuda.current_stream(device))
            yield

    def share(self) -> State:
        """The same rows for a second holder."""
        for buffer in self._buffers.values():
            self._pool.hold(buffer)
        return State(self._pool, dict(self._buffers), self._ready)

    def release(self, name: str | None = None) -> None:
        """Of one tensor, or of all that are still held. From any thread."""
        for each in [name] if name is not None else list(self._buffers):
            self._pool.give_back(each, self._buffers.pop(each))


class _Buffer:
    def __init__(self) -> None:
        self.data: torch.Tensor | None = None
        self.holders = 1


class _Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, list[_Buffer]] = {}
        self._all: dict[str, list[_Buffer]] = {}

    @property
    def nbytes(self) -> int:
        with self._lock:
            every = [buffer.data for buffers in self._all.values() for buffer in buffers]
        return sum(data.nbytes for data in every if data is not None)

    def take(self, name: str) -> _Buffer:
        with self._lock:
            free = self._free.setdefault(name, [])
            if free:
                buffer = free.pop()
                buffer.holders = 1
                return buffer
            buffer = _Buffer()
            self._all.setdefault(name, []).append(buffer)
            return buffer

    def hold(self, buffer: _Buffer) -> None:
        with self._lock:
            buffer.holders += 1

    def give_back(self, name: str, buffer: _Buffer) -> None:
        with self._lock:
            buffer.holders -= 1
            if buffer.holders:
                return
            # One that is free already will do for the next snapshot; while an anchor holds a third, none is.
            if len(self._all[name]) > _KEPT and self._free[name]:
                self._all[name].remove(buffer)
            else:
                self._free[name].append(buffer)


def no_room(what: str, device: torch.device) -> WeightsError:
    return WeightsError(
        f"{device} has no memory left for {what}",
        hint='set weights.baseline = "host": the copies of the weights are then kept in host memory',
    )


_streams: dict[torch.device, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all threads: torch keeps the memory that a stream's work has taken for that stream alone."""
    with _streams_lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


def _now(gpu: torch.device) -> torch.cuda.Event:
    """Reached when what this thread has queued so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(gpu))
    return event


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _select(run: RunInfo, parameters: Mapping[str, Published]) -> dict[str, RowsOf]:
    """The run's tensors in its order. Others may only be further names of these (tied, under the first
    name)."""
    missing = [spec.name for spec in run.tensors if spec.name not in parameters]
    if missing:
        raise ModelMismatch(
            f"the trainer has no parameter {missing[0]!r} ({len(missing)} of the run are missing)",
            hint="give the publisher the parameters that ensure_run was given, under their Hugging Face names",
        )
    chosen = {spec.name: _rows(parameters[spec.name]) for spec in run.tensors}
    for spec in run.tensors:
        if chosen[spec.name].shape != spec.shape:
            raise ModelMismatch(
                f"parameter {spec.name} has shape {chosen[spec.name].shape}, in the run {spec.shape}",
                hint="start from the run's own model, or give this one a run URL of its own",
            )
    addresses = {_local(rows.whole).data_ptr() for rows in chosen.values()}
    for name in parameters.keys() - chosen.keys():
        local = _local(_rows(parameters[name]).whole)
        if local.numel() and local.data_ptr() not in addresses:
            raise ModelMismatch(
                f"parameter {name!r} is not among the run's tensors",
                hint="give ensure_run and the publisher the same parameters",
            )
    return chosen


def _rows(published: Published) -> RowsOf:
    return published if isinstance(published, RowsOf) else RowsOf.all_of(published)


def _holders(tensor: torch.Tensor, ranks: int) -> int:
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return mesh.shape[1] if mesh is not None and mesh.ndim == 2 else ranks


def _check_placement(name: str, tensor: torch.Tensor, rank: int, ranks: int, holders: int) -> None:
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    in_order = mesh.mesh.flatten().tolist() == list(range(ranks)) and mesh.shape[-1] == holders
    supported = ((Shard(0),), (Replicate(), Shard(0)))[: 2 if holders < ranks or mesh.ndim == 2 else 1]
    if not in_order or tuple(tensor.placements) not in supported or mesh.ndim > 2:
        raise WeightsError(
            f"parameter {name} is placed as {tuple(tensor.placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}: only Shard(0) over all {ranks} ranks in order, or over each row of a mesh "
            "[copies, ranks / copies], can be published",
            hint="apply fully_shard with a mesh of all ranks, of one dimension or of two, and its default placement",
        )
    expected = (rows_of(rank % holders, tensor.shape[0], holders), *tensor.shape[1:])
    if tuple(_local(tensor).shape) != expected:
        raise WeightsError(
            f"rank {rank} holds {tuple(_local(tensor).shape)} of parameter {name}, not {expected}",
            hint="rows must be split by torch.chunk's rule, as fully_shard does",
        )
