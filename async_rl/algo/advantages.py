"""How much better a sample did than others, from the rewards of a batch; and what becomes of answers cut off.

    reward'     = reward + overlong penalty          where truncated = "penalty"
    advantage   = reward' - baseline                 by `estimator`, below
    loss mask   = 0 for samples that were cut off    where truncated = "mask"

Legend: S samples of one group, G groups of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

__all__ = [
    "AdvantageConfig",
    "advantage_cautions",
    "batch_advantages",
    "group_advantages",
    "overlong_penalty",
]

Floats = np.ndarray[Any, np.dtype[np.float32]]


class AdvantageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[advantage]`: from rewards to advantages."""

    estimator: Literal["group_mean", "group_mean_std", "leave_one_out", "global"] = "group_mean"
    """group_mean: A = r - mean of the group. No division by the group's deviation: it would give the groups that are
    nearly solved or nearly hopeless, whose deviation is small, the largest weight (Dr. GRPO, arXiv 2503.20783,
    section 3).
    group_mean_std: A = (r - mean) / (deviation + 1e-4), GRPO's own (arXiv 2402.03300, section 4.1.2).
    leave_one_out: A = r - mean of the *others*, unbiased (RLOO, arXiv 2402.14740): group_mean times n / (n - 1).
    global: A = r - mean of the whole batch: no group needed, more variance; mind orchestrator.drop_no_signal."""
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    """A sample that ended at sampling.max_tokens. keep: trained as it is, with the reward that it has. mask: out of
    the loss, but in its group's mean: being cut off says little about what came before (DAPO, arXiv 2503.14476,
    section 3.4, "overlong filtering"); the policy then never learns to be brief. penalty: its reward, and that of
    one that comes near, is lowered (the same, equation 13)."""
    overlong_buffer: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Of truncated = "penalty": the last part of max_tokens, over which the penalty grows from 0 to its full size.
    DAPO's: 4096 of 20480."""
    overlong_penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Of truncated = "penalty": its full size, in units of the reward. DAPO's, with rewards of 1 and -1."""


DEVIATION_FLOOR = 1e-4
"""Added to the deviation, so that equal rewards give zeros and nearly equal ones no giants; TRL's and verl's."""


def group_advantages(rewards_S: Sequence[float]) -> Floats:
    """A = r - mean, float32 [S]. Computed in float64 relative to the first reward, so that equal rewards give
    exact zeros whatever their size. Raises ValueError for an empty group or a reward that is not finite."""
    return _centred(rewards_S).astype(np.float32)


def batch_advantages(rewards_GS: Sequence[Sequence[float]], config: AdvantageConfig) -> list[Floats]:
    """Of each group, float32 [S]. Raises ValueError as `group_advantages` does."""
    if config.estimator == "global" and rewards_GS:
        flat = group_advantages([reward for rewards_S in rewards_GS for reward in rewards_S])
        return np.split(flat, np.cumsum([len(rewards_S) for rewards_S in rewards_GS])[:-1])
    return [_of_group(rewards_S, config.estimator) for rewards_S in rewards_GS]


def _of_group(rewards_S: Sequence[float], estimator: str) -> Floats:
    centred = _centred(rewards_S)
    count = len(rewards_S)
    if estimator == "group_mean_std":
        centred = centred / (centred.std() + DEVIATION_FLOOR)
    elif estimator == "leave_one_out":
        centred = centred * (count / max(count - 1, 1))  # one alone has no others, and no signal
    return centred.astype(np.float32)


def _centred(rewards_S: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    rewards = np.asarray(rewards_S, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"a group needs a reward per sample, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    relative = rewards - rewards[0]
    centred: np.ndarray[Any, np.dtype[np.float64]] = relative - relative.mean()
    return centred


def overlong_penalty(tokens: int, max_tokens: int, config: AdvantageConfig) -> float:
    """What is added to the reward of a sample of so many tokens: 0 up to the buffer, then linear, down to
    -overlong_penalty at max_tokens (DAPO, equation 13). 0 where `truncated` is something else. Raises ValueError
    where there is no max_tokens."""
    if config.truncated != "penalty":
        return 0.0
    if max_tokens < 1:
        raise ValueError('advantage.truncated = "penalty" needs max_tokens of the sampling')
    buffer = config.overlong_buffer * max_tokens
    over = (tokens - (max_tokens - buffer)) / buffer
    return -config.overlong_penalty * min(max(over, 0.0), 1.0)


def advantage_cautions(config: AdvantageConfig, drop_no_signal: bool) -> list[str]:
    """As `losses.cautions`. `drop_no_signal`: whether groups with equal rewards are left out before the trainer."""
    found = []
    if config.estimator == "global" and drop_no_signal:
        found.append(
            "advantage.estimator = global with orchestrator.drop_no_signal = true: groups whose rewards are equal "
            "have a signal with this baseline, and are left out all the same; set drop_no_signal = false"
        )
    if config.truncated == "penalty" and drop_no_signal:
        found.append(
            "advantage.truncated = penalty with orchestrator.drop_no_signal = true: groups that differ only in "
            "length are left out before the penalty; set drop_no_signal = false"
        )
    return found
