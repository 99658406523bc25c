"""The codec: whatever changes, comes back, bit for bit; and its size is near the entropy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.weights.codec import (
    TILE,
    Mode,
    add_steps,
    apply_tile,
    digest_of,
    encode_steps,
    encode_tile,
    tile_steps,
)
from async_rl.weights.codec.blocks import split
from async_rl.weights.codec.model import model_of, plan_small
from async_rl.weights.codec.numbers import pack, unpack
from async_rl.weights.codec.small import encode_small
from async_rl.weights.codec.steps import dense_numbers, encode_dense
from async_rl.weights.codec.steps import encode_steps as encode_sparse

ALL = (1 << 64) - 1
quick = settings(max_examples=80, deadline=None)


def rounded(values):
    """float32 -> the bits of bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def placed(bits, offset):
    """The same elements as a read-only view into a longer array, from an odd place on."""
    longer = np.zeros(len(bits) + offset, np.uint16)
    longer[offset:] = bits
    view = longer[offset:]
    view.flags.writeable = False
    return view


BASES = {
    "any bits": lambda rng, n: rng.integers(0, 1 << 16, n),
    "weights": lambda rng, n: rounded(rng.normal(0, 0.02, n)),
    "near zero": lambda rng, n: rng.integers(0, 200, n) | rng.choice([0, 0x8000], n),
    "one value": lambda rng, n: np.full(n, rng.integers(0, 1 << 16)),
    "NaNs": lambda rng, n: 0x7F80 | rng.integers(0, 0x80, n) | rng.choice([0, 0x8000], n),
    "zeros": lambda rng, n: rng.choice([0, 0x8000], n),
}
WHERE = {
    "nowhere": lambda rng, n: np.zeros(n, bool),
    "one": lambda rng, n: np.arange(n) == rng.integers(0, n),
    "the last": lambda rng, n: np.arange(n) == n - 1,
    "rare": lambda rng, n: rng.random(n) < 0.01,
    "some": lambda rng, n: rng.random(n) < 0.2,
    "most": lambda rng, n: rng.random(n) < 0.9,
    "all": lambda rng, n: np.ones(n, bool),
    "clusters": lambda rng, n: (np.arange(n) // 97 % 7 == 3) & (rng.random(n) < 0.8),
    "the first tenth": lambda rng, n: np.arange(n) < n // 10,
    "every fourth": lambda rng, n: np.arange(n) % 4 == 1,
}
HOW = {
    "a step": lambda rng, bits: bits + rng.choice([-1, 1], len(bits)),
    "small steps": lambda rng, bits: bits + rng.geometric(0.3, len(bits)) * rng.choice([-1, 1], len(bits)),
    "any bits": lambda rng, bits: rng.integers(0, 1 << 16, len(bits)),
    "the sign": lambda rng, bits: bits ^ 0x8000,
    "the highest step": lambda rng, bits: bits ^ 0x7FFF,
    "up by one": lambda rng, bits: bits + 1,
}


@st.composite
def changes(draw, longest=6000):
    """(base, new) of one tile."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    edges = st.sampled_from([1, 2, 3, 31, 63, 64, 65, 128, 2049])
    n = draw(st.one_of(edges, st.integers(1, longest)))
    base = BASES[draw(st.sampled_from(sorted(BASES)))](rng, n).astype(np.uint16)
    where = WHERE[draw(st.sampled_from(sorted(WHERE)))](rng, n)
    new = base.copy()
    new[where] = HOW[draw(st.sampled_from(sorted(HOW)))](rng, base[where].astype(np.int64)).astype(
        np.uint16
    )
    return placed(base, draw(st.integers(0, 3))), placed(new, draw(st.integers(0, 3)))


bit_pairs = st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=200)


def coded_by(mode, base, new):
    """A change of at least one element in a given mode, whether it is the best or not."""
    coded = encode_tile(base, new, 0)
    positions, steps = tile_steps(coded.mode, coded.data, len(base))
    if mode == Mode.SMALL:
        return encode_small(base, new, positions, steps, plan_small(base, positions, steps))
    if mode == Mode.DENSE:
        return encode_dense(dense_numbers(positions, steps, len(base)), len(positions))
    return encode_sparse(positions, steps, len(base))


def check_round_trip(base, new, mode, data, place=5 << 33):
    values = np.array(base)
    changed, moved = apply_tile(mode, data, values, place)
    assert np.array_equal(values, new)
    assert changed == np.count_nonzero(base != new)
    assert moved == (digest_of(new, place) - digest_of(base, place)) & ALL


@quick
@given(changes(), st.booleans())
def test_what_is_encoded_is_applied_bit_for_bit_and_moves_the_digest(pair, small):
    base, new = pair
    coded = encode_tile(base, new, 5 << 33, small=small)
    if coded is None:
        assert np.array_equal(base, new)
        return
    check_round_trip(base, new, coded.mode, coded.data)
    assert coded.changed == np.count_nonzero(base != new)
    assert coded.moved == (digest_of(new, 5 << 33) - digest_of(base, 5 << 33)) & ALL


@quick
@given(bit_pairs, st.booleans())
def test_any_two_bit_patterns_are_told_apart_and_restored(pairs, small):
    base, new = np.array(pairs, np.uint16).T.copy()
    coded = encode_tile(base, new, 0, small=small)
    if coded is None:
        assert np.array_equal(base, new)
    else:
        check_round_trip(base, new, coded.mode, coded.data)


@quick
@given(changes())
def test_every_mode_can_carry_every_change(pair):
    base, new = pair
    coded = encode_tile(base, new, 0)
    if coded is None:
        return
    for mode in Mode:
        check_round_trip(base, new, mode, coded_by(mode, base, new))


@pytest.mark.parametrize("shift", [1, 0x7FFF, 0x8000, 0x8001])
@pytest.mark.parametrize("small", [False, True])
def test_all_bit_patterns_survive_minus_zero_infinities_and_nans_included(shift, small):
    base = np.arange(1 << 16).astype(np.uint16)
    coded = encode_tile(base, base + np.uint16(shift), 0, small=small)
    check_round_trip(base, base + np.uint16(shift), coded.mode, coded.data)


def test_minus_zero_and_zero_are_a_step_apart():
    coded = encode_tile(np.array([0x8000, 0], np.uint16), np.array([0, 0x8000], np.uint16), 0)
    positions, steps = tile_steps(coded.mode, coded.data, 2)
    assert positions.tolist() == [0, 1] and steps.tolist() == [1, -1]


def test_nothing_changed_is_nothing():
    bits = np.arange(1000, dtype=np.uint16)
    assert encode_tile(bits, bits.copy(), 0) is None
    assert encode_tile(bits, bits.copy(), 0, small=True) is None


@quick
@given(
    st.sampled_from([1, 2, 4095, 4096, 4097, 4098, 4099, 7000]),
    st.sampled_from([1, 2, 4, 8, 9, 1 << 16, 1 << 32]),
    st.integers(0, 3),
    st.integers(0, 1 << 32),
)
def test_sequences_of_every_length_and_range_come_back_grouped_or_not(length, stop, before, seed):
    rng = np.random.default_rng(seed)
    values = np.minimum(rng.integers(0, stop, length), rng.integers(0, stop, length)).astype(np.uint32)
    first, last = rng.integers(0, 3, (2, before)).astype(np.uint32)
    told, sizes = np.concatenate((first, values, last)), np.array((before, length, before))
    data = np.frombuffer(pack(told, sizes, np.zeros(3, np.int64)), np.uint8)
    assert np.array_equal(unpack(data, 0, sizes, np.zeros(3, np.int64)), told)


@quick
@given(
    st.sampled_from([1, 15, 64, 130, 4000]), st.sampled_from([0, 1, 2, 100, 242, 256]), st.integers(0, 2)
)
def test_sums_of_weights_are_the_same_however_a_machine_adds_them_up(count, limit, shift):
    rng = np.random.default_rng(count + limit)
    base = rng.integers(0, 1 << 16, count).astype(np.uint16)
    base[::3] = limit << 7 & 0x7FFF | rng.integers(0, 512, len(base[::3]))
    model = model_of(rng.integers(0, 36, 256), limit)
    (parts, sums, _), _, hot = split(base, model, shift, 0)
    exponents = (base >> 7) & 0xFF
    each = np.zeros(len(sums) << (4 + shift), np.int64)
    each[:count] = model.weights[exponents]
    assert np.array_equal(parts, each.reshape(-1, 16).sum(1))
    assert np.array_equal(sums, each.reshape(len(sums), -1).sum(1))
    assert np.array_equal(hot, np.flatnonzero(exponents < limit))


# ---------------------------------------------------------------- composition


@quick
@given(changes(), st.integers(0, 1 << 32))
def test_two_deltas_added_up_are_the_direct_one_byte_for_byte(pair, seed):
    first, second = pair
    third = np.array(second)
    rng = np.random.default_rng(seed)
    some = rng.random(len(first)) < 0.3
    third[some] = first[some]  # steps that cancel
    more = rng.random(len(first)) < 0.05
    third[more] += np.uint16(3)
    parts = [encode_tile(a, b, 0) for a, b in ((first, second), (second, third), (first, third))]
    steps = [
        tile_steps(part.mode, part.data, len(first))
        if part
        else (np.empty(0, np.uint32), np.empty(0, np.int16))
        for part in parts
    ]
    positions, added = add_steps(steps[0], steps[1])
    assert np.array_equal(positions, steps[2][0]) and np.array_equal(added, steps[2][1])
    if parts[2] is not None:
        mode, data = encode_steps(positions, added, len(first))
        assert (mode, data) == (parts[2].mode, parts[2].data)
        assert (parts[2].moved - sum(part.moved for part in parts[:2] if part)) & ALL == 0


@quick
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 1 << 32))
def test_steps_come_back_from_bytes(count, part, seed):
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(count) < part).astype(np.uint32)
    steps = rng.integers(-(1 << 15), 1 << 15, len(positions)).astype(np.int16)
    steps[steps == 0] = 1
    mode, data = encode_steps(positions, steps, count)
    found = tile_steps(mode, data, count)
    assert np.array_equal(found[0], positions) and np.array_equal(found[1], steps)


def test_steps_in_a_tile_of_two_to_the_31_elements_come_back():
    positions = np.array([0, 1 << 20, (1 << 31) - 1], np.uint32)
    steps = np.array([-(1 << 15), 1, (1 << 15) - 1], np.int16)
    mode, data = encode_steps(positions, steps, 1 << 31)
    found = tile_steps(mode, data, 1 << 31)
    assert np.array_equal(found[0], positions) and np.array_equal(found[1], steps)


def test_a_small_tile_says_that_it_needs_its_base():
    with pytest.raises(ValueError, match="without its base"):
        tile_steps(Mode.SMALL, b"", 10)


# ---------------------------------------------------------------- the digest


def test_the_digest_is_the_documented_sum():
    def mix(key):
        key ^= key >> 30
        key = key * 0xBF58476D1CE4E5B9 & ALL
        key ^= key >> 27
        key = key * 0x94D049BB133111EB & ALL
        return key ^ key >> 31

    bits, place = [0, 0x8000, 0x7FC1, 1, 0xFFFF], 123_456_789_012
    expected = sum(mix((place + i) << 16 | b) for i, b in enumerate(bits)) & ALL
    assert digest_of(np.array(bits, np.uint16), place) == expected
    assert digest_of(np.array([], np.uint16), place) == 0


@quick
@given(changes(), st.integers(0, 6000))
def test_digests_of_parts_add_up(pair, cut):
    bits, _ = pair
    cut = min(cut, len(bits))
    assert digest_of(bits, 7) == (digest_of(bits[:cut], 7) + digest_of(bits[cut:], 7 + cut)) & ALL


# ---------------------------------------------------------------- size


def ordered(bits):
    return bits.view(np.int16).astype(np.int64) ^ ((bits.view(np.int16) >> 15) & 0x7FFF)


def entropy_bytes(steps):
    """Of the positions and of the steps, without context."""
    counts = np.unique(steps, return_counts=True)[1]
    return -(counts * np.log2(counts / len(steps))).sum() / 8


@pytest.mark.parametrize("rate", [2e-7, 1e-6, 1e-5])
def test_a_trained_step_costs_what_its_entropy_says(rate):
    rng = np.random.default_rng(7)
    n = 1 << 18
    master = rng.normal(0, 0.02, n).astype(np.float32)
    moved = master + rate * rng.uniform(0.3, 1.5, n).astype(np.float32) * rng.choice([-1, 1], n)
    base, new = rounded(master), rounded(moved)
    steps = ordered(new) - ordered(base)
    exponents = (base >> 7) & 0xFF
    given_exponent = sum(entropy_bytes(steps[exponents == each]) for each in np.unique(exponents))
    default, small = (len(encode_tile(base, new, 0, small=small).data) for small in (False, True))
    assert default < 1.05 * entropy_bytes(steps)
    assert small < 1.10 * given_exponent


def test_large_steps_that_repeat_cost_little():
    rng = np.random.default_rng(3)
    base = rng.choice(np.array([0x7FC1, 0xFF81, 0x8000, 0, 0x7F80, 0xFF80], np.uint16), 1 << 16)
    for part in (0.1, 1.0):
        new = np.where(rng.random(len(base)) < part, rng.permutation(base), base)
        coded = encode_tile(base, new, 0)
        check_round_trip(base, new, coded.mode, coded.data)
        assert len(coded.data) < 1.05 * entropy_bytes(ordered(new) - ordered(base))


def test_noise_costs_hardly_more_than_itself():
    rng = np.random.default_rng(3)
    base, new = rng.integers(0, 1 << 16, (2, 1 << 16)).astype(np.uint16)
    for small in (False, True):
        assert len(encode_tile(base, new, 0, small=small).data) < 2 * len(base) + 200


def test_one_change_in_a_large_tile_costs_a_dozen_bytes():
    base = np.zeros(TILE, np.uint16)
    new = base.copy()
    new[777_777] = 1
    assert len(encode_tile(base, new, 0).data) <= 12


def test_a_uniform_change_costs_next_to_nothing():
    base = np.arange(TILE).astype(np.uint16) & np.uint16(0x3FFF)
    assert len(encode_tile(base, base + np.uint16(1), 0).data) < 24


# ---------------------------------------------------------------- imports


def test_importing_the_codec_loads_no_numba():
    code = "import sys, async_rl.weights.codec; print([m for m in ('numba', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
