"""The ranks of one trainer, as the publisher uses them: bytes from one to another, short messages to everyone.

Each opening is a gloo group of its own, so that a background thread can use it while training talks over NCCL
or another group. No object collectives: those pickle. `Solo` is the same for a single process that never
initialised torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from async_rl import errors
from async_rl.errors import AsyncRLError, WeightsError

__all__ = [
    "GlooRanks",
    "RankLost",
    "Ranks",
    "Report",
    "Solo",
    "exchange",
    "from_rank0",
    "open_ranks",
    "raise_first",
]

Shared = TypeVar("Shared", bound=Struct)
Result = TypeVar("Result")

_OTHERS = "waiting for the other ranks"
_RANK0 = "waiting for what rank 0 found"


class RankLost(WeightsError):
    """Another rank ended or hangs: the group can't be used any more."""


class Report(Struct, frozen=True):
    """What one rank has to say. An error travels as class name, message and hint."""

    kind: str = ""  # of the error; empty: all went well
    message: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: AsyncRLError) -> Report:
        return cls(type(error).__name__, error.message[:1500], error.hint[:500])

    def error(self) -> AsyncRLError:
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else WeightsError
        rebuilt: AsyncRLError = kind(self.message, hint=self.hint)
        return rebuilt


class Ranks(Protocol):
    rank: int
    size: int

    def send(self, data: torch.Tensor, to: int) -> None:
        """`data`: uint8 [n], contiguous, on the CPU; n > 0. Blocks until the receiver has it."""
        ...

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fills `data`, uint8 [n]."""
        ...

    def gather(self, mine: bytes) -> list[bytes]:
        """Everyone's, by rank, on every rank. For short ones: each is padded to the longest."""
        ...

    def close(self) -> None: ...


class Solo:
    rank = 0
    size = 1

    def send(self, data: torch.Tensor, to: int) -> None:
        raise AssertionError("a single rank has nobody to send to")

    def receive(self, data: torch.Tensor, source: int) -> None:
        raise AssertionError("a single rank has nobody to receive from")

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def close(self) -> None:
        pass


class GlooRanks:
    """Every operation is bounded by the group's timeout and raises RankLost."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = _new_group(timeout_s)

    def send(self, data: torch.Tensor, to: int) -> None:
        _guard(lambda: dist.send(data, to, group=self._group), f"sending to rank {to}")

    def receive(self, data: torch.Tensor, source: int) -> None:
        _guard(lambda: dist.recv(data, source, group=self._group), f"receiving from rank {source}")

    def gather(self, mine: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        length = torch.tensor([len(mine)])
        _guard(lambda: dist.all_gather(lengths, length, group=self._group), _OTHERS)
        longest = max(1, *(int(each) for each in lengths))
        row = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        _guard(lambda: dist.all_gather(rows, row, group=self._group), _OTHERS)
        return [each.numpy().tobytes()[: int(size)] for each, size in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    limit = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = _guard(
        lambda: dist.new_group(backend="gloo", timeout=limit), "opening a group"
    )
    return group


def _guard(operation: Callable[[], Result], doing: str) -> Result:
    try:
        return operation()
    except RuntimeError as error:  # what torch raises for a lost peer and for its own timeout
        raise RankLost(
            f"rank {dist.get_rank()} failed while {doing}: {error}",
            hint="another rank ended or hangs: look at its log",
        ) from error


def open_ranks(timeout_s: float) -> Ranks:
    """Collective: every rank of the default group must call it."""
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return GlooRanks(timeout_s) if many else Solo()


def exchange(ranks: Ranks, mine: Shared) -> list[Shared]:
    """Collective: everyone's, by rank, on every rank."""
    return [msgspec.json.decode(each, type=type(mine)) for each in ranks.gather(msgspec.json.encode(mine))]


def raise_first(reports: Iterable[Report]) -> None:
    """The most telling error: Fenced before all else, a passing one last. Nothing where there is none."""
    failed = [report for report in reports if report.kind]
    order = {errors.Fenced.__name__: 0, errors.StoreUnavailable.__name__: 2}
    if failed:
        raise min(failed, key=lambda report: order.get(report.kind, 1)).error()


def from_rank0(make: Callable[[], Shared], kind: type[Shared], timeout_s: float = 600.0) -> Shared:
    """Collective: rank 0 calls `make`, and every rank gets its result, or raises its error. Raises RankLost.

    For what one process must do for all: `from_rank0(lambda: claim(store), Claim)`.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    group = _new_group(timeout_s)
    try:
        failure: AsyncRLError | None = None
        data = b""
        if dist.get_rank() == 0:
            try:
                data = b"+" + msgspec.json.encode(make())
            except AsyncRLError as error:
                failure = error
                data = b"-" + msgspec.json.encode(Report.of(error))
        length = torch.tensor([len(data)])
        _guard(lambda: dist.broadcast(length, src=0, group=group), _RANK0)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        _guard(lambda: dist.broadcast(content, src=0, group=group), _RANK0)
    finally:
        dist.destroy_process_group(group)
    if failure is not None:
        raise failure
    received = content.numpy().tobytes()
    if received[:1] == b"-":
        raise msgspec.json.decode(received[1:], type=Report).error()
    return msgspec.json.decode(received[1:], type=kind)
