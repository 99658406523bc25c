"""In which type matrix products are computed where nothing is said: trainer and engines by one rule.

Weights are published in 16 bits. A CPU without instructions for bfloat16 emulates each product of them, several times
slower than float32, and float32 holds every bfloat16 exactly: so there the same weights are computed with in float32.
"""

from __future__ import annotations

import platform

import torch

__all__ = ["compute_dtype", "engine_dtype"]


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Of the trainer's matrix products; see ModelConfig.dtype."""
    if wanted == "auto":
        native = device.type != "cpu" or _cpu_has_bfloat16()
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]


def engine_dtype(wanted: str, *, on_cpu: bool) -> torch.dtype:
    """Of an engine's weights, products and KV cache; see RolloutConfig.dtype."""
    if wanted == "auto":
        native = not on_cpu or _cpu_has_bfloat16() or _arm_has_bfloat16()
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[wanted]


def _cpu_has_bfloat16() -> bool:
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


def _arm_has_bfloat16() -> bool:
    """vLLM has kernels of its own for it. (torch's backward pass has not, so the trainer does not ask.)"""
    if platform.machine() not in ("aarch64", "arm64") or not hasattr(torch.cpu, "get_capabilities"):
        return False
    return bool(torch.cpu.get_capabilities().get("bf16", False))
