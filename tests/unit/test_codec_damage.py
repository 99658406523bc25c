"""Coded bytes that nobody wrote: refused or harmless, never out of bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import Corrupt
from async_rl.weights.codec import Mode, apply_planes, apply_tile, encode_planes, tile_steps
from async_rl.weights.codec.blocks import CONTEXTS, SPARE, STATES, pick, put_picks, spread
from async_rl.weights.codec.model import get_levels
from async_rl.weights.codec.numbers import pack, put_varint
from async_rl.weights.codec.rans import BAD
from tests.unit.test_codec import changes, coded_by

quick = settings(max_examples=150, deadline=None)
modes = st.sampled_from(list(Mode))
GUARD = 64


def apply_guarded(mode, data, base):
    """Applies between two walls; (what came out, or None for Corrupt)."""
    walled = np.full(len(base) + 2 * GUARD, 0xABCD, np.uint16)
    inside = walled[GUARD:-GUARD]
    inside[:] = base
    try:
        changed, moved = apply_tile(mode, data, inside, 0)
    except Corrupt:
        assert np.array_equal(inside, base), "a refused tile has changed something"
        changed = -1
    else:
        assert 0 <= changed <= len(base) and 0 <= moved < 1 << 64
    assert (walled[:GUARD] == 0xABCD).all() and (walled[-GUARD:] == 0xABCD).all()
    return inside if changed >= 0 else None


@quick
@given(modes, st.binary(max_size=300), st.integers(1, 5000))
def test_random_bytes_are_refused_or_stay_inside(mode, data, count):
    apply_guarded(mode, data, np.zeros(count, np.uint16))


@quick
@given(modes, changes(longest=3000), st.data())
def test_a_flipped_bit_is_refused_or_stays_inside(mode, pair, draw):
    base, new = pair
    if np.array_equal(base, new):
        return
    data = bytearray(coded_by(mode, base, new))
    at = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[at >> 3] ^= 1 << (at & 7)
    apply_guarded(mode, bytes(data), base)


@quick
@given(modes, changes(longest=3000), st.data())
def test_a_changed_byte_of_the_header_is_refused_or_stays_inside(mode, pair, draw):
    base, new = pair
    if np.array_equal(base, new):
        return
    data = bytearray(coded_by(mode, base, new))
    data[draw.draw(st.integers(0, min(len(data), 24) - 1))] = draw.draw(st.integers(0, 255))
    apply_guarded(mode, bytes(data), base)


@quick
@given(modes, changes(longest=3000), st.data())
def test_a_cut_or_longer_tile_is_refused(mode, pair, draw):
    base, new = pair
    if np.array_equal(base, new):
        return
    data = coded_by(mode, base, new)
    cut = draw.draw(st.integers(0, len(data) - 1))
    assert apply_guarded(mode, data[:cut], base) is None
    assert apply_guarded(mode, data + b"\0", base) is None


@quick
@given(modes, changes(longest=3000), st.integers(1, 6000))
def test_a_tile_for_another_count_of_elements_is_refused_or_stays_inside(mode, pair, count):
    base, new = pair
    if not np.array_equal(base, new):
        apply_guarded(mode, coded_by(mode, base, new), np.resize(base, count))


@quick
@given(changes(longest=3000), changes(longest=3000))
def test_a_small_tile_on_another_base_is_refused_or_stays_inside(pair, other):
    if not np.array_equal(*pair):
        apply_guarded(Mode.SMALL, coded_by(Mode.SMALL, *pair), other[0])


def packed(sequences):
    """Of (numbers, span) each."""
    lengths = np.array([len(values) for values, _ in sequences])
    spans = np.array([span for _, span in sequences])
    return pack(np.concatenate([values for values, _ in sequences]), lengths, spans)


def numbers_of(*values):
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("mode", "data"),
    [
        (Mode.STEPS, put_varint(1) + packed([(numbers_of(100), 200), (numbers_of(0), 0)])),
        (Mode.STEPS, put_varint(2) + packed([(numbers_of(98, 1), 200), (numbers_of(0, 0), 0)])),
        (Mode.STEPS, put_varint(1) + packed([(numbers_of(5), 200), (numbers_of(0xFFFF), 0)])),
        (
            Mode.STEPS,
            put_varint(101) + packed([(np.zeros(101, np.uint32), 200), (np.zeros(101, np.uint32), 0)]),
        ),
        (Mode.DENSE, put_varint(1) + packed([(numbers_of(*[0] * 99, 0x10000), 0)])),
        (Mode.DENSE, put_varint(2) + packed([(numbers_of(*[0] * 99, 1), 0)])),
    ],
    ids=[
        "first gap",
        "second gap",
        "a step of 0",
        "too many",
        "a step too large",
        "another number of changes",
    ],
)
def test_well_formed_bytes_with_impossible_numbers_are_refused(mode, data):
    assert apply_guarded(mode, data, np.zeros(100, np.uint16)) is None


@pytest.mark.parametrize(("shown", "first"), [((35, 36), 0), ((255,), 0), ((1, 1), 255)])
def test_levels_beyond_the_largest_weight_or_the_last_exponent_are_refused(shown, first):
    levels = np.zeros(256, np.int64)
    assert get_levels(np.array([9, 35, 0, 35, 9], np.uint8), 1, 2, 253, levels) == 4
    assert levels.tolist() == [0] * 253 + [35, 0, 35]
    assert get_levels(np.array([*shown, 9], np.uint8), 0, len(shown) - 1, first, levels) == BAD


@pytest.mark.parametrize(
    ("numbers", "weightless", "right"),
    [
        ((1, 0, 2), None, True),
        ((1, 0, 2), 1, True),
        ((1, 0, 2), 2, False),
        ((1, 0, 1), None, False),
        ((1, 0, 3), None, False),
        ((0xFFFFFFFF, 0, 3), None, False),
    ],
)
def test_blocks_that_change_more_or_less_often_than_told_or_without_weight_are_refused(
    numbers, weightless, right
):
    sums = np.full(3, 100, np.uint16)
    if weightless is not None:
        sums[weightless] = 0
    where = np.zeros(3 + SPARE, np.uint32)
    starts = np.zeros(CONTEXTS, np.int64)
    found = spread(numbers_of(*numbers), starts, sums, np.zeros(3, np.uint8), where)
    assert (found == 0, found == BAD) == (right, not right)
    assert not right or where[:3].tolist() == [0, 2, 2]


@pytest.mark.parametrize("order", [(3, 9), (9, 3), (3, 3)])
def test_picks_of_a_block_come_in_order_and_once(order):
    base = np.full(16, 0x3F80, np.uint16)
    weights, sums = np.zeros(256, np.int64), np.array([160], np.uint16)
    weights[0x7F] = 10
    slots = np.array([-(-(10 * at << 16) // 160) for at in order], np.uint32)
    widths = np.full(2, (10 << 16) // 160, np.uint32)
    words = np.empty(2 + 2 * STATES + 1, np.uint32)
    first = put_picks(slots, widths, words)
    where = np.zeros(2, np.uint32)
    found = pick(base, weights, 0, sums, sums, where, words[first:].view(np.uint8))
    assert (found, where.tolist()) == (0, [3, 9]) if order == (3, 9) else found == BAD


@pytest.mark.parametrize("mode", [0, 4, 255])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(Corrupt, match=f"mode {mode}"):
        tile_steps(mode, b"\0", 10)


@quick
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 500), st.floats(0, 1), st.integers(0, 1 << 32))
def test_tensors_of_other_widths_come_back(width, items, part, seed):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, width * items).astype(np.uint8)
    new = np.where(rng.random(width * items) < part, rng.integers(0, 256, width * items), base).astype(
        np.uint8
    )
    data = encode_planes(base, new.tobytes(), width)
    if data is None:
        assert np.array_equal(base, new)
        return
    values = bytearray(base.tobytes())
    apply_planes(data, values, width)
    assert values == new.tobytes()


@quick
@given(st.binary(max_size=100), st.integers(0, 60))
def test_planes_that_nobody_wrote_are_refused_and_change_nothing(data, count):
    values = np.zeros(count, np.uint8)
    with pytest.raises(Corrupt, match="planes"):
        apply_planes(data, values, 4)
    assert not values.any()


def test_planes_for_a_tensor_of_another_size_are_refused():
    data = encode_planes(np.zeros(8, np.float32), np.ones(8, np.float32), 4)
    with pytest.raises(Corrupt, match="planes"):
        apply_planes(data, np.zeros(9, np.float32), 4)
