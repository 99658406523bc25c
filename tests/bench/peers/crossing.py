"""When a run reached a reward: one rule for both sides."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["crossing"]


def crossing(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    """Seconds until the held-out reward is `goal`: where the line between the first measurement that has it and the
    one before crosses it. `points` are (seconds, reward) in order of time. None where none has it."""
    before: tuple[float, float] | None = None
    for seconds, reward in points:
        if reward >= goal:
            if before is None:
                return seconds
            share = (goal - before[1]) / (reward - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, reward
    return None
