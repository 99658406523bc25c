"""How much better a sample did than its group.

    A_i = reward_i - mean(rewards of the group)

No division by the group's deviation: it would give the groups that are nearly solved or nearly hopeless,
whose deviation is small, the largest weight (Dr. GRPO, arXiv 2503.20783, section 3). A group whose rewards
are all equal has no signal, and its advantages are exactly zero.

Legend: S samples of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["group_advantages"]


def group_advantages(rewards_S: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Advantages, float32 [S]. Computed in float64 relative to the first reward, so that equal rewards give
    exact zeros whatever their size. Raises ValueError for an empty group or a reward that is not finite."""
    rewards = np.asarray(rewards_S, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"a group needs a reward per sample, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    centred = rewards - rewards[0]
    advantages: np.ndarray[Any, np.dtype[np.float32]] = (centred - centred.mean()).astype(np.float32)
    return advantages
