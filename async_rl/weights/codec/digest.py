"""The digest of a state: a sum over its elements, so that a change updates it in O(changed).

    digest = sum over elements of mix(place << 16 | bits), modulo 2^64

`place` is the element's index in the whole state: the run's tensors one after another, in the order of run.json.
The sum does not depend on how the state is cut, so ranks add up their parts. `mix` is the finalizer of splitmix64
(Steele, Lea, Flood 2014): bijective, so that no single changed element goes unseen.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MASK", "digest_of", "mix"]

MASK = (1 << 64) - 1


def mix(keys: np.ndarray) -> np.ndarray:
    """uint64 [n] -> uint64 [n]."""
    keys = keys ^ (keys >> np.uint64(30))
    keys = keys * np.uint64(0xBF58476D1CE4E5B9)
    keys = keys ^ (keys >> np.uint64(27))
    keys = keys * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = keys ^ (keys >> np.uint64(31))
    return mixed


def digest_of(values: np.ndarray, place: int) -> int:
    """Of consecutive elements, uint16 [n], the first of which stands at `place`. No elements: 0."""
    keys = np.arange(place, place + len(values), dtype=np.uint64) << np.uint64(16)
    return int(mix(keys | values).sum(dtype=np.uint64))
