"""Attention over a packed row whose samples share prompts (async_rl/algo/families.py says how they lie).

A branch attends to the tokens of its trunk before its own first position, and to itself, causally. Branches of equal
length at equal positions are computed together, whichever trunks they have, so there are as many calls of torch's
attention as there are different shapes. Keys and values of the shared tokens are gathered for each branch; what is
shared is all the rest that a layer computes for them.

Legend: T tokens of a row, L own tokens of a sample, S tokens of its trunk that it sees, N samples of one shape,
H heads of queries, G heads of keys and values, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Branches", "branched_attention", "branches_of", "visible"]


class Shape(NamedTuple):
    """Samples of one shape, laid one after the other once the row is in order."""

    samples: int
    own: int  # L
    trunk_NS: Tensor | None  # int64, flat: places in the row, of each sample's S tokens of its trunk


class Branches:
    """Of a row. Not a tuple: FSDP would look inside, and make another one of it."""

    def __init__(self, shapes: list[Shape], order_T: Tensor) -> None:
        self.shapes, self.order_T = shapes, order_T
        self.back_T = torch.empty_like(order_T)
        self.back_T[order_T] = torch.arange(len(order_T), device=order_T.device)


def branches_of(position_ids_T: Tensor) -> Branches | None:
    """None for a row in which every sample begins at position 0."""
    positions = position_ids_T.tolist()
    starts = [at for at, place in enumerate(positions) if at == 0 or place != positions[at - 1] + 1]
    if all(positions[at] == 0 for at in starts):
        return None
    by_shape: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (S, L) -> (where it starts, its trunk)
    trunk = 0
    for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
        seen = positions[start]
        trunk = start if seen == 0 else trunk
        by_shape.setdefault((seen, end - start), []).append((start, trunk))
    order, shapes = [], []
    for (seen, own), members in by_shape.items():
        order += [at for start, _ in members for at in range(start, start + own)]
        places = [at for _, root in members for at in range(root, root + seen)]
        trunk_NS = torch.tensor(places, device=position_ids_T.device) if seen else None
        shapes.append(Shape(len(members), own, trunk_NS))
    return Branches(shapes, torch.tensor(order, device=position_ids_T.device))


def branched_attention(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, scaling: float | None, window: int | None
) -> Tensor:
    """query [H, T, D], key and value [G, T, D] -> [T, H, D]."""
    tokens = [shape.samples * shape.own for shape in branches.shapes]
    queries, keys, values = (
        each.index_select(1, branches.order_T).split(tokens, 1)  # type: ignore[no-untyped-call]
        for each in (query, key, value)
    )
    parts = []
    for own_query, own_key, own_value, shape in zip(queries, keys, values, branches.shapes, strict=True):
        key_NGD, value_NGD = (
            _behind_trunk(whole, own, shape) for whole, own in ((key, own_key), (value, own_value))
        )
        query_NHLD = _by_sample(own_query, shape.samples)
        seen = key_NGD.shape[2] - shape.own
        plain = not seen and (window is None or window >= shape.own)
        result_NHLD = scaled_dot_product_attention(
            query_NHLD,
            key_NGD,
            value_NGD,
            attn_mask=None if plain else visible(shape.own, seen, window, query.device),
            is_causal=plain,
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        parts.append(result_NHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, branches.back_T)


def visible(own: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """[L, S + L]: a token sees itself and those before it, of the last `window` where there is one."""
    places = torch.arange(seen + own, device=device)
    distance = places[seen:, None] - places[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def _behind_trunk(whole: Tensor, own: Tensor, shape: Shape) -> Tensor:
    """[N, G, S + L, D]"""
    own_NGLD = _by_sample(own, shape.samples)
    if shape.trunk_NS is None:
        return own_NGLD
    return torch.cat([_by_sample(whole.index_select(1, shape.trunk_NS), shape.samples), own_NGLD], 2)


def _by_sample(heads: Tensor, samples: int) -> Tensor:
    """[G, N L, D] -> [N, G, L, D]"""
    return heads.unflatten(1, (samples, -1)).transpose(0, 1)  # type: ignore[no-untyped-call,no-any-return]
