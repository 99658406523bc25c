"""Rows hold several samples only where the model keeps them apart: else the learner gives each a row of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.algo.losses import DppoTv, LossConfig, totals_of
from async_rl.algo.packing import TrainSample, pack
from async_rl.errors import ConfigError
from tests.learner_support import CPU, VOCABULARY, gradients, make_samples, on_ranks
from workers.learner import Learner
from workers.packed_attention import attends_packed
from workers.pretrained import hide_broken_media_packages
from workers.process_group import RankGroup, rank_group
from workers.settings import ModelConfig, TrainerConfig
from workers.updates import train_batch

PLAIN = DppoTv()
WARNING = "are not kept apart"

LONGEST = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},  # its layers hand nothing on to their attention
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # its mask knows no positions
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # nor does its
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    # Its window stands in its mask alone.
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 2,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
SETTLED = {  # by attention: what the learner settles on
    "qwen3": {"auto": "packed", "sdpa": "apart"},
    "mistral": {"auto": "packed"},
    "mixtral": {"auto": "packed"},
    "nemotron": {"auto": "apart"},
    "opt": {"auto": "packed", "sdpa": "alone"},
    "gpt_oss": {"auto": "alone", "eager": "alone"},
    "lfm2": {"auto": "alone"},
    "mamba2": {"auto": "alone"},
    "qwen2_moe": {"auto": "apart"},
}
CASES = [
    (family, attention, settled) for family, each in SETTLED.items() for attention, settled in each.items()
]


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    torch.set_num_threads(1)
    with rank_group(CPU, 60.0) as alone:
        yield alone


def save(folder: Path, family: str, **changes: Any) -> Path:
    hide_broken_media_packages()
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | changes))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def learner_of(
    folder: Path, group: RankGroup, attention: str = "auto", loss: LossConfig = PLAIN, **model: Any
) -> Learner:
    return Learner(
        ModelConfig(path=str(folder), attention=attention, **({"dtype": "float32"} | model)),  # type: ignore[arg-type]
        TrainerConfig(learning_rate=1e-2, warmup_steps=0),
        loss,
        temperature=1.0,
        group=group,
        device=CPU,
        max_tokens=16,
    )


def in_groups(count: int) -> list[TrainSample]:
    """Four samples of each prompt."""
    samples = make_samples(count, seed=5)
    return [
        dataclasses.replace(sample, prompt_P=samples[index - index % 4].prompt_P)
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize(("family", "attention", "settled"), CASES)
def test_gradients_do_not_depend_on_the_packing(
    tmp_path: Path,
    group: RankGroup,
    caplog: pytest.LogCaptureFixture,
    family: str,
    attention: str,
    settled: str,
):
    """Whatever the model: they are those of transformers' own attention with a row for each sample."""
    folder = save(tmp_path, family)
    samples = in_groups(8)
    learner = learner_of(folder, group, attention, router_loss_coef=0.0)
    assert attends_packed(learner._model) == learner.shares_prompts == (settled == "packed")
    assert learner.row_tokens(1000) == (1 if settled == "alone" else 1000)
    warnings = [record for record in caplog.records if WARNING in record.message]
    assert len(warnings) == (settled == "alone")

    rows = pack(samples, learner.row_tokens(1000), 1, share=learner.shares_prompts)[0]
    found = learner.forward_backward(rows, totals_of(samples))
    own = learner_of(
        folder, group, "eager" if family in ("gpt_oss", "mamba2") else "sdpa", router_loss_coef=0.0
    )
    wanted = own.forward_backward(pack(samples, 1, 1)[0], totals_of(samples))
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)
    ours, theirs = (torch.cat([g.flatten() for g in gradients(each).values()]) for each in (learner, own))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.9999


@pytest.mark.parametrize("family", ["mistral", "lfm2", "qwen2_moe", "mixtral"])
def test_rounding_of_16_bits_is_not_taken_for_a_leak_nor_a_leak_for_rounding(
    tmp_path: Path, group: RankGroup, family: str
):
    learner = learner_of(save(tmp_path, family), group, dtype="bfloat16", router_loss_coef=0.0)
    settled = SETTLED[family]["auto"]
    assert learner.row_tokens(7) == (1 if settled == "alone" else 7)
    assert learner.shares_prompts == (settled == "packed")


@pytest.mark.parametrize("family", ["mistral", "qwen2_moe"])
def test_windows_that_are_longer_than_a_few_tokens_are_tried_too(
    tmp_path: Path, group: RankGroup, family: str
):
    learner = learner_of(save(tmp_path, family, sliding_window=40), group, router_loss_coef=0.0)
    assert learner.row_tokens(7) == 7
    assert learner.shares_prompts == (family == "mistral")


def test_packed_attention_that_misses_a_window_is_refused_where_it_was_asked_for(
    tmp_path: Path, group: RankGroup
):
    with pytest.raises(ConfigError, match="Qwen2MoeForCausalLM is not computed right"):
        learner_of(save(tmp_path, "qwen2_moe"), group, "packed", router_loss_coef=0.0)


def test_the_trainer_packs_as_the_learner_says(
    tmp_path: Path, group: RankGroup, monkeypatch: pytest.MonkeyPatch
):
    found: list[int] = []

    def noted(samples, limit, ranks, *, share):  # type: ignore[no-untyped-def]
        rows = pack(samples, limit, ranks, share=share)
        found.extend(row.samples for row in rows[0])
        return rows

    monkeypatch.setattr("workers.updates.pack", noted)
    learner = learner_of(save(tmp_path, "lfm2"), group)
    assert train_batch(learner, group, in_groups(8), learner._trainer).made == 1
    assert found == [1] * 8


def test_a_reference_that_does_not_keep_samples_apart_decides_for_the_policy_too(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    policy, reference = save(tmp_path / "policy", "qwen3"), save(tmp_path / "reference", "lfm2")
    learner = learner_of(policy, group, loss=DppoTv(reference_coef=0.1, reference=str(reference)))
    assert attends_packed(learner._model)
    assert learner.row_tokens(1000) == 1 and not learner.shares_prompts
    assert sum(WARNING in record.message for record in caplog.records) == 1
    assert "by the reference model" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_settle_on_the_same(tmp_path: Path):
    folders = {family: save(tmp_path / family, family) for family in ("qwen3", "opt", "lfm2", "qwen2_moe")}
    on_ranks(_settle, 2, folders)


def _settle(group: RankGroup, folders: dict[str, Path]) -> None:
    for family, folder in folders.items():
        learner = learner_of(folder, group, router_loss_coef=0.0)
        settled = SETTLED[family]["auto"]
        assert learner.row_tokens(7) == (1 if settled == "alone" else 7), family
        assert learner.shares_prompts == (settled == "packed"), family


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, None),
        ("llama", {"rope_type": "linear", "factor": 4.0}, LONGEST),
        ("phi3", {"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ("phi3", {"rope_type": "longrope", "original_max_position_embeddings": 256}, LONGEST),
    ],
    ids=["dynamic", "linear", "longrope", "longrope that is never long"],
)
def test_positions_that_depend_on_the_longest_of_a_row_are_refused_or_kept_from_it(
    tmp_path: Path, group: RankGroup, family: str, rope: dict[str, Any], longest: int | None
):
    changes: dict[str, Any] = {}
    if family == "phi3":
        rope = {**rope, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        changes = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
    folder = save(tmp_path, family, rope_parameters={"rope_theta": 10000.0, **rope}, **changes)
    if longest is not None:
        learner = learner_of(folder, group)
        assert learner.longest == longest and learner.row_tokens(7) == 7
        return
    with pytest.raises(ConfigError, match=f'rope_type = "{rope["rope_type"]}"'):
        learner_of(folder, group)


# ---------------------------------------------------------------- mixtures of experts


PHIMOE: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_mixture_computes_what_it_is_served_as(tmp_path: Path, group: RankGroup, checkpointing: bool):
    """Phi-MoE's rate of "jitter" is a threshold, and where it trains it draws experts at random."""
    from transformers import AutoModelForCausalLM

    folder = save(tmp_path, "phimoe", **PHIMOE)
    learner = learner_of(folder, group, router_loss_coef=0.0, activation_checkpointing=checkpointing)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.copy_(parameter.bfloat16())
    for sample in make_samples(12, seed=5):
        row = pack([sample], 1000, 1)[0][0]
        found, _, kept = learner.logprobs(row)
        with torch.no_grad():
            logits = served(input_ids=torch.from_numpy(row.input_ids_T)[None], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[kept, torch.from_numpy(row.targets_T)[kept]]
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-4)


def test_checkpointed_activations_of_a_mixture_give_the_same_gradients(tmp_path: Path, group: RankGroup):
    folder = save(tmp_path, "phimoe", **PHIMOE)
    samples = make_samples(8, seed=5)
    found = []
    for checkpointing in (False, True):
        learner = learner_of(folder, group, router_loss_coef=0.0, activation_checkpointing=checkpointing)
        learner.forward_backward(pack(samples, 1000, 1)[0], totals_of(samples))
        found.append(gradients(learner))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)


DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def test_a_balance_loss_that_the_model_does_not_have_is_told_and_forgotten(
    tmp_path: Path, group: RankGroup, caplog: pytest.LogCaptureFixture
):
    folder = save(tmp_path / "without", "deepseek_v3", **DEEPSEEK)
    learner = learner_of(folder, group, router_loss_coef=0.01)
    assert learner.shares_prompts and "has no balance loss" in caplog.text
    caplog.clear()
    assert learner_of(folder, group).shares_prompts
    balanced = learner_of(save(tmp_path / "with", "mixtral"), group, router_loss_coef=0.01)
    assert not balanced.shares_prompts and "has no balance loss" not in caplog.text
