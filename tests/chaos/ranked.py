"""The ranks of one trainer: how they meet, who holds which rows, and the points at which they talk to each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from async_rl.weights.ranks import GlooRanks
from async_rl.weights.shards import rows_of
from tests.chaos.points import Points

__all__ = ["assign", "rank_group", "watch_ranks", "zeros"]

LIMIT_S = 30.0
GROUPS = ("front", "versions", "anchors")
"""Of a publisher, in the order in which it opens them."""


@contextmanager
def rank_group(meeting: str, rank: int, ranks: int) -> Iterator[None]:
    """They meet in a file, which outlives each of them, as torchrun's store does."""
    if ranks == 1:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def zeros(shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """bfloat16; with several ranks, this one's rows of each."""
    if ranks == 1:
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (ranks,))
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, *row) in shapes.items():
        tensors[name] = DTensor.from_local(
            torch.zeros((rows_of(rank, rows, ranks), *row), dtype=torch.bfloat16),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((rows, *row)),
            stride=torch.empty((rows, *row), device="meta").stride(),
        )
    return tensors


def assign(tensor: torch.Tensor, bits: np.ndarray, rank: int, ranks: int) -> None:
    """This rank's rows of `bits`, uint16 in the whole tensor's shape."""
    rows = torch.from_numpy(bits.view(np.int16))
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
        start = rank * -(-len(rows) // ranks)
        rows = rows[start : start + len(tensor)]
    tensor.view(torch.int16).copy_(rows)


def watch_ranks(points: Points) -> None:
    """Points before and after everything that this process says to the other ranks."""
    names = iter(GROUPS)
    groups: dict[int, str] = {}
    begin = GlooRanks.__init__

    def named(self: GlooRanks, timeout_s: float) -> None:
        begin(self, timeout_s)
        groups[id(self)] = next(names)

    def watched(what: str) -> Callable[..., Any]:
        act = getattr(GlooRanks, what)

        def watching(self: GlooRanks, *args: Any) -> Any:
            name = f"{what} {groups[id(self)]}"
            points.pass_by(name, "before")
            answer = act(self, *args)
            points.pass_by(name, "after")
            return answer

        return watching

    GlooRanks.__init__ = named  # type: ignore[method-assign]
    for what in ("gather", "send", "receive"):
        setattr(GlooRanks, what, watched(what))
