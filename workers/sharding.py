"""Where the model lies: FSDP2 over the ranks, one unit per decoder layer and one for the rest.

    replicas = 1    rows over all ranks
    replicas = R    HSDP: R copies of the model, each over ranks / R ranks that should be neighbours (one node):
                    gradients are reduced within a copy, then added up over the copies

Offload. `optimizer`: masters and moments in host memory, where the update runs. `all`: the rows of the weights too;
FSDP brings a layer to the device when it is its turn. Neither changes a bit of what is computed, but for where the
update's arithmetic runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from async_rl.errors import ConfigError

__all__ = ["Placement", "decoder_layers", "place", "shard"]


class Placement(NamedTuple):
    """The ranks as a mesh, and this rank's place in it."""

    mesh: DeviceMesh  # [ranks], or [replicas, ranks / replicas]
    shards: int  # ranks that hold one copy of the model between them
    replica: int  # which copy this rank's rows belong to; copy 0 is the one that is written down

    @property
    def group(self) -> Any:
        """The process group of the ranks that share this rank's copy."""
        return self.mesh.get_group(self.mesh.ndim - 1)


def place(device: torch.device, ranks: int, replicas: int) -> Placement:
    """Collective. Raises ConfigError where `ranks` are not so many equal copies."""
    if ranks % replicas:
        raise ConfigError(
            f"trainer.replicas = {replicas} does not divide the {ranks} ranks",
            hint="start a multiple of it (torchrun --nproc-per-node), or change trainer.replicas",
        )
    if replicas == 1:
        return Placement(init_device_mesh(device.type, (ranks,)), ranks, 0)
    mesh = init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=("replica", "shard"))
    return Placement(mesh, ranks // replicas, mesh.get_local_rank("replica"))


def shard(root: nn.Module, model: Any, placement: Placement, dtype: torch.dtype, *, offload: bool) -> None:
    """FSDP2 in place. `root`: the module that is called, with `model` in it. `dtype`: of the matrix products.
    `offload`: rows wait in host memory."""
    half = dtype if dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    on_cuda = placement.mesh.device_type == "cuda"
    where = CPUOffloadPolicy(pin_memory=on_cuda) if offload else OffloadPolicy()
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=placement.mesh, mp_policy=precision, offload_policy=where)
    fully_shard(root, mesh=placement.mesh, mp_policy=precision, offload_policy=where)
    for module in root.modules():
        if isinstance(module, FSDPModule) and placement.mesh.size() > 1:
            # FSDP averages over ranks by default; ours is a sum, divided by the loss tokens of the whole
            # batch. (Of one rank both are the same, and a factor would cost a copy of the gradient.)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def decoder_layers(model: Any) -> Iterable[nn.Module]:
    """The modules that transformers itself says must not be split over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
