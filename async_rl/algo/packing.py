"""Samples of uneven length -> micro-batches without padding, the same number of them on every rank.

Each sample is a prompt and its completion. Samples are laid end to end in one row of at most `limit`
tokens; positions restart at each, and where positions restart attention is cut (the learner's test holds
that). All arrays are aligned with the input token whose logits they speak about: `targets[t]` is the token
that follows input t in its sample, and the last token of a sample is never an input, because nothing
follows it.

    input       a b c x y | d e u v w        prompts abc, de; completions xyz, uvwt
    positions   0 1 2 3 4 | 0 1 2 3 4
    target      b c x y z | e u v w t
    loss mask   . . 1 1 1 | . 1 1 1 1

With `share`, samples of one prompt lie behind one copy of it (families.py): the others begin at its last token, and
at that token's position. So where a position is 0 a sample begins, and where it is another that does not follow the
one before, a sample goes on behind the beginning of the last whole one:

    input       a b c x y c u         prompt abc; completions xyz, uv
    positions   0 1 2 3 4 2 3

Everything is a function of its arguments: each rank packs the whole batch and takes its share, no message
needed.

Legend: T tokens of a micro-batch, P of a prompt, C of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.algo.families import families_of, laid

__all__ = ["MicroBatch", "TrainSample", "best_fit_decreasing", "pack", "plan"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class TrainSample:
    """One completion with all that its loss needs."""

    prompt_P: np.ndarray[Any, Any]  # token ids, at least one
    tokens_C: np.ndarray[Any, Any]  # token ids
    logprobs_C: np.ndarray[Any, Any]  # behaviour logprobs
    mask_C: np.ndarray[Any, Any]  # nonzero: a loss token
    lags_C: np.ndarray[Any, Any]  # optimizer steps back to the oldest policy with a part in the token
    advantage: float
    slots_C: np.ndarray[Any, Any] | None = None  # where each token is measured (mismatch.py); None: nowhere

    @property
    def inputs(self) -> int:
        """Tokens it takes in a micro-batch."""
        return len(self.prompt_P) + len(self.tokens_C) - 1

    def __post_init__(self) -> None:
        lengths = {len(self.tokens_C), len(self.logprobs_C), len(self.mask_C), len(self.lags_C)}
        if len(lengths) != 1:
            raise ValueError(
                f"tokens, logprobs, mask and lags of a sample differ in length: {sorted(lengths)}"
            )
        if not len(self.prompt_P) or not len(self.tokens_C):
            raise ValueError(
                "a sample needs at least one prompt token (to predict the first from) and one more"
            )


@dataclass(frozen=True)
class MicroBatch:
    """One row of T tokens for one forward pass. `samples` is 0 for the filler that evens out the ranks."""

    input_ids_T: Ints
    position_ids_T: Ints
    targets_T: Ints
    loss_mask_T: Bools
    behaviour_T: Floats  # log mu of the target, 0 where the mask is false
    advantages_T: Floats
    lags_T: Ints
    slots_T: Ints  # -1: not measured
    samples_T: Ints  # which sample of the row: 0, 1, …; each is whole, for losses that look at all of it
    samples: int

    @property
    def tokens(self) -> int:
        return len(self.input_ids_T)


def pack(
    samples: Sequence[TrainSample], limit: int, ranks: int, *, share: bool = False
) -> list[list[MicroBatch]]:
    """Micro-batches [ranks][m], the same m >= 1 for every rank; rows are at most `limit` tokens long,
    except that a longer sample has a row of its own. `share`: one copy of a prompt for the samples that have it in
    common, for attention that understands such rows (workers/branched_attention.py)."""
    families = families_of(samples, limit) if share else [[index] for index in range(len(samples))]
    planned = plan([laid(samples, family) for family in families], limit, ranks)
    return [[_lay(samples, [families[i] for i in row]) for row in rows] for rows in planned]


def plan(lengths: Sequence[int], limit: int, ranks: int) -> list[list[list[int]]]:
    """Indices of samples [ranks][m][…]; rows that are empty stand for fillers.

    Best-fit-decreasing finds how few rows are needed; rounded up to a multiple of the ranks, that many rows
    are filled evenly if the samples allow it (attention costs the square of a row, and ranks wait for the
    slowest).
    """
    rows = best_fit_decreasing(lengths, limit)
    count = max(1, -(-len(rows) // ranks)) * ranks
    rows = _fill_evenly(lengths, limit, count) or rows + [[] for _ in range(count - len(rows))]
    return _deal(lengths, rows, ranks)


def best_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Longest first, each into the fullest row that still has room; a sample over the limit gets a row
    alone. Never more than 11/9 of the optimum and a constant. Ties go to the earlier sample and row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        fitting = [row for row in range(len(rows)) if room[row] >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda row: (room[row], row))
            rows[best].append(index)
            room[best] -= lengths[index]
        else:
            rows.append([index])
            room.append(limit - lengths[index])
    return rows


def _fill_evenly(lengths: Sequence[int], limit: int, count: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest of `count` rows; None where that breaks the limit."""
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in _longest_first(lengths):
        row = min(range(count), key=lambda row: (filled[row], row))
        if rows[row] and filled[row] + lengths[index] > limit:
            return None
        rows[row].append(index)
        filled[row] += lengths[index]
    return rows


def _deal(lengths: Sequence[int], rows: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Rows to ranks, the same number each: the longest row left to the rank with the fewest tokens and
    room."""
    each = len(rows) // ranks
    tokens = [sum(lengths[i] for i in row) for row in rows]
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for row in _longest_first(tokens):
        rank = min((r for r in range(ranks) if len(shares[r]) < each), key=lambda r: (load[r], r))
        shares[rank].append(rows[row])
        load[rank] += tokens[row]
    return shares


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _lay(all_samples: Sequence[TrainSample], families: Sequence[Sequence[int]]) -> MicroBatch:
    if not families:
        return _filler()
    samples = [all_samples[index] for family in families for index in family]
    shared = [
        len(all_samples[index].prompt_P) - 1 if index != family[0] else 0
        for family in families
        for index in family
    ]  # tokens of each that lie in its family's trunk

    def row(of_sample: Callable[[TrainSample], np.ndarray[Any, Any]], dtype: Any) -> Any:
        parts = [of_sample(sample)[skip:] for sample, skip in zip(samples, shared, strict=True)]
        return np.concatenate(parts).astype(dtype, copy=False)

    lengths = [sample.inputs - skip for sample, skip in zip(samples, shared, strict=True)]
    return MicroBatch(
        input_ids_T=row(lambda s: _whole(s)[:-1], np.int64),
        position_ids_T=row(lambda s: np.arange(s.inputs), np.int64),
        targets_T=row(lambda s: _whole(s)[1:], np.int64),
        loss_mask_T=row(lambda s: _after_prompt(s, s.mask_C) != 0, np.bool_),
        behaviour_T=row(lambda s: _after_prompt(s, s.logprobs_C), np.float32),
        advantages_T=row(lambda s: np.full(s.inputs, s.advantage), np.float32),
        lags_T=row(lambda s: _after_prompt(s, s.lags_C), np.int64),
        slots_T=row(_slots, np.int64),
        samples_T=np.repeat(np.arange(len(samples)), lengths),
        samples=len(samples),
    )


def _whole(sample: TrainSample) -> Ints:
    whole: Ints = np.concatenate([sample.prompt_P, sample.tokens_C]).astype(np.int64)
    return whole


def _after_prompt(sample: TrainSample, values_C: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values of completion tokens at the inputs that predict them; zeros in the prompt before."""
    return np.concatenate([np.zeros(len(sample.prompt_P) - 1, dtype=values_C.dtype), values_C])


def _slots(sample: TrainSample) -> np.ndarray[Any, Any]:
    if sample.slots_C is None:
        return np.full(sample.inputs, -1)
    return np.concatenate([np.full(len(sample.prompt_P) - 1, -1), sample.slots_C])


def _filler() -> MicroBatch:
    """One token without loss: a rank with nothing to do must still take part in the collectives of a
    pass."""
    zero = np.zeros(1, dtype=np.int64)
    none = np.zeros(1, dtype=np.float32)
    mask = np.zeros(1, dtype=np.bool_)
    return MicroBatch(zero, zero, zero, mask, none, none, zero, zero - 1, zero, samples=0)
