"""How few bytes the change of a tensor could take: two limits that codecs are measured against.

A tensor of n weights of which k change, by steps with the distribution S:

    no context       n H(k/n) + k H(S)              the positions are random, the steps independent
    given exponent   the same, summed over the weights of each exponent of the base

H is the entropy in bits of the distribution as found (Shannon 1948); its own description is not counted. Clustered
changes can be coded in less: these are the limits of two models, not of everything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from async_rl.weights.peers import changed_positions

__all__ = ["Change", "change_of", "given_exponent_bytes", "no_context_bytes", "steps_between"]

EXPONENTS = 256

_PART = 1 << 20  # elements looked at at once: bounds the memory


class Change(NamedTuple):
    """What a change says, without the unchanged weights: all that the two limits need."""

    weights: int
    of_exponent: np.ndarray  # int64 [256]: weights with this exponent in the base (bits 7 … 14)
    exponents: np.ndarray  # uint8 [k]: of the changed weights' base
    steps: np.ndarray  # int16 [k], none of them 0

    @property
    def changed(self) -> int:
        return len(self.steps)


def steps_between(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    """uint16 [k] each -> int16 [k]: the distance in value order, modulo 2^16."""
    with np.errstate(over="ignore"):
        result: np.ndarray = _ordered(new) - _ordered(base)
    return result


def change_of(base: np.ndarray, new: np.ndarray) -> Change:
    """Of one tensor, uint16 [n] each."""
    positions = changed_positions(base, new)
    of_exponent = np.zeros(EXPONENTS, np.int64)
    for start in range(0, len(base), _PART):
        of_exponent += np.bincount(_exponent(base[start : start + _PART]), minlength=EXPONENTS)
    before = base[positions]
    return Change(len(base), of_exponent, _exponent(before), steps_between(before, new[positions]))


def no_context_bytes(change: Change) -> float:
    """The first limit, see above."""
    steps = np.unique(change.steps, return_counts=True)[1]
    return _bits(np.array([change.weights - change.changed, change.changed])) / 8 + _bits(steps) / 8


def given_exponent_bytes(change: Change) -> float:
    """The second limit, see above."""
    changed = np.bincount(change.exponents, minlength=EXPONENTS)
    total = sum(
        _bits(np.array([weights - moved, moved]))
        for weights, moved in zip(change.of_exponent, changed, strict=True)
    )
    keys = change.exponents.astype(np.uint32) << np.uint32(16) | change.steps.view(np.uint16)
    counts = np.unique(keys, return_counts=True)[1]
    # The bits of (exponent, step) less those of the exponent alone are those of the step given the exponent.
    total += _bits(counts) - _bits(changed)
    return float(total) / 8


def _exponent(bits: np.ndarray) -> np.ndarray:
    return ((bits >> 7) & 0xFF).astype(np.uint8)


def _ordered(bits: np.ndarray) -> np.ndarray:
    signed = bits.view(np.int16)
    return signed ^ ((signed >> 15) & 0x7FFF)


def _bits(counts: np.ndarray) -> float:
    """total x H(counts / total): bits to code all of them."""
    counts = counts[counts > 0].astype(np.float64)
    total = counts.sum()
    return float((counts * np.log2(total / counts)).sum()) if len(counts) else 0.0
