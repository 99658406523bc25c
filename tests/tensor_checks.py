"""What codec/tensors.py must do on any device: as the host's kernels, bit for bit. For tests/unit and tests/gpu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from async_rl.weights.codec import Mode, apply_tile, digest_of, encode_tile, tensors
from async_rl.weights.codec.tiles import encode_found

__all__ = ["check_applied", "check_digest", "check_surveyed", "extremes", "on_device", "to_host"]

DTYPES = (torch.bfloat16, torch.float16)


def on_device(bits: np.ndarray, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of 16-bit floats with these bits, a copy."""
    return torch.from_numpy(np.array(bits).view(np.int16)).to(device).view(dtype)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensors.bits_of(tensor).cpu().numpy().view(np.uint16)
    return bits


def check_surveyed(
    base: np.ndarray, new: np.ndarray, place: int, sizes: Sequence[int], small: bool, device: torch.device
) -> None:
    """What is found on the device is coded as encode_tile codes it: bytes, mode, changes, digest."""
    before, after = (tensors.bits_of(on_device(bits, device)) for bits in (base, new))
    found = tensors.survey(before, after, place, sizes, small=small)
    start = 0
    for size, tile in zip(sizes, found, strict=True):
        cut = slice(start, start + size)
        expected = encode_tile(base[cut], new[cut], place + start, small=small)
        assert (tile is None and expected is None) or (tile is not None and encode_found(tile) == expected)
        start += size


def check_applied(
    base: np.ndarray, new: np.ndarray, place: int, mode: Mode, data: bytes, device: torch.device
) -> None:
    """Applied on the device, a tile makes the same weights and says the same as on the host."""
    values = np.array(base)
    expected = apply_tile(mode, data, values, place)
    there = on_device(base, device, DTYPES[len(base) % 2])
    changed, moved = tensors.apply_tile(mode, data, tensors.bits_of(there), place)
    assert (changed, tensors.unsigned(int(moved))) == expected
    assert np.array_equal(to_host(there), values) and np.array_equal(values, new)


def check_digest(bits: np.ndarray, place: int, device: torch.device) -> None:
    there = tensors.digest(tensors.bits_of(on_device(bits, device)), place)
    assert tensors.unsigned(int(there)) == digest_of(np.array(bits), place)


@cache
def extremes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of states: every bit pattern among them, and every mode of the codec."""
    rng = np.random.default_rng(5)
    all_bits = np.arange(1 << 16).astype(np.uint16)
    masters = 0.02 * torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    weights = on_host(masters)
    trained = on_host(masters + 3e-6 * torch.from_numpy(rng.normal(size=len(masters))).float())
    few, some, most = (np.where(rng.random(len(weights)) < part, 1, 0) for part in (1e-4, 0.05, 0.7))
    up_or_down = rng.choice(np.array([1, 0xFFFF], np.uint16), len(weights))
    any_bits = rng.integers(0, 1 << 16, (2, 20_000)).astype(np.uint16)
    return {
        "every pattern, one step": (all_bits, all_bits + np.uint16(1)),
        "every pattern, the sign": (all_bits, all_bits ^ np.uint16(0x8000)),
        "every pattern, the largest step": (all_bits, all_bits ^ np.uint16(0x7FFF)),
        "any pattern to any": (any_bits[0], any_bits[1]),
        "few weights": (weights, weights + up_or_down * few.astype(np.uint16)),
        "some weights": (weights, weights + up_or_down * some.astype(np.uint16)),
        "most weights": (weights, weights + up_or_down * most.astype(np.uint16)),
        "no weight": (weights, weights.copy()),
        "a training step": (weights, trained),  # seldom where exponents are large
    }


def on_host(values: torch.Tensor) -> np.ndarray:
    """Rounded to bfloat16."""
    return to_host(values.to(torch.bfloat16))
