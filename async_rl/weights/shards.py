"""The local part of the trainer's parameters, as 16-bit rows in host memory.

Supported: FSDP2's DTensors sharded by rows (`Shard(0)` over all ranks, with torch.chunk's rule: rank r
holds rows [r*c, min((r+1)*c, rows)), c = ceil(rows / ranks); the last shards may be short or empty), and
plain tensors, which are taken to be equal on every rank. Everything else is refused before training starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor, Shard

from async_rl.errors import ModelMismatch, WeightsError
from async_rl.weights.packs import TensorSpec
from async_rl.weights.run import RunInfo

__all__ = ["Snapshot", "rows_of"]

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def rows_of(rank: int, rows: int, ranks: int) -> int:
    """How many of `rows` rows a rank holds, by torch.chunk's rule."""
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - rank * chunk))


class Snapshot:
    """Buffers for one copy of this rank's shards, allocated once: `take` fills them, `sources` and `local`
    read them."""

    def __init__(self, run: RunInfo, parameters: Mapping[str, torch.Tensor], rank: int, ranks: int) -> None:
        """Raises ModelMismatch if `parameters` are not the run's tensors, WeightsError for an unsupported
        placement."""
        self.rank, self.ranks = rank, ranks
        self._parameters = _select(run, parameters)
        for spec in run.tensors:
            _check_placement(spec, self._parameters[spec.name], rank, ranks)
        self._on_gpu = any(tensor.device.type == "cuda" for tensor in self._parameters.values())
        dtype = TORCH_DTYPES[run.dtype]
        self._buffers = {
            name: torch.empty(_local(tensor).shape, dtype=dtype, pin_memory=tensor.device.type == "cuda")
            for name, tensor in self._parameters.items()
        }

    @torch.no_grad()
    def take(self) -> None:
        """Round the parameters as they are now to 16 bit, as `.to(dtype)` does."""
        for name, tensor in self._parameters.items():
            buffer = self._buffers[name]
            buffer.copy_(_local(tensor).to(buffer.dtype), non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize()  # before the optimizer may change what is still being copied

    def sources(self, spec: TensorSpec, owner: int) -> Iterator[tuple[int, int]]:
        """(rank, bytes) of the pieces of a tensor in their order; empty pieces are left out."""
        if not isinstance(self._parameters[spec.name], DTensor):
            if spec.nbytes:
                yield owner, spec.nbytes
            return
        row_bytes = spec.nbytes // spec.shape[0] if spec.shape[0] else 0
        for rank in range(self.ranks):
            size = rows_of(rank, spec.shape[0], self.ranks) * row_bytes
            if size:
                yield rank, size

    def local(self, spec: TensorSpec) -> torch.Tensor:
        """This rank's piece: uint8 [bytes], a view."""
        return self._buffers[spec.name].reshape(-1).view(torch.uint8)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _select(run: RunInfo, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The run's tensors in its order. Others may only be further names of these (tied, under the first
    name)."""
    missing = [spec.name for spec in run.tensors if spec.name not in parameters]
    if missing:
        raise ModelMismatch(
            f"the trainer has no parameter {missing[0]!r} ({len(missing)} of the run are missing)"
        )
    chosen = {spec.name: parameters[spec.name] for spec in run.tensors}
    for spec in run.tensors:
        if tuple(chosen[spec.name].shape) != spec.shape:
            raise ModelMismatch(
                f"parameter {spec.name} has shape {tuple(chosen[spec.name].shape)}, in the run {spec.shape}"
            )
    addresses = {_local(tensor).data_ptr() for tensor in chosen.values()}
    for name in parameters.keys() - chosen.keys():
        local = _local(parameters[name])
        if local.numel() and local.data_ptr() not in addresses:
            raise ModelMismatch(
                f"parameter {name!r} is not among the run's tensors",
                hint="give ensure_run and the publisher the same parameters",
            )
    return chosen


def _check_placement(spec: TensorSpec, tensor: torch.Tensor, rank: int, ranks: int) -> None:
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    over_all = mesh.ndim == 1 and mesh.mesh.flatten().tolist() == list(range(ranks))
    if not over_all or tuple(tensor.placements) != (Shard(0),):
        raise WeightsError(
            f"parameter {spec.name} is placed as {tuple(tensor.placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}: only Shard(0) over all {ranks} ranks in order can be published",
            hint="apply fully_shard with a one-dimensional mesh of all ranks and its default placement",
        )
    expected = (rows_of(rank, spec.shape[0], ranks), *spec.shape[1:])
    if tuple(_local(tensor).shape) != expected:
        raise WeightsError(
            f"rank {rank} holds {tuple(_local(tensor).shape)} of parameter {spec.name}, not {expected}",
            hint="rows must be split by torch.chunk's rule, as fully_shard does",
        )
