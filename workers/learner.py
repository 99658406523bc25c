"""The policy being trained: FSDP2 over any number of ranks, float32 master weights, bfloat16 forward.

    stats = learner.forward_backward(micro_batches, totals)   gradients of the whole batch, on every rank's rows
    learner.optimizer_step(stats)                             clip, update; refused if anything is not finite

One rank takes the same path as many. Each decoder layer is one FSDP unit, sharded by rows; gradients are
summed over ranks in float32 and never averaged: the loss is already divided by a number of the whole batch,
which every rank knows because every rank packs the whole batch. So gradients depend on neither packing nor
ranks, but for rounding.

Agreement with the engine. Engines sample with weights rounded to bfloat16, so the forward pass must see
exactly those. With bfloat16 products FSDP rounds the float32 masters as it gathers them. Without (a CPU
that lacks bfloat16 instructions emulates them six times slower than float32), the module holds the rounded
values in float32 and the masters lie beside it (masters.py; sharding.py, optimizers.py).

The frozen reference of a KL term is a second model, sharded alike; on a GPU its rows lie in host memory, and FSDP
fetches a layer at a time.

Legend: T tokens of a micro-batch, K of them loss tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.algo.losses import (
    Greatest,
    LossConfig,
    LossResult,
    TokenSums,
    Totals,
    by_token,
    denominator,
    needs_proximal,
    part_of,
    policy_loss,
    total_of,
)
from async_rl.algo.packing import MicroBatch
from async_rl.errors import ConfigError
from async_rl.log import get_logger
from async_rl.weights.rows import Published
from workers.adapter_scale import AdapterScale
from workers.apart import Rows, settle_rows
from workers.compute_type import compute_dtype
from workers.context import longest_of
from workers.custom_loss import custom_function
from workers.file_names import find_names, persistent_buffers
from workers.frozen import frozen_digest
from workers.head import HeadSettings, LogitMap, usual_budget
from workers.masters import Adapters, Masters, WholeMasters, adapted, local
from workers.optimizers import OptimizerRows, make_optimizer, optimizer_rows, set_updates
from workers.packed_attention import load_model
from workers.policy import Ask, Policy, Scores
from workers.process_group import RankGroup
from workers.row_inputs import loss_inputs, measured
from workers.settings import ModelConfig, TrainerConfig
from workers.sharding import decoder_layers, place, shard
from workers.stats import StepStats, stats_of
from workers.utilisation import Utilisation, peak_of

__all__ = ["Learner", "StepStats", "compute_dtype", "warmup_factor"]

log = get_logger(__name__)


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
        max_tokens: int = 0,
    ) -> None:
        """Collective. Raises ConfigError for a folder without a model, and for a custom loss that is none.
        `temperature` and `max_tokens` (per sample) are the sampling's."""
        self._trainer, self._loss, self._temperature = trainer, loss, temperature
        self._max_tokens, self._custom = max_tokens, custom_function(loss)
        self._group, self._device = group, device
        self._dtype = compute_dtype(model.dtype, device)
        self._model = load_model(model.path, model.attention, device)
        self._names = find_names(self._model, Path(model.path))
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        self.longest = longest_of(self._model.config.get_text_config().to_dict())
        """Tokens that the model allows in a sequence; 0: no limit is known."""
        _turn_off_dropout(self._model)
        self._router_coef = _router_coef(self._model, model.router_loss_coef)
        if model.activation_checkpointing:
            _checkpoint_activations(self._model)
        targets = adapted(self._model, model) if model.lora_rank else []
        if model.compile:
            for layer in decoder_layers(self._model):
                layer.compile()
        self._placement = place(device, group.size, trainer.replicas)
        self._policy = self._sharded(self._model, offload=trainer.offload == "all")

        self._seen: dict[str, DTensor] = dict(self._model.named_parameters())
        self._masters = self._make_masters(model, targets)
        self._gradients: dict[str, DTensor] = {}  # of the masters
        self.updates = 0  # of the optimizer: steps less refused ones
        self._optimizer = make_optimizer(self._masters.tensors, trainer)
        self._round_frozen()
        self._masters.show()
        self.adapters = self._adapters_of(model)
        self._rows = own = self._settled(self._policy, model)
        peak = peak_of(device, self._dtype, trainer.peak_tflops)
        self.utilisation = Utilisation.of(self._model, peak, group.size)
        self._reference = self._load_reference(model) if loss.reference_coef else None
        if group.rank == 0:
            self._tell_what_is_left_out(model, own)
        if not self._rows.balanced:
            self._router_coef = 0.0  # prompts may be shared

    def _sharded(self, model: Any, *, offload: bool) -> Policy:
        token_bytes = self.vocab_size * self._dtype.itemsize
        settings = _head_settings(self._trainer, self._temperature, self._device, token_bytes)
        policy = Policy(model, settings, whole=self._trainer.head == "logits")
        shard(policy, model, self._placement, self._dtype, offload=offload)
        return policy

    def _make_masters(self, model: ModelConfig, targets: Sequence[str]) -> Masters:
        on_host = self._trainer.offload != "none"
        if not targets:
            return WholeMasters(self._seen, self._dtype, on_host=on_host)
        return Adapters(
            self._seen,
            targets,
            self._placement,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            on_host=on_host,
        )

    def _tell_what_is_left_out(self, model: ModelConfig, own: Rows) -> None:
        """`own`: without the reference."""
        name = type(self._model).__name__
        if not self._rows.packed:
            who, leaks = "this", self._policy
            if self._reference is not None and own.packed:
                who, leaks = "the reference", self._reference
            log.warning(
                f"samples that lie in one row are not kept apart by {who} model with this attention: each is trained "
                "in a row of its own, without shared prompts, which is slower",
                model=type(leaks.model).__name__,
                attention=leaks.model.config._attn_implementation,
            )
        if (self._router_coef or model.router_loss_coef) and not self._rows.balanced:
            log.warning(
                "the model has no balance loss of routers: model.router_loss_coef does nothing", model=name
            )

    def _adapters_of(self, model: ModelConfig) -> AdapterScale:
        """What a checkpoint has to say of the weights that it does not hold. Before any of them was trained: all is
        seen as it is in the model's folder. Collective."""
        frozen: dict[str, Tensor] = dict(persistent_buffers(self._model))
        if model.lora_rank:
            frozen |= self._seen
        base = frozen_digest(frozen, self._placement, self._group)
        return msgspec.structs.replace(model.adapters, base=base)

    def parameters(self) -> dict[str, DTensor]:
        """transformers' names to sharded parameters; rounded to bfloat16 they are what the forward pass
        sees."""
        return self._seen

    def published(self) -> dict[str, Published]:
        """The same, and what else the forward pass reads, by the names of the model's files. Raises ConfigError where
        they are not rows of parameters (file_names.py)."""
        return self._names.of(self._seen | persistent_buffers(self._model))

    @property
    def shares_prompts(self) -> bool:
        """Whether rows may hold a prompt once for all of its samples: not where a mixture's routers are asked for
        balance, a mean over tokens in which a prompt counts as often as it is there."""
        wanted = self._trainer.share_prompts == "auto"
        return wanted and self._rows.shared and not self._router_coef

    def row_tokens(self, wanted: int) -> int:
        """The limit to pack with, `wanted` where the model (and the reference) keep the samples of a row apart: else
        one that no two samples fit into."""
        return wanted if self._rows.packed else 1

    # ------------------------------------------------------------ one step

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        totals: Totals,
        slots: int = 0,
        proximal: Sequence[Tensor] | None = None,
    ) -> StepStats:
        """Gradients and statistics of one batch. Collective: this rank's micro-batches, as many as on every
        rank.

        `totals` and `slots` of the whole batch, all ranks. `proximal`: of each micro-batch [K], of the
        policy before the step's first update. Gradients of an earlier batch are forgotten.
        """
        self._forget()
        divisor = denominator(self._loss, totals, self._max_tokens)
        sums = torch.zeros(len(TokenSums._fields) + 1, dtype=torch.float64)
        greatest = torch.zeros(len(Greatest._fields), dtype=torch.float64)
        by_slot = np.zeros((slots, 4))
        for index, row in enumerate(micro_batches):
            result, entropy, measures, aux = self._loss_of(
                row, slots, proximal[index] if proximal else None
            )
            total = result.total / divisor
            if aux is not None:
                total = total + aux * (int(row.loss_mask_T.sum()) / max(totals.tokens, 1))
            total.backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([value.double() for value in (*result.sums, entropy)]).cpu()
            greatest = torch.maximum(
                greatest, torch.stack([value.double() for value in result.greatest]).cpu()
            )
            by_slot += measures
        self._gradients = self._masters.gradients()
        squares = torch.zeros((), dtype=torch.float64)
        if self._placement.replica == 0:  # the other copies have the same gradients
            for gradient in self._gradients.values():
                squares += _square_sum(local(gradient)).cpu()
        sums = torch.cat([sums, squares.reshape(1), torch.from_numpy(by_slot).reshape(-1)])
        self._group.sum(sums)
        self._group.max(greatest)
        *token_values, entropy_sum, square_sum = sums[: len(TokenSums._fields) + 2].tolist()
        by_token = TokenSums(*token_values)
        stats = stats_of(
            by_token,
            Greatest(*greatest.tolist()),
            loss=float(by_token.loss) / divisor,
            entropy=entropy_sum,
            grad_norm=math.sqrt(square_sum),
            tokens=totals.tokens,
        )
        slot_sums = sums[len(TokenSums._fields) + 2 :].reshape(slots, 4).tolist()
        return replace(stats, measured=tuple(map(tuple, slot_sums)))

    @property
    def wants_proximal(self) -> bool:
        return needs_proximal(self._loss)

    def logprobs(self, row: MicroBatch, of: Policy | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """log pi of the targets at the loss tokens, float32 [K]; entropy there [K]; the indices of these
        tokens [K]. `of`: another model than the policy. The entropy has a gradient where the loss has a bonus for it.

        A row without loss tokens gives its first token, so that the pass still has something to go backward
        from.
        """
        ask = self._ask(row)
        scores = self._scores(row, ask, of)
        return scores.logprobs_K, scores.entropy_K, ask.kept_K

    def _ask(self, row: MicroBatch) -> Ask:
        kept_K = torch.from_numpy(row.loss_mask_T).nonzero().squeeze(-1)
        kept_K = (kept_K if len(kept_K) else torch.zeros(1, dtype=torch.int64)).to(self._device)
        targets_K = self._to_device(row.targets_T)[kept_K]
        return Ask(kept_K, targets_K, entropy_gradient=self._loss.entropy_coef > 0)

    def _scores(self, row: MicroBatch, ask: Ask, of: Policy | None = None) -> Scores:
        policy = of or self._policy
        scores: Scores = policy(self._to_device(row.input_ids_T), self._to_device(row.position_ids_T), ask)
        if not torch.is_grad_enabled():
            policy.give_back()  # what a backward pass would have given back
        return scores

    def _loss_of(
        self, row: MicroBatch, slots: int, proximal_K: Tensor | None
    ) -> tuple[LossResult, Tensor, Any, Tensor | None]:
        """The loss and its statistics, the entropy, what the slots measure, what the routers of a mixture add."""
        reference_K = None
        if self._reference is not None:
            with torch.no_grad():
                reference_K = self.logprobs(row, self._reference)[0]
        ask = self._ask(row)
        nothing_K = torch.zeros(len(ask.kept_K), device=self._device)
        known = loss_inputs(row, ask.kept_K, nothing_K, nothing_K, proximal_K, reference_K)
        if by_token(self._loss):
            # A token's gradient is known as soon as its logprob is: made together with it, logits are computed once.
            ask.loss_of = lambda logprobs_k, entropy_k, k: total_of(
                part_of(known, k, logprobs_k, entropy_k), self._loss
            )
        scores = self._scores(row, ask)
        inputs = known._replace(logprobs_T=scores.logprobs_K, entropy_T=scores.entropy_K)
        result = policy_loss(inputs, self._loss, self._custom)
        if scores.loss is not None:
            result = result._replace(total=scores.loss)
        entropy = scores.entropy_K.detach().where(inputs.mask_T, 0.0).sum()
        slot_sums = measured(row, scores.logprobs_K, scores.entropy_K, ask.kept_K, slots)
        aux = None if scores.aux_loss is None else self._router_coef * scores.aux_loss
        return result, entropy, slot_sums, aux

    def optimizer_step(self, stats: StepStats) -> bool:
        """Clip and update, at the next learning rate of the warm-up. False, with weights and optimizer
        untouched, where the loss or the gradient is not finite (one NaN in Adam's moments would never leave
        them again), and where the batch had no loss token (momentum alone must not move the weights)."""
        if not stats.finite or not stats.tokens:
            self._forget()
            return False
        scale = min(1.0, self._trainer.clip_norm / (stats.grad_norm + 1e-6))
        for name, gradient in self._gradients.items():
            local(gradient).mul_(scale)
            self._masters.tensors[name].grad = gradient
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.learning_rate
        self._optimizer.step()
        self._forget()
        self.updates += 1
        self._masters.show()
        return True

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._trainer.learning_rate * warmup_factor(self.updates, self._trainer.warmup_steps)

    # ------------------------------------------------------------ checkpoints

    def rows(self) -> dict[str, OptimizerRows]:
        """Everything a checkpoint holds of this rank, by name; live tensors, to read or to write into. Call
        `restored` after writing."""
        return optimizer_rows(self._masters.tensors, self._optimizer, self._placement, self._group.rank)

    def restored(self, updates: int) -> None:
        """The tensors of `rows` were overwritten with the state after `updates` updates. Collective."""
        self.updates = updates
        set_updates(self._optimizer, updates)
        self._masters.show()

    # ------------------------------------------------------------ inside

    def _load_reference(self, model: ModelConfig) -> Policy:
        """The frozen policy, as it would be served: weights rounded to bfloat16. Raises ConfigError for a folder
        without a model, or with another vocabulary."""
        folder = self._loss.reference or model.path
        reference = load_model(folder, model.attention, self._device)
        rows = reference.get_input_embeddings().weight.shape[0]
        if rows != self.vocab_size:
            raise ConfigError(
                f"loss.reference: the model in {folder} has a vocabulary of {rows} tokens, the policy one of "
                f"{self.vocab_size}",
                hint="a reference must be of the same family, with the same tokenizer",
            )
        _turn_off_dropout(reference)
        for parameter in reference.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.bfloat16().to(self._dtype)
        _round_buffers(reference)
        policy = self._sharded(reference, offload=self._device.type != "cpu")
        self._rows = self._rows.both(self._settled(policy, model))
        return policy

    def _settled(self, policy: Policy, model: ModelConfig) -> Rows:
        """What the policy's rows may hold, once its scores are checked. Collective."""
        policy.check(self._device)
        return settle_rows(
            policy,
            self._group,
            attention=model.attention,
            vocabulary=self.vocab_size,
            device=self._device,
            dtype=self._dtype,
        )

    @torch.no_grad()
    def _round_frozen(self) -> None:
        """What has no master is seen as it is published, too."""
        _round_buffers(self._model)
        for weight in self._seen.values():
            if not weight.requires_grad:
                local(weight).copy_(local(weight).to(torch.bfloat16))

    def _forget(self) -> None:
        self._gradients = {}
        self._masters.forget()
        self._optimizer.zero_grad(set_to_none=True)

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _head_settings(
    trainer: TrainerConfig, temperature: float, device: torch.device, token_bytes: int
) -> HeadSettings:
    """`token_bytes`: of the logits of one token."""
    accelerator = device.type != "cpu"
    budget = trainer.head_tile_mib << 20 or usual_budget(token_bytes, accelerator)
    compiled = trainer.head_compile == "always" or (trainer.head_compile == "auto" and accelerator)
    return HeadSettings(LogitMap(), temperature, budget, compiled)


def _router_coef(model: Any, wanted: float | None) -> float:
    """Of a mixture of experts: the weight of its routers' balance loss (Switch, arXiv 2101.03961), which it is asked
    for; 0 for other models. A mean over a micro-batch's tokens, so it alone depends on the packing."""
    coef = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0) if wanted is None else wanted
    if coef and hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
        return coef
    return 0.0


def _turn_off_dropout(model: nn.Module) -> None:
    """Nothing is left to chance: pi must be the policy that the engines serve. Rates of dropout, and of layers
    dropped, stand in modules of their own or as plain numbers, by many names; layers whose activations are
    checkpointed are in their training mode, and would use them. What is called noise or jitter is left alone: where
    it is noise, a module below the layers adds it, in training mode only; and Phi-MoE means a threshold by it."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def _checkpoint_activations(model: Any) -> None:
    """transformers' layers do it in training mode only: that of the layer itself. What lies in it stays as it is
    served; routers that draw at random while they train are among it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


@torch.no_grad()
def _round_buffers(model: nn.Module) -> None:
    for buffer in persistent_buffers(model).values():
        buffer.copy_(buffer.bfloat16())


def _square_sum(gradient: Tensor) -> Tensor:
    """In float64, a piece at a time: the whole of a vocabulary's gradient would be its largest tensor twice more."""
    pieces = gradient.reshape(-1).split(1 << 20)  # type: ignore[no-untyped-call]
    return sum((p.double().square().sum() for p in pieces), gradient.new_zeros((), dtype=torch.float64))
