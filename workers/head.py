"""The last layer without its logits: log-probability and entropy of the next token, in tiles.

    logit_v = m(h . w_v + b_v) / temperature        m: a scale and perhaps a soft cap (LogitMap)
    log pi(y) = logit_y - L,    L = log sum_v exp(logit_v),    H = L - sum_v pi_v logit_v

A [tokens, vocabulary] tensor of a micro-batch is by far the largest of a step (2.5 GB at 4096 tokens and a
vocabulary of 152k, and three of them live at once in the obvious computation). Here only tiles of it exist, of a
size that is given. Two ways:

`token_scores` goes over the vocabulary twice. Forward keeps running maxima and sums (the online softmax of Milakov
and Gimelshein, arXiv 1805.02867) and L and H remain; backward computes each tile again, turns it into

    d/dlogit_v = g (1[v = y] - pi_v) - g_H pi_v (log pi_v + H)

for the gradients g of log pi(y) and g_H of H that come in, and multiplies it away at once. Tiles take all tokens and
a part of the vocabulary as long as they can, so that each row of the head's gradient is written once. Four
products of tokens x vocabulary x width instead of three.

`token_loss` is for losses that are sums over tokens: there g is known as soon as L is. All logits of some tokens are
kept until their gradients are made, in the forward pass: three products. Backward multiplies the gradients by what
comes in.

Products have the type of `hidden` and the head; everything behind them, sums over tiles included, is float32 (float64
for float64). A logit of -inf (a bias that masks a word) has probability 0 and no gradient; other values that are not
finite come out as NaN.

Legend: K tokens, V vocabulary, D width; k, v the tokens and words of one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers import head_tile as tile
from workers.head_tile import HeadSettings, LogitMap

__all__ = [
    "HeadSettings",
    "LogitMap",
    "LossOf",
    "Tiles",
    "plan_rows",
    "plan_tiles",
    "token_loss",
    "token_scores",
    "usual_budget",
]

LossOf = Callable[[Tensor, Tensor, slice], Tensor]
"""(log pi [k], H [k], which of the tokens) -> their part of the loss, a scalar with gradient in both."""


class Tiles(NamedTuple):
    """Shape of the largest tile."""

    tokens: int
    words: int


def plan_tiles(tokens: int, words: int, logit_bytes: int, budget: int) -> Tiles:
    """All tokens and as many words as `budget` bytes hold, at `logit_bytes` each; fewer tokens only where not even
    tile.NARROWEST words fit. Even shares: the last tile is not a sliver."""
    tokens, words = max(tokens, 1), max(words, 1)
    narrowest = min(tile.NARROWEST, words)
    rows = _even(tokens, max(1, budget // (logit_bytes * narrowest)))
    return Tiles(rows, _even(words, max(narrowest, budget // (logit_bytes * rows))))


def plan_rows(tokens: int, words: int, logit_bytes: int, kept_bytes: int, budget: int) -> Tiles:
    """For `token_loss`: so many tokens that their logits, kept at `kept_bytes` each, take three quarters of `budget`;
    the arithmetic goes over them in parts that fit into the rest. At least one token, whatever it takes."""
    tokens, words = max(tokens, 1), max(words, 1)
    rows = _even(tokens, max(1, budget * 3 // 4 // (kept_bytes * words)))
    return Tiles(rows, _even(words, max(min(tile.NARROWEST, words), budget // 4 // (logit_bytes * rows))))


def usual_budget(token_bytes: int, accelerator: bool) -> int:
    """Bytes of a tile where nothing is said: room for the logits (plan_rows; `token_bytes` a token) of so many tokens
    that multiplying them is not waiting for memory. Adding a part to the head's gradient moves all of it: a CPU with
    ten operations per byte of bandwidth is busy from 256 tokens on, an accelerator with hundreds from a thousand on.
    And never less than products want in the other direction."""
    tokens, least = (1024, 512 << 20) if accelerator else (256, 64 << 20)
    return max(least, tokens * token_bytes * 4 // 3)


def _even(count: int, most: int) -> int:
    """Of parts of at most `most` that together are `count`, the size if they are as equal as can be."""
    return -(-count // -(-count // most))


def token_scores(
    hidden_KD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_K: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """log pi of the targets [K] and the entropy [K], nats, float32; gradients of both to hidden, weight and bias.

    Where all logits fit into the budget, they are kept for the backward pass.
    """
    return _Scores.apply(hidden_KD, weight_VD, bias_V, targets_K, settings)  # type: ignore[no-untyped-call,no-any-return]


def token_loss(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_K: Tensor,
    settings: HeadSettings,
    loss_of: LossOf,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `loss_of` over tiles, a scalar with gradients to hidden, weight and bias; log pi [K] and entropy [K]
    without.

    `loss_of` is called for consecutive parts of the tokens, and must be a sum over tokens: what it gives for a part
    must not depend on tokens elsewhere.
    """
    wanted = torch.is_grad_enabled()
    return _Loss.apply(hidden_KD, weight_VD, bias_V, targets_K, settings, loss_of, wanted)  # type: ignore[no-untyped-call,no-any-return]


# ---------------------------------------------------------------- twice over the vocabulary


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_K: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no gradient of the entropy: no work for it
        tokens, words = len(hidden_KD), len(weight_VD)
        tiles = plan_tiles(tokens, words, tile.logit_bytes(hidden_KD, settings), settings.tile_bytes)
        fold = tile.tool(tile.fold, settings.compiled)
        whole = None
        if tiles == (tokens, words):
            whole = tile.product(hidden_KD, weight_VD, bias_V, slice(0, words))
        scores_3K = hidden_KD.new_empty((3, tokens), dtype=tile.wide(hidden_KD))
        for k in tile.slices(tokens, tiles.tokens):
            state = tile.nothing(hidden_KD[k])
            for v in tile.slices(words, tiles.words):
                # Nothing here has a name that outlives the call: two tiles would be there at once.
                state = fold(
                    tile.product(hidden_KD[k], weight_VD[v], bias_V, v) if whole is None else whole,
                    *state,
                    targets_K[k] - v.start,
                    settings,
                    bias_V is not None,
                )
            scores_3K[:, k] = torch.stack(tile.finished(*state))
        logprobs_K, entropy_K, log_sum_K = (each.clone() for each in scores_3K)
        ctx.settings, ctx.tiles = settings, tiles
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, targets_K, log_sum_K, entropy_K, whole)
        return logprobs_K, entropy_K

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        hidden_KD, weight_VD, bias_V, targets_K, log_sum_K, entropy_K, whole = ctx.saved_tensors
        settings = ctx.settings
        slope = tile.tool(tile.slope, settings.compiled)
        gradients = tile.Gradients(hidden_KD, weight_VD, bias_V, ctx.needs_input_grad)
        # What comes before the logit is x: the map's slope is in the coefficients, tokens long, not in each tile.
        g_K, gh_K = (None if g is None else g * settings.slope for g in incoming)
        if g_K is None:
            g_K = torch.zeros_like(log_sum_K)
        for v in tile.slices(len(weight_VD), ctx.tiles.words):
            for k in tile.slices(len(hidden_KD), ctx.tiles.tokens):
                slope_kv = slope(
                    tile.product(hidden_KD[k], weight_VD[v], bias_V, v) if whole is None else whole,
                    log_sum_K[k],
                    entropy_K[k],
                    g_K[k],
                    None if gh_K is None else gh_K[k],
                    targets_K[k] - v.start,
                    settings,
                    bias_V is not None,
                )
                gradients.add(k, v, slope_kv)
                del slope_kv  # before the next one is made
        return (*gradients.result(), None, None)


# ---------------------------------------------------------------- once, where the loss is known


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_K: Tensor,
        settings: HeadSettings,
        loss_of: LossOf,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(hidden_KD)
        tiles = plan_rows(
            tokens,
            len(weight_VD),
            tile.logit_bytes(hidden_KD, settings),
            hidden_KD.element_size(),
            settings.tile_bytes,
        )
        needed = [wanted and each for each in ctx.needs_input_grad]
        gradients = None
        if any(needed):
            gradients = tile.Gradients(
                hidden_KD, weight_VD, bias_V, needed, by_tokens=tiles.tokens < tokens
            )
        scores_2K = hidden_KD.new_empty((2, tokens), dtype=tile.wide(hidden_KD))
        total = scores_2K.new_zeros(())
        for k in tile.slices(tokens, tiles.tokens):
            scores_2K[:, k], loss = _part_of_loss(
                k, tiles.words, hidden_KD[k], weight_VD, bias_V, targets_K[k], settings, loss_of, gradients
            )
            total += loss
        ctx.save_for_backward(*(gradients.result() if gradients else (None, None, None)))
        ctx.mark_non_differentiable(logprobs_K := scores_2K[0], entropy_K := scores_2K[1])
        return total, logprobs_K, entropy_K

    @staticmethod
    def backward(ctx: Any, incoming: Tensor, *_: Any) -> Any:
        # In place: these are the only ones there are, and a second backward through freed tensors raises.
        made = [each if each is None else each.mul_(incoming.to(each.dtype)) for each in ctx.saved_tensors]
        return (*made, None, None, None, None)


def _part_of_loss(
    k: slice,
    narrow: int,
    hidden_kD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_k: Tensor,
    settings: HeadSettings,
    loss_of: LossOf,
    gradients: tile.Gradients | None,
) -> tuple[Tensor, Tensor]:
    """log pi and entropy [2, k], and the loss, of tokens k; their part is added to `gradients`, if it is wanted. The
    arithmetic takes `narrow` words at a time."""
    words, masks = len(weight_VD), bias_V is not None
    fold, slope = (tile.tool(each, settings.compiled) for each in (tile.fold, tile.slope))
    product_kV = tile.product(hidden_kD, weight_VD, bias_V, slice(0, words))
    state = tile.nothing(hidden_kD)
    for v in tile.slices(words, narrow):
        state = fold(product_kV[:, v], *state, targets_k - v.start, settings, masks)
    logprobs_k, entropy_k, log_sum_k = tile.finished(*state)
    scores_2k = torch.stack([logprobs_k, entropy_k])
    if gradients is None:
        return scores_2k, loss_of(logprobs_k, entropy_k, k)
    with torch.enable_grad():
        leaves = logprobs_k.detach().requires_grad_(), entropy_k.detach().requires_grad_()
        loss = loss_of(*leaves, k)
        given = torch.autograd.grad(loss, leaves, allow_unused=True)
    g_k, gh_k = (None if g is None else g * settings.slope for g in given)
    g_k = torch.zeros_like(logprobs_k) if g_k is None else g_k
    for v in tile.slices(words, narrow):
        local_k = targets_k - v.start
        gradients.add(
            k, v, slope(product_kV[:, v], log_sum_k, entropy_k, g_k, gh_k, local_k, settings, masks)
        )
    return scores_2k, loss.detach()
