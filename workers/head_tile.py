"""One tile of logits: the products, what is kept of it, and its gradient (head.py says how tiles are used).

Legend: K tokens, V vocabulary, D width; k, v the tokens and words of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_rl.log import get_logger

__all__ = [
    "NARROWEST",
    "Gradients",
    "HeadSettings",
    "LogitMap",
    "finished",
    "fold",
    "logit_bytes",
    "nothing",
    "product",
    "slices",
    "slope",
    "tool",
    "wide",
]

log = get_logger(__name__)

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
        int  # limit of all that lives of a tile at one time; 1024 words of one token are always allowed
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


def product(hidden_kD: Tensor, weight_vD: Tensor, bias_V: Tensor | None, v: slice) -> Tensor:
    """x [k, v], in the type of its factors: what an engine of this type computes, too."""
    if bias_V is None:
        return hidden_kD @ weight_vD.T
    return torch.addmm(bias_V[v], hidden_kD, weight_vD.T)


def _bent(product_kv: Tensor, settings: HeadSettings) -> Tensor:
    """The logit but for `settings.factor`: x itself, or the tanh."""
    cap = settings.logits.cap
    if cap is None:
        return product_kv
    return product_kv.to(wide(product_kv)).mul(settings.logits.scale / cap).tanh_()


def nothing(hidden_kD: Tensor) -> tuple[Tensor, ...]:
    """Of no words yet: greatest logit, sum of e^d, sum of d e^d (d: logit less the greatest), the target's logit."""
    zero_k = hidden_kD.new_zeros(len(hidden_kD), dtype=wide(hidden_kD))
    return zero_k + LOWEST, zero_k, zero_k, zero_k


def fold(
    product_kv: Tensor,
    top_k: Tensor,
    sum_k: Tensor,
    moment_k: Tensor,
    target_k: Tensor,
    local_k: Tensor,
    settings: HeadSettings,
    masks: bool,
) -> tuple[Tensor, ...]:
    """The state of `nothing` with the words of one more tile in it. `local_k`: the target's column, if it is one."""
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


def finished(top_k: Tensor, sum_k: Tensor, moment_k: Tensor, target_k: Tensor) -> tuple[Tensor, ...]:
    """log pi of the target, entropy, L."""
    log_sum_k = sum_k.log()
    return target_k - top_k - log_sum_k, log_sum_k - moment_k / sum_k, top_k + log_sum_k


def slope(
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


class Gradients:
    """Of hidden, weight and bias, from tiles; None for those that are not needed.

    Tiles come either word by word (all tokens of some words, then the next words) or, `by_tokens`, all words of some
    tokens, then the next tokens. By words, a row of the weight's gradient is written once, in the type of the weight,
    when its sum is there. By tokens all sums grow at once, and all of them are wide.
    """

    def __init__(
        self,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        needed: Sequence[bool],
        *,
        by_tokens: bool = False,
    ) -> None:
        self._hidden, self._weight = hidden_KD, weight_VD
        self._dtypes = [None if each is None else each.dtype for each in (hidden_KD, weight_VD, bias_V)]
        dtype = wide(hidden_KD)
        self._of_hidden = torch.zeros_like(hidden_KD, dtype=dtype) if needed[0] else None
        make = (
            torch.empty_like if len(hidden_KD) else torch.zeros_like
        )  # the first tile of each row overwrites it
        self._of_weight = make(weight_VD, dtype=dtype if by_tokens else None) if needed[1] else None
        self._of_bias = torch.zeros_like(bias_V, dtype=dtype) if needed[2] and bias_V is not None else None
        self._sum_vD: Tensor | None = None  # of the words whose tokens are coming

    def add(self, k: slice, v: slice, slope_kv: Tensor) -> None:
        """A tile's part. `slope_kv`: gradient of x."""
        if self._of_bias is not None:
            self._of_bias[v] += slope_kv.sum(0)
        if self._of_hidden is not None:
            _add_times_weight(self._of_hidden[k], slope_kv, self._weight[v])
        if self._of_weight is not None:
            self._add_to_weight(k, self._of_weight[v], slope_kv)

    def _add_to_weight(self, k: slice, rows_vD: Tensor, slope_kv: Tensor) -> None:
        first, last = k.start == 0, k.stop == len(self._hidden)
        if self._hidden.dtype == slope_kv.dtype:
            rows_vD.addmm_(slope_kv.T, self._hidden[k], beta=0.0 if first else 1.0)
            return
        part_vD = _wide_product(slope_kv.T, self._hidden[k])
        if rows_vD.dtype == part_vD.dtype:
            rows_vD.copy_(part_vD if first else part_vD.add_(rows_vD))
            return
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
        # In parts: a wide copy of the whole head would be far over the budget.
        for w in slices(len(weight_vD), NARROWEST):
            sum_kD.addmm_(slope_kv[:, w], weight_vD[w].to(slope_kv.dtype))


def _wide_product(slope: Tensor, narrow: Tensor) -> Tensor:
    """slope @ narrow in the type of `slope`; on an accelerator with 16-bit factors, as fast as it can."""
    if slope.is_cuda:
        return torch.mm(slope.to(narrow.dtype), narrow, out_dtype=slope.dtype)
    return slope @ narrow.to(slope.dtype)


def logit_bytes(hidden_KD: Tensor, settings: HeadSettings) -> int:
    """The most that lives per logit of a tile: the product (or the slope in its type), two tensors of the arithmetic
    (d and e^d, or log pi and pi), the tanh."""
    broad = torch.finfo(wide(hidden_KD)).bits // 8
    narrow = hidden_KD.element_size()
    capped = settings.logits.cap is not None
    return 2 * broad + narrow + (broad if capped else 0)


def slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


_TOOLS: dict[Any, Any] = {}


def tool(function: Any, compiled: bool) -> Any:
    """`function`, or what torch.compile makes of it: a kernel or two per tile instead of ten passes over it."""
    if not compiled:
        return function
    if function not in _TOOLS:
        _TOOLS[function] = _compiled(function)
    return _TOOLS[function]


def _compiled(function: Any) -> Any:
    """Compiled for any number of tokens and words; as it is, with a warning, where it can't be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    made: Any = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        try:
            return made(*arguments)
        except TorchDynamoException as error:
            log.warning(
                'a part of the head can\'t be compiled and runs as it is, slower (trainer.head_compile = "never" '
                "asks for that)",
                part=function.__name__,
                reason=str(error).partition("\n")[0],
            )
            _TOOLS[function] = function
            return function(*arguments)

    return run
