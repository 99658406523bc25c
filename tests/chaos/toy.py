"""Weights that follow from their place in the lineage, so that anybody can say what a version must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

SMALL = {
    "embed.weight": (512, 96),
    "layer.weight": (160, 200),
    "layer.bias": (37,),
    "nothing.weight": (0, 4),
    "head.weight": (97, 300),
}
"""220 KB: a full state in three packs, a delta in two or three."""

LARGE = {**SMALL, "embed.weight": (1400, 2048)}
"""One tensor of 5.7 MB: a pack of several multipart parts, and three tiles."""

MODELS = {"small": SMALL, "large": LARGE}

State = dict[str, np.ndarray]
"""Tensor name -> its bits, uint16, in the tensor's shape."""

Lives = Mapping[int, tuple[int, int]]
"""Incarnation -> (incarnation, step) of the version it went on from; the first from (-1, 0)."""


class Place(NamedTuple):
    """A state: after so many steps of this incarnation."""

    incarnation: int
    step: int


def state_at(model: str, seed: int, lives: Lives, place: Place) -> State:
    """The bits. `lives` must reach back to the run's first incarnation."""
    return {name: bits.copy() for name, bits in _state(model, seed, _history(lives, place)).items()}


def hash_at(model: str, seed: int, lives: Lives, place: Place) -> str:
    return _hash(model, seed, _history(lives, place))


def hash_of(state: Mapping[str, np.ndarray]) -> str:
    """Of the tensors' names and bits, in the order of the names."""
    result = hashlib.sha256()
    for name in sorted(state):
        result.update(f"{name} {state[name].shape}".encode())
        result.update(np.ascontiguousarray(state[name]).data)
    return result.hexdigest()


def _history(lives: Lives, place: Place) -> tuple[Place, ...]:
    """Where each of the steps up to `place` was made, oldest first."""
    steps: list[Place] = []
    incarnation, step = place
    while True:
        parent, start = lives[incarnation]
        steps += [Place(incarnation, number) for number in range(step, start, -1)]
        if parent < 0:
            return tuple(reversed(steps))
        incarnation, step = parent, start


@lru_cache(maxsize=24)
def _state(model: str, seed: int, steps: tuple[Place, ...]) -> State:
    if not steps:
        source = np.random.default_rng(seed)
        return {name: _weights(source, shape) for name, shape in MODELS[model].items()}
    state = {name: bits.copy() for name, bits in _state(model, seed, steps[:-1]).items()}
    source = np.random.default_rng([seed, *steps[-1]])
    for bits in state.values():
        _change(source, bits.reshape(-1))
    return state


@lru_cache(maxsize=4096)
def _hash(model: str, seed: int, steps: tuple[Place, ...]) -> str:
    return hash_of(_state(model, seed, steps))


def _weights(source: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Like weights: bfloat16, normally distributed; and a few NaNs, infinities and zeros of both signs."""
    bits = (source.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    odd = np.array([0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001], np.uint16)
    flat = bits.reshape(-1)
    if flat.size > 2 * odd.size:
        flat[source.choice(flat.size, odd.size, replace=False)] = odd
    return bits


def _change(source: np.random.Generator, flat: np.ndarray) -> None:
    """A sparse step: 2 % of the elements move by one or two, a few jump anywhere."""
    count = flat.size // 50
    where = source.integers(0, max(1, flat.size), count)
    flat[where] += source.choice(np.array([1, 2, 0xFFFF, 0xFFFE], np.uint16), count)
    far = source.integers(0, max(1, flat.size), flat.size // 5000)
    flat[far] = source.integers(0, 1 << 16, far.size, np.uint16)
