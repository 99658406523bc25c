"""Objects of a real bucket, damaged: cut short, one bit flipped, another version's in their place, missing."""

from __future__ import annotations

from collections.abc import Callable

from async_rl.store import ObjectStore

__all__ = ["DAMAGES", "Damage", "region_of"]

Damage = Callable[[ObjectStore, str, str, int], None]
"""(store, key, key of another of its kind, byte where it is flipped)"""


def truncated(store: ObjectStore, key: str, other: str, at: int) -> None:
    data = store.get(key)
    store.put(key, data[: len(data) // 2])


def cut_by_one(store: ObjectStore, key: str, other: str, at: int) -> None:
    store.put(key, store.get(key)[:-1])


def flipped(store: ObjectStore, key: str, other: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1 << (at % 8)
    store.put(key, bytes(data))


def swapped(store: ObjectStore, key: str, other: str, at: int) -> None:
    store.put(key, store.get(other))


def missing(store: ObjectStore, key: str, other: str, at: int) -> None:
    store.delete(key)


DAMAGES: dict[str, Damage] = {
    "truncated": truncated,
    "cut by one byte": cut_by_one,
    "one bit flipped": flipped,
    "swapped": swapped,
    "missing": missing,
}


def region_of(data: bytes, region: str) -> int:
    """A byte of the safetensors header, of the tensors (or tiles), or of what stands at the end (a table)."""
    header = 8 + int.from_bytes(data[:8], "little")
    return {
        "length": 1,
        "header": header // 2 + 4,
        "tiles": header + (len(data) - header) // 3,
        "table": len(data) - 9,
    }[region]
