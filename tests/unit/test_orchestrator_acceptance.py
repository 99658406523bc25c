"""What is wrong with a group is found before it is stored."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from async_rl.algo.staleness import Node, Tree
from async_rl.wire import Array
from orchestrator.acceptance import Fault, Requirements, examine, explain, quick
from orchestrator.versions import Versions
from tests.orchestration import VOCAB, group, sample, train_key

NEED = Requirements(samples=2, max_tokens=8, vocab_size=VOCAB, reward_range=(0.0, 1.0))


@pytest.fixture
def versions():
    made = Versions(Tree({4: Node(-1, 10), 5: Node(4, 12)}), 4, 0.0)
    made.add(5, 0.0)
    return made


def of(*samples, **changes):
    return group(train_key(0), samples=samples, **changes)


def good(**changes):
    return sample(4, **changes)


def test_a_good_group_gives_the_versions_that_sampled_each_sample(versions):
    assert examine(of(good(), good(spans=((5, 4),))), NEED, versions) == ((4,), (5,))
    assert examine(of(good(spans=((4, 1), (5, 3))), good(reward=0.0)), NEED, versions) == ((4, 5), (4,))


def test_a_token_outside_the_mask_may_be_anything_the_policy_did_not_sample(versions):
    tool = good(
        length=12, mask=Array.of([1] * 4 + [0] * 8, "|u1"), logprobs=Array.of([-1.0] * 4 + [0.0] * 8, "<f4")
    )
    assert examine(of(tool, good()), NEED, versions) == ((4,), (4,))


BAD = {
    "a prompt without tokens": (of(good(), good(), prompt=Array.of([], "<i4")), "shape"),
    "a prompt token outside the vocabulary": (
        of(good(), good(), prompt=Array.of([VOCAB], "<i4")),
        "tokens",
    ),
    "too few samples": (of(good()), "shape"),
    "too many samples": (of(good(), good(), good()), "shape"),
    "an empty completion": (of(good(), good(length=0, spans=())), "shape"),
    "fewer logprobs than tokens": (of(good(), good(logprobs=Array.of([-1.0] * 3, "<f4"))), "shape"),
    "a longer mask": (of(good(), good(mask=Array.of([1] * 5, "|u1"))), "shape"),
    "a mask of twos": (of(good(), good(mask=Array.of([2] * 4, "|u1"))), "shape"),
    "more tokens than leased": (of(good(), good(length=9)), "shape"),
    "tokens as floats": (of(good(), good(tokens=Array.of([1.0] * 4, "<f4"))), "shape"),
    "bytes that are no whole tokens": (
        of(good(), good(tokens=Array("<i4", memoryview(b"12345")))),
        "shape",
    ),
    "a token outside the vocabulary": (
        of(good(), good(tokens=Array.of([1, 2, 3, VOCAB], "<i4"))),
        "tokens",
    ),
    "a negative token": (of(good(), good(tokens=Array.of([1, 2, 3, -1], "<i4"))), "tokens"),
    "a positive logprob": (of(good(), good(logprobs=Array.of([-1, -1, -1, 0.1], "<f4"))), "logprobs"),
    "a logprob that is not a number": (
        of(good(), good(logprobs=Array.of([math.nan] * 4, "<f4"))),
        "logprobs",
    ),
    "an infinite logprob": (of(good(), good(logprobs=Array.of([-math.inf] * 4, "<f4"))), "logprobs"),
    "a reward above the range": (of(good(), good(reward=1.5)), "reward"),
    "a reward that is not a number": (of(good(), good(reward=math.nan)), "reward"),
    "spans that miss a token": (of(good(), good(spans=((4, 3),))), "shape"),
    "the spans of the sample before, and another length": (
        of(good(), good(length=5, spans=((4, 4),))),
        "shape",
    ),
    "a span too many, that the next sample lacks": (
        of(good(spans=((4, 4), (4, 4))), good(spans=())),
        "shape",
    ),
    "spans of a negative length": (of(good(), good(spans=((4, 6), (5, -2)))), "shape"),
    "half a span": (of(good(), good(spans=((4, 4), (5,)))), "shape"),
    "no spans": (of(good(), good(spans=((),))), "shape"),
    "versions that go backwards": (of(good(), good(spans=((5, 2), (4, 2)))), "version"),
    "a version of an earlier life": (of(good(), good(spans=((3, 4),))), "version"),
    "a version from the future": (of(good(), good(spans=((4, 2), (6, 2)))), "early"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name, versions):
    bad, code = BAD[name]
    fault = examine(bad, NEED, versions)
    assert isinstance(fault, Fault) and fault.code == code and fault.detail
    assert fault.counts == (code != "early"), (
        "only a version that we have not heard of yet is nobody's failure"
    )


def test_spans_that_would_overflow_a_sum_in_32_bits_are_refused(versions):
    huge = 2**31 - 1
    wraps = good(spans=((4, huge), (4, huge), (5, 6)))  # 2 * (2^31 - 1) + 6 = 4 modulo 2^32
    assert examine(of(good(), wraps), NEED, versions).code == "shape"


def test_a_group_that_measures_a_version_must_not_be_older(versions):
    need = msgspec.structs.replace(NEED, oldest_version=5)
    assert examine(of(good(), good()), need, versions).code == "version"
    assert examine(of(*[good(spans=((5, 4),))] * 2), need, versions) == ((5,), (5,))


@pytest.mark.parametrize("name", BAD)
def test_the_quick_look_lets_nothing_pass_that_is_wrong(name, versions):
    assert quick(BAD[name][0], NEED, versions) is None


numbers = st.lists(
    st.sampled_from([-2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 9, VOCAB - 1, VOCAB, 2**31 - 1]), max_size=10
)
floats = st.lists(
    st.sampled_from([-np.inf, -1e30, -1.0, -0.0, 0.0, 9e-5, 2e-4, 1.0, np.nan, np.inf]), max_size=10
)


@st.composite
def samples(draw):
    """Right in most things, so that each rule is the one that decides."""
    made = good(reward=draw(st.sampled_from([0.0, 1.0, 1.0, 1.0 + 1e-7, -0.1, math.nan])))
    changes = {
        "tokens": lambda: Array.of(draw(numbers), "<i4"),
        "logprobs": lambda: Array.of(draw(floats), "<f4"),
        "mask": lambda: Array.of(draw(st.lists(st.integers(0, 2), max_size=10)), "|u1"),
        "spans": lambda: Array.of(draw(numbers), "<i4"),
        "text": lambda: "",
    }
    kind = draw(st.sampled_from([*changes, "text", "all lengths"]))
    if kind == "all lengths":
        length = draw(st.integers(0, 10))
        return sample(4, length=length, spans=((4, max(1, length)),))
    return msgspec.structs.replace(made, **{kind: changes[kind]()})


@given(st.lists(samples(), min_size=1, max_size=3), st.sampled_from([[1, 2], [], [-1], [VOCAB]]))
def test_the_quick_look_says_what_the_rules_say(drawn, prompt):
    versions = Versions(Tree({4: Node(-1, 10), 5: Node(4, 12)}), 4, 0.0)
    versions.add(5, 0.0)
    made = of(*drawn, prompt=Array.of(prompt, "<i4"))
    found, said = quick(made, NEED, versions), explain(made, NEED, versions)
    if found is not None:
        assert found == said
    elif not isinstance(said, Fault):
        assert any(sample.reward > 1.0 or sample.reward < 0.0 for sample in drawn), (
            "only rounding of rewards"
        )


@pytest.mark.parametrize(
    ("prompt", "length", "right"),
    [(6, 4, True), (7, 4, False), (3_000_000, 4, False), (1, 9, True), (2, 9, False), (10, 4, False)],
)
def test_a_sample_with_its_prompt_is_no_longer_than_the_model_allows(prompt, length, right, versions):
    """What the trainer could not train it would be given again after every resume."""
    masked = sample(
        4,
        length=length,
        spans=((4, length),),
        mask=Array.of([1] * 4 + [0] * (length - 4), "|u1"),
        reward=0.5,
    )
    made = of(masked, masked, prompt=Array.of([1] * prompt, "<i4"))
    need = msgspec.structs.replace(NEED, longest=10)
    found = examine(made, need, versions)
    assert (found == ((4,), (4,))) is right
    if not right:
        assert found.code == "shape" and "the model allows 10" in found.detail


def test_a_reward_without_end_is_refused_where_every_reward_is_allowed(versions):
    need = msgspec.structs.replace(NEED, reward_range=(-math.inf, math.inf))
    endless = of(good(reward=math.inf), good())
    assert quick(endless, need, versions) is None and examine(endless, need, versions).code == "reward"
