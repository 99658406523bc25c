"""Seeds: the same group always asks for the same samples, whoever generates it, and however often."""

from __future__ import annotations

import struct
from hashlib import blake2b

from async_rl.wire import Key

__all__ = ["seeds_of"]

_SEEDS = struct.Struct("<16I")
"""In one digest of BLAKE2b: a group's are mostly fewer."""


def seeds_of(run_seed: int, key: Key, samples: int) -> tuple[int, ...]:
    """One per sample, 31 bits (engines take a signed 32-bit seed)."""
    group = f"{run_seed}/{key.split}/{key.ordinal}/{key.group}/".encode()
    seeds: list[int] = []
    for block in range(-(-samples // 16)):
        seeds += _SEEDS.unpack(blake2b(group + b"%d" % block).digest())
    return tuple([seed & 0x7FFFFFFF for seed in seeds[:samples]])
