"""The optimisation step alone against TRL's GRPOTrainer: tokens per second, and memory above what both must hold.

Same model, same samples with a long tail of lengths, same threads, as many micro-batches, beta = 0, on policy. Ours
packs samples end to end; TRL pads every prompt and every completion to the longest of the batch. That both compute
the same is looked at first: the loss and the whole gradient of the first step.

Tokens are those of the samples; padding counts for nobody. Memory is the peak of the process above its size after the
first optimizer step, less the gradients (peers/memory.py). Each side runs alone, in turn, on one thread; its time is
that of the processor, which other work on the machine disturbs little, and its fastest step counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tests.bench.claims import Claim
from tests.bench.peers.runs import OURS, SideFailed, run_side
from tests.bench.peers.samples import Samples, draw, save
from tests.bench.trl_env import trl_python

__all__ = ["gradient_distance", "run"]

THREADS = 1
"""Two, on two cores that others use as well, wait for each other at every product."""
LIMIT_S = 300.0
STEPS = 1
VOCABULARY = 32_000
GROUPS, GROUP, MEDIAN, LONGEST = 4, 8, 64, 512
MICRO_BATCHES = 4

OURS_WAYS: dict[str, dict[str, Any]] = {
    "plain": {"checkpointing": False},
    "checkpointed": {"checkpointing": True},
}
TRL_WAYS: dict[str, dict[str, Any]] = {
    "checkpointed": {"checkpointing": True},  # its default
    "plain": {"checkpointing": False},
    "narrow": {"checkpointing": False},
}
"""narrow: so few samples in a micro-batch that it is, with its padding, as wide as ours."""


def run(scratch: Path, console: Console) -> list[Claim]:
    python = trl_python(console)
    if python is None:
        console.print("skipped: there is nothing to compare with")
        return []
    samples = draw(1, GROUPS, GROUP, VOCABULARY, LONGEST, MEDIAN)
    limit = row_limit(samples, MICRO_BATCHES)
    console.print(
        f"{samples.count} samples, {samples.inputs} tokens, the longest {samples.longest}; padded they are "
        f"{samples.rectangle}"
    )
    common = {
        "model": str(write_model(scratch / "model")),
        "samples": str(save(samples, scratch / "samples.npz")),
        "threads": THREADS,
        "steps": STEPS,
        "microbatch_tokens": limit,
        "batch": samples.count // MICRO_BATCHES,
        "gradients": "",
    }
    ours, theirs = {}, {}
    for name, way in OURS_WAYS.items():
        gradients = str(scratch / "ours.safetensors") if name == "plain" else ""
        asked = {**common, **way, "gradients": gradients}
        ours[name] = _side(console, f"ours, {name}", OURS, "step_ours", asked, scratch / f"ours-{name}")
    for name, way in TRL_WAYS.items():
        asked = {**common, **way, "compact": True}
        if name == "plain":
            asked["gradients"] = str(scratch / "trl.safetensors")
        if name == "narrow":
            asked["batch"] = narrow_batch(samples, limit)
        theirs[name] = _side(console, f"TRL, {name}", python, "step_trl", asked, scratch / f"trl-{name}")
    return _claims(samples, ours, theirs, scratch)


def _side(
    console: Console, label: str, python: Path | str, module: str, asked: dict[str, Any], folder: Path
) -> dict[str, Any]:
    try:
        result = run_side(python, f"tests.bench.peers.{module}", asked, folder, LIMIT_S)
    except SideFailed as error:
        raise RuntimeError(f"{label}: {error}") from error
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(
        f"{label} ({versions}): {min(result['cpu_s']):.2f} s of processor a step "
        f"({min(result['times']):.2f} s by the clock), {result['micro_batches']} micro-batches, "
        f"{_megabytes(result['above'])} above weights, gradients and optimizer, {_megabytes(result['peak'])} in all"
    )
    return result


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def _claims(
    samples: Samples, ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], scratch: Path
) -> list[Claim]:
    def rate(side: dict[str, Any]) -> float:
        return samples.inputs / min(side["cpu_s"])

    def memory(name: str, mine: dict[str, Any], peer: dict[str, Any], aim: float | None = None) -> Claim:
        return Claim(
            f"memory above weights, gradients and optimizer / TRL's, {name}",
            mine["above"] / peer["above"],
            unit="x",
            at_most=aim,
            how=f"{_megabytes(mine['above'])} and {_megabytes(peer['above'])}; "
            f"{mine['micro_batches']} and {peer['micro_batches']} micro-batches",
        )

    wide = {name: side for name, side in theirs.items() if name != "narrow"}
    best = max(wide, key=lambda name: rate(wide[name]))
    mine, peer, narrow = ours["plain"], theirs[best], theirs["narrow"]
    distance = gradient_distance(scratch / "ours.safetensors", scratch / "trl.safetensors")
    return [
        Claim(
            "gradient of ours and of TRL's, distance",
            distance,
            at_most=1e-3,
            how=f"of the norm, first step; loss {mine['loss']:.6f} and {theirs['plain']['loss']:.6f}",
        ),
        Claim(
            "training tokens/s / TRL's",
            rate(mine) / rate(peer),
            unit="x",
            at_least=1.5,
            how=f"{rate(mine):.0f} and {rate(peer):.0f} ({best}); {mine['micro_batches']} micro-batches each, "
            f"{THREADS} threads",
        ),
        Claim(
            "training tokens/s / TRL's, as wide with its padding",
            rate(mine) / rate(narrow),
            unit="x",
            how=f"{rate(mine):.0f} and {rate(narrow):.0f}; {mine['micro_batches']} and "
            f"{narrow['micro_batches']} micro-batches",
        ),
        memory("plain", mine, theirs["plain"], 0.5),
        memory("checkpointed", ours["checkpointed"], theirs["checkpointed"], 0.5),
        memory("as wide with its padding", mine, narrow),
    ]


def narrow_batch(samples: Samples, limit: int) -> int:
    """Samples of a padded micro-batch of about `limit` tokens; it divides their number."""
    wanted = max(1, limit * samples.count // samples.rectangle)
    return max(size for size in range(1, wanted + 1) if samples.count % size == 0)


def row_limit(samples: Samples, rows: int) -> int:
    """The smallest limit of tokens with which packing makes that many micro-batches, as many as TRL's."""
    from async_rl.algo.packing import best_fit_decreasing

    lengths = (samples.prompts_S + samples.completions_S - 1).tolist()
    limit = max(-(-sum(lengths) // rows), max(lengths))
    while len(best_fit_decreasing(lengths, limit)) > rows:
        limit += 1
    return limit


def gradient_distance(one: Path, other: Path) -> float:
    """|a - b| / |b| over all tensors of two files, whose names must be the same."""
    from safetensors.numpy import load_file

    a, b = load_file(one), load_file(other)
    if a.keys() != b.keys():
        raise ValueError(f"the gradients of different tensors: {sorted(a.keys() ^ b.keys())[:4]}")
    apart = sum(float(np.square(a[name].astype(np.float64) - b[name]).sum()) for name in b)
    return float(np.sqrt(apart / sum(float(np.square(b[name].astype(np.float64)).sum()) for name in b)))


def write_model(folder: Path) -> Path:
    """A Qwen3 of 8 million weights, 6 of them its vocabulary of 32 thousand; every value one that bfloat16 has."""
    import torch

    from workers.pretrained import hide_broken_media_packages
    from workers.tiny_model import new_tokenizer

    hide_broken_media_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    return folder
