"""A published tensor that is a part of a trained one: some of its rows, or of a row some elements.

Models may be trained with many tensors of their files in one parameter. transformers keeps the experts of a mixture
so: `experts.7.up_proj.weight` [I, H] of the files is the second half of row 7 of `experts.gate_up_proj` [E, 2 I, H].
A row is what ranks share parameters by (FSDP2, `Shard(0)`), so whoever holds the row holds all of what is published
of it, and compares and uploads it alone, as he does the rows of a tensor that is published as it is:

    trained [R, …]       rows first, first + 1, … first + count - 1; of each the elements at `offset`, by `strides`
    published            [count, *inner], or, of one row, `inner` alone; its elements in the order of `inner`

Which part of which tensor a name of the files means is found out in workers/file_names.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Published", "RowsOf"]


@dataclass(frozen=True, eq=False)
class RowsOf:
    whole: Tensor  # the trained one: any tensor, or a DTensor
    shape: tuple[int, ...]  # as published
    first: int  # row
    count: int  # rows
    inner: tuple[int, ...]  # sizes of what is published of a row
    strides: tuple[int, ...]  # of it, in elements
    offset: int  # of it in its row, elements

    @classmethod
    def all_of(cls, whole: Tensor) -> RowsOf:
        """A tensor that is published as it is. A scalar is one row."""
        inner = tuple(whole.shape[1:])
        strides = tuple(math.prod(inner[at + 1 :]) for at in range(len(inner)))
        return cls(whole, tuple(whole.shape), 0, rows_in(whole), inner, strides, 0)

    @classmethod
    def of_view(
        cls, whole: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> RowsOf | None:
        """What a view of `whole`, were that contiguous, shows. None where a row of it would not be published by
        itself: a matrix transposed, a part that crosses rows."""
        shape, strides = tuple(shape), tuple(strides)
        row = math.prod(whole.shape[1:])
        if not whole.ndim or not row or not math.prod(shape):
            return None
        first, at = divmod(offset, row)
        rows_lead = bool(shape) and strides[0] == row
        for lead in (1, 0) if rows_lead else (0,):
            inner, steps = shape[lead:], strides[lead:]
            last = at + sum((size - 1) * step for size, step in zip(inner, steps, strict=True))
            if last < row:
                return cls(whole, shape, first, shape[0] if lead else 1, inner, steps, at)
        return None

    @property
    def unit(self) -> int:
        """Elements that are published of a row."""
        return math.prod(self.inner)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Of its rows, counted from its own first: the one where it begins to lie in rows `start` to `stop` of the
        trained tensor, and how many do."""
        low = min(max(start - self.first, 0), self.count)
        high = min(max(stop - self.first, low), self.count)
        return low, high - low

    def of_rows(self, rows: Tensor, start: int) -> Tensor:
        """The published elements in `rows`, which are those of the trained tensor from `start` on: a view of them,
        [rows that are ours, *inner]."""
        low, count = self.within(start, start + rows_in(rows))
        if not count:
            return rows.new_empty((0, *self.inner))
        rows = rows.contiguous()
        row = math.prod(rows.shape[1:])
        at = rows.storage_offset() + (self.first + low - start) * row + self.offset
        return torch.as_strided(rows, (count, *self.inner), (row, *self.strides), at)

    def shown(self) -> Tensor:
        """The published tensor as a view of the trained one, which is contiguous and lies here whole."""
        assert self.whole.is_contiguous()
        return self.of_rows(self.whole.detach(), 0).view(self.shape)


Published = Tensor | RowsOf


def rows_in(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 1
