"""Updates of an engine whose model is split over two processes: with a head of its own, fused matrices and biases.

The unsplit one, with a tied head, is in tests/contract/test_engine.py.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from tests.rollout_support import Truth
from workers.engines.shards import find_shards
from workers.engines.vllm_engine import VLLMEngine
from workers.rollout_settings import RolloutConfig

VOCAB = 150
"""No multiple of vLLM's padding: each part holds rows that no file fills."""
BF16 = 0.1


def write_model(folder: Path, seed: int) -> Path:
    import torch

    from workers.pretrained import hide_broken_media_packages

    hide_broken_media_packages()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.15,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(number: int) -> list[int]:
    return [2 + (number * 7 + i * 5) % (VOCAB - 2) for i in range(7)]


async def say(engine: VLLMEngine) -> list[tuple[list[int], list[float]]]:
    """Answers to a few prompts, one after the other and with the same seeds: the same arithmetic every time."""
    said = []
    for number in range(4):
        c = await engine.generate(
            prompt(number),
            seed=number,
            temperature=1.0,
            max_tokens=15,
            request_id=f"{engine.version}/{number}/{engine.staging}",
        )
        said.append((c.tokens.tolist(), c.logprobs.tolist()))
    return said


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_halves_of_a_model_change_places_at_once_and_serve_what_a_start_would(tmp_path):
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        pytest.skip("it needs two cores, and Linux to pin to them")
    a, b = write_model(tmp_path / "a", 1), write_model(tmp_path / "b", 2)

    async def live() -> None:
        engine = VLLMEngine(
            RolloutConfig(
                tensor_parallel=2,
                cpu_bind=f"{cores[0]}|{cores[1]}",
                max_sequences=8,
                max_model_len=256,
                kv_cache_gib=0.1,
            )
        )
        await engine.start(a, 0)
        try:
            started = await say(engine)
            update = await engine.update(1, find_shards(b))
            assert update.staged_s > 0 and engine.staging
            staged = await say(engine)
            assert (await engine.update(2, find_shards(a))).staged_s > 0
            assert await say(engine) == started, "bit for bit what this version said after the start"
            engine.staging = False
            assert (await engine.update(3, find_shards(b))).staged_s == 0
            assert await say(engine) == staged, "a load in the pause says the same"
            engine.staging = True
            assert (await engine.update(4, find_shards(a))).staged_s > 0 and engine.staging
            assert await say(engine) == started, "and what is staged after one too"
        finally:
            await engine.close()
        truth = Truth(b)
        for number, (tokens, logprobs) in enumerate(staged):
            expected = truth.logprobs(prompt(number), tokens)
            assert np.abs(np.asarray(logprobs) - expected).mean() < BF16

    asyncio.run(live())
