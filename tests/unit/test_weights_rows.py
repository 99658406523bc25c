"""A part of a trained tensor: which elements it is, and which of them a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from async_rl.weights.rows import RowsOf
from async_rl.weights.shards import rows_of

WHOLE = torch.arange(5 * 6 * 4).reshape(5, 6, 4)
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda whole: whole,
    "one expert": lambda whole: whole[3],
    "half of an expert": lambda whole: whole[2].chunk(2)[1],
    "half of an expert, transposed": lambda whole: whole[4].chunk(2)[0].T,
    "every second row of an expert": lambda whole: whole[1, ::2],
    "a column": lambda whole: whole[0, :, 2],
    "some experts": lambda whole: whole[1:4],
    "all experts transposed": lambda whole: whole.transpose(1, 2),
    "one half of all experts": lambda whole: whole.chunk(2, dim=1)[1],
    "one element": lambda whole: whole[4, 5, 3],
}


def part_of(whole: Tensor, cut: Callable[[Tensor], Tensor]) -> tuple[RowsOf | None, Tensor]:
    view = cut(whole)
    return RowsOf.of_view(whole, view.shape, view.stride(), int(view.storage_offset())), view


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", CUTS)
def test_what_the_ranks_hold_of_a_part_is_the_part_each_element_once_and_in_its_order(
    name: str, ranks: int
):
    part, view = part_of(WHOLE, CUTS[name])
    assert part is not None and part.shape == tuple(view.shape)
    chunk, pieces, at = -(-len(WHOLE) // ranks), [], 0
    for rank in range(ranks):
        start = min(rank * chunk, len(WHOLE))
        stop = start + rows_of(rank, len(WHOLE), ranks)
        first, count = part.within(start, stop)
        held = part.of_rows(WHOLE[start:stop], start)
        assert held.numel() == count * part.unit
        if count:
            assert first * part.unit == at
        at += held.numel()
        pieces.append(held.flatten())
    assert torch.cat(pieces).tolist() == view.flatten().tolist()


@pytest.mark.parametrize(
    ("whole", "cut"),
    [
        (torch.zeros(6, 4), lambda whole: whole.T),  # every row of it has an element of every row
        (
            torch.zeros(4, 6),
            lambda whole: whole.flatten()[3:9],
        ),  # from the middle of one to that of another
        (torch.zeros(5, 6, 4), lambda whole: whole.transpose(0, 1)),
        (torch.zeros(5, 6, 4), lambda whole: whole.flatten(0, 1)[2:9]),
        (torch.zeros(0, 4), lambda whole: whole),
    ],
)
def test_what_is_not_cut_by_rows_is_no_part(whole: Tensor, cut: Callable[[Tensor], Tensor]):
    part, _ = part_of(whole, cut)
    assert part is None


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (3, 0), (4, 2, 3)])
def test_a_tensor_published_as_it_is_is_all_of_its_rows(shape: tuple[int, ...]):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    part = RowsOf.all_of(whole)
    assert part.shape == shape
    assert torch.equal(part.of_rows(whole, 0).reshape(shape), whole)
    turned = torch.arange(6).reshape(2, 3).T  # not in the order of its memory
    assert torch.equal(RowsOf.all_of(turned).of_rows(turned, 0), turned)
