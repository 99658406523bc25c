"""What the trainer measures of each group: means that are zero where they should be, in the right slots."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.algo.mismatch import LOG_RATIO_CLAMP, token_measures, totals_by_slot
from async_rl.algo.packing import TrainSample, pack
from async_rl.wire import Key, Measured
from workers.checks import Slot, checked, slots_of


def logprobs(chance, temperature=1.0):
    logits = chance.standard_normal(30) / temperature
    return logits - np.log(np.exp(logits).sum())


def test_under_the_behaviour_policy_ratio_and_surprise_have_mean_zero_and_kl_is_kl():
    """Exact expectations over every token, with a policy that has moved away."""
    chance = np.random.default_rng(0)
    pi, mu = logprobs(chance), logprobs(chance)
    pi = np.log(0.7 * np.exp(mu) + 0.3 * np.exp(pi))
    entropy = -(np.exp(pi) * pi).sum()
    kl, ratio, surprise = token_measures(pi, mu, np.full(30, entropy)) @ np.exp(mu)
    assert abs(ratio) < 1e-12 and abs(surprise) < 1e-12
    assert kl == pytest.approx((np.exp(mu) * (mu - pi)).sum()) and kl > 0.01


def test_one_token_can_not_do_more_than_the_clamp():
    kl, ratio, surprise = token_measures(
        [0.0, -90.0, -np.inf, -1.0], [-90.0, 0.0, -1.0, -np.inf], [1.0] * 4
    )
    assert kl.max() == ratio.max() - LOG_RATIO_CLAMP == pytest.approx(np.exp(2) - 3)
    assert np.isfinite(surprise).all() and kl.min() > 0


def test_sums_go_into_their_slots_and_what_has_none_nowhere():
    measures = np.arange(12.0).reshape(3, 4)
    totals = totals_by_slot([1, -1, 0, 1], measures, 3)
    assert totals.tolist() == [[1, 2, 6, 10], [2, 3, 11, 19], [0, 0, 0, 0]]


def test_a_slot_is_a_lag_before_or_after_an_update():
    slots: dict[Slot, int] = {}
    key = Key("train", 3)
    assert slots_of(key, np.array([2, 2, 2, 2]), [(5, 3), (6, 1)], slots, 10).tolist() == [10, 10, 10, 11]
    assert slots_of(key, np.array([0, 0]), [(7, 2)], slots, 10).tolist() == [12, 12]
    assert slots_of(key, np.array([2]), [(5, 1)], slots, 10).tolist() == [10]
    assert list(slots) == [Slot(key, 2, True), Slot(key, 2, False), Slot(key, 0, True)]


def test_what_is_told_are_means_and_a_slot_without_tokens_or_numbers_is_left_out():
    slots = [Slot(Key("train", i), i, True) for i in range(3)]
    told = checked(
        4, 9, slots, ((2.0, 1.0, -1.0, 0.5), (0.0, 0.0, 0.0, 0.0), (1.0, float("nan"), 0.0, 0.0))
    )
    assert (told.incarnation, told.step) == (4, 9)
    assert told.rows == (Measured(Key("train", 0), 0, True, 2, 0.5, -0.5, 0.25),)


def test_packing_keeps_each_tokens_slot_beside_its_target():
    def of(slots):
        return TrainSample(
            np.array([1, 2, 3]),
            np.array([4, 5]),
            np.zeros(2, np.float32),
            np.ones(2),
            np.zeros(2),
            1.0,
            slots,
        )

    ((row,),) = pack([of(np.array([0, 1])), of(None)], 100, 1)
    assert row.slots_T[row.loss_mask_T].tolist() == [0, 1, -1, -1]
    assert (row.slots_T[~row.loss_mask_T] == -1).all()
    (_, (filler,)) = pack([of(None)], 100, 2)
    assert filler.slots_T.tolist() == [-1]
