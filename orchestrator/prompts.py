"""Prompts from the environment, which is the user's code: asking for one, with an error that names it."""

from __future__ import annotations

from async_rl.envs.base import Environment, Split
from async_rl.errors import AsyncRLError, ConfigError, EnvironmentFailed
from async_rl.wire import MAX_MESSAGE_BYTES, Prompt
from orchestrator.config import EvalConfig

__all__ = ["check_prompts", "prompt_of"]

MOST_CHARS = MAX_MESSAGE_BYTES // 5
"""Of up to four bytes each, and some room: what is longer is in no message that a worker takes."""
_HINT = "an environment gives a prompt for every ordinal; fix it and start again"


def check_prompts(environment: Environment, evaluation: EvalConfig) -> None:
    """Ask for the first prompt of each split that will be needed: what is wrong shows before anybody
    connects, and not after the minutes in which a worker starts its engine. Raises as `prompt_of`."""
    prompt_of(environment, "train", 0)
    if evaluation.every:
        prompt_of(environment, "eval", 0)


def prompt_of(environment: Environment, split: Split, ordinal: int) -> Prompt:
    """Raises ConfigError where the environment does (a file that can't be used), EnvironmentFailed for
    anything else."""
    where = f"environment {environment.name!r}, {split} prompt {ordinal}"
    try:
        prompt = environment.prompt(split, ordinal)
    except ConfigError:
        raise
    except AsyncRLError as error:
        raise EnvironmentFailed(f"{where}: {error.message}", hint=error.hint or _HINT) from error
    except Exception as error:  # the edge to the user's code: whatever it raises
        raise EnvironmentFailed(f"{where}: {type(error).__name__}: {error}", hint=_HINT) from error
    if not isinstance(prompt, Prompt):
        raise EnvironmentFailed(f"{where}: {prompt!r} is no async_rl.wire.Prompt", hint=_HINT)
    if (chars := _chars(prompt)) > MOST_CHARS:
        raise EnvironmentFailed(
            f"{where}: {chars} characters are over the limit of {MOST_CHARS}: no worker could read it",
            hint="leave it out, or shorten it (its answer and info count, too)",
        )
    return prompt


def _chars(prompt: Prompt) -> int:
    chars = len(prompt.text) + len(prompt.answer)
    if prompt.messages:
        chars += sum(len(each.content) for each in prompt.messages)
    if prompt.info:
        chars += sum(len(key) + len(value) for key, value in prompt.info.items())
    return chars
