"""The ranks of one trainer: how they find each other, and the few things they tell each other.

Under torchrun the environment names the ranks; alone, a process is a group of one and opens no port.
Messages are bytes and small tensors in host memory over gloo (on CUDA, the gradients' own traffic goes over
NCCL beside it). No object collectives: those pickle. Every operation has a limit, so a rank that died stops
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from async_rl.errors import ConfigError, TrainingError

__all__ = ["RankGroup", "choose_device", "rank_group"]

T = TypeVar("T")


def choose_device(wanted: str) -> torch.device:
    """auto, cpu or cuda as this rank's device. Raises ConfigError where cuda is wanted and absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            'trainer.device = "cuda", but torch finds no CUDA device', hint='use "auto" or "cpu"'
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def rank_group(device: torch.device, timeout_s: float) -> Iterator[RankGroup]:
    """Joins the ranks that torchrun started, or makes a group of one; leaves it again at the end."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
    try:
        yield RankGroup()
    finally:
        dist.destroy_process_group()


class RankGroup:
    """The default process group. Every method is collective: all ranks call it at the same point."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self._bounded(lambda: dist.broadcast(length, src=0), "waiting for rank 0")
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0 and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(content):
            self._bounded(lambda: dist.broadcast(content, src=0), "waiting for rank 0")
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, by rank, on every rank. For short ones: each is padded to the longest."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        mine = torch.tensor([len(data)])
        self._bounded(lambda: dist.all_gather(lengths, mine), "waiting for the other ranks")
        longest = max(int(length) for length in lengths)
        row = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._bounded(lambda: dist.all_gather(rows, row), "waiting for the other ranks")
        return [each.numpy().tobytes()[: int(length)] for each, length in zip(rows, lengths, strict=True)]

    def sum(self, values: torch.Tensor) -> None:
        """In place, `values` in host memory; the same bits on every rank."""
        if self.size > 1:
            self._bounded(lambda: dist.all_reduce(values), "adding up over the ranks")

    def max(self, values: torch.Tensor) -> None:
        """In place, `values` in host memory."""
        if self.size > 1:
            self._bounded(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX), "comparing over the ranks")

    def _bounded(self, operation: Callable[[], T], doing: str) -> T:
        try:
            return operation()
        except RuntimeError as error:  # what torch raises for a lost peer and for its own timeout
            raise TrainingError(
                f"rank {self.rank} of {self.size} failed while {doing}: {error}",
                hint="another rank ended or hangs: the cause stands in its log",
            ) from error
