"""The others' formats: bit-exact in everything, and as large as they are described to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.weights.entropy import change_of, given_exponent_bytes, no_context_bytes
from async_rl.weights.peers import PEERS, changed_positions

FORMATS = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)


def rounded(values: np.ndarray) -> np.ndarray:
    """float64 -> the nearest bfloat16's bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam_step(n: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    weights = rng.normal(0, 0.05, n).astype(np.float32).astype(np.float64)
    return rounded(weights), rounded(weights + rate * rng.uniform(-1, 1, n))


@pytest.fixture(scope="module")
def adam_3e6() -> list[tuple[np.ndarray, np.ndarray]]:
    return [adam_step(2_000_000, 3e-6)]


def coded_and_back(peer, changes) -> int:
    coded = peer.encode(changes)
    values = [base.copy() for base, _ in changes]
    peer.apply(coded, values)
    for value, (_, new) in zip(values, changes, strict=True):
        np.testing.assert_array_equal(value, new)
    return len(coded)


@FORMATS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bits_come_back(peer, data):
    changes = []
    for size in data.draw(
        st.lists(st.sampled_from([1, 2, 31, 32, 33, 700, 70_000]), min_size=1, max_size=3)
    ):
        rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
        base = rng.integers(0, 1 << 16, size, dtype=np.uint16)
        new = base.copy()
        changed = rng.random(size) < data.draw(st.sampled_from([0.0, 0.0001, 0.02, 0.6, 1.0]))
        spread = data.draw(st.sampled_from([2, 1 << 16]))
        new[changed] += rng.integers(1, spread, int(changed.sum()), dtype=np.uint16)
        changes.append((base, new))
    coded_and_back(peer, changes)


@FORMATS
def test_nothing_changed_comes_back(peer):
    base = np.arange(1000, dtype=np.uint16)
    coded_and_back(peer, [(base, base.copy()), (base[:1], base[:1].copy())])


@FORMATS
def test_nan_payloads_and_signed_zeros_come_back(peer):
    special = np.array(
        [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x8001], np.uint16
    )
    base, new = (grid.ravel() for grid in np.meshgrid(special, special))
    coded_and_back(peer, [(base, new)])


def test_the_scan_finds_what_differs_wherever_it_stands():
    base = np.zeros(100, np.uint16)
    for place in range(100):
        new = base.copy()
        new[place] = 0x8000
        assert changed_positions(base, new).tolist() == [place]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # The table of the design notes gives 6.06, 4.24, 2.63, 1.73, 1.25 and 0.91 at an entropy of 1.17 and 0.80;
        # here they are 1.07 and 0.74.
        ("int32 + value", 6.0, 6.01),
        ("u32 + value, zstd-3", 4.2, 4.8),
        ("xor, zstd-1", 2.3, 2.65),
        ("packed gaps, zstd-1", 1.58, 1.75),
        ("gaps + steps, zstd-1", 1.10, 1.25),
        ("class gaps + steps, zstd-1", 0.82, 0.93),
    ],
)
def test_a_step_of_adam_costs_what_others_pay(adam_3e6, name, low, high):
    peer = next(peer for peer in PEERS if peer.name == name)
    changed = len(changed_positions(*adam_3e6[0]))
    assert low <= coded_and_back(peer, adam_3e6) / changed <= high


def test_entropies_of_a_step_of_adam(adam_3e6):
    change = change_of(*adam_3e6[0])
    assert 1.05 < no_context_bytes(change) / change.changed < 1.09
    assert 0.72 < given_exponent_bytes(change) / change.changed < 0.76


def test_the_entropy_of_a_coin_for_every_weight():
    base = np.full(1 << 16, 0x3F80, np.uint16)
    new = base + (np.arange(1 << 16) % 2).astype(
        np.uint16
    )  # one bit of position per weight, one kind of step
    change = change_of(base, new)
    assert no_context_bytes(change) == pytest.approx((1 << 16) / 8)
    assert given_exponent_bytes(change) == pytest.approx((1 << 16) / 8)


def test_an_exponent_that_always_changes_and_one_that_never_does_carry_nothing():
    base = np.where(np.arange(4096) % 3 == 0, 0x3F80, 0x4080).astype(np.uint16)
    new = base + (base == 0x3F80)
    change = change_of(base, new.astype(np.uint16))
    assert given_exponent_bytes(change) == pytest.approx(0.0)
    assert no_context_bytes(change) > 400


def test_of_nothing_changed_both_entropies_are_nothing():
    base = np.arange(100, dtype=np.uint16)
    change = change_of(base, base.copy())
    assert (no_context_bytes(change), given_exponent_bytes(change)) == (0.0, 0.0)
