"""A micro-batch and what the model said of it, as the loss and the measures of workers want it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.algo.losses import LossInputs
from async_rl.algo.mismatch import token_measures, totals_by_slot
from async_rl.algo.packing import MicroBatch

__all__ = ["loss_inputs", "measured"]


def loss_inputs(
    row: MicroBatch,
    kept_K: Tensor,
    logprobs_K: Tensor,
    entropy_K: Tensor,
    proximal_K: Tensor | None,
    reference_K: Tensor | None,
) -> LossInputs:
    """Of the tokens at the indices `kept_K` of the row, where they lie."""

    def kept(values_T: Any) -> Tensor:
        return torch.from_numpy(values_T).to(kept_K.device, non_blocking=True)[kept_K]

    return LossInputs(
        logprobs_T=logprobs_K,
        behaviour_T=kept(row.behaviour_T),
        advantages_T=kept(row.advantages_T),
        mask_T=kept(row.loss_mask_T),
        lags_T=kept(row.lags_T),
        samples_T=kept(row.samples_T),
        samples=max(row.samples, 1),  # a filler's token is of a sample too
        proximal_T=proximal_K,
        reference_T=reference_K,
        entropy_T=entropy_K,
    )


def measured(
    row: MicroBatch, logprobs_K: Tensor, entropy_K: Tensor, kept_K: Tensor, slots: int
) -> np.ndarray[Any, Any]:
    """[slots, 4]: tokens and sums of the three measures (algo/mismatch.py) of each slot."""
    if not slots:
        return np.zeros((0, 4))
    kept = kept_K.cpu().numpy()
    log_pi, entropy = (values.detach().cpu().numpy() for values in (logprobs_K, entropy_K))
    each = token_measures(log_pi, row.behaviour_T[kept], entropy)
    return totals_by_slot(np.where(row.loss_mask_T, row.slots_T, -1)[kept], each, slots)
