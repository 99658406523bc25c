"""Reverse a string: `hello` -> `olleh`. The reward is the share of positions that are right."""

from __future__ import annotations

import random
from typing import Annotated

from msgspec import Meta, Struct

from async_rl.envs.base import Split
from async_rl.envs.draws import draw
from async_rl.errors import ConfigError
from async_rl.wire import Message, Prompt

__all__ = ["Reverse", "ReverseArgs", "positions_right"]


class ReverseArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths are drawn uniformly from [min_length, max_length], characters from `alphabet`."""

    min_length: Annotated[int, Meta(ge=1)] = 4
    max_length: Annotated[int, Meta(ge=1, le=10_000)] = 4
    alphabet: Annotated[str, Meta(min_length=2)] = "abcdefghij"
    instruction: str = ""
    """Stands before the string in the user's turn. A tiny model knows no other task; for a real one, for
    example "Reverse this string and answer with the result only: "."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_length > self.max_length:
            raise ConfigError(
                f"environment.args: min_length {self.min_length} is over max_length {self.max_length}",
                hint="the length of each string is drawn between the two",
            )
        if len(set(self.alphabet)) != len(self.alphabet) or any(c.isspace() for c in self.alphabet):
            raise ConfigError(
                f"environment.args: alphabet {self.alphabet!r} has a repeated or a space character",
                hint="list each character once, for example 'abcdefgh'",
            )


class Reverse:
    """The `reverse` environment."""

    name = "reverse"
    reward_range = (0.0, 1.0)
    arguments = ReverseArgs

    def __init__(self, args: ReverseArgs) -> None:
        self.args = args
        for split in ("train", "eval"):
            self.prompt(split, 0)  # both splits have problems, or the ConfigError comes now

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        text = draw(self._string, seed=self.args.seed, split=split, ordinal=ordinal)
        return Prompt(messages=(Message("user", self.args.instruction + text),), answer=text[::-1])

    async def reward(self, prompt: Prompt, completion: str) -> float:
        return positions_right(completion.strip(), prompt.answer)

    def _string(self, rng: random.Random) -> str:
        length = rng.randint(self.args.min_length, self.args.max_length)
        return "".join(rng.choices(self.args.alphabet, k=length))


def positions_right(answer: str, expected: str) -> float:
    """Equal positions over the longer length, in [0, 1]: 1 only for the expected string, and padding never
    pays."""
    right = sum(a == b for a, b in zip(answer, expected, strict=False))
    return right / max(len(answer), len(expected), 1)
