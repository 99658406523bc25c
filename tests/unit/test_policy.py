"""The stand-in for a model's last layer finds out what the model does to logits, and steps back where it can't."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_rl.errors import ConfigError
from workers.head_tile import HeadSettings, LogitMap
from workers.policy import PROBE, Ask, Policy, Scores, read_map

CPU = torch.device("cpu")
WORDS, WIDTH = 30, 8
WARNING = "computed whole"


class Model(nn.Module):
    """A causal language model in shape; `after` is what it does to its logits."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lm_head: nn.Module = nn.Linear(WIDTH, WORDS, bias=False)
        self.after = after

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor
    ) -> Any:
        hidden = self.embedding(input_ids + position_ids)[:, logits_to_keep]
        return SimpleNamespace(logits=self.after(self.lm_head(hidden)))


class GivesAllRows(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:  # type: ignore[override]
        return super().forward(input_ids, position_ids, use_cache, torch.arange(input_ids.shape[1]))


class UsesItTwice(Model):
    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor
    ) -> Any:
        super().forward(input_ids, position_ids, use_cache, logits_to_keep)
        return super().forward(input_ids, position_ids, use_cache, logits_to_keep)


class SkipsIt(Model):
    def forward(self, input_ids: Tensor, **named: Any) -> Any:
        return SimpleNamespace(logits=self.embedding(input_ids) @ self.lm_head.weight.T)


def settings(temperature: float = 0.8) -> HeadSettings:
    return HeadSettings(LogitMap(), temperature, 1 << 12)


def checked(model: nn.Module) -> Policy:
    policy = Policy(model, settings())
    policy.check(CPU)
    return policy


def scores(policy: Policy, **how: Any) -> Scores:
    ids = torch.tensor([3, 1, 4, 1, 5])
    kept = torch.tensor([1, 2, 4])
    answer: Scores = policy(ids, torch.zeros_like(ids), Ask(kept, torch.tensor([4, 1, 9]), **how))
    return answer


def wanted(model: Model) -> Tensor:
    with torch.no_grad():
        hidden = model.embedding(torch.tensor([1, 4, 5]))
        table = (model.after(hidden @ model.lm_head.weight.T) / 0.8).log_softmax(-1)
    return table[torch.arange(3), torch.tensor([4, 1, 9])]


def capped(logits: Tensor) -> Tensor:
    return 2.5 * torch.tanh(logits / 2.5)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (lambda logits: logits, LogitMap()),
        (lambda logits: logits.float() / 8.0, LogitMap(0.125)),
        (capped, LogitMap(1.0, 2.5)),
        (lambda logits: capped(logits * 3.0), LogitMap(3.0, 2.5)),
        (lambda logits: 2.0 * capped(logits), LogitMap(2.0, 5.0)),
    ],
    ids=["nothing", "scale", "cap", "scale and cap", "cap and scale"],
)
def test_a_scale_and_a_cap_are_found_out_by_what_the_model_does(after, found):
    model = Model(after)
    policy = checked(model)
    assert policy.in_tiles
    seen = policy._settings.logits
    assert seen.scale == pytest.approx(found.scale, rel=1e-6)
    assert seen.cap == (found.cap and pytest.approx(found.cap, rel=1e-6))
    for way in ({}, {"whole": True}):
        assert torch.allclose(scores(policy, **way).logprobs_K, wanted(model), atol=1e-5)


@pytest.mark.parametrize(
    "after",
    [
        lambda logits: logits + 0.3,
        lambda logits: logits.relu(),
        lambda logits: -logits,
        lambda logits: logits[..., :3],
        lambda logits: torch.where(torch.arange(logits.shape[-1]) == 17, -torch.inf, logits),
        lambda logits: logits + 3.0 * (torch.arange(logits.shape[-1]) == 17),
    ],
    ids=["a shift", "a kink", "a sign", "a part", "a masked word", "a likelier word"],
)
def test_anything_else_is_computed_from_logits_with_one_warning(caplog: pytest.LogCaptureFixture, after):
    model = Model(after)
    with caplog.at_level(logging.WARNING):
        policy = checked(model)
    assert not policy.in_tiles and caplog.text.count(WARNING) == 1
    if after(torch.zeros(1, WORDS)).shape[-1] == WORDS:
        assert torch.allclose(scores(policy).logprobs_K, wanted(model), atol=1e-6)
    ids = torch.tensor([[3]])
    assert model(ids, ids * 0, False, torch.tensor([0])).logits.numel() > 1, "the stand-in is gone"


@pytest.mark.parametrize("kind", [UsesItTwice, SkipsIt])
def test_a_model_that_uses_its_last_layer_otherwise_is_computed_from_logits(
    caplog: pytest.LogCaptureFixture, kind: type[Model]
):
    with caplog.at_level(logging.WARNING):
        assert not checked(kind()).in_tiles
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize("head", [None, nn.Sequential(nn.Linear(WIDTH, WORDS))], ids=["none", "another"])
def test_a_last_layer_that_is_not_linear_is_left_alone(caplog: pytest.LogCaptureFixture, head):
    model = Model()
    if head is not None:
        model.lm_head = head
    else:
        model.get_output_embeddings = lambda: None  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        policy = checked(model)
    assert not policy.in_tiles and caplog.text.count(WARNING) == 1
    assert scores(policy).logprobs_K.isfinite().all()


def test_a_model_that_gives_all_rows_gives_those_that_are_asked_for():
    model = GivesAllRows()
    policy = checked(model)
    assert policy.in_tiles
    for way in ({}, {"whole": True}):
        assert torch.allclose(scores(policy, **way).logprobs_K, wanted(model), atol=1e-5)


def test_logits_on_request_change_nothing_about_the_model(caplog: pytest.LogCaptureFixture):
    model = Model()
    forward = model.lm_head.forward
    policy = Policy(model, settings(), whole=True)
    policy.check(CPU)
    assert model.lm_head.forward == forward and not policy.in_tiles and not caplog.text


def test_a_model_that_breaks_without_logits_says_how_to_go_on():
    with pytest.raises(ConfigError, match='trainer.head = "logits"'):
        checked(Model(lambda logits: logits[..., torch.tensor([25])]))


def test_the_model_alone_still_gives_logits():
    model = Model()
    ids = torch.tensor([[3, 1]])
    before = model(ids, ids * 0, False, torch.arange(2)).logits
    policy = checked(model)
    scores(policy)
    assert torch.equal(model(ids, ids * 0, False, torch.arange(2)).logits, before)


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_and_losses_are_those_from_logits(whole: bool):
    def gradients(policy: Policy, loss_of: Any, **how: Any) -> dict[str, Tensor]:
        policy.zero_grad()
        answer = scores(policy, loss_of=loss_of, **how)
        loss = answer.loss
        if loss is None:
            loss = (answer.logprobs_K.exp() - 0.1 * answer.entropy_K).sum()
        loss.backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}  # type: ignore[union-attr]

    policy = checked(Model(capped))
    expected = gradients(policy, None, entropy_gradient=True, whole=True)
    by_loss = gradients(
        policy, lambda lp, h, k: (lp.exp() - 0.1 * h).sum(), entropy_gradient=True, whole=whole
    )
    by_scores = gradients(policy, None, entropy_gradient=True, whole=whole)
    for name, gradient in expected.items():
        assert torch.allclose(by_loss[name], gradient, atol=1e-6), name
        assert torch.allclose(by_scores[name], gradient, atol=1e-6), name
    assert not scores(policy, whole=whole).entropy_K.requires_grad


def test_no_probe_reads_as_a_map_that_is_none():
    assert read_map(PROBE) == LogitMap()
    assert read_map([0.0] * len(PROBE)) is None
    assert read_map([float("nan")] * len(PROBE)) is None
    assert read_map([abs(x) for x in PROBE]) is None
