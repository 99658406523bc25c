"""Log-probabilities and entropies in tiles equal those from whole logits in float64: values and gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from workers import head_tile
from workers.head import (
    HeadSettings,
    LogitMap,
    Tiles,
    plan_rows,
    plan_tiles,
    token_loss,
    token_scores,
    usual_budget,
)

MAPS = [LogitMap(), LogitMap(0.3), LogitMap(1.7, cap=2.0)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """A head in float64, and what its outputs are multiplied by before the backward pass."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    g: Tensor
    g_entropy: Tensor


def make_case(tokens: int, words: int, *, bias: bool = False, seed: int = 0, width: int = 5) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    return Case(
        normal(tokens, width),
        normal(words, width),
        normal(words) if bias else None,
        torch.randint(words, (tokens,), generator=draw),
        normal(tokens),
        normal(tokens),
    )


def reference(
    case: Case, logits: LogitMap, temperature: float, entropy_weight: float
) -> list[Tensor | None]:
    """log pi, entropy, and the gradients of hidden, weight and bias, from all logits at once."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    bias = None if case.bias is None else case.bias.clone().requires_grad_()
    x = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    table = (logits(x) / temperature).log_softmax(-1)
    logprobs = table.gather(-1, case.targets[:, None]).squeeze(-1)
    entropy = -(table.exp() * table.clamp(min=-1e9)).sum(-1)
    ((logprobs * case.g).sum() + entropy_weight * (entropy * case.g_entropy).sum()).backward()
    return [
        logprobs.detach(),
        entropy.detach(),
        hidden.grad,
        weight.grad,
        None if bias is None else bias.grad,
    ]


def in_tiles(
    case: Case, made: HeadSettings, entropy_weight: float, fused: bool, dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    hidden = case.hidden.to(dtype, copy=True).requires_grad_()
    weight = case.weight.to(dtype, copy=True).requires_grad_()
    bias = None if case.bias is None else case.bias.to(dtype, copy=True).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    g, g_entropy = case.g.to(wide), case.g_entropy.to(wide)
    if fused:

        def loss_of(logprobs_k: Tensor, entropy_k: Tensor, k: slice) -> Tensor:
            loss = (logprobs_k * g[k]).sum()
            return loss + entropy_weight * (entropy_k * g_entropy[k]).sum() if entropy_weight else loss

        loss, logprobs, entropy = token_loss(hidden, weight, bias, case.targets, made, loss_of)
        assert not logprobs.requires_grad and not entropy.requires_grad
    else:
        logprobs, entropy = token_scores(hidden, weight, bias, case.targets, made)
        loss = (logprobs * g).sum()
        if entropy_weight:
            loss = loss + entropy_weight * (entropy * g_entropy).sum()
    loss.backward()
    for given_tensor in (hidden, weight, bias):
        assert given_tensor is None or given_tensor.grad is None or given_tensor.grad.dtype == dtype
    return [
        logprobs.detach(),
        entropy.detach(),
        hidden.grad,
        weight.grad,
        None if bias is None else bias.grad,
    ]


def assert_near(found: list[Tensor | None], wanted: list[Tensor | None], tolerance: float) -> None:
    for name, one, other in zip(
        ("logprob", "entropy", "to hidden", "to weight", "to bias"), found, wanted, strict=True
    ):
        assert (one is None) == (other is None), name
        if one is not None and other is not None and other.numel():
            scale = other.abs().max().clamp(min=1.0)
            assert (one.double() - other).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
@given(
    tokens=st.integers(0, 9),
    words=st.integers(1, 23),
    narrowest=st.integers(1, 8),
    budget=st.integers(1, 1500),
    logits=st.sampled_from(MAPS),
    bias=st.booleans(),
    temperature=st.sampled_from([0.6, 1.0]),
    entropy_weight=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
)
@example(0, 7, 1, 100, MAPS[2], True, 0.6, 0.7, 0)
@example(1, 1, 1, 1, MAPS[0], False, 1.0, 0.7, 0)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiles_of_any_shape_give_what_whole_logits_give(
    fused, tokens, words, narrowest, budget, logits, bias, temperature, entropy_weight, seed
):
    case = make_case(tokens, words, bias=bias, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_tile, "NARROWEST", narrowest)
        found = in_tiles(case, HeadSettings(logits, temperature, budget), entropy_weight, fused)
    assert_near(found, reference(case, logits, temperature, entropy_weight), 1e-10)


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("logits", MAPS, ids=["plain", "scaled", "capped"])
def test_types_of_the_trainer_give_it_to_their_rounding(
    monkeypatch: pytest.MonkeyPatch, fused: bool, dtype: torch.dtype, tolerance: float, logits: LogitMap
):
    monkeypatch.setattr(head_tile, "NARROWEST", 16)
    case = make_case(40, 70, bias=True, width=16)
    case = case._replace(  # what both can represent
        hidden=(case.hidden / 4).bfloat16().double(),
        weight=case.weight.bfloat16().double(),
        bias=case.bias.bfloat16().double(),
    )
    made = HeadSettings(logits, 0.9, 5000)
    assert_near(in_tiles(case, made, 0.5, fused, dtype), reference(case, logits, 0.9, 0.5), tolerance)


@pytest.mark.parametrize(
    ("fused", "budget"),
    [(False, 10 * 4 * 64), (False, 10 * 4 * 2), (True, 4 * 2 * 256)],
    ids=["four words", "four words of two tokens", "three tokens"],
)
def test_sums_over_tiles_are_not_rounded_to_16_bits(
    monkeypatch: pytest.MonkeyPatch, fused: bool, budget: int
):
    """Of 64 tiles each would add its own rounding; together no more than one."""
    monkeypatch.setattr(head_tile, "NARROWEST", 4)
    case = make_case(64, 256, width=8)
    case = case._replace(
        hidden=(case.hidden / 4).bfloat16().double(), weight=case.weight.bfloat16().double()
    )
    found = in_tiles(case, HeadSettings(LogitMap(), 1.0, budget), 0.0, fused, torch.bfloat16)
    # The logits' own rounding is in both.
    rounded = (case.hidden.bfloat16() @ case.weight.bfloat16().T).double()
    pi = rounded.softmax(-1)
    slope = case.g[:, None] * (torch.nn.functional.one_hot(case.targets, 256) - pi)
    for one, other in ((found[2], slope @ case.weight), (found[3], slope.T @ case.hidden)):
        assert one is not None
        error = (one.double() - other).abs()
        assert (error <= 2**-8 * other.abs() + 1e-5).all(), error.max()


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
@pytest.mark.parametrize("words", [3, 4, 24])
def test_words_that_a_bias_masks_have_no_part_in_anything(
    monkeypatch: pytest.MonkeyPatch, fused: bool, words: int
):
    """Whole tiles of them, the first and the last included."""
    monkeypatch.setattr(head_tile, "NARROWEST", 2)
    case = make_case(6, words, bias=True)
    assert case.bias is not None
    allowed = torch.arange(words) % 24 == words - 2
    allowed[0] = words == 3
    case.bias[~allowed] = -math.inf
    case = case._replace(targets=torch.full((6,), words - 2))
    found = in_tiles(case, HeadSettings(LogitMap(), 0.9, 300), 0.5, fused)
    assert all(each is not None and each.isfinite().all() for each in found)
    left = case._replace(
        weight=case.weight[allowed],
        bias=case.bias[allowed],
        targets=torch.full((6,), int(allowed[: words - 2].sum())),
    )
    wanted = reference(left, LogitMap(), 0.9, 0.5)
    assert_near(
        [*found[:3], found[3][allowed], found[4][allowed]],  # type: ignore[index]
        wanted,
        1e-10,
    )
    assert (found[3][~allowed] == 0).all() and (found[4][~allowed] == 0).all()  # type: ignore[index]


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
def test_a_masked_target_is_impossible_and_poisons_no_gradient(fused: bool):
    case = make_case(4, 9, bias=True)
    assert case.bias is not None
    case.bias[2] = -math.inf
    case.targets[:] = torch.tensor([2, 1, 2, 3])
    found = in_tiles(case, HeadSettings(LogitMap(), 1.0, 200), 0.5, fused)
    assert found[0] is not None and found[0].isneginf().tolist() == [True, False, True, False]
    assert all(each is not None and each.isfinite().all() for each in found[1:])


def test_logits_far_apart_lose_nothing():
    case = make_case(5, 30)
    case = case._replace(hidden=case.hidden * 1e4)
    found = in_tiles(case, HeadSettings(LogitMap(), 1.0, 500), 0.5, False, torch.float32)
    assert all(each is None or each.isfinite().all() for each in found)
    wanted = reference(case, LogitMap(), 1.0, 0.5)
    assert torch.allclose(found[0].double(), wanted[0], rtol=1e-5)  # type: ignore[union-attr,arg-type]


def test_what_is_not_a_number_stays_visible():
    case = make_case(3, 20)
    case.hidden[1, 0] = math.nan
    found = in_tiles(case, HeadSettings(LogitMap(), 1.0, 100), 0.0, False)
    assert found[0].isnan().tolist() == [False, True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
def test_a_frozen_head_gets_no_gradient_and_makes_none(fused: bool):
    case = make_case(4, 9)
    hidden = case.hidden.clone().requires_grad_()
    made = HeadSettings(LogitMap(), 1.0, 100)
    if fused:
        loss = token_loss(hidden, case.weight, None, case.targets, made, lambda lp, h, k: lp.sum())[0]
    else:
        loss = token_scores(hidden, case.weight, None, case.targets, made)[0].sum()
    loss.backward()
    wanted = reference(case._replace(g=torch.ones(4, dtype=torch.float64)), LogitMap(), 1.0, 0.0)
    assert torch.allclose(hidden.grad, wanted[2])  # type: ignore[arg-type]


def test_a_fused_loss_scales_with_what_comes_in():
    case = make_case(4, 9)
    made = HeadSettings(LogitMap(), 1.0, 100)
    weight = case.weight.clone().requires_grad_()
    loss, logprobs, _ = token_loss(
        case.hidden, weight, None, case.targets, made, lambda lp, h, k: (lp.exp() * case.g[k]).sum()
    )
    (loss / 7).backward()
    assert loss.item() == pytest.approx((logprobs.exp() * case.g).sum().item())
    wanted = reference(case._replace(g=case.g * logprobs.exp() / 7), LogitMap(), 1.0, 0.0)
    assert torch.allclose(weight.grad, wanted[3])  # type: ignore[arg-type]


def test_without_gradients_a_fused_loss_makes_none():
    case = make_case(4, 9)
    weight = case.weight.clone().requires_grad_()
    with torch.no_grad():
        loss, _, _ = token_loss(
            case.hidden,
            weight,
            None,
            case.targets,
            HeadSettings(LogitMap(), 1.0, 100),
            lambda lp, h, k: lp.sum(),
        )
    assert not loss.requires_grad


@given(
    tokens=st.integers(0, 1 << 20),
    words=st.integers(1, 1 << 18),
    logit_bytes=st.sampled_from([10, 12, 16]),
    budget=st.integers(1 << 20, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_no_tile_is_over_the_budget(tokens: int, words: int, logit_bytes: int, budget: int):
    tiles = plan_tiles(tokens, words, logit_bytes, budget)
    assert 1 <= tiles.tokens <= max(tokens, 1) and 1 <= tiles.words <= words
    assert tiles.tokens * tiles.words * logit_bytes <= budget
    if tiles.tokens < tokens:
        assert (tiles.tokens + 1) * min(words, head_tile.NARROWEST) * logit_bytes * 2 > budget


@given(
    tokens=st.integers(0, 1 << 20),
    words=st.integers(1, 1 << 18),
    sizes=st.sampled_from([(10, 2), (12, 4), (16, 4)]),
    budget=st.integers(16 << 20, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_logits_that_are_kept_fit_into_the_budget_with_the_arithmetic_on_them(
    tokens: int, words: int, sizes: tuple[int, int], budget: int
):
    logit_bytes, kept_bytes = sizes
    rows = plan_rows(tokens, words, logit_bytes, kept_bytes, budget)
    assert 1 <= rows.tokens <= max(tokens, 1) and 1 <= rows.words <= words
    kept = rows.tokens * words * kept_bytes
    assert kept <= budget * 3 // 4
    if rows.words > head_tile.NARROWEST:
        assert kept + rows.tokens * rows.words * logit_bytes <= budget
    if rows.tokens < tokens:
        assert 2 * (rows.tokens + 1) * words * kept_bytes > budget * 3 // 4


def test_the_usual_budget_keeps_the_logits_of_some_hundreds_of_tokens_whatever_the_vocabulary():
    assert usual_budget(40 * 4, accelerator=False) == 64 << 20
    for words, size, accelerator, tokens in ((151_936, 4, False, 256), (262_144, 2, True, 1024)):
        budget = usual_budget(words * size, accelerator)
        assert 0.9 * tokens <= plan_rows(tokens * 10, words, 12, size, budget).tokens <= tokens


def test_tiles_take_all_tokens_while_they_can_and_even_shares_of_the_words():
    assert plan_tiles(2048, 49152, 12, 64 << 20) == Tiles(2048, 2587)  # 2730 fit: 19 tiles
    assert plan_tiles(100, 40, 12, 64 << 20) == Tiles(100, 40)
    assert plan_tiles(100_000, 150_000, 12, 32 << 20) == Tiles(2703, 1028)


def test_compiled_arithmetic_is_the_same_arithmetic(monkeypatch: pytest.MonkeyPatch):
    """What torch.compile is given, run as it is: whether a compiler is there is another question."""
    given_functions = []
    monkeypatch.setattr(head_tile, "_TOOLS", {})
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: given_functions.append(function) or function
    )
    case = make_case(6, 40)
    wanted = in_tiles(case, HeadSettings(LogitMap(), 1.0, 300), 0.5, False)
    assert not given_functions
    found = in_tiles(case, HeadSettings(LogitMap(), 1.0, 300, compiled=True), 0.5, False)
    assert len(given_functions) == 2
    assert all(a is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_can_not_be_compiled_runs_as_it_is_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*arguments: object) -> None:
        raise BackendCompilerFailed(refuse, RuntimeError("no compiler"), None)

    monkeypatch.setattr(head_tile, "_TOOLS", {})
    monkeypatch.setattr(torch, "compile", lambda function, **how: refuse)
    case = make_case(6, 40)
    with caplog.at_level(logging.WARNING):
        found = in_tiles(case, HeadSettings(LogitMap(), 1.0, 300, compiled=True), 0.0, True)
    assert_near(found, reference(case, LogitMap(), 1.0, 0.0), 1e-10)
    assert caplog.text.count("can't be compiled") == 2, "fold and slope, once each"
