"""Samples of one prompt lie behind one copy of it, and nothing else about them changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algo.families import families_of, laid
from async_rl.algo.packing import TrainSample, pack


def a_sample(prompt: list[int], tokens: list[int]) -> TrainSample:
    count = len(tokens)
    return TrainSample(
        prompt_P=np.array(prompt, np.int32),
        tokens_C=np.array(tokens, np.int32),
        logprobs_C=-np.array(tokens, np.float32),
        mask_C=np.ones(count, np.uint8),
        lags_C=np.array(tokens),
        advantage=float(tokens[0]),
        slots_C=np.array(tokens),
    )


def test_branches_begin_at_the_prompts_last_token_behind_the_longest_sample():
    [[row]] = pack([a_sample([1, 2, 3], [7, 8]), a_sample([1, 2, 3], [4, 5, 6])], 20, 1, share=True)
    assert row.input_ids_T.tolist() == [1, 2, 3, 4, 5, 3, 7]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert row.targets_T.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert row.loss_mask_T.tolist() == [False, False, True, True, True, True, True]
    assert row.behaviour_T.tolist() == [0, 0, -4, -5, -6, -7, -8]
    assert row.advantages_T.tolist() == [4] * 5 + [7] * 2
    assert row.slots_T.tolist() == [-1, -1, 4, 5, 6, 7, 8]
    assert row.samples_T.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert row.samples == 2


def test_a_prompt_of_one_token_has_nothing_to_share():
    [[row]] = pack([a_sample([1], [2, 3]), a_sample([1], [4])], 20, 1, share=True)
    assert row.position_ids_T.tolist() == [0, 1, 0]


def test_a_family_over_the_limit_becomes_several_with_a_trunk_each():
    samples = [a_sample([1, 2, 3, 4], [5, 6])] * 5  # 5 tokens whole, 2 behind a trunk
    families = families_of(samples, 9)
    assert families == [[0, 1, 2], [3, 4]]
    assert [laid(samples, family) for family in families] == [9, 7]


def test_a_sample_over_the_limit_is_a_family_of_its_own():
    samples = [a_sample([1, 2], [3] * 30), a_sample([1, 2], [4])]
    assert families_of(samples, 10) == [[0], [1]]


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=4)
completions = st.lists(st.integers(4, 9), min_size=1, max_size=6)


@given(
    drawn=st.lists(st.tuples(prompts, completions), min_size=1, max_size=16),
    limit=st.integers(1, 40),
    ranks=st.integers(1, 3),
)
def test_every_sample_can_be_read_back_from_the_row_by_its_positions(
    drawn: list[tuple[list[int], list[int]]], limit: int, ranks: int
):
    samples = [a_sample(prompt, tokens) for prompt, tokens in drawn]
    longest = max(sample.inputs for sample in samples)
    found = []
    for row in (row for rows in pack(samples, limit, ranks, share=True) for row in rows):
        assert row.tokens <= max(limit, longest)
        trunk: list[int] = []
        for each in range(row.samples):
            mine = row.samples_T == each
            ids, first = row.input_ids_T[mine].tolist(), int(row.position_ids_T[mine][0])
            assert row.position_ids_T[mine].tolist() == list(range(first, first + len(ids)))
            trunk = ids if first == 0 else trunk
            whole = trunk[:first] + ids + row.targets_T[mine].tolist()[-1:]
            trained = row.targets_T[mine][row.loss_mask_T[mine]].tolist()
            found.append(
                (tuple(whole), tuple(trained), tuple(row.behaviour_T[mine][row.loss_mask_T[mine]]))
            )
    expected = [((*p, *c), tuple(c), tuple(-float(each) for each in c)) for p, c in drawn]
    assert sorted(found) == sorted(expected)
