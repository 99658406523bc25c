"""The digest of a state: a sum over its elements, so that a change updates it in O(changed).

    digest = sum over elements of mix(place << 16 | bits), modulo 2^64

`place` is the element's index in the whole state: the run's tensors one after another, in the order of run.json.
The sum does not depend on how the state is cut, so ranks add up their parts. `mix` is the finalizer of splitmix64
(Steele, Lea, Flood 2014): bijective, so that no single changed element goes unseen.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MASK", "digest_of"]

MASK = (1 << 64) - 1


def digest_of(values: np.ndarray, place: int) -> int:
    """Of consecutive elements, uint16 [n], the first of which stands at `place`. No elements: 0."""
    from async_rl.weights.codec import elements

    return int(elements.digest(values, place))
