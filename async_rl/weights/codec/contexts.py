"""SMALL: what changes is told by what the base weight is. Smaller, and not readable without the base.

How probable a change is depends on the exponent of the base weight, which both sides have. Every exponent gets a
weight, -ln(1 - p) in units of 1 / UNIT, and elements follow each other on an axis, each as long as its weight:
there, changes fall as evenly as raindrops. A gap is told in two parts. Its bucket, wide enough to hold many elements,
is a number as in STEPS. Which element of the bucket it is, is told with an interval of rANS as long as the element's
part of the bucket: the decoder finds the element by walking along the weights, and needs no table of elements. So a
change costs what its probability says, for any number of probabilities, and the buckets still capture how changes
cluster.

Where changes are not rare, intervals would be longer than buckets. *Hot* elements, whose exponents are below a limit,
have no length: every one's step is told, 0 included, in groups of exponents with steps of about the same size.

    varint changes, buckets, limit, first, levels - 1, bytes of P, words
    P: levels, buckets | words of the walk | steps

Levels are one for every exponent from the first that changes to the last: below the limit 1 where a group begins,
else 0; from the limit on the quantised weight, which is below 2^16. Exponents from limit + 14 on share one: so there
are 16 weights, and a vector instruction looks up as many. Steps: of the elements that are not hot (less 1, as none is
0), then group by group.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from async_rl.weights.codec.elements import ordered
from async_rl.weights.codec.jit import (
    F64,
    HAS_SUM_16,
    I16,
    I16_OUT,
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16,
    U32,
    U32_OUT,
    below_64,
    helper,
    int64,
    kernel,
    load_u64,
    low_bit,
    sum_16,
    uint64,
)
from async_rl.weights.codec.numbers import get_varint, pack, put_varint, unpack
from async_rl.weights.codec.rans import BAD, SYMBOLS, low_bits_of, lowest_of, symbol_of
from async_rl.weights.codec.steps import number_step, step_number

__all__ = ["SmallPlan", "decode_small", "encode_small", "plan_small"]

Steps = tuple[np.ndarray, np.ndarray]

EXPONENTS = 256
UNIT_BITS = 18
UNIT = 1 << UNIT_BITS
"""The mean gap. Weights are at least 1: rarer changes than 2^-18 cost a little more than they should."""

BUCKET_BITS = 16
"""The first buckets are a quarter of UNIT wide: 0.004 bits lost to the slope inside."""

SKIP = 24
"""The number for a gap that goes on: as much as all buckets below it."""

SKIP_LENGTH = 1 << (BUCKET_BITS + 7)

HOT_FROM = 0.15
"""Probability of a change. Below, elements that lie across the border of two buckets cost too much; above, telling
every element's step takes too long."""

STRAY = 0.02
"""Part of the changes that may be in exponents that should be hot, yet are not below the limit: a rare exponent far
above the others shall not make them all hot."""

WEIGHTS = 16
"""The first is 0, of all that is hot."""

_WEIGHT_BITS = 16
_LEVEL_TOP = 4 * _WEIGHT_BITS - 5  # symbol_of(2^16 - 1)
SAMPLED_FROM = 1 << 16
"""Elements of a tile of which a quarter is enough to tell probabilities."""

_GROUPS = 16  # at most


class _Model(NamedTuple):
    """What both sides make of the levels."""

    limit: int
    weights: np.ndarray  # int64 [EXPONENTS]; 0 below the limit
    low: np.ndarray  # uint8 [WEIGHTS]: the low bytes of the weights from exponent limit - 1 on
    high: np.ndarray  # uint8 [WEIGHTS]
    groups: np.ndarray  # uint8 [EXPONENTS]; 0 for what is not hot
    group_count: int


class SmallPlan(NamedTuple):
    changes: np.ndarray  # by exponent, int64 [EXPONENTS]
    levels: np.ndarray
    model: _Model
    bits: float  # the entropy given the exponent, without low bits of steps
    bits_without: float  # likewise, without context


def plan_small(base: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> SmallPlan:
    """For a change of at least one element of `base`."""
    elements, changes = np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    numbers = np.zeros(EXPONENTS * SYMBOLS, np.int64)
    _count(base, positions, steps, elements, changes, numbers)
    limit = _hot_limit(elements, changes)  # the exponents below it are hot
    top = min(limit + WEIGHTS - 2, EXPONENTS - 1)  # the last with a level of its own
    for counts in (elements, changes):
        counts[top] = counts[top:].sum()
        counts[top + 1 :] = 0
    levels = np.zeros(EXPONENTS, np.int64)
    bits = _set_levels(elements, changes, numbers, limit, levels)
    by_symbol = numbers.reshape(EXPONENTS, SYMBOLS)[:, 1:].sum(0)
    by_symbol = np.append(by_symbol[by_symbol > 0], len(base) - len(positions))
    without = float(np.sum(by_symbol * np.log2(len(base) / np.maximum(by_symbol, 1))))
    return SmallPlan(changes, levels, _model_of(levels, limit), bits, without)


def encode_small(
    base: np.ndarray, new: np.ndarray, positions: np.ndarray, steps: np.ndarray, plan: SmallPlan
) -> bytes:
    changes, levels, model = plan[:3]
    limit = model.limit
    hot, hot_groups, sizes = _find_hot(base, model)
    sizes[0] = changes[limit:].sum()
    starts = np.cumsum(sizes) - sizes
    told = np.empty(int(sizes.sum()), np.uint32)
    room = int(sizes[0]) + (len(base) << _WEIGHT_BITS) // SKIP_LENGTH
    buckets, lows, parts = np.empty(room, np.uint32), np.empty(room, np.uint32), np.empty(room, np.uint32)
    made = _survey(base, positions, steps, limit, *model[1:4], told, buckets, lows, parts)
    _tell_hot(base, new, hot, hot_groups, starts, told)
    buckets = buckets[:made]
    words = np.empty(made + 2, "<u4")
    first_word = _put_walk(buckets, lows, parts, words)

    used = np.flatnonzero(changes)
    first, last = int(used[0]), int(used[-1])
    differences = np.diff(levels[first : last + 1], prepend=0)
    shown = ((differences << 1) ^ (differences >> 63)).astype(np.uint32)
    told_first = pack([(shown, 0), (buckets, 0)])
    head = (len(positions), made, limit, first, last - first, len(told_first), len(words) - first_word)
    sections = [(told[start : start + size], 0) for start, size in zip(starts, sizes, strict=True)]
    return b"".join((*map(put_varint, head), told_first, words[first_word:].tobytes(), pack(sections)))


def decode_small(data: np.ndarray, base: np.ndarray) -> list[Steps] | None:
    """Positions and steps, in two parts that have no position in common. None for bytes that nobody wrote."""
    at, head = 0, []
    for _ in range(7):
        number, at = get_varint(data, at)
        head.append(number)
    changes, made, limit, first, span, plan_size, word_count = head
    words_at = at + plan_size
    steps_at = words_at + 4 * word_count
    # A bucket is a change, or a skip: of these no more make sense than the base's weights add up to.
    most = len(base) + (len(base) << _WEIGHT_BITS) // SKIP_LENGTH
    if min(head) < 0 or changes > len(base) or made > most or limit > EXPONENTS:
        return None
    if first + span >= EXPONENTS or steps_at > len(data):
        return None
    plan = unpack(data[:words_at], at, [span + 1, made], [0, 0])
    if plan is None:
        return None
    levels = np.zeros(EXPONENTS, np.int64)
    if _get_levels(plan[: span + 1], first, levels) == BAD:
        return None
    model = _model_of(levels, limit)
    words = np.frombuffer(data[words_at:steps_at].tobytes(), "<u4")
    cold = np.empty(min(made, len(base)), np.uint32)
    found = _walk(base, *model[:4], plan[span + 1 :], words, cold)
    if found == BAD:
        return None
    hot, hot_groups, sizes = _find_hot(base, model)
    sizes[0] = found
    lengths = sizes[: model.group_count].tolist()
    told = unpack(data, steps_at, lengths, [0] * len(lengths))
    if told is None:
        return None
    cold_steps = np.empty(found, np.int16)
    hot_positions, hot_steps = np.empty(len(hot) + 1, np.uint32), np.empty(len(hot) + 1, np.int16)
    kept = _deal_hot(hot, hot_groups, told, np.cumsum(sizes) - sizes, hot_positions, hot_steps)
    if kept == BAD or _deal(told[:found], cold_steps) == BAD or kept + found != changes:
        return None
    return [(cold[:found], cold_steps), (hot_positions[:kept], hot_steps[:kept])]


def _model_of(levels: np.ndarray, limit: int) -> _Model:
    weights, groups = np.empty(EXPONENTS, np.int64), np.empty(EXPONENTS, np.uint8)
    low, high = np.zeros(WEIGHTS, np.uint8), np.zeros(WEIGHTS, np.uint8)
    count = _fill_model(levels, limit, weights, low, high, groups)
    return _Model(limit, weights, low, high, groups, count)


def _find_hot(base: np.ndarray, model: _Model) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions uint32 and groups uint8 of the hot elements, and how many are in each group, int64 [_GROUPS + 1]."""
    hot, groups = np.empty(len(base), np.uint32), np.empty(len(base), np.uint8)
    sizes = np.zeros(_GROUPS + 1, np.int64)
    found = _hot(base, model.limit, model.groups, hot, groups, sizes) if model.limit else 0
    return hot[:found], groups[:found], sizes


# ---------------------------------------------------------------- kernels


@kernel(I64, U32, I64, I64_OUT)
def _get_levels(shown: np.ndarray, first: int, levels: np.ndarray) -> int:
    level = 0
    for i in range(len(shown)):
        number = int64(shown[i])
        level += (number >> 1) ^ -(number & 1)
        if level < 0 or level > _LEVEL_TOP:
            return BAD
        levels[first + i] = level
    return 0


@kernel(I64, I64_IN, I64, I64_OUT, U8_OUT, U8_OUT, U8_OUT)
def _fill_model(
    levels: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    groups: np.ndarray,
) -> int:
    """A _Model; `low` and `high` are zeros. The number of groups."""
    group = 0
    for exponent in range(EXPONENTS):
        if exponent < limit:
            # Those before the first level belong to the first group.
            group = min(max(group + int64(levels[exponent] > 0), 1), _GROUPS)
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


@kernel(I64, I64_IN, I64_IN)
def _hot_limit(elements: np.ndarray, changes: np.ndarray) -> int:
    """The exponent from which on all are cold, but for a few changes."""
    total = above = 0
    for exponent in range(EXPONENTS):
        total += changes[exponent]
    for exponent in range(EXPONENTS - 1, -1, -1):
        if changes[exponent] and changes[exponent] >= HOT_FROM * elements[exponent]:
            above += changes[exponent]
        if above > STRAY * total:
            return exponent + 1
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
    """By exponent of the base: elements (about), changes, and the symbols of their steps, [EXPONENTS * SYMBOLS]."""
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
        exponent = (int64(base[positions[j]]) >> 7) & 0xFF
        changes[exponent] += 1
        numbers[exponent * SYMBOLS + symbol_of(step_number(int64(steps[j])))] += 1
    for exponent in range(EXPONENTS):
        elements[exponent] = max(elements[exponent], changes[exponent])
        numbers[exponent * SYMBOLS] = elements[exponent] - changes[exponent]
    return 0


@kernel(F64, I64_IN, I64_IN, I64_IN, I64, I64_OUT)
def _set_levels(
    elements: np.ndarray, changes: np.ndarray, numbers: np.ndarray, limit: int, levels: np.ndarray
) -> float:
    """Hot exponents join the group before as long as that costs no more than a table of their own. Returns the bits
    of all symbols, if every exponent of what is hot had a table."""
    bits = 0.0
    cold = np.zeros(SYMBOLS, np.int64)
    cold_total = 0
    for exponent in range(limit, EXPONENTS):
        if changes[exponent]:
            chance = changes[exponent] / elements[exponent]
            rest = elements[exponent] - changes[exponent]
            bits -= changes[exponent] * math.log2(chance)
            if rest:
                bits -= rest * math.log2(1.0 - chance)
            for symbol in range(1, SYMBOLS):
                cold[symbol] += numbers[exponent * SYMBOLS + symbol]
            cold_total += changes[exponent]
            chance = min(chance, 0.5)
            weight = int64(-math.log(1.0 - chance) * UNIT + 0.5)
            levels[exponent] = symbol_of(min(max(weight, 1), (1 << _WEIGHT_BITS) - 1))
    for symbol in range(SYMBOLS):
        if cold[symbol]:
            bits += cold[symbol] * math.log2(cold_total / cold[symbol])
    group = np.zeros(SYMBOLS, np.int64)
    group_cost, made = 0.0, 0
    for exponent in range(limit):
        alone = together = 0.0
        alone_total = together_total = 0
        for symbol in range(SYMBOLS):
            mine = numbers[exponent * SYMBOLS + symbol]
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
            for symbol in range(SYMBOLS):
                group[symbol] += numbers[exponent * SYMBOLS + symbol]
            continue
        alone += alone_total * math.log2(max(alone_total, 1)) + 64.0
        together += together_total * math.log2(max(together_total, 1)) + 64.0
        joins = made and (together <= alone + group_cost or made == _GROUPS or changes[exponent] == 0)
        if not joins:
            made += 1
        levels[exponent] = int64(not joins)
        group_cost = together if joins or made == 1 else alone
        for symbol in range(SYMBOLS):
            mine = numbers[exponent * SYMBOLS + symbol]
            group[symbol] = mine + (group[symbol] if joins or made == 1 else 0)
    return bits


@helper
def _weigh(weights: np.ndarray, four: Any) -> int:
    """Of four elements, in one word."""
    mask = uint64(0xFF)
    low: int = weights[(four >> uint64(7)) & mask] + weights[(four >> uint64(23)) & mask]
    high: int = weights[(four >> uint64(39)) & mask] + weights[(four >> uint64(55)) & mask]
    return low + high


if HAS_SUM_16:

    @helper
    def _weigh_16(
        base: np.ndarray,
        at: int,
        count: int,
        limit: int,
        weights: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> int:
        """Of `count` elements up to 16, where 16 are left."""
        total: int = sum_16(base, at, count, limit - 1, low, high)
        return total

else:

    @helper
    def _weigh_16(
        base: np.ndarray,
        at: int,
        count: int,
        limit: int,
        weights: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> int:
        total = 0
        end = at + count
        while at + 4 <= end:
            total += _weigh(weights, load_u64(base, at))
            at += 4
        while at < end:
            total += weights[(int64(base[uint64(at)]) >> 7) & 0xFF]
            at += 1
        return total


@kernel(I64, U16, U32, I16, I64, I64_IN, U8, U8, U32_OUT, U32_OUT, U32_OUT, U32_OUT)
def _survey(
    base: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low_bytes: np.ndarray,
    high_bytes: np.ndarray,
    told: np.ndarray,
    buckets: np.ndarray,
    lows: np.ndarray,
    parts: np.ndarray,
) -> int:
    """What the decoder will be told of elements that are not hot: steps, and for every bucket the element's part of
    it, [low, low + part). Returns the number of buckets."""
    made = cold = 0
    at = 0  # elements before are in `length`, or before the last change
    length = 0
    for change in range(len(positions)):
        position = int64(positions[change])
        exponent = (int64(base[position]) >> 7) & 0xFF
        if exponent < limit:
            continue
        while at + 16 <= position:
            length += _weigh_16(base, at, 16, limit, weights, low_bytes, high_bytes)
            at += 16
        if at + 16 <= len(base):
            length += _weigh_16(base, at, position - at, limit, weights, low_bytes, high_bytes)
        else:
            while at < position:
                length += weights[(int64(base[uint64(at)]) >> 7) & 0xFF]
                at += 1
        at = position + 1
        told[uint64(cold)] = step_number(int64(steps[change])) - 1
        cold += 1
        while length >= SKIP_LENGTH:
            buckets[uint64(made)] = SKIP
            made += 1
            length -= SKIP_LENGTH
        # An element across a border is told by its larger part.
        weight = weights[exponent]
        bucket = symbol_of(length >> BUCKET_BITS)
        low = length - (lowest_of(bucket) << BUCKET_BITS)
        part = min(weight, (1 << (BUCKET_BITS + low_bits_of(bucket))) - low)
        if 2 * part < weight and bucket + 1 < SKIP:
            bucket += 1
            low = 0
            part = min(weight - part, 1 << (BUCKET_BITS + low_bits_of(bucket)))
        buckets[uint64(made)] = bucket
        lows[uint64(made)] = low
        parts[uint64(made)] = part
        made += 1
        length = 0
    return made


@kernel(I64, U32, U32, U32, U32_OUT)
def _put_walk(buckets: np.ndarray, lows: np.ndarray, parts: np.ndarray, words: np.ndarray) -> int:
    """The intervals as one rANS state of 64 bits, backwards to the end of `words`; the first word used."""
    state = uint64(1 << 32)
    at = len(words)
    for i in range(len(buckets) - 1, -1, -1):
        bucket = int64(buckets[i])
        if bucket == SKIP:
            continue
        bits = BUCKET_BITS + low_bits_of(bucket)
        part = int64(parts[i])
        if part >> bits:
            continue  # the whole bucket: nothing to tell
        part_u = uint64(part)
        if state >= part_u << uint64(64 - bits):
            at -= 1
            words[at] = state & uint64(0xFFFFFFFF)
            state >>= uint64(32)
        quotient = state // part_u
        state = (quotient << uint64(bits)) + (state - quotient * part_u) + uint64(lows[i])
    words[at - 1] = state >> uint64(32)
    words[at - 2] = state & uint64(0xFFFFFFFF)
    return at - 2


@kernel(I64, U16, I64, I64_IN, U8, U8, U32, U32, U32_OUT)
def _walk(
    base: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low_bytes: np.ndarray,
    high_bytes: np.ndarray,
    buckets: np.ndarray,
    words: np.ndarray,
    stops: np.ndarray,
) -> int:
    """Finds the elements that change and are not hot. How many, or BAD."""
    n = len(base)
    if len(words) < 2:
        return BAD
    state = uint64(words[0]) | (uint64(words[1]) << uint64(32))
    word = 2
    at = found = 0
    ahead = 0
    for j in range(len(buckets)):
        bucket = int64(buckets[j])
        if bucket >= SKIP:
            if bucket > SKIP:
                return BAD
            ahead += SKIP_LENGTH
            continue
        bits = BUCKET_BITS + low_bits_of(bucket)
        border = ahead + (lowest_of(bucket) << BUCKET_BITS)
        ahead = 0
        value = int64(state & uint64((1 << bits) - 1))
        target = border + value
        end = 0  # on the axis, of the element before `at`; the last change is at 0
        while at + 16 <= n:
            after = end + _weigh_16(base, at, 16, limit, weights, low_bytes, high_bytes)
            if after > target:
                break
            end = after
            at += 16
        if at + 16 <= n:
            # Among these 16: which four, and which of them, without a branch, which could not be predicted.
            end_1 = end + _weigh(weights, load_u64(base, at))
            end_2 = end_1 + _weigh(weights, load_u64(base, at + 4))
            end_3 = end_2 + _weigh(weights, load_u64(base, at + 8))
            at += 4 * (int64(end_1 <= target) + int64(end_2 <= target) + int64(end_3 <= target))
            end = end_1 if end_1 <= target else end
            end = end_2 if end_2 <= target else end
            end = end_3 if end_3 <= target else end
            four = load_u64(base, at)
            weight_1 = weights[(four >> uint64(7)) & uint64(0xFF)]
            weight_2 = weights[(four >> uint64(23)) & uint64(0xFF)]
            weight_3 = weights[(four >> uint64(39)) & uint64(0xFF)]
            weight = weights[(four >> uint64(55)) & uint64(0xFF)]
            end_1 = end + weight_1
            end_2 = end_1 + weight_2
            end_3 = end_2 + weight_3
            at += int64(end_1 <= target) + int64(end_2 <= target) + int64(end_3 <= target)
            end = end_1 if end_1 <= target else end
            end = end_2 if end_2 <= target else end
            end = end_3 if end_3 <= target else end
            weight = weight if end_3 <= target else weight_3
            weight = weight if end_2 <= target else weight_2
            weight = weight if end_1 <= target else weight_1
        else:
            while True:
                if at >= n:
                    return BAD
                weight = weights[(int64(base[uint64(at)]) >> 7) & 0xFF]
                if end + weight > target:
                    break
                end += weight
                at += 1
        end += weight
        if found == len(stops):
            return BAD
        stops[uint64(found)] = at
        found += 1
        at += 1
        low = max(end - weight - border, 0)
        part = min(end - border, 1 << bits) - low
        state = uint64(part) * (state >> uint64(bits)) + uint64(value - low)
        empty = state < uint64(1 << 32)
        next_word = uint64(words[uint64(min(word, len(words) - 1))])  # wanted or not, as in rans.py
        state = (state << uint64(32)) | next_word if empty else state
        word += int64(empty)
    return found if ahead == 0 and word == len(words) and state == uint64(1 << 32) else BAD


@kernel(I64, U16, I64, U8, U32_OUT, U8_OUT, I64_OUT)
def _hot(
    base: np.ndarray,
    limit: int,
    groups: np.ndarray,
    positions: np.ndarray,
    told_by: np.ndarray,
    sizes: np.ndarray,
) -> int:
    """Positions and groups of all elements whose exponent is below the limit, counted in `sizes`; how many."""
    found = at = 0
    while at + 64 <= len(base):
        below = below_64(base, at, limit << 7) if limit < EXPONENTS else ~uint64(0)
        while below != uint64(0):
            position = at + low_bit(below)
            positions[uint64(found)] = position
            told_by[uint64(found)] = groups[(int64(base[uint64(position)]) >> 7) & 0xFF]
            found += 1
            below &= below - uint64(1)
        at += 64
    for i in range(at, len(base)):
        exponent = (int64(base[i]) >> 7) & 0xFF
        if exponent < limit:
            positions[uint64(found)] = i
            told_by[uint64(found)] = groups[exponent]
            found += 1
    for i in range(found):
        sizes[told_by[i]] += 1
    return found


@kernel(I64, U16, U16, U32, U8, I64_IN, U32_OUT)
def _tell_hot(
    base: np.ndarray,
    new: np.ndarray,
    hot: np.ndarray,
    told_by: np.ndarray,
    starts: np.ndarray,
    told: np.ndarray,
) -> int:
    """The steps of hot elements into `told`, where each group starts."""
    cursors = starts.copy()
    for i in range(len(hot)):
        group = told_by[i]
        cursor = cursors[group]
        cursors[group] = cursor + 1
        position = hot[i]
        told[uint64(cursor)] = step_number(ordered(int64(new[position])) - ordered(int64(base[position])))
    return len(hot)


@kernel(I64, U32, U8, U32, I64_IN, U32_OUT, I16_OUT)
def _deal_hot(
    hot: np.ndarray,
    told_by: np.ndarray,
    told: np.ndarray,
    starts: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Gives every hot element, the next step of its group; those of 0 are left out. The number of
    changes, or BAD."""
    cursors = starts.copy()
    made = 0
    largest = 0
    for i in range(len(hot)):
        group = told_by[i]
        cursor = cursors[group]
        cursors[group] = cursor + 1
        number = int64(told[uint64(cursor)])
        largest = max(largest, number)
        positions[uint64(made)] = hot[i]  # overwritten unless something changed: the outputs hold one more
        steps[uint64(made)] = number_step(number)
        made += int64(number != 0)
    return made if largest <= 0xFFFF else BAD


@kernel(I64, U32, I16_OUT)
def _deal(told: np.ndarray, steps: np.ndarray) -> int:
    """Of elements that are not hot: none is 0."""
    largest = 0
    for i in range(len(told)):
        number = int64(told[i]) + 1
        largest = max(largest, number)
        steps[i] = number_step(number)
    return 0 if largest <= 0xFFFF else BAD
