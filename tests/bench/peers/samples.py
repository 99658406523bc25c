"""Samples with a long tail of lengths, the same for both sides.

Lengths are lognormal, as those of reasoning models' answers are nearly: a few samples of a batch are several times as
long as the rest, and who pads computes every sample as long as the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Samples", "draw", "load", "save"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Samples:
    """S samples in groups of equal prompts; `tokens` holds prompts and completions end to end."""

    tokens: Ints
    prompts_S: Ints  # lengths
    completions_S: Ints  # lengths
    rewards_S: np.ndarray[Any, np.dtype[np.float64]]
    group: int

    def pairs(self) -> list[tuple[Ints, Ints]]:
        ends = np.cumsum(self.prompts_S + self.completions_S)
        starts = ends - self.prompts_S - self.completions_S
        return [
            (self.tokens[start : start + prompt], self.tokens[start + prompt : end])
            for start, prompt, end in zip(starts, self.prompts_S, ends, strict=True)
        ]

    @property
    def count(self) -> int:
        return len(self.prompts_S)

    @property
    def longest(self) -> int:
        return int((self.prompts_S + self.completions_S).max())

    @property
    def inputs(self) -> int:
        """Tokens of all samples: what a step trains on, padding not counted."""
        return int(self.prompts_S.sum() + self.completions_S.sum())

    @property
    def rectangle(self) -> int:
        """Tokens with every prompt and every completion padded to the longest of the batch."""
        return len(self.prompts_S) * int(self.prompts_S.max() + self.completions_S.max())


def draw(seed: int, groups: int, group: int, vocabulary: int, longest: int, median: int = 96) -> Samples:
    """Prompts: median 48 tokens, sigma 0.4; completions: `median`, sigma 0.8, at most `longest`. The first ids of the
    vocabulary, special tokens, do not occur."""
    source = np.random.default_rng(seed)
    prompts = np.exp(source.normal(np.log(48), 0.4, groups)).astype(np.int64).clip(8, 192)
    completions = (
        np.exp(source.normal(np.log(median), 0.8, groups * group)).astype(np.int64).clip(4, longest)
    )
    parts = []
    for number, length in enumerate(completions):
        if number % group == 0:
            prompt = source.integers(16, vocabulary, prompts[number // group])
        parts += [prompt, source.integers(16, vocabulary, length)]
    rewards = source.integers(0, 2, groups * group).astype(np.float64)
    return Samples(np.concatenate(parts), np.repeat(prompts, group), completions, rewards, group)


def save(samples: Samples, path: Path) -> Path:
    np.savez(
        path,
        tokens=samples.tokens,
        prompts=samples.prompts_S,
        completions=samples.completions_S,
        rewards=samples.rewards_S,
        group=np.array(samples.group),
    )
    return path


def load(path: Path) -> Samples:
    with np.load(path, allow_pickle=False) as file:
        return Samples(
            file["tokens"], file["prompts"], file["completions"], file["rewards"], int(file["group"])
        )
