"""The codec's passes over torch tensors do what the host's kernels do, bit for bit. Here on a CPU; tests/gpu has the
same checks for a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import Corrupt
from async_rl.weights.codec import Mode, encode_tile, tensors
from tests.tensor_checks import check_applied, check_digest, check_surveyed, extremes, on_device, to_host
from tests.unit.test_codec import bit_pairs, changes, coded_by, quick

CPU = torch.device("cpu")
places = st.integers(0, 1 << 45)


@quick
@given(changes(), st.booleans(), st.lists(st.integers(1, 3000), max_size=4), places)
def test_tiles_surveyed_on_a_device_are_coded_byte_for_byte_as_on_the_host(pair, small, cuts, place):
    base, new = pair
    sizes = []
    for size in cuts:
        if sum(sizes) + size < len(base):
            sizes.append(size)
    check_surveyed(base, new, place, [*sizes, len(base) - sum(sizes)], small, CPU)


@quick
@given(bit_pairs, st.booleans())
def test_any_two_bit_patterns_are_coded_as_on_the_host(pairs, small):
    base, new = np.array(pairs, np.uint16).T.copy()
    check_surveyed(base, new, 3 << 40, [len(base)], small, CPU)


@quick
@given(changes(), st.sampled_from(list(Mode)), places)
def test_a_tile_of_any_mode_changes_a_tensor_as_it_changes_the_hosts_copy(pair, mode, place):
    base, new = pair
    if encode_tile(base, new, 0) is not None:
        check_applied(base, new, place, mode, coded_by(mode, base, new), CPU)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", extremes())
def test_every_bit_pattern_and_rate_of_change_goes_there_and_back(name, small):
    base, new = extremes()[name]
    check_surveyed(base, new, 7 << 33, [len(base) // 3, len(base) - len(base) // 3], small, CPU)
    coded = encode_tile(base, new, 7 << 33, small=small)
    if coded is not None:
        check_applied(base, new, 7 << 33, coded.mode, coded.data, CPU)


def test_the_changes_that_are_tried_here_and_on_a_gpu_need_every_mode():
    coded = [encode_tile(*pair, 0, small=small) for pair in extremes().values() for small in (False, True)]
    assert {tile.mode for tile in coded if tile is not None} == set(Mode)


@quick
@given(changes(), places)
def test_the_digest_of_a_tensor_is_that_of_its_bits(pair, place):
    check_digest(pair[0], place, CPU)


def test_digests_and_dense_tiles_longer_than_a_chunk_are_whole(monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", 1000)
    base, new = np.random.default_rng(2).integers(0, 1 << 16, (2, 2345)).astype(np.uint16)
    check_digest(base, 9, CPU)
    check_applied(base, new, 9, Mode.DENSE, coded_by(Mode.DENSE, base, new), CPU)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_tile_that_contradicts_itself_leaves_the_tensor_as_it_was(mode):
    base = np.arange(500).astype(np.uint16) * np.uint16(77)
    new = base.copy()
    new[::5] += np.uint16(2)
    data = coded_by(mode, base, new)
    there = on_device(base, CPU)
    with pytest.raises(Corrupt):
        tensors.apply_tile(mode, data[:-3], tensors.bits_of(there), 0)
    with pytest.raises(Corrupt):
        tensors.apply_tile(9, data, tensors.bits_of(there), 0)
    assert np.array_equal(to_host(there), base)


def test_a_tensor_of_another_width_or_with_gaps_is_refused():
    with pytest.raises(ValueError, match=r"torch\.float32"):
        tensors.bits_of(torch.zeros(4))
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        tensors.bits_of(torch.zeros(3, 2, dtype=torch.bfloat16).T)
    assert tensors.bits_of(torch.zeros((), dtype=torch.float16)).shape == (1,)


def test_only_what_changed_and_the_exponents_it_needs_come_to_the_host():
    base, new = extremes()["few weights"]
    before, after = (tensors.bits_of(on_device(bits, CPU)) for bits in (base, new))
    changed = np.count_nonzero(base != new)
    (plain,) = tensors.survey(before, after, 0, [len(base)], small=False)
    positions, steps = plain.told
    assert (positions.nbytes + steps.nbytes, plain.exponents) == (6 * changed, None)
    (small,) = tensors.survey(before, after, 0, [len(base)], small=True)
    assert small.exponents is None  # too few changes for the small mode
    base, new = extremes()["some weights"]
    before, after = (tensors.bits_of(on_device(bits, CPU)) for bits in (base, new))
    (small,) = tensors.survey(before, after, 0, [len(base)], small=True)
    assert small.exponents.nbytes == len(base)
    base, new = extremes()["most weights"]
    before, after = (tensors.bits_of(on_device(bits, CPU)) for bits in (base, new))
    (dense,) = tensors.survey(before, after, 0, [len(base)], small=False)
    assert dense.told.nbytes == 2 * len(base)
