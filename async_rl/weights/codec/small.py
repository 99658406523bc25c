"""SMALL: what changes is told by what the base weight is. Smaller, and not readable without the base.

How probable a change is depends on the exponent of the base weight, which both sides have. model.py says how probable
by exponent; blocks.py picks the elements that change, among those for which that is rare; hot.py tells a step for
each of the others.

    varint changes, cold changes, limit, first level, levels - 1, shift of blocks, first context, words
    levels, a byte each | words of the picks
    numbers of changes in blocks, by context | steps of what was picked, less 1, as none is 0 | steps of hot elements,
    group by group: as numbers.py packs them
"""

from __future__ import annotations

import numpy as np

from async_rl.weights.codec.blocks import (
    CONTEXTS,
    PART_BITS,
    SPARE,
    STATES,
    first_context,
    pick,
    put_picks,
    split,
    split_into,
    spread,
    survey,
)
from async_rl.weights.codec.elements import apply
from async_rl.weights.codec.hot import deal_hot, group_hot, group_into, tell_hot
from async_rl.weights.codec.jit import (
    I16_OUT,
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16,
    U16_OUT,
    U32,
    U32_OUT,
    U64_OUT,
    int64,
    kernel,
)
from async_rl.weights.codec.model import EXPONENTS, GROUPS, WEIGHTS, SmallPlan, fill_model, get_levels
from async_rl.weights.codec.numbers import pack, put_varint, read_other_forms, read_symbols
from async_rl.weights.codec.rans import BAD
from async_rl.weights.codec.rans import SPARE as SYMBOLS_SPARE
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import number_step

__all__ = ["apply_small", "encode_small"]

PARTS = 4  # in a block, at most

CROWDED = 0.5
"""Changes in a block, in the mean, with which smaller blocks are worth their time: the order of k changes in one is
told in vain, log2(k!) bits."""

_HEAD = 8  # numbers


def encode_small(
    base: np.ndarray, new: np.ndarray, positions: np.ndarray, steps: np.ndarray, plan: SmallPlan
) -> bytes:
    model, cold = plan.model, plan.cold
    shift = 2
    while shift and cold * (16 << shift) > CROWDED * len(base):
        shift -= 1
    first = first_context(plan.weight, shift)
    blocks, in_context, hot = split(base, model, shift, first)
    hot_groups, in_group = group_hot(base, hot, model)
    in_group[0] = cold  # no element is in this group
    sizes = np.concatenate((in_context, in_group))
    starts = np.cumsum(sizes) - sizes
    size = int(sizes.sum())
    told = scratch("told", size + 1, np.uint32)
    slots, widths = scratch("slots", cold + 1, np.uint32), scratch("widths", cold, np.uint32)
    numbers = scratch("block_numbers", len(blocks[1]), np.uint8)
    told_steps = told[starts[CONTEXTS] :]
    survey(
        base, positions, steps, *model[:4], shift, *blocks, starts, numbers, told, told_steps, slots, widths
    )
    tell_hot(base, new, hot, hot_groups, starts[CONTEXTS:], told)
    words = scratch("words", cold + 2 * STATES + 1, np.uint32)
    first_word = put_picks(slots[:cold], widths, words) if cold else len(words)
    head = (
        len(positions),
        cold,
        model.limit,
        plan.first,
        plan.last - plan.first,
        shift,
        first,
        len(words) - first_word,
    )
    levels = plan.levels[plan.first : plan.last + 1].astype(np.uint8)
    picks = words[first_word:].astype("<u4", copy=False)
    return b"".join(
        (
            *map(put_varint, head),
            levels.data,
            picks.data,
            pack(told[:size], sizes, np.zeros(len(sizes), np.int64)),
        )
    )


def apply_small(data: np.ndarray, values: np.ndarray, place: int) -> tuple[int, int] | None:
    """Changes `values` in place; how many change, and what that adds to the digest, modulo 2^64. None for bytes that
    nobody wrote, with `values` as they were."""
    count = len(values)
    parts = -(-count >> PART_BITS) + PARTS
    blocks = (
        scratch("parts", parts, np.uint16),
        scratch("sums", parts, np.uint16),
        scratch("contexts", parts, np.uint8),
        scratch("hot", count, np.uint32),
        scratch("hot_groups", count, np.uint8),
    )
    told = scratch("told", count + parts, np.uint32)
    symbols = scratch("symbols", count + parts + SYMBOLS_SPARE, np.uint8)
    facts, sizes, forms = np.empty(_FACTS, np.int64), np.zeros(_SIZES, np.int64), np.zeros(_SIZES, np.int64)
    weights = np.empty(EXPONENTS, np.int64)
    if _read(data, values, *blocks, told, symbols, facts, sizes, forms, weights) == BAD:
        return None
    at = int(facts[_READ_TO])
    if forms.any():
        at = read_other_forms(data, at, sizes, forms, told, symbols)
    changed, cold, hot = facts[:3].tolist()
    if at != len(data):
        return None
    positions = scratch("positions", max(count, cold + hot + SPARE + 1), np.uint32)
    steps = scratch("steps", cold + hot + 1, np.int16)
    moved = np.zeros(1, np.uint64)
    if _apply(data, values, place, *blocks, told, facts, sizes, weights, positions, steps, moved) == BAD:
        return None
    return changed, int(moved[0])


_CHANGED, _COLD, _HOT, _SHIFT, _BLOCKS, _WORDS_FROM, _WORDS_TO, _READ_TO, _FACTS = range(9)
_SIZES = CONTEXTS + GROUPS + 1


@kernel(
    I64,
    U8,
    U16,
    U16_OUT,
    U16_OUT,
    U8_OUT,
    U32_OUT,
    U8_OUT,
    U32_OUT,
    U8_OUT,
    I64_OUT,
    I64_OUT,
    I64_OUT,
    I64_OUT,
)
def _read(
    data: np.ndarray,
    base: np.ndarray,
    parts: np.ndarray,
    sums: np.ndarray,
    contexts: np.ndarray,
    hot: np.ndarray,
    hot_groups: np.ndarray,
    told: np.ndarray,
    symbols: np.ndarray,
    facts: np.ndarray,
    sizes: np.ndarray,
    forms: np.ndarray,
    weights: np.ndarray,
) -> int:
    """Everything told but what stands in other forms; fills in all but `data` and `base`. 0, or BAD."""
    head = np.empty(_HEAD, np.int64)
    at = 0
    for i in range(_HEAD):
        value = filled = 0
        while True:
            if at >= len(data) or filled > 28:
                return BAD
            byte = int64(data[at])
            at += 1
            value |= (byte & 127) << filled
            filled += 7
            if byte < 128:
                break
        head[i] = value
    changes, cold, limit, first_level = int64(head[0]), int64(head[1]), int64(head[2]), int64(head[3])
    span, shift, first, word_count = int64(head[4]), int64(head[5]), int64(head[6]), int64(head[7])
    if changes > len(base) or cold > changes or limit > EXPONENTS or shift > 2 or first > 32:
        return BAD
    if word_count and not cold:
        return BAD
    levels = np.zeros(EXPONENTS, np.int64)
    words_at = get_levels(data, at, span, first_level, levels)
    at = words_at + 4 * word_count
    if words_at < 0 or at > len(data):
        return BAD
    low, high = np.zeros(WEIGHTS, np.uint8), np.zeros(WEIGHTS, np.uint8)
    groups = np.empty(EXPONENTS, np.uint8)
    fill_model(levels, limit, weights, low, high, groups)
    blocks = ((len(base) - 1) >> (PART_BITS + shift)) + 1
    found = split_into(
        base,
        limit,
        weights,
        low,
        high,
        shift,
        first,
        parts[: blocks << shift],
        sums[:blocks],
        contexts[:blocks],
        sizes[:CONTEXTS],
        hot,
    )
    if found + cold > len(base):
        return BAD
    group_into(base, hot[:found], groups, hot_groups, sizes[CONTEXTS:])
    sizes[CONTEXTS] = cold  # no element is in this group
    if blocks + cold + found:
        at = read_symbols(data, at, sizes, np.zeros(_SIZES, np.int64), told, symbols, forms)
    facts[_CHANGED], facts[_COLD], facts[_HOT], facts[_SHIFT], facts[_BLOCKS] = (
        changes,
        cold,
        found,
        shift,
        blocks,
    )
    facts[_WORDS_FROM], facts[_WORDS_TO], facts[_READ_TO] = words_at, words_at + 4 * word_count, at
    return 0 if at >= 0 else BAD


@kernel(I64, U32, I16_OUT)
def _deal(told: np.ndarray, steps: np.ndarray) -> int:
    largest = 0
    for i in range(len(told)):
        number = int64(told[i]) + 1
        largest = max(largest, number)
        steps[i] = number_step(number)
    return 0 if largest <= 0xFFFF else BAD


@kernel(
    I64,
    U8,
    U16_OUT,
    I64,
    U16,
    U16,
    U8,
    U32,
    U8,
    U32,
    I64_IN,
    I64_IN,
    I64_IN,
    U32_OUT,
    I16_OUT,
    U64_OUT,
)
def _apply(
    data: np.ndarray,
    values: np.ndarray,
    place: int,
    parts: np.ndarray,
    sums: np.ndarray,
    contexts: np.ndarray,
    hot: np.ndarray,
    hot_groups: np.ndarray,
    told: np.ndarray,
    facts: np.ndarray,
    sizes: np.ndarray,
    weights: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    moved: np.ndarray,
) -> int:
    """`values` as _read got them change, unless something is wrong with what it told. 0, or BAD."""
    cold, found = int64(facts[_COLD]), int64(facts[_HOT])
    shift, blocks = int64(facts[_SHIFT]), int64(facts[_BLOCKS])
    starts = np.zeros(_SIZES, np.int64)
    for i in range(1, _SIZES):
        starts[i] = starts[i - 1] + sizes[i - 1]
    if spread(told, starts, sums[:blocks], contexts, positions[: cold + SPARE]) == BAD:
        return BAD
    if cold:
        words = data[facts[_WORDS_FROM] : facts[_WORDS_TO]]
        if pick(values, weights, shift, parts, sums, positions[:cold], words) == BAD:
            return BAD
    if _deal(told[starts[CONTEXTS] : starts[CONTEXTS] + cold], steps) == BAD:
        return BAD
    hot_starts = starts[CONTEXTS:]
    kept = deal_hot(hot[:found], hot_groups, told, hot_starts, positions[cold:], steps[cold:])
    if kept == BAD or kept + cold != facts[_CHANGED]:
        return BAD
    moved[0] = apply(values, positions[: kept + cold], steps, place)  # no position is in both parts
    return 0
