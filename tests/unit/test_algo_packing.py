"""Packing: every token once, aligned with what it predicts, evenly over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algo.packing import TrainSample, best_fit_decreasing, pack, plan


def a_sample(
    prompt: list[int], tokens: list[int], *, advantage: float = 1.0, mask: list[int] | None = None
):
    count = len(tokens)
    return TrainSample(
        prompt_P=np.array(prompt, dtype=np.int32),
        tokens_C=np.array(tokens, dtype=np.int32),
        logprobs_C=-np.arange(1, count + 1, dtype=np.float32),
        mask_C=np.array(mask or [1] * count, dtype=np.uint8),
        lags_C=np.arange(count),
        advantage=advantage,
    )


def test_two_samples_lie_end_to_end_and_each_array_speaks_about_the_next_token():
    [[row]] = pack(
        [a_sample([1, 2, 3], [4, 5, 6]), a_sample([7, 8], [9], advantage=-2.0)], limit=8, ranks=1
    )
    assert row.input_ids_T.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert row.targets_T.tolist() == [2, 3, 4, 5, 6, 8, 9]
    assert row.loss_mask_T.tolist() == [False, False, True, True, True, False, True]
    assert row.behaviour_T.tolist() == [0, 0, -1, -2, -3, 0, -1]
    assert row.lags_T.tolist() == [0, 0, 0, 1, 2, 0, 0]
    assert row.advantages_T.tolist() == [1, 1, 1, 1, 1, -2, -2]
    assert row.samples == 2
    assert row.samples_T.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_a_mask_of_zero_takes_a_completion_token_out_of_the_loss():
    [[row]] = pack([a_sample([1], [2, 3, 4], mask=[1, 0, 1])], limit=8, ranks=1)
    assert row.loss_mask_T.tolist() == [True, False, True]


def test_best_fit_takes_the_fullest_row_that_has_room():
    # 6 and 5 open rows with 4 and 5 left; 4 fits both and goes where it leaves less.
    assert best_fit_decreasing([6, 5, 4], 10) == [[0, 2], [1]]


def test_a_sample_over_the_limit_has_a_row_of_its_own():
    assert sorted(map(sorted, best_fit_decreasing([50, 3, 4], 10))) == [[0], [1, 2]]


def test_ranks_get_equal_tokens_when_the_samples_allow_it():
    # Best fit needs three rows; two ranks need four, and these are filled evenly instead of one staying
    # empty.
    shares = plan([5] * 12, 20, ranks=2)
    assert [[len(row) for row in share] for share in shares] == [[3, 3], [3, 3]]


def test_a_rank_without_samples_gets_a_filler_without_loss():
    shares = pack([a_sample([1], [2, 3])], limit=8, ranks=3)
    assert [len(share) for share in shares] == [1, 1, 1]
    fillers = [row for share in shares for row in share if not row.samples]
    assert len(fillers) == 2
    assert all(row.tokens == 1 and not row.loss_mask_T.any() for row in fillers)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    limit=st.integers(1, 40),
    ranks=st.integers(1, 3),
)
def test_a_sample_is_never_split_over_rows(lengths: list[int], limit: int, ranks: int):
    """Losses that look at a whole sample stand on it."""
    samples = [a_sample([index], [7] * length) for index, length in enumerate(lengths)]
    found = {}
    for row in (row for share in pack(samples, limit, ranks) for row in share):
        for each in range(row.samples):
            tokens = row.input_ids_T[row.samples_T == each]
            assert int(tokens[0]) not in found
            found[int(tokens[0])] = len(tokens)
    assert found == dict(enumerate(lengths))


def test_an_empty_batch_is_one_filler_per_rank():
    assert [[row.samples for row in share] for share in pack([], limit=8, ranks=2)] == [[0], [0]]


@pytest.mark.parametrize(("prompt", "tokens"), [([], [1]), ([1], [])])
def test_a_sample_without_prompt_or_completion_is_refused(prompt: list[int], tokens: list[int]):
    with pytest.raises(ValueError, match="at least one"):
        a_sample(prompt, tokens)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        TrainSample(np.ones(1), np.ones(3), np.ones(2), np.ones(3), np.ones(3), 0.0)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    limit=st.integers(1, 50),
    ranks=st.integers(1, 5),
)
def test_every_sample_is_planned_once_within_the_limit_and_the_same_rows_per_rank(
    lengths: list[int], limit: int, ranks: int
):
    shares = plan(lengths, limit, ranks)
    assert shares == plan(list(lengths), limit, ranks)
    assert sorted(i for share in shares for row in share for i in row) == list(range(len(lengths)))
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    fewest = max(1, -(-len(best_fit_decreasing(lengths, limit)) // ranks))
    assert len(shares[0]) == fewest
    for row in (row for share in shares for row in share):
        assert len(row) <= 1 or sum(lengths[i] for i in row) <= limit
