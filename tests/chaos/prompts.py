"""Prompts whose completions are long or short by their ordinal, and some of which carry no signal: what a storm asks.

What each ordinal is, is a pure function here, so the checker needs nobody's word for it.
"""

from __future__ import annotations

import zlib

from async_rl.envs.base import Split
from async_rl.wire import Message, Prompt

__all__ = ["LONG_TOKENS", "SHORT_TOKENS", "Lengths", "is_flat", "is_long", "tokens_of"]

LONG_TOKENS = 64
SHORT_TOKENS = 4


def is_long(ordinal: int) -> bool:
    """One in three, in no rhythm that batches or leases could share."""
    return zlib.crc32(f"long {ordinal}".encode()) % 3 == 0


def is_flat(ordinal: int) -> bool:
    """One in eight has equal rewards."""
    return zlib.crc32(f"flat {ordinal}".encode()) % 8 == 0


def tokens_of(ordinal: int) -> int:
    """How many the policy may sample; hooks/sitecustomize.py sees to it in the worker."""
    return LONG_TOKENS if is_long(ordinal) else SHORT_TOKENS


class Lengths:
    name = "lengths"
    reward_range = (0.0, 1.0)

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        text = "".join("abcdefghij"[int(digit)] for digit in str(ordinal))
        return Prompt(messages=(Message("user", text),), answer=str(ordinal))

    async def reward(self, prompt: Prompt, completion: str) -> float:
        if is_flat(int(prompt.answer)):
            return 0.5
        return zlib.crc32(f"{prompt.answer} {completion}".encode()) % 1000 / 1000
