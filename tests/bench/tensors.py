"""The codec on torch tensors against its numba kernels, on the same pair: a ratio, to see that it works and at what
price. On a GPU where there is one; on a CPU torch passes over memory for each operation, so it must be slower."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from async_rl.weights.codec import TILE, CodedTile, apply_tile, encode_found, encode_tile, tensors
from async_rl.weights.peers import Changes
from async_rl.weights.surveys import WINDOW
from tests.bench.claims import Claim

__all__ = ["claims"]

Tiles = list[tuple[int, int, CodedTile]]
"""Tensor, first element, coded."""


def claims(name: str, changes: Changes, repeats: int) -> list[Claim]:
    """Context, not claims. Fails where the bytes, or what they make, are not the same."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the kernels it is compared with
    try:
        there = [tuple(_on(device, bits) for bits in pair) for pair in changes]
        tiles, host_s = _best(lambda: _encode(changes), repeats)
        found, device_s = _best(lambda: _encode_there(there), repeats)
        if found != tiles:
            raise AssertionError(f"tensors on {device} were coded otherwise than on the host, on {name}")
        values, host_apply_s = _best(lambda: _apply(tiles, changes), repeats)
        made, device_apply_s = _best(lambda: _apply_there(tiles, there), repeats)
        if not all(torch.equal(_on(device, a), b) for a, b in zip(values, made, strict=True)):
            raise AssertionError(f"tensors on {device} were changed otherwise than on the host, on {name}")
    finally:
        torch.set_num_threads(threads)
    how = f"{name}; wall time, one thread"
    return [
        Claim(f"encode, numba / torch on {device.type}", host_s / device_s, "x", how=how),
        Claim(
            f"decode + apply, numba / torch on {device.type}", host_apply_s / device_apply_s, "x", how=how
        ),
    ]


def _on(device: torch.device, bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(bits).view(np.int16)).to(device)


def _best(work: Callable[[], list], repeats: int) -> tuple[list, float]:  # type: ignore[type-arg]
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return result, best


def _encode(changes: Changes) -> Tiles:
    made = []
    for tensor, (base, new) in enumerate(changes):
        for start in range(0, len(base), TILE):
            cut = slice(start, start + TILE)
            coded = encode_tile(base[cut], new[cut], start)
            if coded is not None:
                made.append((tensor, start, coded))
    return made


def _encode_there(there: list[tuple[torch.Tensor, ...]]) -> Tiles:
    made = []
    for tensor, (base, new) in enumerate(there):
        for first in range(0, len(base), WINDOW):
            window = slice(first, first + WINDOW)
            length = len(base[window])
            sizes = [min(TILE, length - start) for start in range(0, length, TILE)]
            found = tensors.survey(base[window], new[window], first, sizes, small=False)
            made += [
                (tensor, first + index * TILE, encode_found(tile))
                for index, tile in enumerate(found)
                if tile is not None
            ]
    return made


def _apply(tiles: Tiles, changes: Changes) -> list[np.ndarray]:
    values = [base.copy() for base, _ in changes]
    for tensor, start, coded in tiles:
        apply_tile(coded.mode, coded.data, values[tensor][start : start + TILE], start)
    return values


def _apply_there(tiles: Tiles, there: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    values = [base.clone() for base, _ in there]
    moved = [
        tensors.apply_tile(coded.mode, coded.data, values[tensor][start : start + TILE], start)[1]
        for tensor, start, coded in tiles
    ]
    if (
        moved
        and tensors.unsigned(int(torch.stack(moved).sum())) != sum(each[2].moved for each in tiles) % 2**64
    ):
        raise AssertionError("tiles moved the digest otherwise than they say")
    return values
