"""What may be added to any loss: the KL to a frozen reference, and an entropy bonus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.inputs import LossInputs, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["reference_kl", "with_extras"]


def reference_kl(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """[T]. With x = clamp(log pi - log ref, ±20): k1 x, k2 x²/2, k3 exp(-x) - 1 + x (Schulman, "Approximating KL
    divergence"); see LossConfig.reference_estimator for their gradients."""
    x_T = log_ratio(logprobs_T, reference_T)
    if estimator == "k1":
        return x_T
    if estimator == "k2":
        return 0.5 * x_T.square()
    return (-x_T).expm1() + x_T


def with_extras(loss_T: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """[T]. Raises ValueError where the inputs lack what a coefficient asks for."""
    if config.reference_coef:
        if inputs.reference_T is None:
            raise ValueError("loss.reference_coef > 0 needs the logprobs of the reference")
        kl_T = reference_kl(inputs.logprobs_T, inputs.reference_T, config.reference_estimator)
        loss_T = loss_T + config.reference_coef * kl_T
    if config.entropy_coef:
        if inputs.entropy_T is None:
            raise ValueError("loss.entropy_coef > 0 needs the entropies")
        loss_T = loss_T - config.entropy_coef * inputs.entropy_T
    return loss_T
