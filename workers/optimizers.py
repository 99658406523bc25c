"""The optimizers, with their state made at the start and not at the first step, so that a checkpoint always has the
same shape.

    adamw       decoupled weight decay (arXiv 1711.05101), torch's. Two moments: 8 bytes per weight
    adafactor   second moments as a row and a column per matrix (arXiv 1804.04235), transformers'. Without first
                moment, relative steps and parameter scaling: next to no memory. Its step is clipped to
                root-mean-square 1, so its learning rate means what AdamW's does

Legend: [rows, …] as in the masters, float32, sharded as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import zeros as sharded_zeros

from workers.masters import local
from workers.pretrained import hide_broken_media_packages
from workers.settings import TrainerConfig
from workers.sharding import Placement

__all__ = ["OptimizerRows", "make_optimizer", "optimizer_rows", "set_updates"]


@dataclass(frozen=True)
class OptimizerRows:
    """One tensor's rows on this rank with what the optimizer keeps of them, live and writable: what a checkpoint
    holds."""

    shape: tuple[int, ...]  # of the whole tensor
    first: int  # row
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By what they are (param, exp_avg, …): float32, each with these rows as its first dimension."""
    written: bool = True
    """By this rank. (A further copy of the model reads, and writes nothing.)"""

    @property
    def rows(self) -> int:
        return next(iter(self.tensors.values())).shape[0]


def make_optimizer(masters: dict[str, DTensor], trainer: TrainerConfig) -> torch.optim.Optimizer:
    """Weight decay on matrices only; adapters decay as the matrices they are."""
    groups = [
        {"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": trainer.weight_decay},
        {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if trainer.optimizer == "adafactor":
        return _adafactor(groups, masters, trainer)
    optimizer = torch.optim.AdamW(
        groups,
        lr=trainer.learning_rate,
        betas=trainer.betas,
        eps=trainer.eps,
        fused=True,  # one pass over memory instead of ten
    )
    for parameter in masters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),  # where a fused step reads it
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _adafactor(groups: Any, masters: dict[str, DTensor], trainer: TrainerConfig) -> torch.optim.Optimizer:
    hide_broken_media_packages()
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(
        groups,
        lr=trainer.learning_rate,
        relative_step=False,
        scale_parameter=False,
        warmup_init=False,
    )
    for parameter in masters.values():
        state: dict[str, Any] = {"step": 0, "RMS": 0}
        if parameter.ndim >= 2:
            state["exp_avg_sq_row"] = _zeros(parameter, parameter.shape[:-1], parameter.placements)
            everywhere = [Replicate()] * parameter.device_mesh.ndim
            columns = (*parameter.shape[:-2], parameter.shape[-1])
            # Of more than two dimensions: the columns of each matrix, so still sharded by the first one.
            placements = parameter.placements if parameter.ndim > 2 else everywhere
            state["exp_avg_sq_col"] = _zeros(parameter, columns, placements)
        else:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        optimizer.state[parameter] = state
    return optimizer


def _zeros(like: DTensor, shape: tuple[int, ...], placements: Any) -> Tensor:
    made = sharded_zeros(shape, dtype=torch.float32, device_mesh=like.device_mesh, placements=placements)
    return made.to(local(like).device)


def optimizer_rows(
    masters: dict[str, DTensor], optimizer: torch.optim.Optimizer, placement: Placement, rank: int
) -> dict[str, OptimizerRows]:
    """By name. A state that is whole on every rank stands under a name of its own, and is rank 0's to write."""
    found: dict[str, OptimizerRows] = {}
    own = rank % placement.shards
    for name, master in masters.items():
        state = {
            key: value
            for key, value in optimizer.state[master].items()
            if isinstance(value, DTensor) and value.ndim
        }
        whole = {key: value for key, value in state.items() if not _sharded(value)}
        # torch.chunk's rule: the last ranks may hold less, or nothing.
        chunk = -(-master.shape[0] // placement.shards)
        found[name] = OptimizerRows(
            shape=tuple(master.shape),
            first=min(own * chunk, master.shape[0]),
            tensors={
                "param": local(master),
                **{key: local(value) for key, value in state.items() if key not in whole},
            },
            written=placement.replica == 0,
        )
        for key, value in whole.items():
            found[f"{name}/{key}"] = OptimizerRows(
                tuple(value.shape), 0, {"state": local(value)}, written=rank == 0
            )
    return found


def _sharded(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """After a restore: how many updates the state has seen."""
    for state in optimizer.state.values():
        if isinstance(state["step"], Tensor):
            state["step"].fill_(updates)
        else:
            state["step"] = updates
