"""Seeds: the same group always asks for the same samples, whoever generates it, and however often."""

from __future__ import annotations

from hashlib import blake2b

from async_rl.wire import Key

__all__ = ["seeds_of"]


def seeds_of(run_seed: int, key: Key, samples: int) -> tuple[int, ...]:
    """One per sample, 31 bits (engines take a signed 32-bit seed)."""
    group = blake2b(f"{run_seed}/{key.split}/{key.ordinal}/{key.group}/".encode(), digest_size=4)
    seeds = []
    for sample in range(samples):
        one = group.copy()
        one.update(b"%d" % sample)
        seeds.append(int.from_bytes(one.digest(), "little") & 0x7FFFFFFF)
    return tuple(seeds)
