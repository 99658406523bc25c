"""A causal language model of transformers that answers with log-probabilities instead of logits.

    scores = policy(input_ids, position_ids, Ask(kept, targets))

The model's own forward runs, whatever it does before and after its last layer. Only that layer is stood in for: it
is given the hidden states, has its weights at hand (FSDP has gathered them for the whole forward of the root unit,
and reduces the gradients that the backward pass leaves there), makes the scores (head.py), and gives the model a few
numbers to go on with instead of logits. What the model makes of them shows what it does to logits: nothing, a scale,
a soft cap. Nothing is read from a config, where the same thing has a dozen names.

A model whose last layer is not a plain Linear, or that does more than that to its logits, has its logits computed
whole, with one warning. `Policy.check` finds that out with two tokens, once, before training.

This module is the FSDP root: the scores are its output, so FSDP sees the backward pass begin.

Legend: T tokens of a micro-batch, K of them asked for, V vocabulary, D width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from async_rl.errors import ConfigError
from async_rl.log import get_logger
from workers.head import HeadSettings, LogitMap, LossOf, token_loss, token_scores
from workers.packed_attention import attention_inputs

__all__ = ["Ask", "Policy", "Scores", "read_map"]

log = get_logger(__name__)

PROBE = (0.0, 2.0**-10, -(2.0**-10), 0.7, -0.7, 5.0, -5.0, 40.0, -40.0, 1e6, -1e6)
"""What the model gets instead of logits. The second tells the scale (a cap bends it by less than float32 can show),
the last but one tells the cap; the others must then fit."""
SMALL, LARGE = 1, 9

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of log-probabilities, relative to the greatest (at least 1), for products of this type: rounding is an order of
magnitude below, a word that is masked or a bias that is added behind the last layer is above."""


class Ask:
    """What is wanted of a forward pass. Not a dataclass: FSDP would look inside and round its tensors."""

    def __init__(
        self,
        kept_K: Tensor,
        targets_K: Tensor,
        *,
        loss_of: LossOf | None = None,
        entropy_gradient: bool = False,
        whole: bool = False,
    ) -> None:
        """`kept_K`: indices of the tokens that are asked for, ascending; `targets_K`: the tokens that follow them.
        With `loss_of` (head.token_loss) a loss comes back, and scores without gradients. `whole`: by way of logits.
        """
        self.kept_K, self.targets_K = kept_K, targets_K
        self.loss_of, self.entropy_gradient, self.whole = loss_of, entropy_gradient, whole


class Scores(NamedTuple):
    logprobs_K: Tensor  # log pi of the targets, float32
    entropy_K: Tensor  # nats; without gradient unless it was asked for
    loss: Tensor | None = None
    aux_loss: Tensor | None = None  # what the model adds by itself: the balance of a mixture's routers


class Policy(nn.Module):
    def __init__(self, model: Any, settings: HeadSettings, *, whole: bool = False) -> None:
        """`settings.logits` is found out by `check`. `whole`: compute logits, whatever the model is."""
        super().__init__()
        self.model = model
        self._settings = settings
        self._takes_kept = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._stand_in: _StandIn | None = None
        if whole:
            return
        head = model.get_output_embeddings()
        if type(head) is nn.Linear:
            self._stand_in = _StandIn(head)
        else:
            known = "it names none" if head is None else f"it is a {type(head).__name__}, not a Linear"
            self._give_up(f"its last layer is not known ({known})")

    @property
    def in_tiles(self) -> bool:
        return self._stand_in is not None

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, ask: Ask) -> Scores:
        scores = None
        if self._stand_in is None or ask.whole:
            output = self._call(input_ids_T, position_ids_T, ask)
        else:
            with self._stand_in.asked(ask, self._settings):
                output = self._call(input_ids_T, position_ids_T, ask)
            scores = self._stand_in.answer(output.logits)
        if scores is None:
            scores = _whole_scores(_kept(output.logits[0], ask), ask, self._settings.temperature)
        return scores._replace(aux_loss=getattr(output, "aux_loss", None))

    def give_back(self) -> None:
        """After a pass without a backward pass: else the next one would see the weights that this one has gathered,
        whatever has become of them (FSDP gathers the root unit once, and waits for the backward pass to let go)."""
        if isinstance(self, FSDPModule):
            self.reshard()

    def _call(self, input_ids_T: Tensor, position_ids_T: Tensor, ask: Ask) -> Any:
        return self.model(
            input_ids=input_ids_T[None],
            # Where positions restart, attention is cut: no sample sees another.
            position_ids=position_ids_T[None],
            **attention_inputs(self.model, position_ids_T),
            use_cache=False,
            # Of prompt tokens logits would be the largest tensor, for nothing.
            **({"logits_to_keep": ask.kept_K} if self._takes_kept else {}),
        )

    # ------------------------------------------------------------ what the model does to its logits

    @torch.no_grad()
    def check(self, device: torch.device) -> None:
        """Find out what the model does to its logits, and whether scores in tiles are those from logits, with two
        tokens. Collective, once, before training; where it can't be found out, logits are computed from then on."""
        if self._stand_in is None:
            return
        two = torch.arange(2, device=device)
        try:
            reason = self._difference(two, two.flip(0))
        except (IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the model could not be run without its logits: {type(error).__name__}: {error}",
                hint='set trainer.head = "logits": they are then computed whole, which takes more memory',
            ) from error
        finally:
            self.give_back()
        if reason:
            self._give_up(reason)

    def _difference(self, two: Tensor, targets: Tensor) -> str:
        """Why the model's scores can't be computed in tiles, or nothing."""
        assert self._stand_in is not None
        self(two, two, Ask(two, targets))
        if self._stand_in.calls != 1:
            return f"it uses its last layer {self._stand_in.calls} times in a pass"
        shown = self._stand_in.shown
        if shown is None or shown.shape != (1, 1, len(PROBE)):
            return "it does not give back what comes out of its last layer"
        found = read_map(shown.flatten().tolist())
        if found is None:
            return "what it does to its logits is neither a scale nor a soft cap"
        self._settings = replace(self._settings, logits=found)
        tiles = self(two, two, Ask(two, targets))
        whole = self(two, two, Ask(two, targets, whole=True))
        allowed = CHECK_TOLERANCE[self._stand_in.seen_dtype]
        for one, other in zip(tiles[:2], whole[:2], strict=True):
            if not bool(((one - other).abs() <= allowed * other.abs().clamp(min=1.0)).all()):
                return "its logits are not its last layer's products, scaled or capped"
        log.debug("scores are computed in tiles", scale=found.scale, cap=found.cap)
        return ""

    def _give_up(self, reason: str) -> None:
        if self._stand_in is not None:
            self._stand_in.remove()
            self._stand_in = None
        log.warning(
            "the logits of this model are computed whole, which takes several times the memory",
            model=type(self.model).__name__,
            reason=reason,
        )


class _StandIn:
    """In the place of the last layer's forward while scores are asked for."""

    def __init__(self, head: nn.Linear) -> None:
        self._head, self._own = head, head.forward
        self._ask: Ask | None = None
        self._settings: HeadSettings | None = None
        self._scores: Scores | None = None
        self.calls = 0
        self.shown: Tensor | None = None
        self.seen_dtype = torch.float32
        self._probe: Tensor | None = None
        head.forward = self._forward  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        self._head.forward = self._own  # type: ignore[method-assign]

    @contextmanager
    def asked(self, ask: Ask, settings: HeadSettings) -> Iterator[None]:
        self._ask, self._settings, self._scores, self.calls, self.shown = ask, settings, None, 0, None
        try:
            yield
        finally:
            self._ask = None

    def answer(self, shown: Tensor) -> Scores | None:
        """`shown`: what the model made of PROBE. None where the model went around its last layer: it made logits."""
        scores, self._scores, self.shown = self._scores, None, shown
        return scores

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._ask is None or self._settings is None:
            return self._own(hidden)
        self.calls += 1
        self.seen_dtype = hidden.dtype
        ask = self._ask
        hidden_KD = _kept(hidden.reshape(-1, hidden.shape[-1]), ask)
        arguments = (hidden_KD, self._head.weight, self._head.bias, ask.targets_K, self._settings)
        if ask.loss_of is None:
            logprobs_K, entropy_K = token_scores(*arguments)
            entropy_K = entropy_K if ask.entropy_gradient else entropy_K.detach()
            self._scores = Scores(logprobs_K, entropy_K)
        else:
            loss, logprobs_K, entropy_K = token_loss(*arguments, ask.loss_of)
            self._scores = Scores(logprobs_K, entropy_K, loss)
        if self._probe is None:
            self._probe = torch.tensor(PROBE, device=hidden.device)[None, None]
        return self._probe


def read_map(values: Sequence[float]) -> LogitMap | None:
    """The map that makes `values` of PROBE; None if there is no such map."""
    scale = values[SMALL] / PROBE[SMALL]
    if not 0.0 < scale < math.inf or not 0.0 < values[LARGE] < math.inf:
        return None
    straight = math.isclose(values[LARGE], scale * PROBE[LARGE], rel_tol=1e-5)
    found = LogitMap(scale) if straight else LogitMap(scale, cap=values[LARGE])
    expected = found(torch.tensor(PROBE, dtype=torch.float64)).tolist()
    pairs = zip(values, expected, strict=True)
    return found if all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in pairs) else None


def _kept(rows: Tensor, ask: Ask) -> Tensor:
    """Those that are asked for, where the model gives all rows."""
    return rows if len(rows) == len(ask.kept_K) else rows[ask.kept_K]


def _whole_scores(logits_KV: Tensor, ask: Ask, temperature: float) -> Scores:
    logprobs_KV = (logits_KV.float() / temperature).log_softmax(-1)
    # Not a view: FSDP hangs the beginning of its backward pass on this tensor.
    logprobs_K = logprobs_KV.gather(-1, ask.targets_K[:, None]).sum(-1)
    with torch.set_grad_enabled(ask.entropy_gradient and torch.is_grad_enabled()):
        entropy_K = -(logprobs_KV.exp() * logprobs_KV).nan_to_num().sum(-1)
    if ask.loss_of is None:
        return Scores(logprobs_K, entropy_K)
    loss = ask.loss_of(logprobs_K, entropy_K, slice(0, len(logprobs_K)))
    return Scores(logprobs_K.detach(), entropy_K.detach(), loss)
