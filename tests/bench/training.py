"""Models whose weights move as under Adam, without the forward pass: for benches of what follows it.

Per weight, the gradient is noise around a small mean of its own, g = n + SIGNAL * s, and Adam's update is
lr * m / sqrt(v) with m the moving average of g (0.9) and v = 1, its limit for such a gradient. Weights begin
normally distributed, norms at one. At a learning rate of 3e-6 that changes 1.1 % of the 16-bit weights per step; a
delta over 4, 16 and 64 steps has 0.64, 0.37 and 0.18 of the bytes of the single ones (0.66 and 0.36 over 4 and 16
steps of a sentence encoder in real training). How well changes are *coded* is measured on real training, in codec.py,
not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["SMALL", "SMOL", "Training", "model_config", "write_model_dir"]

WEIGHT_STD = 0.05
SIGNAL = 0.1
"""In reinforcement learning the gradient of a batch is mostly noise."""
MOMENTUM_STD = 0.23
"""Of m where the gradient is noise of variance 1: sqrt((1 - 0.9) / (1 + 0.9))."""
BLOCK = 1 << 22
NOISE = 1 << 24
"""Normal numbers are drawn once; every block of weights takes a stretch from another place in every step."""


SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""SmolLM2-135M's: 134.5 M weights."""
SMALL = {**SMOL, "vocab_size": 12288, "num_hidden_layers": 4}
"""21.2 M weights."""


def model_config(shape: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **shape,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def write_model_dir(folder: Path, shape: dict[str, int] = SMOL) -> Path:
    """The model's folder without weights."""
    from transformers import GenerationConfig

    config = model_config(shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    return folder


class Training:
    """`parameters`: tensor name -> float32 master, all of them views of `flat`, in order; `step` moves them."""

    def __init__(self, rate: float, shape: dict[str, int] = SMOL, seed: int = 1) -> None:
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(model_config(shape))
            sizes: dict[str, torch.Size] = {name: each.shape for name, each in model.named_parameters()}
        self.rate = rate
        self._random = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(NOISE, generator=self._random)
        self.flat = torch.empty(sum(math.prod(size) for size in sizes.values()))
        self.parameters: dict[str, torch.Tensor] = {}
        at = 0
        for name, size in sizes.items():
            self.parameters[name] = self.flat[at : at + math.prod(size)].view(size)
            at += math.prod(size)
        self._momentum = torch.empty_like(self.flat)
        for weights, momentum in self._blocks():
            torch.mul(self._stretch(len(weights)), WEIGHT_STD, out=weights)
            torch.mul(self._stretch(len(weights)), MOMENTUM_STD, out=momentum)
        for name, tensor in self.parameters.items():
            if "norm" in name:
                tensor.fill_(1.0)

    @property
    def nbytes(self) -> int:
        """In 16 bit."""
        return 2 * len(self.flat)

    def step(self) -> None:
        for number, (weights, momentum) in enumerate(self._blocks()):
            signal = self._noise[number : number + len(weights)]
            momentum.mul_(0.9).add_(self._stretch(len(weights)), alpha=0.1).add_(signal, alpha=0.1 * SIGNAL)
            weights.sub_(momentum, alpha=self.rate)

    def _blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(torch.split(self.flat, BLOCK), torch.split(self._momentum, BLOCK), strict=True)

    def _stretch(self, size: int) -> torch.Tensor:
        at = int(torch.randint(0, NOISE - size + 1, (1,), generator=self._random).item())
        return self._noise[at : at + size]

    def bits(self) -> torch.Tensor:
        """The state as it is published: int16 [weights], bfloat16's bits."""
        return self.flat.bfloat16().view(torch.int16)
