"""Random access into an endless sequence of prompts, with train and eval apart by construction.

A prompt is a pure function of (seed, split, ordinal): no generator is carried from one to the next, so a
resumed run, or another process, gets the same one. Which split a problem belongs to is a property of the
problem itself (a hash of its text), not of the draw, so no held-out problem can ever be drawn for training,
whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from async_rl.envs.base import Split
from async_rl.errors import ConfigError

__all__ = ["EVAL_SHARE", "draw", "generator", "hash_fraction", "split_of"]

EVAL_SHARE = 0.125
"""Share of a generated task's problems that is held out: an eighth leaves nearly all of a small space to
train on and still gives hundreds of distinct held-out problems where there are a few thousand in all."""

_TRIES = 2_000
"""Draws before a split counts as empty; at EVAL_SHARE a split that is not empty is missed with p <
1e-100."""


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on nothing but `text`: the same on every machine and Python."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"async-rl split").digest()
    return int.from_bytes(digest, "little") / 2**64


def split_of(problem: str) -> Split:
    """The side on which a problem stands, for every seed."""
    return "eval" if hash_fraction(problem) < EVAL_SHARE else "train"


def generator(seed: int, *place: str | int) -> random.Random:
    """The random generator of one place in a sequence. Strings seed by their hash, not by Python's own."""
    return random.Random(f"async-rl/{seed}/" + "/".join(map(str, place)))


def draw(
    problem: Callable[[random.Random], str],
    *,
    seed: int,
    split: Split,
    ordinal: int,
    identity: Callable[[str], str] = str,
) -> str:
    """Problem number `ordinal` of a split: drawn until one falls on its side.

    `identity` maps problems that give each other away (2+3 and 3+2) to one text, so that they stay
    together. Raises ConfigError where the split seems to hold no problem at all.
    """
    rng = generator(seed, split, ordinal)
    for _ in range(_TRIES):
        candidate = problem(rng)
        if split_of(identity(candidate)) == split:
            return candidate
    raise ConfigError(
        f"the environment has too few different problems: none of {_TRIES} draws was of the {split} split",
        hint="widen its arguments (longer strings, more letters, larger numbers)",
    )
