"""Log-probabilities in tiles on an accelerator: its products with wide sums, compiled arithmetic, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.head import HeadSettings, LogitMap, token_loss, token_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # the first use of torch.compile takes a minute
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def case(tokens: int, words: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=draw).to(dtype)
    weight = (torch.randn(words, width, generator=draw) * 2 / width**0.5).to(dtype)
    targets = torch.randint(words, (tokens,), generator=draw)
    return hidden, weight, targets, torch.randn(tokens, generator=draw)


def wanted(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor, logits: LogitMap) -> list[Tensor]:
    hidden, weight = (each.double().requires_grad_() for each in (hidden, weight))
    table = (logits(hidden @ weight.T) / 0.8).log_softmax(-1)
    logprobs = table.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(table.exp() * table).sum(-1)
    ((logprobs * g).sum() + 0.1 * entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", [LogitMap(), LogitMap(0.5, 3.0)], ids=["plain", "capped"])
def test_scores_and_gradients_are_those_of_whole_logits_in_float64(
    fused: bool, compiled: bool, dtype: torch.dtype, logits: LogitMap
):
    made = HeadSettings(logits, 0.8, MIB, compiled)
    for tokens in (70, 301):  # another shape must not be another kernel's
        given = case(tokens, 5003, 64, dtype)
        hidden, weight, targets, g = (each.cuda() for each in given)
        hidden.requires_grad_(), weight.requires_grad_()

        def loss_of(lp: Tensor, h: Tensor, k: slice, g: Tensor = g) -> Tensor:
            return (lp * g[k]).sum() + 0.1 * h.sum()

        if fused:
            loss, logprobs, entropy = token_loss(hidden, weight, None, targets, made, loss_of)
        else:
            logprobs, entropy = token_scores(hidden, weight, None, targets, made)
            loss = loss_of(logprobs, entropy, slice(None))
        loss.backward()
        for found, expected in zip(
            (logprobs.detach(), entropy.detach(), hidden.grad, weight.grad),
            wanted(*given, logits),
            strict=True,
        ):
            assert found is not None
            error = (found.cpu().double() - expected).abs().max()
            assert error <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("fused", [False, True], ids=["twice", "fused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_memory_is_a_tile_and_the_gradients(fused: bool, compiled: bool):
    """4096 tokens, 150k words: whole logits alone would be 1.2 GB, in the narrower type."""
    hidden, weight, targets, g = (each.cuda() for each in case(4096, 150_000, 512, torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    made = HeadSettings(LogitMap(), 1.0, 256 * MIB, compiled)
    for _ in range(2):  # the first one may compile
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if fused:
            loss = token_loss(hidden, weight, None, targets, made, lambda lp, h, k: (lp * g[k]).sum())[0]
        else:
            loss = (token_scores(hidden, weight, None, targets, made)[0] * g).sum()
        loss.backward()
        del loss
    most = torch.cuda.max_memory_allocated() - before
    # Hidden states' gradient wide and narrow; the head's, and its wide sum where all of it grows at once.
    gradients = 6 * hidden.numel() + (6 if fused else 2) * weight.numel()
    part = 8 * weight.shape[1] * 150_000 // 10  # products of one tile, before they are added
    assert most <= gradients + 256 * MIB + part + 64 * MIB
