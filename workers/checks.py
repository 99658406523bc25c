"""What the orchestrator is told about the behaviour logprobs of each group of a step: it compares workers by it.

A slot is a part of one group, so that like can be compared with like: tokens of one lag, and apart from each other
those that were sampled before their sample met an update of the engine (`pure`: one policy, and a cache of its own)
and those after it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from async_rl.wire import Checked, Key, Measured

__all__ = ["Slot", "checked", "slots_of"]


class Slot(NamedTuple):
    key: Key
    lag: int  # optimizer steps, as of the oldest policy with a part in the token
    pure: bool


def slots_of(
    key: Key, lags_C: Any, spans: list[tuple[int, int]], slots: dict[Slot, int], first: int
) -> np.ndarray[Any, Any]:
    """[C]: the slot of each token of a sample with these lags and version spans. New slots are added to those of its
    group, numbered from `first` on."""
    before_update = 0
    for version, tokens in spans:
        if version != spans[0][0]:
            break
        before_update += tokens
    slots_C = np.empty(len(lags_C), dtype=np.int64)
    pure_C = np.arange(len(lags_C)) < before_update
    for lag in np.unique(lags_C).tolist():
        for pure in (True, False):
            chosen_C = (lags_C == lag) & (pure_C == pure)
            if chosen_C.any():
                slots_C[chosen_C] = slots.setdefault(Slot(key, lag, pure), first + len(slots))
    return slots_C


def checked(
    incarnation: int, step: int, slots: list[Slot], measured: tuple[tuple[float, ...], ...]
) -> Checked:
    """`measured`: as StepStats has it. Slots without a loss token, or of a step that is not finite, are left out."""
    rows = []
    for slot, (tokens, *sums) in zip(slots, measured, strict=True):
        if tokens and all(map(math.isfinite, sums)):
            kl, ratio, surprise = (value / tokens for value in sums)
            rows.append(Measured(slot.key, slot.lag, slot.pure, int(tokens), kl, ratio, surprise))
    return Checked(incarnation, step, tuple(rows))
