"""A loss of the user's own: `[loss] custom = "module:function"`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from async_rl.algo.losses.config import LossConfig

__all__ = ["Custom"]


class Custom(LossConfig, frozen=True, forbid_unknown_fields=True):
    """The function is called as `function(inputs, config)` with cleaned LossInputs and this section, and returns the
    loss of each token [T], or a TokenLoss. It must not add over tokens, nor divide by their number. It is tried at
    start on a few made-up tokens."""

    name: Literal["custom"] = "custom"
    custom: str = ""
    """`module:function`; the module is looked for on PYTHONPATH and in the current folder."""
    args: dict[str, Any] = field(default_factory=dict)
    """For the function to read, as `config.args`."""
    proximal: bool = False
    """Whether it reads `inputs.proximal_T`: with trainer.minibatches over 1 this takes a forward pass more."""
