"""The passes over the weights themselves for torch tensors of any device: what elements.py does in host memory.

    survey                 two states -> what each tile changes, on the host, where the entropy coder goes on
    apply_tile, apply      a coded tile, decoded on the host -> a tensor, in place
    digest                 of a tensor's elements, without moving them

Weights are int16 [W] here, the bits of one tensor's consecutive elements (`bits_of`); K of them change. Steps,
digests and coded bytes are those of the host's kernels, for every bit pattern, on every device: all of it is
arithmetic on integers of 32 and 64 bits, and sums of integers do not depend on their order.

Not a part of the package's own names: whoever imports it needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from async_rl.weights.codec.digest import MASK
from async_rl.weights.codec.tiles import SMALL_FROM, Found, Mode, small_steps, tile_numbers, tile_steps

__all__ = ["apply", "apply_numbers", "apply_tile", "bits_of", "digest", "survey", "unsigned"]

CHUNK = 1 << 22
"""Elements hashed at once: some 32 MiB for each of three intermediate tensors, long enough to fill a GPU."""

_SPARSE_BYTES, _DENSE_BYTES = 6, 2
"""What crosses to the host: a position and a step for each element that changed, or a step for each element."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a 16-bit tensor: int16 [elements], a view. Raises ValueError for any other, and for one whose
    elements do not lie one after another."""
    if tensor.dtype.itemsize != 2 or not tensor.is_contiguous():
        raise ValueError(f"no view of 16-bit elements: {tensor.dtype} with strides {tensor.stride()}")
    return tensor.detach().view(torch.int16).view(-1)


def unsigned(total: int) -> int:
    """A sum that a device made in int64 -> modulo 2^64."""
    return total & MASK


# ---------------------------------------------------------------- the writer's side


def survey(
    base_W: torch.Tensor, new_W: torch.Tensor, place: int, sizes: Sequence[int], *, small: bool
) -> list[Found | None]:
    """What changes in consecutive tiles of `sizes` elements, W in all; None for a tile in which nothing does.

    `place`: of the first element, see digest.py. `small`: the small mode may be tried, for which exponents are sent.
    Waits for the device a few times, however many tiles there are. On it, up to 50 bytes an element are allocated.
    """
    differ_W = base_W != new_W
    counts = torch.stack([tile.sum() for tile in torch.split(differ_W, list(sizes))]).tolist()
    changed = sum(counts)
    if not changed:
        return [None] * len(sizes)
    if _SPARSE_BYTES * changed < _DENSE_BYTES * len(base_W):
        found = _changes(base_W, new_W, differ_W, place, sizes, counts)
    else:
        found = _differences(base_W, new_W, place, sizes, counts)
    if small:
        for index, (each, tile) in enumerate(zip(found, torch.split(base_W, list(sizes)), strict=True)):
            if each is not None and each.changed >= SMALL_FROM:
                found[index] = each._replace(exponents=_exponents(tile))
    return found


def _changes(
    base_W: torch.Tensor,
    new_W: torch.Tensor,
    differ_W: torch.Tensor,
    place: int,
    sizes: Sequence[int],
    counts: Sequence[int],
) -> list[Found | None]:
    """Positions and steps of what changed."""
    at_K = differ_W.nonzero().view(-1)
    before_K, after_K = base_W[at_K], new_W[at_K]
    steps = _int16(_ordered(after_K) - _ordered(before_K)).cpu().numpy()
    positions = at_K.to(torch.int32).cpu().numpy().view(np.uint32)
    at_K += place
    moved = _sums(_hash(at_K, after_K) - _hash(at_K, before_K), counts)
    found: list[Found | None] = []
    start = done = 0
    for size, count, more in zip(sizes, counts, moved, strict=True):
        mine = slice(done, done + count)
        told = (positions[mine] - np.uint32(start), steps[mine])
        found.append(Found(size, count, unsigned(more), told) if count else None)
        start, done = start + size, done + count
    return found


def _differences(
    base_W: torch.Tensor, new_W: torch.Tensor, place: int, sizes: Sequence[int], counts: Sequence[int]
) -> list[Found | None]:
    """The steps of all elements, as numbers."""
    steps_W = _wrapped(_ordered(new_W) - _ordered(base_W))
    numbers = _int16((steps_W << 1) ^ (steps_W >> 31)).cpu().numpy().view(np.uint16)
    places_W = torch.arange(place, place + len(base_W), device=base_W.device)
    moved = _sums(_hash(places_W, new_W) - _hash(places_W, base_W), sizes)
    found: list[Found | None] = []
    start = 0
    for size, count, more in zip(sizes, counts, moved, strict=True):
        told = numbers[start : start + size]
        found.append(Found(size, count, unsigned(more), told) if count else None)
        start += size
    return found


def _exponents(bits_W: torch.Tensor) -> np.ndarray:
    """uint8 [W], on the host."""
    exponents: np.ndarray = ((bits_W >> 7) & 0xFF).to(torch.uint8).cpu().numpy()
    return exponents


def _sums(values_N: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """Of consecutive parts."""
    sums: list[int] = torch.stack([part.sum() for part in torch.split(values_N, list(sizes))]).tolist()
    return sums


# ---------------------------------------------------------------- the reader's side


def apply_tile(
    mode: int, data: bytes | memoryview, values_W: torch.Tensor, place: int
) -> tuple[int, torch.Tensor]:
    """Change a tile's elements in place: how many, and what that adds to the digest as an int64 [] on their device
    (see `unsigned`). Raises Corrupt, with the elements as they were.

    Only what changes is uploaded, 2 bytes an element of a dense tile at the most; a small tile's exponents come to
    the host before, as it can't be read without them.
    """
    if mode == Mode.DENSE:
        numbers, changed = tile_numbers(data, len(values_W))
        return changed, apply_numbers(values_W, numbers, place)
    if mode == Mode.SMALL:
        positions, steps = small_steps(data, _exponents(values_W))
    else:
        positions, steps = tile_steps(mode, data, len(values_W))
    return len(positions), apply(values_W, positions, steps, place)


def apply(values_W: torch.Tensor, positions: np.ndarray, steps: np.ndarray, place: int) -> torch.Tensor:
    """Change `values_W` in place: positions uint32 [K], ascending and inside, steps int16 [K]. What that adds to the
    digest, as in `apply_tile`."""
    at_K = torch.from_numpy(positions.view(np.int32)).to(values_W.device).long() & 0xFFFFFFFF
    steps_K = torch.from_numpy(steps).to(values_W.device)
    before_K = values_W[at_K]
    after_K = _stepped(before_K, steps_K)
    values_W[at_K] = after_K
    at_K += place
    return (_hash(at_K, after_K) - _hash(at_K, before_K)).sum()


def apply_numbers(values_W: torch.Tensor, numbers: np.ndarray, place: int) -> torch.Tensor:
    """The same for a step of every element, as numbers 0, 1, 2, … for 0, -1, +1, …: [W], below 2^16."""
    short = numbers.astype(np.uint16).view(np.int16)
    moved = torch.zeros((), dtype=torch.int64, device=values_W.device)
    for start in range(0, len(values_W), CHUNK):
        values = values_W[start : start + CHUNK]
        told = torch.from_numpy(short[start : start + CHUNK]).to(values.device).int() & 0xFFFF
        places = torch.arange(place + start, place + start + len(values), device=values.device)
        moved -= _hash(places, values).sum()
        values.copy_(_stepped(values, (told >> 1) ^ -(told & 1)))
        moved += _hash(places, values).sum()
    return moved


def digest(values_W: torch.Tensor, place: int) -> torch.Tensor:
    """Of consecutive elements, the first of which stands at `place`: an int64 [] on their device (see `unsigned`)."""
    total = torch.zeros((), dtype=torch.int64, device=values_W.device)
    for start in range(0, len(values_W), CHUNK):
        values = values_W[start : start + CHUNK]
        total += _hash(
            torch.arange(place + start, place + start + len(values), device=values.device), values
        ).sum()
    return total


# ---------------------------------------------------------------- elements


def _ordered(bits_N: torch.Tensor) -> torch.Tensor:
    """Sign and magnitude -> two's complement, one to one, as elements.ordered; int32 [N], of 16 bits."""
    wide_N = bits_N.int()
    return wide_N ^ ((wide_N >> 15) & 0x7FFF)


def _wrapped(numbers_N: torch.Tensor) -> torch.Tensor:
    """int32 -> the int32 in -2^15 … 2^15 - 1 that is the same modulo 2^16."""
    return ((numbers_N + 0x8000) & 0xFFFF) - 0x8000


def _int16(numbers_N: torch.Tensor) -> torch.Tensor:
    """Modulo 2^16."""
    return _wrapped(numbers_N).to(torch.int16)


def _stepped(bits_N: torch.Tensor, steps_N: torch.Tensor) -> torch.Tensor:
    """The bits, int16 [N], after `steps_N`; _ordered is its own inverse."""
    return _ordered(_wrapped(_ordered(bits_N) + steps_N)).to(torch.int16)


def _hash(places_N: torch.Tensor, bits_N: torch.Tensor) -> torch.Tensor:
    """int64 [N], new: the summands of the digest. Products wrap at 64 bits, signed or not."""
    key_N = bits_N.long() & 0xFFFF
    key_N |= places_N << 16
    for shift, factor in _MIX:
        key_N ^= _shifted(key_N, shift)
        key_N *= factor
    key_N ^= _shifted(key_N, 31)
    return key_N


_MIX = tuple(
    (shift, factor - (1 << 64)) for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
"""Of splitmix64's finalizer, as in elements.py; the factors as int64."""


def _shifted(key_N: torch.Tensor, by: int) -> torch.Tensor:
    """Zeros come in from the left."""
    return (key_N >> by).bitwise_and_((1 << (64 - by)) - 1)
