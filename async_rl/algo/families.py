"""Samples that have a prompt in common: which of them lie behind one copy of it.

A family is laid as a trunk, which is its longest sample whole, and branches, which are the others from the last token
of the prompt on (each needs that one itself: what it predicts is the branch's own first token):

    trunk     a b c x y z          prompt abc, completions xyzt, uv, w
    branches      c u | c

Nothing that the model computes for a b would be different in the branches' own copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

__all__ = ["families_of", "laid"]


class _Sample(Protocol):
    @property
    def prompt_P(self) -> np.ndarray: ...
    @property
    def inputs(self) -> int: ...


def families_of(samples: Sequence[_Sample], limit: int) -> list[list[int]]:
    """Indices of `samples`, each once, the trunk first. A family that would take more than `limit` tokens becomes
    several, with a trunk each: a family lies in one row."""
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(np.asarray(sample.prompt_P, np.int64).tobytes(), []).append(index)
    return [family for members in by_prompt.values() for family in _split(samples, members, limit)]


def laid(samples: Sequence[_Sample], family: Sequence[int]) -> int:
    """Tokens that a family takes."""
    trunk, *branches = family
    return samples[trunk].inputs + sum(_branch(samples[index]) for index in branches)


def _split(samples: Sequence[_Sample], members: list[int], limit: int) -> list[list[int]]:
    """Longest first, so that the first of each part is its trunk. A trunk may be over the limit, alone."""
    families: list[list[int]] = []
    room = 0
    for index in sorted(members, key=lambda each: (-samples[each].inputs, each)):
        takes = _branch(samples[index])
        if families and takes <= room:
            families[-1].append(index)
        else:
            families.append([index])
            room, takes = limit, samples[index].inputs
        room -= takes
    return families


def _branch(sample: _Sample) -> int:
    return sample.inputs - (len(sample.prompt_P) - 1)
