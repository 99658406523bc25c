"""Mixtures of experts, whose experts transformers keeps in one tensor, are published as their files have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rl.errors import ConfigError
from async_rl.store import ObjectStore, open_store
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.weights.run import RunInfo, ensure_run, open_run
from async_rl.weights.subscriber import Subscriber, pull
from tests.learner_support import CPU, VOCABULARY, make_learner, make_samples, on_ranks, share
from tests.rollout_support import Truth
from workers.engines import make_engine
from workers.engines.shards import find_shards, read_table
from workers.file_names import find_names
from workers.learner import Learner
from workers.pretrained import hide_broken_media_packages, load_causal_lm
from workers.process_group import RankGroup, rank_group
from workers.rollout_settings import RolloutConfig

LIMIT_S = 60.0
SMALL = WeightsConfig(pack_bytes=20_000, delta_pack_bytes=5_000, merge_after_s=LIMIT_S)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,  # as many as of queries: else transformers' own attention fails under a mask
    "moe_intermediate_size": 16,
    "n_routed_experts": 5,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 5, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},  # here other tensors have other names, too
    "minimax_m2": {"num_local_experts": 4, "head_dim": 8},  # such, and a correction of the routers' scores
    "deepseek_v3": DEEPSEEK,  # has one, too, which is no parameter
}


def save(folder: Path, kind: str, seed: int = 0) -> Path:
    hide_broken_media_packages()
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | MIXTURES[kind]))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(CPU, 60.0) as group:
        yield group


def publish_and_train(store: ObjectStore, folder: Path, group: RankGroup, learner: Learner) -> None:
    """Version 0 as loaded, version 1 after an update of the optimizer. Collective."""
    tensors = learner.published()
    run = from_rank0(lambda: ensure_run(store, folder, tensors), RunInfo)
    ours = from_rank0(lambda: claim(store), Claim)
    with Publisher(store, run, ours, tensors, SMALL) as publisher:
        publisher.publish(0)
        publisher.flush(LIMIT_S)
        stats = learner.forward_backward(*share(make_samples(8), 40, group))
        assert learner.optimizer_step(stats)
        publisher.publish(1)
        publisher.flush(LIMIT_S)


def seen(learner: Learner) -> dict[str, Tensor]:
    """By transformers' names, whole: what the forward pass sees."""
    return {name: each.full_tensor().detach().clone() for name, each in learner.parameters().items()}


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(24).reshape(2, 12) % VOCABULARY, use_cache=False).logits


def with_weights(folder: Path, weights: dict[str, Tensor]) -> Any:
    """The model as transformers loads it from `folder`, with other weights in the places of its parameters."""
    model = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(weights[name])
        for name, each in model.named_buffers():
            if name.endswith("correction_bias"):
                each.copy_(each.bfloat16())
    return model


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_published_version_is_the_trained_model_to_the_last_bit_of_its_logits(
    tmp_path: Path, group: RankGroup, kind: str
):
    folder, store = save(tmp_path / "model", kind), open_store(f"file://{tmp_path}/store")
    learner = make_learner(folder, group)
    weights = [seen(learner)]
    publish_and_train(store, folder, group, learner)
    weights.append(seen(learner))

    run = open_run(store)
    assert {spec.name for spec in run.tensors} == set(read_table(find_shards(folder)))
    assert {manifest.way.base for manifest in (read_manifest(store, v) for v in (0, 1))} == {-1, 0}
    with closing(Subscriber(store, run, tmp_path / "cache", WeightsConfig())) as subscriber:
        for version in (0, 1):  # full, then its delta
            subscriber.fetch(read_manifest(store, version))
            model = loaded(pull(store, version, tmp_path / f"pulled-{version}"))
            assert torch.equal(logits(model), logits(with_weights(folder, weights[version])))
    for name, each in weights[1].items():
        if name.endswith("gate_up_proj"):
            assert not torch.equal(each, weights[0][name])


async def test_the_reference_engine_takes_new_weights_of_a_mixture(tmp_path: Path):
    folders = [save(tmp_path / str(seed), "mixtral", seed) for seed in range(2)]
    engine = make_engine(RolloutConfig(engine="reference", max_sequences=4))
    await engine.start(folders[0], 0)
    try:
        for version, folder in enumerate(folders):
            if version:
                await engine.update(version, find_shards(folder))
            said = await engine.generate(
                [3, 5, 7], seed=1, temperature=1.0, max_tokens=12, request_id=str(version)
            )
            apart = [said.logprobs - Truth(each).logprobs([3, 5, 7], said.tokens) for each in folders]
            assert np.abs(apart[version]).max() < 0.05 < 0.5 < np.abs(apart[1 - version]).max()
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_publish_the_experts_that_one_publishes(tmp_path: Path, group: RankGroup):
    """Of five experts they hold 3 and 2."""
    folder, alone = save(tmp_path / "model", "qwen3_moe"), open_store(f"file://{tmp_path}/alone")
    publish_and_train(alone, folder, group, make_learner(folder, group))
    on_ranks(_publish, 2, tmp_path, folder)
    store = open_store(f"file://{tmp_path}/two")
    one, two = read_manifest(alone, 0), read_manifest(store, 0)
    assert (two.digest, two.way.weight_map) == (one.digest, one.way.weight_map)
    assert two.way.tile_digests == one.way.tile_digests
    assert {pack.key.split("-")[2] for pack in read_manifest(store, 1).way.packs} == {"0", "1"}
    model = loaded(pull(store, 1, tmp_path / "pulled"))
    trained = load_file(tmp_path / "trained.safetensors")
    assert all(
        torch.equal(each, trained[name].bfloat16().float()) for name, each in model.named_parameters()
    )


def _publish(group: RankGroup, folder: Path, model: Path) -> None:
    learner = make_learner(model, group)
    publish_and_train(open_store(f"file://{folder}/two"), model, group, learner)
    trained = seen(learner)
    if group.rank == 0:
        save_file(trained, folder / "trained.safetensors")


# ---------------------------------------------------------------- what can't be published


def test_a_model_saved_without_its_prefix_is_refused_with_the_way_to_save_it_anew(
    tmp_path: Path, group: RankGroup
):
    hide_broken_media_packages()
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    GPT2Model(config).save_pretrained(tmp_path / "gpt2")
    learner = make_learner(tmp_path / "gpt2", group)
    with pytest.raises(ConfigError, match=r"transformer\.wte\.weight is one") as raised:
        learner.published()
    assert (
        "save it into another folder" in str(raised.value) and "transformer.wte.weight" in raised.value.hint
    )

    load_causal_lm(tmp_path / "gpt2", dtype=torch.float32, attention="sdpa").save_pretrained(
        tmp_path / "anew"
    )
    assert set(make_learner(tmp_path / "anew", group).published()) == set(learner.parameters())


def test_experts_that_are_not_what_their_files_say_are_refused(tmp_path: Path):
    """As they would be if a name were taken for that of another expert."""
    folder = save(tmp_path / "model", "qwen3_moe")
    model = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")
    assert find_names(model, folder).refused is None
    with torch.no_grad():
        experts = model.model.layers[1].mlp.experts.down_proj
        experts[[1, 2]] = experts[[2, 1]]
    refused = find_names(model, folder).refused
    assert isinstance(refused, ConfigError)
    assert "is not what transformers made of it in model.layers.1.mlp.experts.down_proj," in refused.message


def test_rows_that_were_permuted_are_found_out(tmp_path: Path, monkeypatch: Any):
    """Of a tensor whose way back is not known: its first, middle and last row may well be where they were."""
    from transformers import core_model_loading

    folder = save(tmp_path / "model", "qwen3_moe")
    model = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")
    name = "model.layers.0.self_attn.q_proj.weight"
    known = core_model_loading.revert_weight_conversion

    def without(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: each + 0 if key == name else each for key, each in known(model, state).items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", without)
    assert find_names(model, folder).refused is None
    with torch.no_grad():
        rows = model.model.layers[0].self_attn.q_proj.weight
        rows[[2, 3]] = rows[[3, 2]]
    refused = find_names(model, folder).refused
    assert isinstance(refused, ConfigError) and refused.message.startswith(name)


def test_a_parameter_that_is_computed_from_several_tensors_is_refused(tmp_path: Path, monkeypatch: Any):
    from transformers import core_model_loading

    folder = save(tmp_path / "model", "qwen3_moe")
    model = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")

    def doubled(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}.half": each + each for name, each in state.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", doubled)
    refused = find_names(model, folder).refused
    assert isinstance(refused, ConfigError)
    assert "parameters" in refused.message and "trained, but not published" in refused.hint
