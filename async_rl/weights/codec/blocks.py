"""The small mode's elements that are not hot: how many of a block change, and which.

A block is 16, 32 or 64 consecutive elements. The sum of their weights tells about how many change, so the number that
does is coded in one of CONTEXTS sequences, by the size of the sum, half an octave each. Which ones, is told for one
after another by an interval of rANS as long as the element's part of the sum. The decoder knows from the numbers
which block every change is in, before it looks for any: so the changes take turns on four states, and the search
for one need not wait for the one before.

States have 64 bits, words 32. An element whose weights reach from `low` to `high` in its block's sum has those slots
s of 2^16 for which low <= s * sum >> 16 < high.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from async_rl.weights.codec.elements import put_places
from async_rl.weights.codec.jit import (
    HAS_SUM_16,
    HAS_SUM_64,
    I16,
    I64,
    I64_IN,
    I64_OUT,
    U8,
    U8_OUT,
    U16,
    U16_OUT,
    U32,
    U32_OUT,
    below_64,
    inlined,
    int64,
    kernel,
    load_u32,
    load_u64,
    prefetch,
    sum_16,
    sum_64,
    uint64,
)
from async_rl.weights.codec.model import EXPONENTS, WEIGHTS, Model
from async_rl.weights.codec.rans import BAD, symbol_of
from async_rl.weights.codec.scratch import scratch
from async_rl.weights.codec.steps import step_number

__all__ = [
    "CONTEXTS",
    "PART_BITS",
    "SPARE",
    "STATES",
    "Blocks",
    "first_context",
    "pick",
    "put_picks",
    "split",
    "split_into",
    "spread",
    "survey",
]

CONTEXTS = 8
PART_BITS = 4  # blocks are 1, 2 or 4 parts of 16 elements
STATES = 4
LOW_STATE = 1 << 32
SPARE = 3
AHEAD = 8
"""Changes for which the weights are fetched before they are looked for."""

Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Sums of the weights of the parts, uint16 [blocks << shift], 0 past the last element; of the blocks; and the blocks'
contexts, uint8."""


def first_context(weight: float, shift: int) -> int:
    """Of blocks of 16 << `shift` elements whose mean weight is `weight`."""
    half_octaves = int(2 * np.log2(max(weight * (16 << shift), 1.0)))
    return max(half_octaves - CONTEXTS // 2, 0)


def split(base: np.ndarray, model: Model, shift: int, first: int) -> tuple[Blocks, np.ndarray, np.ndarray]:
    """Blocks of 16 << `shift` elements; how many there are in each context, int64 [CONTEXTS]; positions uint32 of the
    hot elements. In scratch. `first` is
    the size of a sum, in half octaves, up to which blocks are in the first context."""
    blocks = -(-len(base) >> (PART_BITS + shift))
    made = (
        scratch("parts", blocks << shift, np.uint16),
        scratch("sums", blocks, np.uint16),
        scratch("contexts", blocks, np.uint8),
    )
    sizes = np.zeros(CONTEXTS, np.int64)
    hot = scratch("hot", len(base), np.uint32)
    found = split_into(base, model.limit, *model[1:4], shift, first, *made, sizes, hot)
    return made, sizes, hot[:found]


if HAS_SUM_16:

    @inlined
    def _weigh(
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

    @inlined
    def _weigh(
        base: np.ndarray,
        at: int,
        count: int,
        limit: int,
        weights: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> int:
        total = 0
        for i in range(at, at + count):
            total += weights[(int64(base[uint64(i)]) >> 7) & 0xFF]
        return total


if HAS_SUM_64:

    @inlined
    def _weigh_64(
        base: np.ndarray,
        at: int,
        limit: int,
        weights: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        parts: np.ndarray,
        part: int,
    ) -> None:
        """Four parts. `low` and `high`: of the weights from exponent max(limit - 1, 0) on."""
        sum_64(base, at, max(limit - 1, 0), low, high, parts, part)

else:

    @inlined
    def _weigh_64(
        base: np.ndarray,
        at: int,
        limit: int,
        weights: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        parts: np.ndarray,
        part: int,
    ) -> None:
        for i in range(4):
            total = 0
            for j in range(at + (i << PART_BITS), at + ((i + 1) << PART_BITS)):
                total += weights[(int64(base[uint64(j)]) >> 7) & 0xFF]
            parts[uint64(part + i)] = total


@inlined
def _weigh_4(weights: np.ndarray, four: Any) -> int:
    """Of four elements, in one word."""
    mask = uint64(0xFF)
    low: int = weights[(four >> uint64(7)) & mask] + weights[(four >> uint64(23)) & mask]
    high: int = weights[(four >> uint64(39)) & mask] + weights[(four >> uint64(55)) & mask]
    return low + high


@inlined
def _slot(place: int, total: int) -> int:
    """The first that is not below `place` of `total`."""
    scaled = (uint64(place) << uint64(16)) + uint64(total - 1)
    return int64((scaled & uint64(0xFFFFFFFF)) // (uint64(total) & uint64(0xFFFF)))  # 32 bits: faster


@kernel(I64, U16, I64, I64_IN, U8, U8, I64, I64, U16_OUT, U16_OUT, U8_OUT, I64_OUT, U32_OUT)
def split_into(
    base: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low_bytes: np.ndarray,
    high_bytes: np.ndarray,
    shift: int,
    first: int,
    parts: np.ndarray,
    sums: np.ndarray,
    contexts: np.ndarray,
    sizes: np.ndarray,
    hot: np.ndarray,
) -> int:
    """Fills in Blocks, sizes of contexts, and positions of elements that are hot; how many are. In one pass, as the
    weights come from memory."""
    found = 0
    together = len(base) >> 6
    low_16, high_16 = np.empty(WEIGHTS, np.uint8), np.empty(WEIGHTS, np.uint8)
    for i in range(WEIGHTS):
        number = min(i + int64(limit == 0), WEIGHTS - 1)
        low_16[i], high_16[i] = low_bytes[number], high_bytes[number]
    for four in range(together):
        at = four << 6
        _weigh_64(base, at, limit, weights, low_16, high_16, parts, four << 2)
        if limit:
            below = below_64(base, at, limit << 7) if limit < EXPONENTS else ~uint64(0)
            found = put_places(below, at, hot, found)
    if limit:
        for i in range(together << 6, len(base)):
            if (int64(base[i]) >> 7) & 0xFF < limit:
                hot[uint64(found)] = i
                found += 1
    whole = len(base) >> PART_BITS
    for part in range(together << 2, whole):
        parts[part] = _weigh(base, part << PART_BITS, 16, limit, weights, low_bytes, high_bytes)
    if whole << PART_BITS < len(base):
        rest = 0
        for i in range(whole << PART_BITS, len(base)):
            rest += weights[(int64(base[i]) >> 7) & 0xFF]
        parts[whole] = rest
    for part in range(-(-len(base) >> PART_BITS), len(parts)):
        parts[part] = 0
    if shift == 0:
        for block in range(len(sums)):
            sums[block] = parts[block]
    elif shift == 1:
        for block in range(len(sums)):
            sums[block] = parts[2 * block] + parts[2 * block + 1]
    else:
        for block in range(len(sums)):
            at = 4 * block
            sums[block] = parts[at] + parts[at + 1] + parts[at + 2] + parts[at + 3]
    tallies = np.zeros(4 * CONTEXTS, np.int64)  # four, so that no sum waits for itself
    for block in range(len(sums)):
        context = min(max((symbol_of(int64(sums[block])) >> 1) - first, 0), CONTEXTS - 1)
        contexts[block] = context
        tallies[uint64((block & 3) * CONTEXTS + context)] += 1
    for i in range(4 * CONTEXTS):
        sizes[i & (CONTEXTS - 1)] += tallies[i]
    return found


# ---------------------------------------------------------------- the writer's side


@kernel(
    I64,
    U16,
    U32,
    I16,
    I64,
    I64_IN,
    U8,
    U8,
    I64,
    U16,
    U16,
    U8,
    I64_IN,
    U8_OUT,
    U32_OUT,
    U32_OUT,
    U32_OUT,
    U32_OUT,
)
def survey(
    base: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    limit: int,
    weights: np.ndarray,
    low_bytes: np.ndarray,
    high_bytes: np.ndarray,
    shift: int,
    parts: np.ndarray,
    sums: np.ndarray,
    contexts: np.ndarray,
    starts: np.ndarray,
    numbers: np.ndarray,
    told_numbers: np.ndarray,
    told_steps: np.ndarray,
    slots: np.ndarray,
    widths: np.ndarray,
) -> int:
    """What the decoder will be told of elements that are not hot: the number of changes in each block, context by
    context from `starts` on; steps; the first of each element's slots and their number. How many change."""
    for block in range(len(numbers)):
        numbers[block] = 0
    cold = 0
    for change in range(len(positions)):
        position = uint64(positions[change])
        # Overwritten if it is hot: the outputs hold one more.
        slots[uint64(cold)] = position
        told_steps[uint64(cold)] = step_number(int64(steps[change])) - 1
        cold += int64((int64(base[position]) >> 7) & 0xFF >= limit)
    for change in range(cold):
        position = int64(slots[uint64(change)])
        part = position >> PART_BITS
        block = part >> shift
        numbers[uint64(block)] += 1
        low = 0
        for before in range(block << shift, ((block + 1) << shift) - 1):
            low += int64(parts[uint64(before)]) & -int64(before < part)
        at = part << PART_BITS
        if at + 16 <= len(base):
            low += _weigh(base, at, position - at, limit, weights, low_bytes, high_bytes)
        else:
            for i in range(at, position):
                low += weights[(int64(base[i]) >> 7) & 0xFF]
        total = int64(sums[uint64(block)])
        slot = _slot(low, total)
        weight = weights[(int64(base[uint64(position)]) >> 7) & 0xFF]
        slots[uint64(change)] = slot
        widths[uint64(change)] = _slot(low + weight, total) - slot
    cursors = starts.copy()
    for block in range(len(numbers)):
        context = uint64(contexts[block])
        cursor = cursors[context]
        cursors[context] = cursor + 1
        told_numbers[uint64(cursor)] = numbers[block]
    return cold


@inlined
def _put(state: Any, slot: Any, width: Any, words: np.ndarray, at: int) -> tuple[Any, int]:
    words[uint64(at)] = state & uint64(0xFFFFFFFF)  # kept if `at` moves on
    full = int64((state >> uint64(48)) >= width)
    state >>= uint64(full << 5)
    quotient = state // width
    return (quotient << uint64(16)) + (state - quotient * width) + slot, at - full


@kernel(I64, U32, U32, U32_OUT)
def put_picks(slots: np.ndarray, widths: np.ndarray, words: np.ndarray) -> int:
    """Backwards to the end of `words`, which holds one a change and 2 * STATES + 1 more; the first word used."""
    x0 = x1 = x2 = x3 = uint64(LOW_STATE)
    at = len(words) - 1
    i = len(slots)
    while i & 3:
        i -= 1
        turn = i & 3
        slot, width = uint64(slots[uint64(i)]), uint64(widths[uint64(i)])
        if turn == 0:
            x0, at = _put(x0, slot, width, words, at)
        elif turn == 1:
            x1, at = _put(x1, slot, width, words, at)
        else:
            x2, at = _put(x2, slot, width, words, at)
    while i:
        i -= 4
        x3, at = _put(x3, uint64(slots[uint64(i + 3)]), uint64(widths[uint64(i + 3)]), words, at)
        x2, at = _put(x2, uint64(slots[uint64(i + 2)]), uint64(widths[uint64(i + 2)]), words, at)
        x1, at = _put(x1, uint64(slots[uint64(i + 1)]), uint64(widths[uint64(i + 1)]), words, at)
        x0, at = _put(x0, uint64(slots[uint64(i)]), uint64(widths[uint64(i)]), words, at)
    for state in (x3, x2, x1, x0):
        words[at] = state >> uint64(32)
        words[at - 1] = state & uint64(0xFFFFFFFF)
        at -= 2
    return at + 1


# ---------------------------------------------------------------- the reader's side


@kernel(I64, U32, I64_IN, U16, U8, U32_OUT)
def spread(
    told: np.ndarray, starts: np.ndarray, sums: np.ndarray, contexts: np.ndarray, where: np.ndarray
) -> int:
    """The numbers of changes, context by context from `starts` on -> the block of each change. `where` holds SPARE
    more than there are. 0, or BAD if they are not so many or a block of no weight has some."""
    cursors = starts.copy()
    room = len(where) - SPARE
    found = weightless = 0
    for block in range(len(sums)):
        context = uint64(contexts[block])
        cursor = cursors[context]
        cursors[context] = cursor + 1
        number = int64(told[uint64(cursor)])
        weightless |= int64(number != 0) & int64(sums[block] == 0)
        for i in range(SPARE):  # whatever is not wanted is overwritten
            where[uint64(found + i)] = block
        found += number
        if found > room:
            return BAD
        for i in range(SPARE, number):
            where[uint64(found - number + i)] = block
    return 0 if found == room and not weightless else BAD


@inlined
def _find(
    base: np.ndarray, weights: np.ndarray, parts: np.ndarray, shift: int, block: int, target: int
) -> tuple[int, int, int]:
    """The element of the block that holds `target`, which is below its sum: its position, what the elements before it
    weigh, and its weight. With masks instead of branches, which could not be predicted."""
    at = block << shift
    first = at
    low = end = 0
    for i in range(first, first + (1 << shift) - 1):
        more = int64(parts[uint64(i)])
        end += more
        past = int64(end <= target)
        at += past
        low += more & -past
    at <<= PART_BITS
    if at + 16 > len(base):
        while True:
            weight = weights[(int64(base[uint64(at)]) >> 7) & 0xFF]
            if low + weight > target or at + 1 >= len(base):
                return at, low, weight
            low += weight
            at += 1
    fours_1 = _weigh_4(weights, load_u64(base, at))
    fours_2 = _weigh_4(weights, load_u64(base, at + 4))
    fours_3 = _weigh_4(weights, load_u64(base, at + 8))
    left = target - low
    past_1, past_2 = int64(fours_1 <= left), int64(fours_1 + fours_2 <= left)
    past_3 = int64(fours_1 + fours_2 + fours_3 <= left)
    low += (fours_1 & -past_1) + (fours_2 & -past_2) + (fours_3 & -past_3)
    at += 4 * (past_1 + past_2 + past_3)
    four = load_u64(base, at)
    mask = uint64(0xFF)
    one_1 = weights[(four >> uint64(7)) & mask]
    one_2 = weights[(four >> uint64(23)) & mask]
    one_3 = weights[(four >> uint64(39)) & mask]
    left = target - low
    past_1, past_2 = int64(one_1 <= left), int64(one_1 + one_2 <= left)
    past_3 = int64(one_1 + one_2 + one_3 <= left)
    low += (one_1 & -past_1) + (one_2 & -past_2) + (one_3 & -past_3)
    past = past_1 + past_2 + past_3
    return at + past, low, weights[(four >> uint64((past << 4) + 7)) & mask]


@kernel(I64, U16, I64_IN, I64, U16, U16, U32_OUT, U8)
def pick(
    base: np.ndarray,
    weights: np.ndarray,
    shift: int,
    parts: np.ndarray,
    sums: np.ndarray,
    where: np.ndarray,
    words: np.ndarray,
) -> int:
    """Blocks become positions, in place. `words` are bytes. 0, or BAD."""
    if len(words) < 8 * STATES:
        return BAD
    x0, x1, x2, x3 = load_u64(words, 0), load_u64(words, 8), load_u64(words, 16), load_u64(words, 24)
    word = 8 * STATES
    last = len(words) - 4
    before = -1
    end = len(where) - 1
    for i in range(len(where)):
        block = int64(where[i])
        ahead = int64(where[uint64(min(i + AHEAD, end))]) << (PART_BITS + shift)
        prefetch(base, ahead)
        prefetch(base, ahead + (8 << shift))
        total = int64(sums[uint64(block)])
        slot = int64(x0 & uint64(0xFFFF))
        at, low, weight = _find(base, weights, parts, shift, block, (slot * total) >> 16)
        if at <= before:
            return BAD  # twice the same, or not in order
        before = at
        where[i] = at
        first = _slot(low, total)
        width = _slot(low + weight, total) - first
        x = uint64(width) * (x0 >> uint64(16)) + uint64(slot - first)
        empty = int64(x < uint64(LOW_STATE))
        next_word = load_u32(words, min(word, last))  # wanted or not, as in rans.py
        x = (x << uint64(empty << 5)) | (next_word & uint64(-empty))
        x0, x1, x2, x3 = x1, x2, x3, x
        word += empty << 2
    if x0 != LOW_STATE or x1 != LOW_STATE or x2 != LOW_STATE or x3 != LOW_STATE:
        return BAD
    return 0 if word == len(words) else BAD
