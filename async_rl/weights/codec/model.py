"""The small mode's model of a tile: how probable a change is, by the exponent of the base weight.

Every exponent has a *level*, which is written. From the *limit* on, levels are quantised weights below 2^10: how
probable a change is in units of the most probable. Exponents from limit + 14 on share one, so that there are 16
weights with that of the hot, 0: a vector instruction looks up as many. Below the limit, where changes are not rare,
elements are *hot*, and a level of 1 says that a group of exponents begins whose steps are of about the same size.

Counts are made from a quarter of a large tile's elements. Nothing but the levels must be the same for the decoder,
which makes its weights from them with integers only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from async_rl.weights.codec.jit import (
    F64,
    I16,
    I64,
    I64_IN,
    I64_OUT,
    U8_OUT,
    U16,
    U32,
    helper,
    int64,
    kernel,
    load_u64,
    uint64,
)
from async_rl.weights.codec.rans import BAD, low_bits_of, lowest_of, symbol_of
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import step_number

__all__ = [
    "EXPONENTS",
    "GROUPS",
    "LEVELS",
    "WEIGHTS",
    "Model",
    "SmallPlan",
    "fill_model",
    "get_levels",
    "model_of",
    "plan_small",
]

EXPONENTS = 256
GROUPS = 16  # of hot exponents, at most
WEIGHTS = 16

WEIGHT_BITS = 10
"""So that 64 weights add up to less than 2^16."""

LARGEST = 960.0  # what the highest level below stands for
LEVELS = 4 * WEIGHT_BITS - 4  # symbol_of(2^WEIGHT_BITS - 1) + 1

HOT_FROM = 0.15
"""Probability of a change from which telling every element's step costs less than picking those that change."""

STRAY = 0.02
"""Part of the changes that may be in exponents that should be hot, yet are not below the limit: a rare exponent far
above the others shall not make them all hot."""

SAMPLED_FROM = 1 << 16
"""Elements of a tile of which a quarter is enough to tell probabilities."""

STEP_SYMBOLS = 64
"""Of steps: symbol_of(0xFFFF) is 59."""


class Model(NamedTuple):
    """What both sides make of the levels."""

    limit: int
    weights: np.ndarray  # int64 [EXPONENTS]; 0 below the limit
    low: np.ndarray  # uint8 [WEIGHTS]: the low bytes of the weights from exponent limit - 1 on
    high: np.ndarray  # uint8 [WEIGHTS]
    groups: np.ndarray  # uint8 [EXPONENTS]; 0 for what is not hot
    group_count: int


class SmallPlan(NamedTuple):
    levels: np.ndarray  # int64 [EXPONENTS]
    model: Model
    first: int  # the exponents that change are first … last
    last: int
    cold: int  # changes that are not hot
    weight: float  # of an element, in the mean
    bits: float  # the entropy given the exponent, without low bits of steps
    bits_without: float  # likewise, without context


def plan_small(base: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> SmallPlan:
    """For a change of at least one element of `base`."""
    elements, changes = np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    numbers = scratch("numbers", (EXPONENTS + 1) * STEP_SYMBOLS, np.int64)
    numbers[:] = 0
    _count(base, positions, steps, elements, changes, numbers)
    limit = _set_limit(elements, changes)
    levels = np.zeros(EXPONENTS, np.int64)
    bits = _weigh_cold(elements, changes, numbers, limit, levels)
    bits += _group_hot(elements, changes, numbers, limit, levels)
    model = model_of(levels, limit)
    facts = np.zeros(4, np.int64)
    _tell(elements, changes, model.weights, limit, facts)
    first, last, cold, weight = facts.tolist()
    without = _bits(numbers[EXPONENTS * STEP_SYMBOLS :], len(base) - len(positions))
    return SmallPlan(levels, model, first, last, cold, weight / len(base), bits, without)


def model_of(levels: np.ndarray, limit: int) -> Model:
    """`levels`: int64 [EXPONENTS], each below LEVELS (get_levels has looked)."""
    weights, groups = np.empty(EXPONENTS, np.int64), np.empty(EXPONENTS, np.uint8)
    low, high = np.zeros(WEIGHTS, np.uint8), np.zeros(WEIGHTS, np.uint8)
    count = _fill(levels, limit, weights, low, high, groups)
    return Model(limit, weights, low, high, groups, count)


@helper
def get_levels(data: np.ndarray, at: int, span: int, first: int, levels: np.ndarray) -> int:
    """Levels, zeros before, of the bytes of those from exponent `first` to first + span. The byte after, or BAD for
    what nobody wrote."""
    if span < 0 or first < 0 or first + span >= EXPONENTS or at + span >= len(data):
        return BAD
    for i in range(span + 1):
        level = int64(data[at + i])
        if level >= LEVELS:
            return BAD
        levels[first + i] = level
    return at + span + 1


@helper
def fill_model(
    levels: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    groups: np.ndarray,
) -> int:
    """A Model; `low` and `high` are zeros. The number of groups, with that of what is not hot."""
    group = 0
    for exponent in range(EXPONENTS):
        if exponent < limit:
            # Those before the first level belong to the first group.
            group = min(max(group + int64(levels[exponent] > 0), 1), GROUPS)
            groups[exponent] = group
            weights[exponent] = 0
            continue
        groups[exponent] = 0
        number = exponent - limit + 1
        if number >= WEIGHTS:
            weights[exponent] = weights[exponent - 1]
            continue
        level = levels[exponent]
        weights[exponent] = lowest_of(level) + ((1 << low_bits_of(level)) >> 1)
        low[number] = weights[exponent] & 0xFF
        high[number] = weights[exponent] >> 8
    return group + 1


@kernel(I64, I64_IN, I64, I64_OUT, U8_OUT, U8_OUT, U8_OUT)
def _fill(
    levels: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    groups: np.ndarray,
) -> int:
    count: int = fill_model(levels, limit, weights, low, high, groups)
    return count


@kernel(I64, I64_OUT, I64_OUT)
def _set_limit(elements: np.ndarray, changes: np.ndarray) -> int:
    """The exponent from which on all are cold, but for a few changes. The last exponent with a level of its own then
    stands for those above."""
    total = above = limit = 0
    for exponent in range(EXPONENTS):
        total += changes[exponent]
    for exponent in range(EXPONENTS - 1, -1, -1):
        if changes[exponent] and changes[exponent] >= HOT_FROM * elements[exponent]:
            above += changes[exponent]
        if above > STRAY * total:
            limit = exponent + 1
            break
    top = min(limit + WEIGHTS - 2, EXPONENTS - 1)
    for exponent in range(top + 1, EXPONENTS):
        for counts in (elements, changes):
            counts[top] += counts[exponent]
            counts[exponent] = 0
    return limit


@kernel(I64, I64_IN, I64_IN, I64_IN, I64, I64_OUT)
def _tell(
    elements: np.ndarray, changes: np.ndarray, weights: np.ndarray, limit: int, facts: np.ndarray
) -> int:
    """`facts`, zeros before: first and last exponent that changes, cold changes, what all elements weigh."""
    for exponent in range(EXPONENTS - 1, -1, -1):
        if changes[exponent]:
            facts[0] = exponent
            facts[1] = max(facts[1], exponent)
            if exponent >= limit:
                facts[2] += changes[exponent]
        facts[3] += elements[exponent] * weights[exponent]
    return 0


@kernel(I64, U16, U32, I16, I64_OUT, I64_OUT, I64_OUT)
def _count(
    base: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    elements: np.ndarray,
    changes: np.ndarray,
    numbers: np.ndarray,
) -> int:
    """By exponent of the base: elements (about), changes, and the symbols of their steps; the last row of `numbers`,
    [(EXPONENTS + 1) * STEP_SYMBOLS], is of all."""
    tallies = np.zeros(4 * EXPONENTS, np.int64)  # four, so that no sum waits for itself
    mask = uint64(0xFF)
    sampled = 4 if len(base) >= SAMPLED_FROM else 1
    whole = len(base) - len(base) % (4 * sampled)
    for i in range(0, whole, 4 * sampled):
        four = load_u64(base, i)
        tallies[(four >> uint64(7)) & mask] += sampled
        tallies[uint64(EXPONENTS) + ((four >> uint64(23)) & mask)] += sampled
        tallies[uint64(2 * EXPONENTS) + ((four >> uint64(39)) & mask)] += sampled
        tallies[uint64(3 * EXPONENTS) + ((four >> uint64(55)) & mask)] += sampled
    for i in range(whole, len(base)):
        tallies[(int64(base[i]) >> 7) & 0xFF] += 1
    for i in range(4 * EXPONENTS):
        elements[i & 0xFF] += tallies[i]
    for j in range(len(positions)):
        exponent = (int64(base[uint64(positions[j])]) >> 7) & 0xFF
        symbol = symbol_of(step_number(int64(steps[j])))
        numbers[uint64(exponent * STEP_SYMBOLS + symbol)] += 1
    for exponent in range(EXPONENTS):
        for symbol in range(1, STEP_SYMBOLS):
            number = numbers[exponent * STEP_SYMBOLS + symbol]
            changes[exponent] += number
            numbers[EXPONENTS * STEP_SYMBOLS + symbol] += number
        elements[exponent] = max(elements[exponent], changes[exponent])
        numbers[exponent * STEP_SYMBOLS] = elements[exponent] - changes[exponent]
    return 0


@kernel(F64, I64_IN, I64)
def _bits(counts: np.ndarray, more: int) -> float:
    """total * H(counts / total), with `more` as a further count."""
    total = more
    bits = 0.0
    for symbol in range(len(counts)):
        total += counts[symbol]
        if counts[symbol]:
            bits -= counts[symbol] * math.log2(counts[symbol])
    if more:
        bits -= more * math.log2(more)
    return bits + total * math.log2(max(total, 1))


@kernel(F64, I64_IN, I64_IN, I64_IN, I64, I64_OUT)
def _weigh_cold(
    elements: np.ndarray, changes: np.ndarray, numbers: np.ndarray, limit: int, levels: np.ndarray
) -> float:
    """Levels from the limit on. Returns the bits of their changes: one table of steps, a probability each."""
    bits = most = 0.0
    steps = np.zeros(STEP_SYMBOLS, np.int64)
    total = 0
    for exponent in range(limit, EXPONENTS):
        if changes[exponent]:
            chance = min(changes[exponent] / elements[exponent], 0.5)
            most = max(most, -math.log(1.0 - chance))
    for exponent in range(limit, EXPONENTS):
        for symbol in range(1, STEP_SYMBOLS):
            steps[symbol] += numbers[exponent * STEP_SYMBOLS + symbol]
        if changes[exponent]:
            total += changes[exponent]
            chance = changes[exponent] / elements[exponent]
            rest = elements[exponent] - changes[exponent]
            bits -= changes[exponent] * math.log2(chance)
            if rest:
                bits -= rest * math.log2(1.0 - chance)
            weight = int64(-math.log(1.0 - min(chance, 0.5)) / most * LARGEST + 0.5)
            levels[exponent] = symbol_of(min(max(weight, 1), (1 << WEIGHT_BITS) - 1))
    for symbol in range(STEP_SYMBOLS):
        if steps[symbol]:
            bits += steps[symbol] * math.log2(total / steps[symbol])
    return bits


@kernel(F64, I64_IN, I64_IN, I64_IN, I64, I64_OUT)
def _group_hot(
    elements: np.ndarray, changes: np.ndarray, numbers: np.ndarray, limit: int, levels: np.ndarray
) -> float:
    """Levels below the limit: an exponent joins the group before as long as that costs no more than a table of its
    own. Returns the bits of all steps, 0 included, if every exponent had one."""
    bits = 0.0
    group = np.zeros(STEP_SYMBOLS, np.int64)
    group_cost, made = 0.0, 0
    for exponent in range(limit):
        alone = together = 0.0
        alone_total = together_total = 0
        for symbol in range(STEP_SYMBOLS):
            mine = numbers[exponent * STEP_SYMBOLS + symbol]
            both = mine + group[symbol]
            alone_total += mine
            together_total += both
            if mine:
                bits += mine * math.log2(elements[exponent] / mine)
                alone += 5.0 - mine * math.log2(mine)  # a table takes about 5 bits a symbol
            if both:
                together += 5.0 - both * math.log2(both)
        if changes[exponent] == 0 and made == 0:
            # Leaves no trace in the levels: the first group has begun before the first exponent that changes.
            for symbol in range(STEP_SYMBOLS):
                group[symbol] += numbers[exponent * STEP_SYMBOLS + symbol]
            continue
        alone += alone_total * math.log2(max(alone_total, 1)) + 64.0
        together += together_total * math.log2(max(together_total, 1)) + 64.0
        joins = made and (together <= alone + group_cost or made == GROUPS or changes[exponent] == 0)
        if not joins:
            made += 1
        levels[exponent] = int64(not joins)
        group_cost = together if joins or made == 1 else alone
        for symbol in range(STEP_SYMBOLS):
            mine = numbers[exponent * STEP_SYMBOLS + symbol]
            group[symbol] = mine + (group[symbol] if joins or made == 1 else 0)
    return bits
