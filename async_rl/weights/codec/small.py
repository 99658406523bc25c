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
    SPARE,
    STATES,
    first_context,
    pick,
    put_picks,
    split,
    spread,
    survey,
)
from async_rl.weights.codec.hot import deal_hot, group_hot, tell_hot
from async_rl.weights.codec.jit import I16_OUT, I64, U32, int64, kernel
from async_rl.weights.codec.model import EXPONENTS, SmallPlan, get_levels, model_of
from async_rl.weights.codec.numbers import get_varint, pack, put_varint, unpack
from async_rl.weights.codec.rans import BAD
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import number_step

__all__ = ["decode_small", "encode_small"]

Steps = tuple[np.ndarray, np.ndarray]

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
    sizes = _sizes(in_context, cold, in_group)
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
            pack(told[:size], sizes.tolist(), [0] * len(sizes)),
        )
    )


def decode_small(data: np.ndarray, base: np.ndarray) -> list[Steps] | None:
    """Positions and steps, in scratch and in two parts that have no position in common. None for bytes that nobody
    wrote."""
    at, head = 0, []
    for _ in range(_HEAD):
        number, at = get_varint(data, at)
        head.append(number)
    changes, cold, limit, first_level, span, shift, first, word_count = head
    words_at = at + span + 1
    told_at = words_at + 4 * word_count
    if min(head) < 0 or changes > len(base) or cold > changes or told_at > len(data):
        return None
    if limit > EXPONENTS or shift > 2 or first > 32:
        return None
    levels = get_levels(data[at:words_at], first_level)
    if levels is None:
        return None
    model = model_of(levels, limit)
    (parts, sums, contexts), in_context, hot = split(base, model, shift, first)
    hot_groups, in_group = group_hot(base, hot, model)
    sizes = _sizes(in_context, cold, in_group)
    starts = np.cumsum(sizes) - sizes
    told = unpack(data, told_at, sizes.tolist(), [0] * len(sizes), keep=False)
    if told is None:
        return None
    where = scratch("where", cold + SPARE, np.uint32)
    if spread(told, starts, sums, contexts, where) == BAD:
        return None
    picked, picked_steps = where[:cold], scratch("picked_steps", cold, np.int16)
    words = np.frombuffer(data[words_at:told_at].tobytes(), "<u4")
    if cold and pick(base, model.weights, shift, parts, sums, picked, words) == BAD:
        return None
    steps_at = int(starts[CONTEXTS])
    if (word_count and not cold) or _deal(told[steps_at : steps_at + cold], picked_steps) == BAD:
        return None
    hot_positions = scratch("hot_positions", len(hot) + 1, np.uint32)
    hot_steps = scratch("hot_steps", len(hot) + 1, np.int16)
    kept = deal_hot(hot, hot_groups, told, starts[CONTEXTS:], hot_positions, hot_steps)
    if kept == BAD or kept + cold != changes:
        return None
    return [(picked, picked_steps), (hot_positions[:kept], hot_steps[:kept])]


def _sizes(in_context: np.ndarray, cold: int, in_group: np.ndarray) -> np.ndarray:
    """Of all sequences, as they follow each other: numbers by context, steps of what is picked, steps by group."""
    in_group[0] = cold  # no element is in this group
    return np.concatenate((in_context, in_group))


@kernel(I64, U32, I16_OUT)
def _deal(told: np.ndarray, steps: np.ndarray) -> int:
    largest = 0
    for i in range(len(told)):
        number = int64(told[i]) + 1
        largest = max(largest, number)
        steps[i] = number_step(number)
    return 0 if largest <= 0xFFFF else BAD
