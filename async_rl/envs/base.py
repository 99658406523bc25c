"""What an environment is: an endless, seekable sequence of prompts and a reward for a completion.

The orchestrator calls `prompt` (it owns the order), the rollout worker calls `reward`; both build the same
environment from its name and arguments, so an environment is deterministic in them and loads nothing heavy.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct

from async_rl.wire import Prompt

__all__ = ["Environment", "EnvironmentConfig", "Split", "is_deterministic"]

Split = Literal["train", "eval"]


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[environment]`: which task is learned."""

    name: str = "reverse"
    """reverse, arithmetic, jsonl, or a user's own class as `module:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment; unknown ones are refused with the valid choices."""


class Environment(Protocol):
    name: str
    reward_range: tuple[float, float]
    """Rewards outside it are refused: they are a bug or an attack, never a signal."""

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        """Prompt number `ordinal` (0, 1, 2, … without end); always the same for the same arguments, so a resumed
        run goes on where it was. The `eval` prompts never occur in `train`."""
        ...

    async def reward(self, prompt: Prompt, completion: str) -> float:
        """The reward of one completion (text, end token removed). May raise: the lease then counts as failed.

        The orchestrator scores a sample of the groups again, and a worker whose rewards differ goes into quarantine.
        An environment whose rewards are not a function of prompt and completion (a judge that samples, a clock) says
        so with an attribute `deterministic = False`; then nothing is scored again."""
        ...


def is_deterministic(environment: Environment) -> bool:
    """Whether the same completion always has the same reward, as an environment says; one that says nothing has."""
    return bool(getattr(environment, "deterministic", True))
