"""SMALL: what changes is told by what the base weight is. Smaller, and not readable without the base.

How probable a change is depends on the exponent of the base weight, which both sides have. Every exponent gets a
weight, -ln(1 - p) in units of 1 / UNIT, and elements follow each other on an axis, each as long as its weight: there,
changes fall as evenly as raindrops. A gap is told in two parts. Its bucket, wide enough to hold many elements, is a symbol as in
STEPS. Which element of the bucket it is, is told with an interval of rANS as long as the element's part of the bucket: the
decoder finds the element by walking along the weights, and needs no table of elements. So a change costs what its
probability says, for hundreds of probabilities, and the buckets' frequencies still capture how changes cluster.

Where changes are not rare, intervals would be longer than buckets. Elements of such *hot* exponents have no length and
each has its step told, 0 included, in groups of exponents with steps of about the same size.

    varint changes, symbols, bytes of P, words | P: levels of the exponents, buckets | words of the walk | steps by group

Levels, one per exponent between the first and the last that changes, are quantised weights or one of two marks.
"""

from __future__ import annotations

import math

import numpy as np

from async_rl.weights.codec.jit import (
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
    int64,
    kernel,
    uint64,
)
from async_rl.weights.codec.numbers import get_varint, pack, put_varint, unpack
from async_rl.weights.codec.rans import BAD, SYMBOLS, low_bits_of, lowest_of, symbol_of
from async_rl.weights.codec.steps import number_step, step_number

__all__ = ["decode_small", "encode_small"]

Steps = tuple[np.ndarray, np.ndarray]

EXPONENTS = 256
UNIT_BITS = 18
UNIT = 1 << UNIT_BITS
"""The mean gap. Weights are at least 1: rarer changes than 2^-18 cost a little more than they should."""

BUCKET_BITS = 16
"""The first buckets are a quarter of UNIT wide: 0.004 bits lost to the slope inside."""

SKIP = 24
"""The symbol for a gap that goes on: as much as all buckets below it."""

SKIP_LENGTH = 1 << (BUCKET_BITS + 7)

HOT_FROM = 0.12
"""Probability of a change. Below, elements that lie across the border of two buckets cost too much; above, telling
every element's step takes too long."""

HOT, HOT_NEXT = (
    72,
    73,
)  # levels: hot, in the group of the hot exponent before or in the next one; above all weights'
HOT_WEIGHT = 1 << 48
_GROUPS = 64  # at most
_LEVEL_TOP = 71  # symbol_of(UNIT) and more


def encode_small(base: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> bytes:
    """A change of at least one element of `base`."""
    elements, changes = np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    numbers = np.zeros(EXPONENTS * SYMBOLS, np.int64)
    _count(base, positions, steps, elements, changes, numbers)
    levels = np.zeros(EXPONENTS, np.int64)
    _set_levels(elements, changes, numbers, levels)
    weights, groups, group_count = _read_levels(levels)

    sizes = np.zeros(group_count, np.int64)
    np.add.at(sizes, groups, np.where(weights == HOT_WEIGHT, elements, changes))
    starts = np.cumsum(sizes) - sizes
    told = np.empty(int(sizes.sum()), np.uint32)
    cold = np.where(weights == HOT_WEIGHT, 0, weights)
    room = int(sizes[0]) + int((cold * elements).sum()) // SKIP_LENGTH + 1
    buckets, lows, parts = np.empty(room, np.uint32), np.empty(room, np.uint32), np.empty(room, np.uint32)
    symbols = _survey(base, positions, steps, weights, groups, starts.copy(), told, buckets, lows, parts)
    buckets = buckets[:symbols]
    words = np.empty(symbols + 2, "<u4")
    first = _put_walk(buckets, lows, parts, words)

    used = np.flatnonzero(levels)
    low, high = int(used[0]), int(used[-1])
    between = levels[low : high + 1]
    differences = np.diff(between, prepend=0)
    shown = ((differences << 1) ^ (differences >> 63)).astype(np.uint32)
    plan = pack([(shown, 0), (buckets, 0)])
    head = b"".join(
        put_varint(number)
        for number in (len(positions), symbols, low, high - low, len(plan), len(words) - first)
    )
    sections = [(told[start : start + size], 0) for start, size in zip(starts, sizes, strict=True)]
    return b"".join((head, plan, words[first:].tobytes(), pack(sections)))


def decode_small(data: np.ndarray, base: np.ndarray) -> Steps | None:
    """None for bytes that nobody wrote."""
    at, head = 0, []
    for _ in range(6):
        number, at = get_varint(data, at)
        head.append(number)
    changes, symbols, low, span, plan_size, word_count = head
    end = at + plan_size + 4 * word_count
    # A symbol is a change, or skips: the base's weights bound how many of those make sense.
    most = len(base) + (len(base) * (UNIT << 1)) // SKIP_LENGTH + 1
    if min(head) < 0 or changes > len(base) or symbols > most or low + span >= EXPONENTS or end > len(data):
        return None
    plan = unpack(data[: at + plan_size], at, [(span + 1, 0), (symbols, 0)])
    if plan is None:
        return None
    shown = plan[0].astype(np.int64)
    levels = np.zeros(EXPONENTS, np.int64)
    levels[low : low + span + 1] = np.cumsum((shown >> 1) ^ -(shown & 1))
    if levels.min() < 0 or levels.max() > HOT_NEXT:
        return None
    weights, groups, group_count = _read_levels(levels)
    if group_count > _GROUPS:
        return None
    words = np.frombuffer(data[at + plan_size : end].tobytes(), "<u4")
    stops, told_by = np.empty(len(base), np.uint32), np.empty(len(base), np.uint8)
    found = _walk(base, weights, groups, plan[1], words, stops, told_by)
    if found == BAD:
        return None
    sizes = np.bincount(told_by[:found], minlength=group_count)
    sections = unpack(data, end, [(int(size), 0) for size in sizes])
    if sections is None:
        return None
    told = np.concatenate(sections)
    positions, steps = np.empty(found + 1, np.uint32), np.empty(found + 1, np.int16)
    if _deal(stops[:found], told_by, told, np.cumsum(sizes) - sizes, positions, steps) != changes:
        return None
    return positions[:changes], steps[:changes]


def _read_levels(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Weights int64 [EXPONENTS], groups uint8 [EXPONENTS] (0: not hot), number of groups."""
    octaves = np.maximum((levels >> 2) - 1, 0)
    lowest = np.where(levels < 4, levels, (4 + (levels & 3)) << octaves)
    hot = levels >= HOT
    weights = np.where(hot, HOT_WEIGHT, lowest + ((1 << octaves) >> 1))
    groups = np.where(hot, np.cumsum(levels == HOT_NEXT), 0)
    return weights, groups.astype(np.uint8), int(groups.max()) + 1


# ---------------------------------------------------------------- kernels


@kernel(I64, U16, U32, I16, I64_OUT, I64_OUT, I64_OUT)
def _count(
    base: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    elements: np.ndarray,
    changes: np.ndarray,
    numbers: np.ndarray,
) -> int:
    """By exponent of the base: elements, changes, and the symbols of their steps, [EXPONENTS * SYMBOLS]."""
    tallies = np.zeros(4 * EXPONENTS, np.int64)  # four, so that no sum waits for itself
    whole = len(base) & ~3
    for i in range(0, whole, 4):
        tallies[(int64(base[i]) >> 7) & 0xFF] += 1
        tallies[EXPONENTS + ((int64(base[i + 1]) >> 7) & 0xFF)] += 1
        tallies[2 * EXPONENTS + ((int64(base[i + 2]) >> 7) & 0xFF)] += 1
        tallies[3 * EXPONENTS + ((int64(base[i + 3]) >> 7) & 0xFF)] += 1
    for i in range(whole, len(base)):
        tallies[(int64(base[i]) >> 7) & 0xFF] += 1
    for i in range(4 * EXPONENTS):
        elements[i & 0xFF] += tallies[i]
    for j in range(len(positions)):
        exponent = (int64(base[positions[j]]) >> 7) & 0xFF
        changes[exponent] += 1
        numbers[exponent * SYMBOLS + symbol_of(step_number(int64(steps[j])))] += 1
    for exponent in range(EXPONENTS):
        numbers[exponent * SYMBOLS] = elements[exponent] - changes[exponent]
    return 0


@kernel(I64, I64_IN, I64_IN, I64_IN, I64_OUT)
def _set_levels(elements: np.ndarray, changes: np.ndarray, numbers: np.ndarray, levels: np.ndarray) -> int:
    """Hot exponents join the group before as long as that costs no more than a table of their own."""
    group = np.zeros(SYMBOLS, np.int64)
    group_cost, any_hot, made = 0.0, False, 0
    for exponent in range(EXPONENTS):
        if changes[exponent] == 0:
            continue
        chance = changes[exponent] / elements[exponent]
        if chance < HOT_FROM:
            weight = int64(-math.log(1.0 - chance) * UNIT + 0.5)
            levels[exponent] = symbol_of(max(weight, 1))
            continue
        alone = together = 0.0
        alone_total = together_total = 0
        for symbol in range(SYMBOLS):
            mine = numbers[exponent * SYMBOLS + symbol]
            both = mine + group[symbol]
            alone_total += mine
            together_total += both
            if mine:
                alone += 5.0 - mine * math.log2(mine)  # a table takes about 5 bits a symbol
            if both:
                together += 5.0 - both * math.log2(both)
        alone += alone_total * math.log2(alone_total) + 12.0
        together += together_total * math.log2(together_total) + 12.0
        joins = any_hot and (together <= alone + group_cost or made == _GROUPS - 2)
        levels[exponent] = HOT if joins else HOT_NEXT
        if not joins:
            made += 1
        any_hot = True
        group_cost = together if joins else alone
        for symbol in range(SYMBOLS):
            group[symbol] = numbers[exponent * SYMBOLS + symbol] + (group[symbol] if joins else 0)
    return 0


@kernel(I64, U16, U32, I16, I64_IN, U8, I64_OUT, U32_OUT, U32_OUT, U32_OUT, U32_OUT)
def _survey(
    base: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    weights: np.ndarray,
    groups: np.ndarray,
    cursors: np.ndarray,
    told: np.ndarray,
    buckets: np.ndarray,
    lows: np.ndarray,
    parts: np.ndarray,
) -> int:
    """What the decoder will be told: steps by group into `told` (each group from its cursor on), and for every symbol
    its bucket and the element's part of that, [low, low + part). Returns the number of symbols."""
    n = len(base)
    made = change = 0
    next_change = int64(positions[0])
    length = 0  # since the last change
    i = 0
    while i < n:
        if i + 4 <= n and i + 4 <= next_change:
            sum_4 = (
                weights[(int64(base[i]) >> 7) & 0xFF]
                + weights[(int64(base[i + 1]) >> 7) & 0xFF]
                + weights[(int64(base[i + 2]) >> 7) & 0xFF]
                + weights[(int64(base[i + 3]) >> 7) & 0xFF]
            )
            if sum_4 < HOT_WEIGHT:
                length += sum_4
                i += 4
                continue
        exponent = (int64(base[i]) >> 7) & 0xFF
        weight = weights[exponent]
        number = 0
        changed = i == next_change
        if changed:
            number = step_number(int64(steps[change]))
            change += 1
            next_change = int64(positions[change]) if change < len(positions) else n
        i += 1
        if weight == HOT_WEIGHT:
            group = groups[exponent]
            told[cursors[group]] = number
            cursors[group] += 1
            continue
        if not changed:
            length += weight
            continue
        told[cursors[0]] = number - 1
        cursors[0] += 1
        while length >= SKIP_LENGTH:
            buckets[made] = SKIP
            made += 1
            length -= SKIP_LENGTH
        # An element across a border is told by its larger part.
        bucket = symbol_of(length >> BUCKET_BITS)
        low = length - (lowest_of(bucket) << BUCKET_BITS)
        part = min(weight, (1 << (BUCKET_BITS + low_bits_of(bucket))) - low)
        if 2 * part < weight and bucket + 1 < SKIP:
            bucket += 1
            low = 0
            part = min(weight - part, 1 << (BUCKET_BITS + low_bits_of(bucket)))
        buckets[made] = bucket
        lows[made] = low
        parts[made] = part
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


@kernel(I64, U16, I64_IN, U8, U32, U32, U32_OUT, U8_OUT)
def _walk(
    base: np.ndarray,
    weights: np.ndarray,
    groups: np.ndarray,
    buckets: np.ndarray,
    words: np.ndarray,
    stops: np.ndarray,
    told_by: np.ndarray,
) -> int:
    """Finds every element whose step is told, and by which group. How many, or BAD."""
    n = len(base)
    if len(words) < 2:
        return BAD
    state = uint64(words[0]) | (uint64(words[1]) << uint64(32))
    word = 2
    i = found = 0
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
        length = weight = 0
        while True:
            while i + 4 <= n:
                sum_4 = (
                    weights[(int64(base[i]) >> 7) & 0xFF]
                    + weights[(int64(base[i + 1]) >> 7) & 0xFF]
                    + weights[(int64(base[i + 2]) >> 7) & 0xFF]
                    + weights[(int64(base[i + 3]) >> 7) & 0xFF]
                )
                if length + sum_4 > target:
                    break
                length += sum_4
                i += 4
            if i >= n:
                return BAD
            exponent = (int64(base[i]) >> 7) & 0xFF
            weight = weights[exponent]
            if weight == HOT_WEIGHT:
                stops[found] = i
                told_by[found] = groups[exponent]
                found += 1
            else:
                length += weight
                if length > target:
                    break
            i += 1
        stops[found] = i
        told_by[found] = 0
        found += 1
        i += 1
        low = max(length - weight - border, 0)
        part = min(length - border, 1 << bits) - low
        state = uint64(part) * (state >> uint64(bits)) + uint64(value - low)
        if state < uint64(1 << 32):
            if word == len(words):
                return BAD
            state = (state << uint64(32)) | uint64(words[word])
            word += 1
    while i < n:
        exponent = (int64(base[i]) >> 7) & 0xFF
        if weights[exponent] == HOT_WEIGHT:
            stops[found] = i
            told_by[found] = groups[exponent]
            found += 1
        i += 1
    if ahead or word != len(words) or state != uint64(1 << 32):
        return BAD
    return found


@kernel(I64, U32, U8, U32, I64_IN, U32_OUT, I16_OUT)
def _deal(
    stops: np.ndarray,
    told_by: np.ndarray,
    told: np.ndarray,
    starts: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Gives every stop the next step of its group; those of 0 are left out. The number of changes, or BAD."""
    cursors = starts.copy()
    made = 0
    for i in range(len(stops)):
        group = int64(told_by[i])
        number = int64(told[cursors[group]]) + int64(group == 0)
        cursors[group] += 1
        if number > 0xFFFF:
            return BAD
        positions[made] = stops[i]  # overwritten unless something changed: the outputs hold one more
        steps[made] = number_step(number)
        made += int64(number != 0)
    return made
