"""Losses by name: the function, and the settings that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from async_rl.algo.losses import sequences, tokens
from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.custom import Custom
from async_rl.algo.losses.inputs import LossInputs, TokenLoss
from async_rl.config import Choice

__all__ = ["LOSSES", "REGISTRY", "Loss", "LossFunction", "by_token", "needs_proximal"]

LossFunction = Callable[[LossInputs, Any], TokenLoss]


class Loss(NamedTuple):
    function: LossFunction
    config: type[LossConfig]


REGISTRY: dict[str, Loss] = {
    "dppo_tv": Loss(tokens.dppo_tv, tokens.DppoTv),
    "ppo_clip": Loss(tokens.ppo_clip, tokens.PpoClip),
    "decoupled": Loss(tokens.decoupled, tokens.Decoupled),
    "tis_token": Loss(tokens.tis_token, tokens.TisToken),
    "tis_sequence": Loss(sequences.tis_sequence, sequences.TisSequence),
    "cispo": Loss(tokens.cispo, tokens.Cispo),
    "gspo": Loss(sequences.gspo, sequences.Gspo),
    "icepop": Loss(tokens.icepop, tokens.IcePop),
    "reinforce": Loss(tokens.reinforce, tokens.Reinforce),
}

DEFAULT = "dppo_tv"


def _name_in(table: Mapping[str, Any]) -> str:
    return str(table.get("name", "custom" if "custom" in table else DEFAULT))


LOSSES = Choice(
    "name", {name: loss.config for name, loss in REGISTRY.items()} | {"custom": Custom}, _name_in
)
"""The section `[loss]`."""


def by_token(config: LossConfig) -> bool:
    """Whether the total may be computed over any part of the tokens at a time: no token's loss depends on another's
    logprob, nor its weight on how many tokens its sample has."""
    whole = isinstance(config, sequences.Gspo | sequences.TisSequence | Custom)
    return not whole and config.normalise != "sequence"


def needs_proximal(config: LossConfig) -> bool:
    """Whether the loss reads the logprobs of the policy before the step's first update."""
    if isinstance(config, tokens.Decoupled):
        return config.proximal == "recomputed"
    return isinstance(config, tokens.IcePop) or (isinstance(config, Custom) and config.proximal)
