"""The last layer without its logits: log-probability and entropy of the next token, in tiles.

    logit_v = m(h . w_v + b_v) / temperature        m: a scale and perhaps a soft cap (LogitMap)
    log pi(y) = logit_y - L,    L = log sum_v exp(logit_v),    H = L - sum_v pi_v logit_v

A [tokens, vocabulary] tensor of a micro-batch is by far the largest of a step (2.5 GB at 4096 tokens and a
vocabulary of 152k, and five of them live at once in the obvious computation). Here only tiles of it exist, of a
size that is given. Two ways:

`token_scores` goes over the vocabulary twice. Forward keeps running maxima and sums (the online softmax of Milakov
and Gimelshein, arXiv 1805.02867) and L and H remain; backward computes each tile again, turns it into

    d/dlogit_v = g (1[v = y] - pi_v) - g_H pi_v (log pi_v + H)

for the gradients g of log pi(y) and g_H of H that come in, and multiplies it away at once. Tiles take all tokens and a
part of the vocabulary as long as they can, so that each row of the head's gradient is written once. Four
products of tokens x vocabulary x width instead of three.

`token_loss` is for losses that are sums over tokens: there g is known as soon as L is. Tiles take the whole
vocabulary and some tokens, the gradients are made in the forward pass, three products. Backward multiplies them by
what comes in.

Products have the type of `hidden` and the head; everything behind them, sums over tiles included, is float32 (float64
for float64). A logit of -inf (a bias that masks a word) has probability 0 and no gradient; other values that are not
finite come out as NaN.

Legend: K tokens, V vocabulary, D width; k, v the tokens and words of one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["HeadSettings", "LogitMap", "LossOf", "Tiles", "plan_tiles", "token_loss", "token_scores"]

LossOf = Callable[[Tensor, Tensor, slice], Tensor]
"""(log pi [k], H [k], which of the tokens) -> their part of the loss, a scalar with gradient in both."""

NARROWEST = 1024
"""Words of a tile, before it takes fewer tokens: narrower products waste the processor. And a tile that takes all
tokens must not become a column of a few words."""

LOWEST = -1e30
"""Stands for -inf where 0 * -inf would follow: exp() of it is 0, and its product with 0 is 0."""


@dataclass(frozen=True)
class LogitMap:
    """What a model does to x = h . w + b: `scale * x`, or `cap * tanh(scale * x / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale * x if self.cap is None else self.cap * torch.tanh(self.scale * x / self.cap)


@dataclass(frozen=True)
class HeadSettings:
    logits: LogitMap
    temperature: float
    tile_bytes: (
        int  # all that lives of a tile at one time is at most this, if 1024 words of one token allow it
    )
    compiled: bool = False  # the arithmetic between the products by torch.compile

    @property
    def slope(self) -> float:
        """Of the logit over x, where there is no cap or x is 0."""
        return self.logits.scale / self.temperature

    @property
    def factor(self) -> float:
        """Of the logit over what `_bent` gives."""
        return self.slope if self.logits.cap is None else self.logits.cap / self.temperature


class Tiles(NamedTuple):
    """Shape of the largest tile."""

    tokens: int
    words: int


def plan_tiles(tokens: int, words: int, logit_bytes: int, budget: int) -> Tiles:
    """All tokens and as many words as `budget` bytes hold, at `logit_bytes` each; fewer tokens only where not even
    NARROWEST words fit. Even shares: the last tile is not a sliver."""
    tokens, words = max(tokens, 1), max(words, 1)
    narrowest = min(NARROWEST, words)
    rows = _even(tokens, max(1, budget // (logit_bytes * narrowest)))
    return Tiles(rows, _even(words, max(narrowest, budget // (logit_bytes * rows))))


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

    `loss_of` is called for consecutive parts of the tokens, and must be a sum over tokens: what it gives for a part must
    not depend on tokens elsewhere.
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
        tiles = plan_tiles(tokens, words, _logit_bytes(hidden_KD, settings), settings.tile_bytes)
        fold = _tool(_fold, settings.compiled)
        parts: list[tuple[Tensor, ...]] = []
        product_kv = None
        for k in _slices(tokens, tiles.tokens):
            state = _nothing(hidden_KD[k])
            for v in _slices(words, tiles.words):
                product_kv = _product(hidden_KD[k], weight_VD[v], bias_V, v)
                local_k = targets_K[k] - v.start
                state = fold(product_kv, *state, local_k, settings, bias_V is not None)
            parts.append(_finished(*state))
        logprobs_K, entropy_K, log_sum_K = (
            (torch.cat(each) for each in zip(*parts, strict=True))
            if parts
            else (_nothing(hidden_KD)[0] for _ in range(3))
        )
        whole = product_kv if tiles == (tokens, words) else None
        ctx.settings, ctx.tiles = settings, tiles
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, targets_K, log_sum_K, entropy_K, whole)
        return logprobs_K, entropy_K

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        hidden_KD, weight_VD, bias_V, targets_K, log_sum_K, entropy_K, whole = ctx.saved_tensors
        settings = ctx.settings
        slope = _tool(_slope, settings.compiled)
        gradients = _Gradients(hidden_KD, weight_VD, bias_V, ctx.needs_input_grad)
        # What comes before the logit is x: the map's slope is in the coefficients, tokens long, not in each tile.
        g_K, gh_K = (None if g is None else g * settings.slope for g in incoming)
        if g_K is None:
            g_K = torch.zeros_like(log_sum_K)
        for v in _slices(len(weight_VD), ctx.tiles.words):
            for k in _slices(len(hidden_KD), ctx.tiles.tokens):
                product_kv = whole if whole is not None else _product(hidden_KD[k], weight_VD[v], bias_V, v)
                slope_kv = slope(
                    product_kv,
                    log_sum_K[k],
                    entropy_K[k],
                    g_K[k],
                    None if gh_K is None else gh_K[k],
                    targets_K[k] - v.start,
                    settings,
                    bias_V is not None,
                )
                gradients.add(k, v, slope_kv)
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
        words, masks = len(weight_VD), bias_V is not None
        fold, slope = (_tool(each, settings.compiled) for each in (_fold, _slope))
        needed = [wanted and each for each in ctx.needs_input_grad]
        gradients = _Gradients(hidden_KD, weight_VD, bias_V, needed)
        scores_K = _nothing(hidden_KD)[0].repeat(2, 1)
        total = scores_K.new_zeros(())
        most = max(1, settings.tile_bytes // (_logit_bytes(hidden_KD, settings) * words))
        all_words = slice(0, words)
        for k in _slices(len(hidden_KD), _even(len(hidden_KD), most) if len(hidden_KD) else 1):
            product_kv = _product(hidden_KD[k], weight_VD, bias_V, all_words)
            state = fold(product_kv, *_nothing(hidden_KD[k]), targets_K[k], settings, masks)
            logprobs_k, entropy_k, log_sum_k = _finished(*state)
            scores_K[0, k], scores_K[1, k] = logprobs_k, entropy_k
            loss, g_k, gh_k = _loss_and_slopes(loss_of, logprobs_k, entropy_k, k, any(needed))
            total += loss
            if any(needed):
                g_k = g_k * settings.slope
                gh_k = None if gh_k is None else gh_k * settings.slope
                slope_kv = slope(product_kv, log_sum_k, entropy_k, g_k, gh_k, targets_K[k], settings, masks)
                gradients.add(k, all_words, slope_kv)
        ctx.save_for_backward(*gradients.result())
        ctx.mark_non_differentiable(logprobs_K := scores_K[0], entropy_K := scores_K[1])
        return total, logprobs_K, entropy_K

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        # In place: these are the only ones there are, and a second backward through freed tensors raises.
        made = [
            each if each is None else each.mul_(incoming[0].to(each.dtype)) for each in ctx.saved_tensors
        ]  # type: ignore[union-attr]
        return (*made, None, None, None, None)


def _loss_and_slopes(
    loss_of: LossOf, logprobs_k: Tensor, entropy_k: Tensor, k: slice, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    if not wanted:
        return loss_of(logprobs_k, entropy_k, k), logprobs_k, None
    with torch.enable_grad():
        leaves = logprobs_k.detach().requires_grad_(), entropy_k.detach().requires_grad_()
        loss = loss_of(*leaves, k)
        g_k, gh_k = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), torch.zeros_like(logprobs_k) if g_k is None else g_k, gh_k


# ---------------------------------------------------------------- one tile


def _product(hidden_kD: Tensor, weight_vD: Tensor, bias_V: Tensor | None, v: slice) -> Tensor:
    """x [k, v], in the type of its factors: what an engine of this type computes, too."""
    if bias_V is None:
        return hidden_kD @ weight_vD.T
    return torch.addmm(bias_V[v], hidden_kD, weight_vD.T)


def _bent(product_kv: Tensor, settings: HeadSettings) -> Tensor:
    """The logit but for `settings.factor`: x itself, or the tanh."""
    cap = settings.logits.cap
    if cap is None:
        return product_kv
    return product_kv.to(_wide(product_kv)).mul(settings.logits.scale / cap).tanh_()


def _nothing(hidden_kD: Tensor) -> tuple[Tensor, ...]:
    """Of no words yet: greatest logit, sum of e^d, sum of d e^d (d: logit less the greatest), the target's logit."""
    zero_k = hidden_kD.new_zeros(len(hidden_kD), dtype=_wide(hidden_kD))
    return zero_k + LOWEST, zero_k, zero_k, zero_k


def _fold(
    product_kv: Tensor,
    top_k: Tensor,
    sum_k: Tensor,
    moment_k: Tensor,
    target_k: Tensor,
    local_k: Tensor,
    settings: HeadSettings,
    masks: bool,
) -> tuple[Tensor, ...]:
    """The state of `_nothing` with the words of one more tile in it. `local_k`: the target's column, if it is one."""
    bent_kv = _bent(product_kv, settings)
    factor = settings.factor
    new_top_k = torch.maximum(top_k, bent_kv.amax(-1).to(top_k.dtype) * factor)
    d_kv = torch.add(-new_top_k[:, None], bent_kv, alpha=factor)
    if masks:
        d_kv.clamp_(min=LOWEST)
    exp_kv = d_kv.exp()
    moved_k = top_k - new_top_k
    shrunk_k = moved_k.exp()
    moment_k = shrunk_k * (moment_k + moved_k * sum_k)
    sum_k = shrunk_k * sum_k + exp_kv.sum(-1)
    moment_k = moment_k + d_kv.mul_(exp_kv).sum(-1)
    column_k, inside_k = _column(local_k, bent_kv.shape[1])
    found_k = bent_kv.gather(-1, column_k[:, None]).squeeze(-1).to(top_k.dtype) * factor
    return new_top_k, sum_k, moment_k, torch.where(inside_k, found_k, target_k)


def _finished(top_k: Tensor, sum_k: Tensor, moment_k: Tensor, target_k: Tensor) -> tuple[Tensor, ...]:
    """log pi of the target, entropy, L."""
    log_sum_k = sum_k.log()
    return target_k - top_k - log_sum_k, log_sum_k - moment_k / sum_k, top_k + log_sum_k


def _slope(
    product_kv: Tensor,
    log_sum_k: Tensor,
    entropy_k: Tensor,
    g_k: Tensor,
    gh_k: Tensor | None,
    local_k: Tensor,
    settings: HeadSettings,
    masks: bool,
) -> Tensor:
    """Gradient of x [k, v], float32, from those of log pi (g) and entropy (gh), both times the map's slope at 0."""
    bent_kv = _bent(product_kv, settings)
    log_pi_kv = torch.add(-log_sum_k[:, None], bent_kv, alpha=settings.factor)
    if gh_k is None:
        slope_kv = log_pi_kv.exp_().mul_(-g_k[:, None])
    else:
        if masks:
            log_pi_kv.clamp_(min=LOWEST)
        pi_kv = log_pi_kv.exp()
        slope_kv = log_pi_kv.add_(entropy_k[:, None]).mul_(-gh_k[:, None]).sub_(g_k[:, None]).mul_(pi_kv)
    column_k, inside_k = _column(local_k, bent_kv.shape[1])
    slope_kv.scatter_add_(1, column_k[:, None], torch.where(inside_k, g_k, 0.0)[:, None])
    if settings.logits.cap is not None:
        slope_kv.mul_(bent_kv.square_().neg_().add_(1.0))
    return slope_kv


def _column(local_k: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """A column that exists, and whether it is the target's: no waiting for a device to say how many are inside."""
    return local_k.clamp(0, words - 1), (local_k >= 0) & (local_k < words)


class _Gradients:
    """Of hidden, weight and bias, from tiles; None for those that are not needed. For each part of the words tiles come
    in the order of their tokens, first to last."""

    def __init__(
        self, hidden_KD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: Sequence[bool]
    ) -> None:
        self._hidden, self._weight = hidden_KD, weight_VD
        self._dtypes = [None if each is None else each.dtype for each in (hidden_KD, weight_VD, bias_V)]
        wide = _wide(hidden_KD)
        self._of_hidden = torch.zeros_like(hidden_KD, dtype=wide) if needed[0] else None
        self._of_weight = torch.zeros_like(weight_VD) if needed[1] and not len(hidden_KD) else None
        if needed[1] and len(hidden_KD):
            self._of_weight = torch.empty_like(weight_VD)
        self._of_bias = torch.zeros_like(bias_V, dtype=wide) if needed[2] and bias_V is not None else None
        self._sum_vD: Tensor | None = None  # of one part of the words, where the weight is not wide itself

    def add(self, k: slice, v: slice, slope_kv: Tensor) -> None:
        """A tile's part. `slope_kv`: gradient of x."""
        if self._of_bias is not None:
            self._of_bias[v] += slope_kv.sum(0)
        if self._of_hidden is not None:
            _add_times_weight(self._of_hidden[k], slope_kv, self._weight[v])
        if self._of_weight is not None:
            self._add_to_weight(k, self._of_weight[v], slope_kv)

    def _add_to_weight(self, k: slice, rows_vD: Tensor, slope_kv: Tensor) -> None:
        """In the type of the weight each row is written once, when its sum over all tokens is there."""
        first, last = k.start == 0, k.stop == len(self._hidden)
        if rows_vD.dtype == slope_kv.dtype:
            rows_vD.addmm_(slope_kv.T, self._hidden[k], beta=0.0 if first else 1.0)
            return
        part_vD = _wide_product(slope_kv.T, self._hidden[k])
        self._sum_vD = part_vD if first or self._sum_vD is None else self._sum_vD.add_(part_vD)
        if last:
            rows_vD.copy_(self._sum_vD)
            self._sum_vD = None

    def result(self) -> tuple[Tensor | None, ...]:
        made = (self._of_hidden, self._of_weight, self._of_bias)
        return tuple(
            None if each is None else each.to(dtype) for each, dtype in zip(made, self._dtypes, strict=True)
        )


def _add_times_weight(sum_kD: Tensor, slope_kv: Tensor, weight_vD: Tensor) -> None:
    """sum += slope @ weight. Sums over tiles are never rounded to 16 bits in between."""
    if weight_vD.dtype == slope_kv.dtype:
        sum_kD.addmm_(slope_kv, weight_vD)
    elif slope_kv.is_cuda:
        sum_kD += _wide_product(slope_kv, weight_vD)
    else:
        for w in _slices(
            len(weight_vD), NARROWEST
        ):  # a wide copy of the whole head would be far over the budget
            sum_kD.addmm_(slope_kv[:, w], weight_vD[w].to(slope_kv.dtype))


def _wide_product(slope: Tensor, narrow: Tensor) -> Tensor:
    """slope @ narrow in the type of `slope`; on an accelerator with 16-bit factors, as fast as it can."""
    if slope.is_cuda:
        return torch.mm(slope.to(narrow.dtype), narrow, out_dtype=slope.dtype)
    return slope @ narrow.to(slope.dtype)


def _logit_bytes(hidden_KD: Tensor, settings: HeadSettings) -> int:
    """The most that lives per logit of a tile: the product, two tensors of the arithmetic (d and e^d, or log pi and pi),
    the tanh, and the slope in 16 bits. In one type, the product is one of the two."""
    wide = torch.finfo(_wide(hidden_KD)).bits // 8
    narrow = hidden_KD.element_size()
    capped = settings.logits.cap is not None
    return 2 * wide + narrow + (wide if capped else 0)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


_TOOLS: dict[Any, Any] = {}


def _tool(function: Any, compiled: bool) -> Any:
    """`function`, or what torch.compile makes of it: one kernel per tile instead of ten passes over it. Once per process."""
    if not compiled:
        return function
    if function not in _TOOLS:
        _TOOLS[function] = torch.compile(function, dynamic=True)
    return _TOOLS[function]
