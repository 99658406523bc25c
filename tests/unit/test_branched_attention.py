"""Samples behind one copy of their prompt attend as if each had a copy of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_packed_attention import HEADS, KEY_HEADS, WIDTH, Layer, model_of, under_mask
from workers.branched_attention import branches_of
from workers.packed_attention import attention_inputs, packed_attention, use_packed_attention

FAMILY = ((0, 7), (4, 3), (4, 2), (4, 2))  # (first position, tokens): a trunk and its branches
ANOTHER = ((0, 5), (4, 2), (4, 1))  # with branches of the same shapes
ROW = (*FAMILY, (0, 3), *ANOTHER, (0, 7), (2, 3))
TOKENS = sum(length for _, length in ROW)


def positions() -> Tensor:
    return torch.cat([torch.arange(first, first + length) for first, length in ROW])


def seen(window: int | None) -> Tensor:
    """[T, T], from the definition: a token sees itself, and what lies before it in its sample."""
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    at = trunk = 0
    for first, length in ROW:
        trunk = at if first == 0 else trunk
        history = [*range(trunk, trunk + first), *range(at, at + length)]
        for place in range(first, first + length):
            start = 0 if window is None else max(0, place + 1 - window)
            mask[at + place - first, history[start : place + 1]] = True
        at += length
    return mask


@pytest.mark.parametrize("window", [None, 3, 5, 100])
def test_values_and_gradients_are_those_of_one_attention_under_the_rows_mask(window: int | None) -> None:
    source = torch.Generator().manual_seed(1)
    heads = [
        torch.randn(1, count, TOKENS, WIDTH, generator=source, requires_grad=True)
        for count in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(1, TOKENS, HEADS, WIDTH, generator=source)
    cuts = branches_of(positions())
    found, _ = packed_attention(Layer(), *heads, None, cuts=cuts, scaling=0.3, sliding_window=window)
    expected = under_mask(*heads, seen(window))
    for one, other in zip(
        [found, *torch.autograd.grad((found * weights).sum(), heads)],
        [expected, *torch.autograd.grad((expected * weights).sum(), heads)],
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_branches_of_one_shape_are_computed_together_whatever_their_trunk() -> None:
    branches = branches_of(positions())
    assert branches is not None
    assert sorted((shape.samples, shape.own) for shape in branches.shapes) == [
        (1, 1),
        (1, 3),
        (1, 3),
        (1, 3),
        (1, 5),
        (2, 7),
        (3, 2),
    ]


def test_a_row_of_whole_samples_has_no_branches() -> None:
    assert branches_of(torch.tensor([0, 1, 2, 0, 1, 0])) is None


@pytest.mark.parametrize(("family", "changes"), [("Qwen3", {}), ("Mistral", {"sliding_window": 3})])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_says_the_same_of_a_branch_as_of_the_sample_alone(
    family: str, changes: dict[str, Any], checkpointed: bool
) -> None:
    model = model_of(family, **changes)
    use_packed_attention(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = torch.randint(1, 30, (TOKENS,), generator=torch.Generator().manual_seed(1))
    row = model(
        input_ids=ids[None],
        position_ids=positions()[None],
        use_cache=False,
        **attention_inputs(model, positions()),
    ).logits[0]
    at, trunk = 0, ids[:0]
    for first, length in ROW:
        own = ids[at : at + length]
        trunk = own if first == 0 else trunk
        alone = torch.cat([trunk[:first], own])
        place = torch.arange(len(alone))
        expected = model(
            input_ids=alone[None],
            position_ids=place[None],
            use_cache=False,
            **attention_inputs(model, place),
        ).logits[0, first:]
        torch.testing.assert_close(row[at : at + length], expected, rtol=1e-4, atol=1e-5)
        at += length
