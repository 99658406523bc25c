"""What the optimizer updates, in float32, and how the weights that the forward pass sees come from it.

Every engine serves bfloat16, so the forward pass sees exactly the bfloat16-rounded weights that are published. The
masters lie behind them:

    WholeMasters   a float32 copy of every weight; where FSDP rounds as it gathers, the weights themselves
    Adapters       LoRA (arXiv 2106.09685): W is frozen; A [r, in] and B [out, r] are trained, and

                       seen = bfloat16(W + alpha / r * B A)

                   is what the forward pass sees, what is published, and what engines serve. So an engine needs to
                   know nothing of adapters, and the policy that is trained is the policy that samples, to the last
                   bit: products with A and B on the side would round differently from the merged weights. With G
                   the gradient at `seen`, taken past the rounding (straight through),

                       dB = alpha / r * G A^T        dA = alpha / r * B^T G

                   G exists for one FSDP unit at a time: it becomes dA and dB as soon as it is reduced.

Legend: r rank of the adapters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from async_rl.errors import ConfigError
from workers.settings import ModelConfig
from workers.sharding import Placement, decoder_layers

__all__ = ["Adapters", "Masters", "WholeMasters", "adapted", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, sharing its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


class Masters(Protocol):
    tensors: dict[str, DTensor]
    """By name: float32, sharded by rows."""

    def forget(self) -> None:
        """Gradients of an earlier batch."""
        ...

    def gradients(self) -> dict[str, DTensor]:
        """Of the tensors that have one, summed over all ranks, where the tensor is. Collective; once per batch."""
        ...

    def show(self) -> None:
        """Put the masters, rounded to bfloat16, where the forward pass reads. Collective."""
        ...


class WholeMasters:
    """Of every weight. `on_host`: copies in host memory, whatever the device."""

    def __init__(self, seen: dict[str, DTensor], dtype: torch.dtype, *, on_host: bool) -> None:
        self._seen = seen
        self.tensors = seen
        if on_host or dtype != torch.bfloat16:
            self.tensors = {name: _copy(weight, on_host) for name, weight in seen.items()}

    def forget(self) -> None:
        for weight in self._seen.values():
            weight.grad = None

    def gradients(self) -> dict[str, DTensor]:
        found: dict[str, Any] = {}
        for name, weight in self._seen.items():
            if weight.grad is not None:
                found[name] = weight.grad.to(local(self.tensors[name]).device)
        return found

    @torch.no_grad()
    def show(self) -> None:
        if self.tensors is self._seen:
            return  # FSDP rounds
        for name, master in self.tensors.items():
            local(self._seen[name]).copy_(local(master).to(torch.bfloat16))


def adapted(model: Any, config: ModelConfig) -> list[str]:
    """Names of the weights that get adapters; all others are frozen. Before sharding.

    Raises ConfigError for a target that the model does not have."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    targets = set(config.lora_targets)
    unknown = targets - {name.rpartition(".")[2] for name in linear}
    if unknown or not linear:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        wanted = ", ".join(sorted(unknown)) or "any"
        raise ConfigError(
            f"model.lora_targets: the decoder layers have no linear layer named {wanted}",
            hint=f"they have: {there}; an empty list takes all of them",
        )
    chosen = [f"{name}.weight" for name in linear if not targets or name.rpartition(".")[2] in targets]
    kept = set(chosen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    return chosen


class Adapters:
    """Of the weights named. Tensors are called after them: NAME.lora_A [r, in], NAME.lora_B [out, r].

    A begins as torch's own linear layers do (uniform, +-1 / sqrt(in)) and B as zero, as in the paper: the first
    policy is the model's own. A's numbers come from its name alone, the same on every rank and in every life.

    Memory per weight of a layer with adapters: 2 bytes of this rank's frozen rows beside the weights that are seen;
    no moments, no masters and, between two units of the backward pass, no gradient."""

    def __init__(
        self,
        seen: Mapping[str, DTensor],
        names: Iterable[str],
        placement: Placement,
        *,
        rank: int,
        alpha: float,
        on_host: bool,
    ) -> None:
        self._placement, self._scale = placement, alpha / rank
        self._seen = {name: seen[name] for name in names}
        self._base = {name: local(weight).to(torch.bfloat16) for name, weight in self._seen.items()}
        self.tensors: dict[str, DTensor] = {}
        self._whole_A: dict[str, Tensor] = {}  # on the device of the weights, as of the last `show`
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        for name, weight in self._seen.items():
            rows, columns = weight.shape
            whole_A = _first_A(name, rank, columns)
            self.tensors[f"{name}.lora_A"] = self._sharded(whole_A, local(weight).device, on_host)
            self.tensors[f"{name}.lora_B"] = self._sharded(
                torch.zeros(rows, rank), local(weight).device, on_host
            )
            weight.register_post_accumulate_grad_hook(self._taker(name))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        self._sums.clear()

    @torch.no_grad()
    def gradients(self) -> dict[str, DTensor]:
        """dB is this rank's rows already; dA has a summand from the rows of every rank of this copy."""
        if not self._sums:
            return {}
        names = list(self._sums)
        flat = torch.cat([self._sums[name][0].flatten() for name in names])
        if self._placement.shards > 1:
            dist.all_reduce(flat, group=self._placement.group)
        found: dict[str, DTensor] = {}
        at = 0
        for name in names:
            sum_A, sum_B = self._sums[name]
            whole = flat[at : at + sum_A.numel()].view_as(sum_A)
            at += sum_A.numel()
            for key, gradient in (("A", self._own_rows(whole)), ("B", sum_B)):
                master = self.tensors[f"{name}.lora_{key}"]
                found[f"{name}.lora_{key}"] = _like(master, gradient.to(local(master).device))
        self._sums.clear()
        return found

    @torch.no_grad()
    def show(self) -> None:
        for name, weight in self._seen.items():
            rows = local(weight)
            self._whole_A[name] = self.tensors[f"{name}.lora_A"].full_tensor().detach().to(rows.device)
            lora_B = local(self.tensors[f"{name}.lora_B"]).to(rows.device)
            merged = torch.addmm(self._base[name].float(), lora_B, self._whole_A[name], alpha=self._scale)
            rows.copy_(merged.to(torch.bfloat16))

    def _taker(self, name: str) -> Any:
        """A hook: FSDP calls it when the weight's gradient is reduced, once per micro-batch."""

        @torch.no_grad()
        def take(weight: DTensor) -> None:
            assert weight.grad is not None
            gradient = local(weight.grad)
            weight.grad = None
            whole_A = self._whole_A[name]
            lora_B = local(self.tensors[f"{name}.lora_B"]).to(gradient.device)
            if name not in self._sums:
                self._sums[name] = (torch.zeros_like(whole_A), torch.zeros_like(lora_B))
            sum_A, sum_B = self._sums[name]
            sum_A.addmm_(lora_B.T, gradient, alpha=self._scale)
            sum_B.addmm_(gradient, whole_A.T, alpha=self._scale)

        return take

    def _own_rows(self, whole: Tensor) -> Tensor:
        """torch.chunk's rule, as FSDP splits."""
        mine = self._placement.mesh.get_local_rank(self._placement.mesh.ndim - 1)
        chunk = -(-whole.shape[0] // self._placement.shards)
        return whole[mine * chunk : (mine + 1) * chunk].contiguous()

    def _sharded(self, whole: Tensor, device: torch.device, on_host: bool) -> DTensor:
        mesh = self._placement.mesh
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        tensor = DTensor.from_local(
            self._own_rows(whole).to(device),
            mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        master: DTensor = nn.Parameter(tensor.cpu() if on_host else tensor)  # type: ignore[assignment]
        return master


def _first_A(name: str, rank: int, columns: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    draw = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(columns)
    return (2 * torch.rand(rank, columns, generator=draw) - 1) * bound


def _like(master: DTensor, rows: Tensor) -> DTensor:
    return DTensor.from_local(
        rows,
        master.device_mesh,
        master.placements,
        run_check=False,
        shape=master.shape,
        stride=master.stride(),
    )


def _copy(weight: DTensor, on_host: bool) -> Any:
    values = weight.detach().clone()
    return nn.Parameter(values.cpu() if on_host else values)
