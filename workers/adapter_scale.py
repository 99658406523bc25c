"""What the rows of adapters in a checkpoint mean: the weights that they stand for are W + alpha / rank * B A
(masters.py). Which weights have adapters, the names of the rows say; what W is, a digest of all that is not trained.

Adapters of another scale are refused and not rescaled: the optimizer's moments, and the learning rate that was
chosen, belong to the old one. No torch here: the settings are read for `--help`.
"""

from __future__ import annotations

from msgspec import Struct

from async_rl.errors import CheckpointError
from async_rl.log import get_logger

__all__ = ["NO_ADAPTERS", "AdapterScale", "check_scale"]

log = get_logger(__name__)


class AdapterScale(Struct, frozen=True):
    rank: int = 0  # 0: the weights themselves are trained
    alpha: float = 0.0
    base: str = ""  # digest of what is not trained (frozen.py); empty: nothing, or not known

    def __str__(self) -> str:
        return f"lora_rank = {self.rank}, lora_alpha = {self.alpha:g}" if self.rank else "lora_rank = 0"


NO_ADAPTERS = AdapterScale()


def check_scale(saved: AdapterScale | None, ours: AdapterScale, checkpoint: str) -> None:
    """`saved`: as the checkpoint says, None where it says nothing. Raises CheckpointError where its rows would stand
    for other weights in this trainer."""
    if saved is None:
        if ours.rank:
            log.warning(
                "the checkpoint does not say what adapters it holds: see that model.lora_alpha is the one that it "
                "was written with",
                checkpoint=checkpoint,
                lora_alpha=ours.alpha,
            )
    elif (saved.rank, saved.alpha) != (ours.rank, ours.alpha):
        raise CheckpointError(
            f"checkpoint {checkpoint} was written with model.{saved}, this trainer has model.{ours}: its weights "
            "would be others than those it stands for",
            hint=f"set model.{saved} to go on with it, or begin anew with --resume never",
        )
    elif saved.base and ours.base and saved.base != ours.base:
        raise CheckpointError(
            f"checkpoint {checkpoint} was written over other frozen weights than those of model.path: together with "
            "these, what it holds would be another policy",
            hint="set model.path to the folder that it was written with, or begin anew with --resume never",
        )
    elif ours.base and not saved.base:
        log.warning(
            "the checkpoint does not say which weights it was trained on: see that model.path is the folder that it "
            "was written with",
            checkpoint=checkpoint,
        )
