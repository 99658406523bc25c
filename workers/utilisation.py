"""Model FLOPs utilisation: what the step had to compute, over what the devices could have in its time.

Counted as PaLM does (arXiv 2204.02311, appendix B): 2 operations per weight of a matrix and token forward, twice that
backward; attention on top, here only the half below the diagonal. Activations that are computed again, and further
passes (a reference, proximal logprobs), are not counted: they are no progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Utilisation", "peak_of"]

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
}
"""bfloat16 operations per second, dense, from the makers' data sheets; the first name that the device's contains."""


def peak_of(device: torch.device, dtype: torch.dtype, tflops: float = 0.0) -> float | None:
    """Of one device in operations per second; None where it is not known. `tflops`: what the run file says."""
    if tflops:
        return tflops * 1e12
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


@dataclass(frozen=True)
class Utilisation:
    body: float  # weights of matrices that a token meets, embeddings and head not counted
    head: float  # weights of the head: loss tokens only
    attention: float  # layers x heads x head dimension
    peak: float | None  # of all devices together, operations per second

    @classmethod
    def of(cls, model: Any, peak: float | None, ranks: int) -> Utilisation:
        """Of a causal language model of transformers."""
        config = model.config
        experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0
        chosen = getattr(config, "num_experts_per_tok", 0) or 0
        share = chosen / experts if experts and chosen else 1.0
        embedded, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        outer = {id(embedded), id(getattr(head, "weight", None))}
        body = sum(
            p.numel() * (share if ".experts." in name else 1.0)
            for name, p in model.named_parameters()
            if p.ndim >= 2 and id(p) not in outer
        )
        heads = getattr(config, "num_attention_heads", 0)
        dimension = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
        attention = getattr(config, "num_hidden_layers", 0) * heads * dimension
        return cls(float(body), float(embedded.numel()), float(attention), peak and peak * ranks)

    def flops(self, lengths: Sequence[int], loss_tokens: int) -> float:
        """Forward and backward of samples of so many tokens each."""
        squares = sum(length * length for length in lengths)
        return 6.0 * (self.body * sum(lengths) + self.head * loss_tokens + self.attention * squares)

    def of_peak(self, flops: float, seconds: float) -> float | None:
        """None where the peak is not known."""
        return flops / (seconds * self.peak) if self.peak and seconds > 0 else None
