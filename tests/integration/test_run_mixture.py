"""A whole run of a mixture of experts: what the trainer publishes, an engine loads, and samples from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.runs import LocalRun
from workers.pretrained import hide_broken_media_packages

START_S = 180.0


@pytest.fixture
def mixture(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's tokenizer, and a random Qwen3 of four experts."""
    hide_broken_media_packages()
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path / "mixture"
    shutil.copytree(tiny_model, folder)
    tiny = AutoConfig.from_pretrained(tiny_model)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=tiny.vocab_size,
            eos_token_id=tiny.eos_token_id,
            pad_token_id=tiny.pad_token_id,
            bos_token_id=None,
            hidden_size=64,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=tiny.max_position_embeddings,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
    ).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("engine", ["reference", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_update_of_a_mixture_serves_the_policy_that_is_trained(
    tmp_path: Path, s3_url: str, mixture: Path, engine: str
):
    """With max_lag = 0 every token is trained by the version that sampled it: were an expert's matrix published as
    another's, pi and mu would differ at once. At a learning rate that changes the policy from step to step."""
    settings = {
        "sampling": {"group_size": 8, "max_tokens": 10},
        "orchestrator": {"max_lag": 0, "batch_groups": 4},
        "trainer": {"steps": 4, "learning_rate": 1e-2},
        "eval": {"every": 0},
    }
    with LocalRun(tmp_path, s3_url, mixture, **settings) as run:
        trainer = run.start_trainer()
        worker = run.start_worker("w1", engine=engine)
        run.wait("four steps", lambda: run.steps() == 4, START_S, worker)
        assert run.finish(trainer, 60.0) == 0, run.logs()
        assert run.finish(worker, 60.0) == 0, run.logs()
        rows = [row for row in run.metrics() if "reward/mean" in row]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        for row in rows:
            assert row["mismatch_lag0/tokens"] == row["tokens"] > 0
            assert row["mismatch_lag0/kl_k3"] < 0.02, row
