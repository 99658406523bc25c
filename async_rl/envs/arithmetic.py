"""Integer arithmetic: `12*7=` -> `84`. The reward is 1 for the exact result, else 0."""

from __future__ import annotations

import random
import re
from typing import Annotated

from msgspec import Meta, Struct

from async_rl.envs.base import Split
from async_rl.envs.draws import draw
from async_rl.errors import ConfigError
from async_rl.wire import Message, Prompt

__all__ = ["Arithmetic", "ArithmeticArgs"]

_OPERATORS = "+-*"


class ArithmeticArgs(Struct, frozen=True, forbid_unknown_fields=True):
    """Both operands are drawn uniformly from [0, max_operand]."""

    max_operand: Annotated[int, Meta(ge=1)] = 99
    operators: Annotated[str, Meta(min_length=1)] = _OPERATORS
    instruction: str = ""
    """Stands before the problem in the user's turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if wrong := sorted(set(self.operators) - set(_OPERATORS)):
            raise ConfigError(
                f"environment.args: unknown operators {wrong}", hint=f"valid: {', '.join(_OPERATORS)}"
            )


class Arithmetic:
    """The `arithmetic` environment."""

    name = "arithmetic"
    reward_range = (0.0, 1.0)
    arguments = ArithmeticArgs

    def __init__(self, args: ArithmeticArgs) -> None:
        self.args = args
        for split in ("train", "eval"):
            self.prompt(split, 0)  # both splits have problems, or the ConfigError comes now

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        problem = draw(
            self._problem, seed=self.args.seed, split=split, ordinal=ordinal, identity=_without_order
        )
        text = f"{self.args.instruction}{problem}="
        return Prompt(messages=(Message("user", text),), answer=str(_result(problem)))

    async def reward(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip() == prompt.answer)

    def _problem(self, rng: random.Random) -> str:
        left, right = (rng.randint(0, self.args.max_operand) for _ in range(2))
        return f"{left}{rng.choice(self.args.operators)}{right}"


def _parse(problem: str) -> tuple[int, str, int]:
    left, operator, right = re.split(r"([-+*])", problem)
    return int(left), operator, int(right)


def _result(problem: str) -> int:
    left, operator, right = _parse(problem)
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _without_order(problem: str) -> str:
    """2+3 and 3+2 are one problem: held out together, or not at all."""
    left, operator, right = _parse(problem)
    if operator != "-":
        left, right = sorted((left, right))
    return f"{left}{operator}{right}"
