"""Real ranks, cheap: forked from a server that has imported torch and transformers once, before it has any thread.

A rank that imports all of it for itself spends some seconds of a processor on that, and tests start dozens of ranks.
The server is multiprocessing's own (`forkserver`), one for each process of pytest; it ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_ranks", "start_ranks"]

KILL_LIMIT_S = 10.0


def as_ranks(function: Callable[..., None], ranks: int, *args: object) -> None:
    """`function(*args)` in `ranks` processes with torchrun's environment; fails with the first traceback. None of
    them outlives this call."""
    context = start_ranks(function, ranks, *args)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            if process.is_alive():  # this test was interrupted, by its limit for one
                process.kill()
                process.join(KILL_LIMIT_S)


def start_ranks(function: Callable[..., None], ranks: int, *args: object) -> Any:
    """The same processes, not awaited: torch's context of them. They have the environment of this moment, not that of
    the server's start."""
    multiprocessing.set_forkserver_preload(["tests.warm"])
    return torch.multiprocessing.start_processes(
        _process,
        (function, ranks, _free_port(), dict(os.environ), args),
        nprocs=ranks,
        join=False,
        start_method="forkserver",
    )


def _process(
    rank: int,
    function: Callable[..., None],
    ranks: int,
    port: int,
    environment: dict[str, str],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(*args)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
