"""Reward functions of a user's own task. The module must be importable where the trainer and the workers run:
in the folder they are started in, on PYTHONPATH, or installed.

A function gets the prompt (its messages, the line's `answer`, the line's other fields as strings in `info`) and
the completion's text, and returns a number in [reward_min, reward_max]. It may be `async`. If it raises, the
lease counts as failed and the reason is shown by `async-rl lag`.
"""

from __future__ import annotations

from async_rl.wire import Prompt


def exact(prompt: Prompt, completion: str) -> float:
    """1 for the answer and nothing else, upper and lower case aside."""
    return float(completion.strip().casefold() == prompt.answer.casefold())


def exact_or_mentioned(prompt: Prompt, completion: str) -> float:
    """1 for the answer, 0.2 where it occurs in a longer text: a way up for a model that likes to talk."""
    return max(exact(prompt, completion), 0.2 * (prompt.answer.casefold() in completion.casefold()))
