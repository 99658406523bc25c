"""The policy being trained: FSDP2 over any number of ranks, float32 master weights, bfloat16 forward.

    stats = learner.forward_backward(micro_batches, loss_tokens)   gradients of the whole batch, on every rank's rows
    learner.optimizer_step(stats)                                  clip, AdamW; refused if anything is not finite

One rank takes the same path as many. Each decoder layer is one FSDP unit, sharded by rows; gradients are
summed over ranks in float32 and never averaged: the loss is already divided by the loss tokens of the whole
batch, which every rank knows because every rank packs the whole batch. So gradients depend on neither
packing nor ranks, but for rounding.

Agreement with the engine. Engines sample with weights rounded to bfloat16, so the forward pass must see
exactly those. With bfloat16 products FSDP rounds the float32 masters as it gathers them. Without (a CPU
that lacks bfloat16 instructions emulates them six times slower than float32), the module holds the rounded
values in float32 and the masters lie beside it.

Legend: T tokens of a micro-batch, K of them loss tokens, k some of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from async_rl.algo.losses import LossConfig, TokenSums, policy_loss
from async_rl.algo.mismatch import token_measures, totals_by_slot
from async_rl.algo.packing import MicroBatch
from workers.head import HeadSettings, LogitMap
from workers.packed_attention import load_model
from workers.policy import Ask, Policy, Scores
from workers.process_group import RankGroup
from workers.settings import ModelConfig, TrainerConfig

__all__ = ["Learner", "OptimizerRows", "StepStats", "compute_dtype", "warmup_factor"]

SUMS_OVER_TOKENS = frozenset({"dppo_tv"})
"""Losses in which a token's part depends on no other token's log-probability: their gradients are made together with
the log-probabilities (head.token_loss)."""


@dataclass(frozen=True)
class StepStats:
    """Of one batch, over all ranks; means are over loss tokens. `fresh_*` see TokenSums, None without such
    tokens."""

    loss: float
    tokens: int
    grad_norm: float  # before clipping
    ratio_mean: float
    ratio_max: float
    abs_logprob: float
    kl_k3: float
    fresh_tokens: int
    fresh_abs_logprob: float | None
    fresh_kl_k3: float | None
    masked_positive: float  # of the tokens with a positive advantage, the part outside the trust region
    masked_negative: float
    entropy: float  # of the policy, nats per token
    measured: tuple[tuple[float, ...], ...] = ()
    """Of each slot: tokens, and the sums of kl, ratio and surprise (algo/mismatch.py)."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class OptimizerRows:
    """One parameter's rows on this rank, live and writable: what a checkpoint holds of it."""

    shape: tuple[int, ...]  # of the whole parameter
    first: int  # row
    param: Tensor  # float32 master
    exp_avg: Tensor
    exp_avg_sq: Tensor


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Of the matrix products; see ModelConfig.dtype."""
    if wanted == "auto":
        native = device.type != "cpu" or _cpu_has_bfloat16()
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]


def _cpu_has_bfloat16() -> bool:
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


def warmup_factor(updates: int, warmup_steps: int) -> float:
    """Of the learning rate, for the update after `updates` others: linear up to 1, then constant."""
    return min(1.0, (updates + 1) / warmup_steps) if warmup_steps else 1.0


class Learner:
    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        loss: LossConfig,
        *,
        temperature: float,
        group: RankGroup,
        device: torch.device,
    ) -> None:
        """Collective. Raises ConfigError for a folder without a model. `temperature` is the sampling's."""
        self._trainer, self._loss, self._temperature = trainer, loss, temperature
        self._group, self._device = group, device
        self._dtype = compute_dtype(model.dtype, device)
        self._model = load_model(model, device)
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        _turn_off_dropout(self._model)
        if model.activation_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.train()  # transformers checkpoints only then; dropout is off anyway
        self._policy = Policy(
            self._model, _head_settings(trainer, temperature, device), whole=trainer.head == "logits"
        )
        _shard(self._policy, self._dtype, device, group.size)

        self._seen: dict[str, DTensor] = dict(self._model.named_parameters())
        self._masters = self._seen
        if self._dtype != torch.bfloat16:
            self._masters = {name: _copy(p) for name, p in self._seen.items()}
        self.updates = 0  # of the optimizer: steps less refused ones
        self._optimizer = _adamw(self._masters, trainer)
        self._show_masters()
        self._policy.check(device)

    def parameters(self) -> dict[str, DTensor]:
        """Hugging Face names to sharded parameters; rounded to bfloat16 they are what the forward pass
        sees."""
        return self._seen

    # ------------------------------------------------------------ one step

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss_tokens: int, slots: int = 0
    ) -> StepStats:
        """Gradients and statistics of one batch. Collective: this rank's micro-batches, as many as on every
        rank.

        `loss_tokens` and `slots` of the whole batch, all ranks. Gradients of an earlier batch are forgotten.
        """
        self._model.zero_grad(set_to_none=True)
        sums = torch.zeros(len(TokenSums._fields) + 1, dtype=torch.float64)
        greatest = torch.zeros(1, dtype=torch.float64)
        measured = np.zeros((slots, 4))
        for row in micro_batches:
            loss, token_sums, ratio_max, entropy, measures = self._loss_of(row, slots)
            (loss / max(loss_tokens, 1)).backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([value.double() for value in (*token_sums, entropy)]).cpu()
            greatest = torch.maximum(greatest, ratio_max.double().cpu())
            measured += measures
        squares = sum(map(_square_sum, self._gradients()), torch.zeros((), dtype=torch.float64))
        sums = torch.cat([sums, squares.cpu().reshape(1), torch.from_numpy(measured).reshape(-1)])
        self._group.sum(sums)
        self._group.max(greatest)
        *token_values, entropy_sum, square_sum = sums[: len(TokenSums._fields) + 2].tolist()
        stats = _stats(
            TokenSums(*token_values), entropy_sum, math.sqrt(square_sum), float(greatest), loss_tokens
        )
        by_slot = sums[len(TokenSums._fields) + 2 :].reshape(slots, 4).tolist()
        return replace(stats, measured=tuple(map(tuple, by_slot)))

    def logprobs(self, row: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """log pi of the targets at the loss tokens, float32 [K]; entropy there [K]; the indices of these
        tokens [K].

        A row without loss tokens gives its first token, so that the pass still has something to go backward
        from.
        """
        ask = self._ask(row)
        scores = self._scores(row, ask)
        return scores.logprobs_K, scores.entropy_K, ask.kept_K

    def _ask(self, row: MicroBatch) -> Ask:
        kept_K = torch.from_numpy(row.loss_mask_T).nonzero().squeeze(-1)
        kept_K = (kept_K if len(kept_K) else torch.zeros(1, dtype=torch.int64)).to(self._device)
        return Ask(kept_K, self._to_device(row.targets_T)[kept_K])

    def _scores(self, row: MicroBatch, ask: Ask) -> Scores:
        scores: Scores = self._policy(
            self._to_device(row.input_ids_T), self._to_device(row.position_ids_T), ask
        )
        if not torch.is_grad_enabled():
            self._policy.give_back()  # what a backward pass would have given back
        return scores

    def _loss_of(self, row: MicroBatch, slots: int) -> tuple[Tensor, TokenSums, Tensor, Tensor, Any]:
        ask = self._ask(row)
        kept_K = ask.kept_K
        mask_K = self._to_device(row.loss_mask_T)[kept_K]
        behaviour_K = self._to_device(row.behaviour_T)[kept_K]
        advantages_K = self._to_device(row.advantages_T)[kept_K]
        fresh_K = self._to_device(row.lags_T)[kept_K] == 0

        def loss_of(logprobs_k: Tensor, k: slice) -> tuple[Tensor, TokenSums, Tensor]:
            return policy_loss(
                logprobs_k, behaviour_K[k], advantages_K[k], mask_K[k], fresh_K[k], self._loss
            )

        if self._loss.name in SUMS_OVER_TOKENS:
            ask.loss_of = lambda logprobs_k, entropy_k, k: loss_of(logprobs_k, k)[0]
        logprobs_K, entropy_K, fused, _ = self._scores(row, ask)
        loss, sums, ratio_max = loss_of(logprobs_K, slice(None))
        loss = loss if fused is None else fused
        measures = np.zeros((slots, 4))
        if slots:
            kept = kept_K.cpu().numpy()
            each = token_measures(
                logprobs_K.detach().cpu().numpy(), row.behaviour_T[kept], entropy_K.cpu().numpy()
            )
            measures = totals_by_slot(np.where(row.loss_mask_T, row.slots_T, -1)[kept], each, slots)
        return loss, sums, ratio_max, entropy_K.where(mask_K, 0.0).sum(), measures

    def optimizer_step(self, stats: StepStats) -> bool:
        """Clip and update, at the next learning rate of the warm-up. False, with weights and optimizer
        untouched, where the loss or the gradient is not finite (one NaN in Adam's moments would never leave
        them again), and where the batch had no loss token (momentum alone must not move the weights)."""
        if not stats.finite or not stats.tokens:
            self._model.zero_grad(set_to_none=True)
            return False
        scale = min(1.0, self._trainer.clip_norm / (stats.grad_norm + 1e-6))
        for name, parameter in self._seen.items():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
                self._masters[name].grad = parameter.grad
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)
        self.updates += 1
        self._show_masters()
        return True

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._trainer.learning_rate * warmup_factor(self.updates, self._trainer.warmup_steps)

    # ------------------------------------------------------------ checkpoints

    def rows(self) -> dict[str, OptimizerRows]:
        """Everything a checkpoint holds of this rank, by parameter name; live tensors, to read or to write
        into. Call `restored` after writing."""
        return {name: self._rows_of(master) for name, master in self._masters.items()}

    def restored(self, updates: int) -> None:
        """The tensors of `rows` were overwritten with the state after `updates` updates."""
        self.updates = updates
        for state in self._optimizer.state.values():
            state["step"].fill_(updates)
        self._show_masters()

    def _rows_of(self, master: DTensor) -> OptimizerRows:
        state = self._optimizer.state[master]
        chunk = -(
            -master.shape[0] // self._group.size
        )  # torch.chunk's rule: the last ranks may hold less, or nothing
        return OptimizerRows(
            shape=tuple(master.shape),
            first=min(self._group.rank * chunk, master.shape[0]),
            param=_local(master),
            exp_avg=_local(state["exp_avg"]),
            exp_avg_sq=_local(state["exp_avg_sq"]),
        )

    # ------------------------------------------------------------ inside

    @torch.no_grad()
    def _show_masters(self) -> None:
        """Put the masters, rounded to bfloat16, where the forward pass reads (unless FSDP rounds them
        itself)."""
        if self._masters is not self._seen:
            for name, master in self._masters.items():
                _local(self._seen[name]).copy_(_local(master).to(torch.bfloat16))

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self._seen.values() if p.grad is not None)

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _head_settings(trainer: TrainerConfig, temperature: float, device: torch.device) -> HeadSettings:
    on_cpu = device.type == "cpu"
    mib = trainer.head_tile_mib or (64 if on_cpu else 512)
    compiled = trainer.head_compile == "always" or (trainer.head_compile == "auto" and not on_cpu)
    return HeadSettings(LogitMap(), temperature, mib << 20, compiled)


def _shard(policy: Policy, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """FSDP2 in place: one unit per decoder layer, one for the rest (embeddings, head, last norm)."""
    mesh = init_device_mesh(device.type, (ranks,))
    half = dtype if dtype != torch.float32 else None
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in _decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule) and ranks > 1:
            # FSDP averages over ranks by default; ours is a sum, divided by the loss tokens of the whole
            # batch. (Alone, a factor would cost a copy of the gradient.)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def _decoder_layers(model: Any) -> Iterable[nn.Module]:
    """The modules that transformers itself says must not be split over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _turn_off_dropout(model: nn.Module) -> None:
    """No dropout: pi must be the policy that the engines serve."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _adamw(masters: dict[str, DTensor], trainer: TrainerConfig) -> torch.optim.AdamW:
    """With its state made now and not at the first step, so that a checkpoint always has the same shape."""
    matrices = [p for p in masters.values() if p.ndim >= 2]
    others = [p for p in masters.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": trainer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
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


def _stats(
    sums: TokenSums, entropy: float, grad_norm: float, ratio_max: float, loss_tokens: int
) -> StepStats:
    """`sums` as plain numbers, over all ranks."""
    count = max(loss_tokens, 1)
    fresh = int(sums.fresh_tokens)
    return StepStats(
        loss=float(sums.loss) / count,
        tokens=int(sums.tokens),
        grad_norm=grad_norm,
        ratio_mean=float(sums.ratio) / count,
        ratio_max=ratio_max,
        abs_logprob=float(sums.abs_logprob) / count,
        kl_k3=float(sums.kl_k3) / count,
        fresh_tokens=fresh,
        fresh_abs_logprob=float(sums.fresh_abs_logprob) / fresh if fresh else None,
        fresh_kl_k3=float(sums.fresh_kl_k3) / fresh if fresh else None,
        masked_positive=float(sums.positive_masked) / max(float(sums.positive), 1.0),
        masked_negative=float(sums.negative_masked) / max(float(sums.negative), 1.0),
        entropy=entropy / count,
    )


def _square_sum(gradient: Tensor) -> Tensor:
    """In float64, a piece at a time: the whole of a vocabulary's gradient would be its largest tensor twice more."""
    pieces = _local(gradient).reshape(-1).split(1 << 20)
    return sum((p.double().square().sum() for p in pieces), torch.zeros((), dtype=torch.float64))


def _copy(parameter: DTensor) -> Any:
    return nn.Parameter(parameter.detach().clone())


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor, sharing its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
