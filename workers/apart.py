"""Does the model say of a sample in a packed row what it says of the sample alone? Asked of the model itself, before
training: no config tells, and gradients of samples that see each other look like any others.

Some models take no notice of where positions restart: those whose masks are made without positions, those that carry
a state along the row (linear attention, state spaces, convolutions). And attention that is cut by us may miss what
stands in transformers' masks alone (a sliding window). So a few made-up samples are scored alone, by transformers'
own attention, and then in rows:

    a, b, c, d      alone: what is true
    a b c d, c d a b    the first of a row has nothing before it: how far it is off is rounding, whatever the model;
                        the later ones must not be further off than a few times that
    a x | y | z     behind one copy of a prompt, each against itself alone; where prompts would be shared

Packed attention that fails gives way to transformers' own where nobody asked for it by name. A model that fails then
is trained with one sample per row: slower, but right.

Legend: T tokens of a row, L of a sample, K of them compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.log import get_logger
from workers.context import longest_of
from workers.packed_attention import attends_packed, use_packed_attention
from workers.policy import Ask, Policy
from workers.process_group import RankGroup

__all__ = ["Rows", "settle_rows"]

log = get_logger(__name__)

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.01}
"""What is never taken for a leak, by the type of the products: of log-probabilities and entropies, relative to the
greater of their size and 1, in the mean. Of random models of some 40 families leaks were 0.08 and more (0.02 for one
that picks keys), rounding below 1e-5 and 1e-3."""
TIMES = 4.0
"""How many times what the first of a row is off. Rounding is alike wherever a sample lies."""
TOKENS, EDGE, BEGINNING = 24, 16, 4
"""Of a sample, and how many at either end are compared; by how many a leak is judged besides by all: what a
convolution carries over is gone after as many."""
LONGEST_WINDOW = 256
"""Of sliding windows that a sample is made longer than, so that one that is missing is noticed."""
DRAWS = 2
"""A leak must show in each of so many draws: the near-ties of a mixture's routers fall by chance."""


class Rows(NamedTuple):
    """How samples may lie in rows."""

    packed: bool  # several in a row
    shared: bool  # and behind one copy of their prompt
    balanced: bool  # a mixture's routers: the model gave their balance loss

    def both(self, other: Rows) -> Rows:
        """For two models that are given the same rows; the balance is the first's."""
        return Rows(self.packed and other.packed, self.shared and other.shared, self.balanced)


@torch.no_grad()
def settle_rows(
    policy: Policy,
    group: RankGroup,
    *,
    attention: str,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rows:
    """Try the attention of a policy that was checked, and change it where `attention` (of ModelConfig) leaves the
    choice. Collective, with the same result on every rank. `dtype`: of the matrix products.

    Raises ConfigError where packed attention was asked for by name, and is not this model's even for one sample."""
    trial = _Trial(policy, group, vocabulary, device, ROUNDING[dtype])
    with _not_compiled():
        if not attends_packed(policy.model):
            return Rows(trial.keeps_apart(), False, trial.balanced)
        found = trial.of_packed()
        if found is not None and (found.packed or attention != "auto"):
            return found
        if attention != "auto":
            raise ConfigError(
                f"{type(policy.model).__name__} is not computed right by packed attention",
                hint='set model.attention = "sdpa"',
            )
        policy.model.set_attn_implementation("sdpa")
        log.info("packed attention is not what this model computes: transformers' own takes its place")
        return Rows(trial.keeps_apart(), False, trial.balanced)


class _Off(NamedTuple):
    """Mean differences from the samples alone."""

    first: float  # of samples that begin a row
    later: float  # of those behind others, over all tokens compared, or over their first ones: the greater


class _Trial:
    def __init__(
        self, policy: Policy, group: RankGroup, vocabulary: int, device: torch.device, rounding: float
    ) -> None:
        self._policy, self._group, self._device, self._rounding = policy, group, device, rounding
        self._vocabulary = vocabulary
        self.balanced = False

    def keeps_apart(self) -> bool:
        """By transformers' own attention."""
        for seed in range(DRAWS):
            samples = self._samples(seed)
            off = self._in_rows(samples, [self._alone(each) for each in samples])
            if not self._anywhere(not off.later <= self._allowed(off.first)):
                return not _picks_keys(self._policy.model)
        return False

    def of_packed(self) -> Rows | None:
        """By packed attention. None where it is not the model's even for a sample alone."""
        same = packed = shared = False
        apart = not _picks_keys(self._policy.model)
        for seed in range(DRAWS):
            samples = self._samples(seed)
            family = _family(samples)
            with _own_attention(self._policy.model):
                alone = [self._alone(each) for each in samples]
                branches = [self._alone(each, _prompt(samples[0]) - 1) for each in family[1:]]
                allowed = self._allowed(self._in_rows(samples, alone).first)
            off = self._in_rows(samples, alone)
            behind = self._behind_one_prompt(family, branches)
            same = same or not self._anywhere(not off.first <= allowed)
            packed = packed or not self._anywhere(not off.later <= allowed)
            shared = shared or not self._anywhere(not behind <= allowed)
            if same and packed and shared:
                break
        return Rows(apart and packed, apart and packed and shared, self.balanced) if same else None

    def _allowed(self, rounding: float) -> float:
        return max(self._rounding, TIMES * rounding)

    def _anywhere(self, found: bool) -> bool:
        """On any rank: all must pack alike."""
        count = torch.tensor([float(found)])
        self._group.max(count)
        return bool(count.item())

    def _samples(self, seed: int) -> list[Tensor]:
        """Two of one length, which packed attention computes together; the first is longer than a window."""
        config = self._policy.model.config.get_text_config()
        most = longest_of(config.to_dict()) or LONGEST_WINDOW * 2
        window = getattr(config, "sliding_window", None)
        short = min(TOKENS, max(2, most // 4))  # some models allow no longer rows
        long = short
        if isinstance(window, int) and window <= LONGEST_WINDOW:
            long = max(short, min(window + EDGE, most - 3 * short))
        draw = torch.Generator().manual_seed(seed)
        lengths = (long, max(2, short - 3), max(2, short - 3), max(2, short - 5))
        return [torch.randint(0, self._vocabulary, (each,), generator=draw) for each in lengths]

    def _in_rows(self, samples: Sequence[Tensor], alone: Sequence[Tensor]) -> _Off:
        first: list[Tensor] = []
        later: list[Tensor] = []
        beginnings: list[Tensor] = []
        for order in ((0, 1, 2, 3), (2, 3, 0, 1)):
            row = [(samples[each], 0) for each in order]
            for at, (found, each) in enumerate(zip(self._said(row), order, strict=True)):
                off = _off(found, alone[each])
                (later if at else first).append(off)
                if at:
                    beginnings.append(off[:, :BEGINNING])
        return _Off(_mean(first), max(_mean(later), _mean(beginnings)))

    def _behind_one_prompt(self, family: Sequence[Tensor], alone: Sequence[Tensor]) -> float:
        """Of the branches, how far they are off from `alone`, what they say alone from their first own token on."""
        trunk, *branches = family
        prompt = _prompt(trunk)
        row = [(trunk, 0), *((branch, prompt - 1) for branch in branches)]
        _, *found = self._said(row)
        return _mean([_off(said, whole) for said, whole in zip(found, alone, strict=True)])

    def _alone(self, sample: Tensor, first: int = 0) -> Tensor:
        """Of the tokens from `first` on."""
        return self._said([(sample, 0)], first)[0]

    def _said(self, row: Sequence[tuple[Tensor, int]], first: int = 0) -> list[Tensor]:
        """Of samples in a row, each laid from the token given on, asked `first` tokens later: log-probabilities and
        entropies [2, K]."""
        ids_T = torch.cat([sample[start:] for sample, start in row])
        places_T = torch.cat([torch.arange(start, len(sample)) for sample, start in row])
        kept = [first + _kept(len(sample) - start - first) for sample, start in row]
        ends = torch.tensor([0, *(len(sample) - start for sample, start in row)]).cumsum(0)
        kept_K = torch.cat([each + end for each, end in zip(kept, ends, strict=False)])
        targets_K = torch.cat([sample.roll(-1)[start:] for sample, start in row])[kept_K]
        ask = Ask(kept_K.to(self._device), targets_K.to(self._device))
        scores = self._policy(ids_T.to(self._device), places_T.to(self._device), ask)
        self._policy.give_back()
        self.balanced = self.balanced or scores.aux_loss is not None
        both = torch.stack([scores.logprobs_K, scores.entropy_K]).double().cpu()
        return list(torch.split(both, [len(each) for each in kept], 1))


def _kept(length: int) -> Tensor:
    at = torch.arange(length)
    return at[(at < EDGE) | (at >= length - EDGE)]


def _family(samples: Sequence[Tensor]) -> list[Tensor]:
    """A trunk and two branches: samples with one prompt."""
    trunk = samples[0]
    prompt = trunk[: _prompt(trunk)]
    return [trunk, *(torch.cat([prompt, each[: len(trunk) - len(prompt)]]) for each in samples[1:3])]


def _prompt(trunk: Tensor) -> int:
    return len(trunk) // 2


def _off(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).abs() / wanted.abs().clamp(min=1.0)


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts), 1).mean())


def _picks_keys(model: Any) -> bool:
    """Attention that picks some keys by their scores (DeepSeek's indexer) picks them from the whole row: the mask is
    too late for those of other samples, and in short rows it does not show, for all are picked."""
    return bool(getattr(model.config.get_text_config(), "index_topk", None))


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        use_packed_attention(model)


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Each of the few shapes here would be compiled, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield
