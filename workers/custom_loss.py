"""A loss of the user's own, found and tried at start: what is wrong with it must not wait for the first batch."""

from __future__ import annotations

from typing import Any

import torch

from async_rl.algo.losses import LossConfig, LossInputs, TokenLoss
from async_rl.algo.losses.custom import Custom
from async_rl.algo.losses.registry import LossFunction
from async_rl.envs.named import load_function
from async_rl.errors import ConfigError

__all__ = ["custom_function"]


def custom_function(config: LossConfig) -> LossFunction | None:
    """None: the loss is one of the registry. Raises ConfigError where there is no such function, or where it does
    not do what a loss does."""
    if not isinstance(config, Custom):
        return None
    if not config.custom:
        raise ConfigError(
            "loss.custom is missing: loss.name = custom needs a function",
            hint='for example custom = "my_losses:mine", with my_losses.py in the current folder',
        )
    function = load_function(config.custom, what="loss.custom")
    _try(function, config)
    return function


def _try(function: LossFunction, config: Custom) -> None:
    inputs = _made_up()
    try:
        problem = _problem(function(inputs, config), inputs)
    except Exception as error:  # the edge to a user's function: whatever it raises
        raise _refusal(config, f"it raised {type(error).__name__}: {error}") from error
    if problem:
        raise _refusal(config, problem)


def _refusal(config: Custom, problem: str) -> ConfigError:
    return ConfigError(
        f"loss.custom = {config.custom!r} was tried on some made-up tokens: {problem}",
        hint="it is called as function(inputs, config) and returns the loss of each token, shape [T], with "
        "gradient: see docs/losses.md",
    )


def _problem(found: Any, inputs: LossInputs) -> str:
    loss_T = found.loss_T if isinstance(found, TokenLoss) else found
    shape = tuple(inputs.mask_T.shape)
    if not isinstance(loss_T, torch.Tensor):
        return f"it returned {type(loss_T).__name__}, not a tensor or a TokenLoss"
    if tuple(loss_T.shape) != shape:
        return f"it returned the shape {tuple(loss_T.shape)}, not {shape}"
    if not loss_T.requires_grad:
        return "what it returned has no gradient"
    if not loss_T.isfinite().all():
        return f"it returned {loss_T.tolist()}, which is not finite"
    loss_T.sum().backward()  # type: ignore[no-untyped-call]
    gradient_T = inputs.logprobs_T.grad
    if gradient_T is None or not gradient_T.isfinite().all():
        return "its gradient by inputs.logprobs_T is missing or not finite"
    return ""


def _made_up() -> LossInputs:
    """Two samples, of three tokens and of one, and a masked one between them."""

    def floats(*values: float) -> torch.Tensor:
        return torch.tensor(values)

    return LossInputs(
        logprobs_T=floats(-0.5, -2.0, -0.1, 0.0, -3.0).requires_grad_(),
        behaviour_T=floats(-0.6, -1.5, -0.1, 0.0, -3.5),
        advantages_T=floats(0.5, 0.5, 0.5, 0.0, -0.5),
        mask_T=torch.tensor([True, True, True, False, True]),
        lags_T=torch.tensor([1, 1, 0, 0, 2]),
        samples_T=torch.tensor([0, 0, 0, 1, 1]),
        samples=2,
        proximal_T=floats(-0.5, -1.9, -0.1, 0.0, -3.1),
        reference_T=floats(-0.7, -2.5, -0.2, 0.0, -3.0),
        entropy_T=floats(1.0, 2.0, 0.5, 0.0, 1.5),
    )
