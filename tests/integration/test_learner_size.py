"""What makes a larger model fit: adapters, lean optimizers, copies, offload. None of it may change what is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.algo.losses import DppoTv
from async_rl.errors import CheckpointError, ConfigError
from async_rl.store.file import FileStore
from tests.learner_support import (
    CPU,
    VOCABULARY,
    gradients,
    make_samples,
    on_ranks,
    save_checkpoint,
    save_tiny_model,
    share,
)
from workers import checkpoints
from workers.adapter_scale import NO_ADAPTERS
from workers.checkpoints import Progress
from workers.learner import Learner
from workers.masters import local
from workers.pretrained import hide_broken_media_packages
from workers.process_group import RankGroup, rank_group
from workers.settings import ModelConfig, TrainerConfig

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture
def group():
    with rank_group(CPU, 30.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def learner_of(
    path: Path, group: RankGroup, model: dict[str, Any] | None = None, **trainer: Any
) -> Learner:
    return Learner(
        ModelConfig(path=str(path), **{"dtype": "float32"} | (model or {})),
        TrainerConfig(**{"learning_rate": 1e-2, "warmup_steps": 0} | trainer),
        DppoTv(),
        temperature=1.0,
        group=group,
        device=CPU,
    )


def train(learner: Learner, group: RankGroup, steps: int = 3) -> None:
    for seed in range(steps):
        batch = share(make_samples(8, seed), 40, group)
        assert learner.optimizer_step(learner.forward_backward(*batch))


def seen(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in learner.parameters().items()}


def master_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: g.full_tensor().clone() for name, g in learner._gradients.items()}


# ---------------------------------------------------------------- adapters


def test_adapters_change_nothing_before_the_first_update(model: Path, group: RankGroup):
    whole, adapted = seen(learner_of(model, group)), seen(learner_of(model, group, LORA))
    assert all(torch.equal(whole[name], adapted[name]) for name in whole)


def test_gradients_of_the_adapters_are_those_of_autograd_through_the_merged_weights(
    model: Path, group: RankGroup
):
    """dB = s G A^T and dA = s B^T G, with G the gradient that full training has at the same weights."""
    learner = learner_of(model, group, LORA)
    train(learner, group, 2)  # B is no longer zero
    batch = share(make_samples(8, seed=9), 40, group)
    learner.forward_backward(*batch)
    found = master_gradients(learner)
    factors = {name: m.full_tensor().detach() for name, m in learner._masters.tensors.items()}

    whole = learner_of(model, group)
    with torch.no_grad():
        for name, value in seen(learner).items():
            local(whole.parameters()[name]).copy_(value)
    whole.forward_backward(*batch)
    scale = 8.0 / 4
    targets = [name.removesuffix(".lora_A") for name in factors if name.endswith(".lora_A")]
    assert len(targets) == 2 * 7
    for name in targets:
        g = gradients(whole)[name]
        a, b = factors[f"{name}.lora_A"], factors[f"{name}.lora_B"]
        assert b.abs().max() > 0
        torch.testing.assert_close(found[f"{name}.lora_B"], scale * g @ a.T, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[f"{name}.lora_A"], scale * b.T @ g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_seen_is_the_merged_weight_rounded_to_bfloat16(model: Path, group: RankGroup, dtype: str):
    learner = learner_of(model, group, {**LORA, "dtype": dtype, "lora_targets": ("q_proj", "down_proj")})
    before = seen(learner)
    train(learner, group)
    factors = {name: m.full_tensor().detach() for name, m in learner._masters.tensors.items()}
    for name, value in seen(learner).items():
        if f"{name}.lora_A" in factors:
            merged = before[name] + 2.0 * factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
            torch.testing.assert_close(value, merged, rtol=2**-8, atol=1e-6)
            assert torch.equal(value, value.bfloat16().float()) and not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), f"{name} is frozen"
    assert {name.split(".")[-3] for name in factors} == {"q_proj", "down_proj"}


def test_frozen_weights_keep_no_gradient_and_targets_none_after_the_step(model: Path, group: RankGroup):
    learner = learner_of(model, group, LORA)
    learner.forward_backward(*share(make_samples(8), 40, group))
    assert all(p.grad is None for p in learner.parameters().values())
    assert {key for row in learner.rows().values() for key in row.tensors} == {
        "param",
        "exp_avg",
        "exp_avg_sq",
    }
    trained = sum(row.tensors["param"].numel() for row in learner.rows().values())
    assert trained < 0.5 * sum(p.numel() for p in learner.parameters().values())


def test_a_target_that_the_model_does_not_have_is_named(model: Path, group: RankGroup):
    with pytest.raises(ConfigError, match="no linear layer named query_key_value"):
        learner_of(model, group, {**LORA, "lora_targets": ("q_proj", "query_key_value")})


# ---------------------------------------------------------------- resumes


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters": (LORA, {}),
    "adafactor": ({}, {"optimizer": "adafactor"}),
    "adapters, adafactor, offload": (LORA, {"optimizer": "adafactor", "offload": "optimizer"}),
    "offload": ({}, {"offload": "optimizer"}),
    "offload, bfloat16": ({"dtype": "bfloat16"}, {"offload": "all"}),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_checkpoint_holds_everything_that_the_next_steps_depend_on(
    model: Path, group: RankGroup, tmp_path: Path, settings: tuple[dict[str, Any], dict[str, Any]]
):
    store = FileStore(f"file://{tmp_path}/run")
    model_settings, trainer = settings
    straight = learner_of(model, group, model_settings, **trainer)
    train(straight, group, 2)
    saved = save_checkpoint(store, group, straight, Progress(2, 2, 0, 16, 2))
    train(straight, group)

    resumed = learner_of(model, group, model_settings, **trainer)
    checkpoints.restore(store, saved, 0, resumed.rows())
    resumed.restored(2)
    train(resumed, group)
    assert all(torch.equal(value, seen(straight)[name]) for name, value in seen(resumed).items())


def test_a_checkpoint_of_other_settings_is_refused(model: Path, group: RankGroup, tmp_path: Path):
    store = FileStore(f"file://{tmp_path}/run")
    saved = save_checkpoint(store, group, learner_of(model, group), Progress(0, 0, 0, 0, 0))
    lean, adapted = learner_of(model, group, optimizer="adafactor"), learner_of(model, group, LORA)
    with pytest.raises(CheckpointError, match="go on with the trainer.optimizer"):
        checkpoints.restore(store, saved, 0, lean.rows())
    with pytest.raises(
        CheckpointError, match=r"lora_A .* other settings of trainer.optimizer or model.lora"
    ):
        checkpoints.restore(store, saved, 0, adapted.rows())


def test_a_checkpoint_of_more_adapters_is_refused(model: Path, group: RankGroup, tmp_path: Path):
    store = FileStore(f"file://{tmp_path}/run")
    more = learner_of(model, group, {**LORA, "lora_targets": ("q_proj", "v_proj")})
    saved = save_checkpoint(store, group, more, Progress(0, 0, 0, 0, 0))
    fewer = learner_of(model, group, {**LORA, "lora_targets": ("q_proj",)})
    with pytest.raises(CheckpointError, match=r"holds .*v_proj.weight.lora_A \(4 such"):
        checkpoints.restore(store, saved, 0, fewer.rows())


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            LORA,
            {**LORA, "lora_alpha": 16.0},
            "lora_rank = 4, lora_alpha = 8, this trainer .* lora_alpha = 16",
        ),
        (LORA, {**LORA, "lora_rank": 2}, "lora_rank = 4, .* has model.lora_rank = 2"),
        (LORA, {}, "lora_rank = 4, .* has model.lora_rank = 0"),
        ({}, LORA, "lora_rank = 0, this trainer has model.lora_rank = 4"),
    ],
    ids=["another alpha", "another rank", "adapters no more", "adapters from now on"],
)
def test_a_resume_with_adapters_of_another_scale_is_refused_before_anything_is_restored(
    model: Path,
    group: RankGroup,
    tmp_path: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    said: str,
):
    store = FileStore(f"file://{tmp_path}/run")
    save_checkpoint(store, group, learner_of(model, group, before), Progress(0, 0, 0, 0, 0))
    with pytest.raises(CheckpointError, match=said):
        checkpoints.choose(store, "latest", "f", ModelConfig(**now).adapters)
    assert checkpoints.choose(store, "latest", "f", ModelConfig(**before).adapters) is not None


def test_a_checkpoint_that_does_not_say_its_alpha_is_resumed_with_a_warning(
    model: Path, group: RankGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One of a release before."""
    store = FileStore(f"file://{tmp_path}/run")
    saved = save_checkpoint(store, group, learner_of(model, group, LORA), Progress(0, 0, 0, 0, 0))
    old = {key: value for key, value in json.loads(msgspec.json.encode(saved)).items() if key != "adapters"}
    store.put(f"{checkpoints.PREFIX}{saved.name}.json", json.dumps(old).encode())
    assert checkpoints.choose(store, "latest", "f", ModelConfig(**LORA).adapters) is not None
    assert "does not say what adapters" in caplog.text


def test_a_resume_of_adapters_over_other_weights_is_refused(
    model: Path, group: RankGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Names, shapes and adapters are the same: only the weights below tell."""
    store = FileStore(f"file://{tmp_path}/run")
    first = learner_of(model, group, LORA)
    train(first, group)
    saved = save_checkpoint(store, group, first, Progress(1, 0, 0, 0, 1))
    other = learner_of(save_tiny_model(tmp_path / "other", seed=1), group, LORA)
    with pytest.raises(CheckpointError, match="over other frozen weights"):
        checkpoints.choose(store, "latest", "f", other.adapters)
    again = learner_of(model, group, LORA)
    assert checkpoints.choose(store, "latest", "f", again.adapters) is not None and not caplog.text

    old = json.loads(msgspec.json.encode(saved))  # as a release before wrote it
    del old["adapters"]["base"]
    store.put(f"{checkpoints.PREFIX}{saved.name}.json", json.dumps(old).encode())
    assert checkpoints.choose(store, "latest", "f", other.adapters) is not None
    assert "does not say which weights it was trained on" in caplog.text


def test_weights_that_are_trained_are_not_frozen(model: Path, group: RankGroup, tmp_path: Path):
    """A checkpoint that holds all of them is resumed on any folder of the same model."""
    plain = learner_of(model, group)
    other = learner_of(save_tiny_model(tmp_path / "other", seed=1), group)
    assert plain.adapters == other.adapters == NO_ADAPTERS


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("settings", [{"offload": "optimizer"}, {"offload": "all"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_changes_no_bit(model: Path, group: RankGroup, settings: dict[str, Any], dtype: str):
    plain, offloaded = (learner_of(model, group, {"dtype": dtype}, **each) for each in ({}, settings))
    for learner in (plain, offloaded):
        train(learner, group)
    wanted = {name: value.bfloat16() for name, value in seen(plain).items()}
    assert all(torch.equal(value.bfloat16(), wanted[name]) for name, value in seen(offloaded).items())


def test_adafactor_keeps_a_row_and_a_column_and_learns(model: Path, group: RankGroup):
    learner = learner_of(model, group, optimizer="adafactor", learning_rate=3e-3)
    batch = share(make_samples(8), 64, group)
    losses = []
    for _ in range(8):
        stats = learner.forward_backward(*batch)
        losses.append(stats.loss)
        assert learner.optimizer_step(stats)
    assert losses[-1] < losses[0]
    kept = sum(
        t.numel() for row in learner.rows().values() for key, t in row.tensors.items() if key != "param"
    )
    assert kept < 0.2 * sum(p.numel() for p in learner.parameters().values())


# ---------------------------------------------------------------- mixtures of experts


def save_mixture(folder: Path, router_coef: float) -> Path:
    hide_broken_media_packages()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        router_aux_loss_coef=router_coef,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_routers_of_a_mixture_get_the_gradient_of_their_balance_loss(tmp_path: Path, group: RankGroup):
    from transformers import AutoModelForCausalLM

    batch = share(make_samples(8), 1000, group)
    found = {}
    for coef in (0.0, 0.05):
        learner = learner_of(save_mixture(tmp_path / str(coef), coef), group)
        learner.forward_backward(*batch)
        found[coef] = gradients(learner)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "0.05", dtype=torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    [row] = batch[0]
    ids, positions = (torch.from_numpy(each)[None] for each in (row.input_ids_T, row.position_ids_T))
    output = plain(input_ids=ids, position_ids=positions, output_router_logits=True, use_cache=False)
    (0.05 * output.aux_loss).backward()
    for name, parameter in plain.named_parameters():
        extra = found[0.05][name] - found[0.0][name]
        wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(extra)
        assert (extra - wanted).abs().max() <= 1e-5, name
    gate = "model.layers.0.mlp.gate.weight"
    assert (found[0.05][gate] - found[0.0][gate]).abs().max() > 1e-4
    off = learner_of(tmp_path / "0.05", group, {"router_loss_coef": 0.0})
    off.forward_backward(*batch)
    assert all(torch.equal(each, found[0.0][name]) for name, each in gradients(off).items())


# ---------------------------------------------------------------- ranks


RANKS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "adapters": (2, LORA, {}),
    "adafactor": (2, {}, {"optimizer": "adafactor"}),
    "two copies": (2, {}, {"replicas": 2}),
    "two copies with adapters, offloaded": (2, LORA, {"replicas": 2, "offload": "all"}),
    "checkpointing, offloaded": (2, {"activation_checkpointing": True}, {"offload": "all"}),
    "mixture": (2, {}, {}),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_two_ranks_gradients_and_updates_are_those_of_one(model: Path, group: RankGroup, tmp_path: Path):
    """And a checkpoint of two ranks is read by one, in every setting."""
    mixture = save_mixture(tmp_path / "mixture-model", 0.0)
    on_ranks(_settings_on_ranks, 2, model, mixture, tmp_path)
    for name, (_, model_settings, trainer) in RANKS.items():
        model = mixture if name == "mixture" else model
        one = learner_of(model, group, model_settings, **{**trainer, "replicas": 1})
        train(one, group, 2)
        batch = share(make_samples(8, seed=7), 40, group)
        stats = one.forward_backward(*batch)
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found["grad_norm"].item() == pytest.approx(stats.grad_norm, rel=1e-3), name
        for key, gradient in master_gradients(one).items():
            scale = gradient.abs().max().clamp(min=1e-3)
            assert (found[f"grad/{key}"] - gradient).abs().max() <= 2e-3 * scale, (name, key)

        store = FileStore(f"file://{tmp_path}/{name}")
        back = learner_of(model, group, model_settings, **{**trainer, "replicas": 1})
        saved = checkpoints.choose(store, "latest", "f", back.adapters)
        assert saved is not None and len(saved.tables) == 2
        checkpoints.restore(store, saved, 0, back.rows())
        back.restored(2)
        for key, value in seen(back).items():
            # Two row blocks of a product may round otherwise than the whole: one bfloat16 step.
            torch.testing.assert_close(
                value, found[f"seen/{key}"], rtol=2**-7, atol=1e-6, msg=f"{name} {key}"
            )


def _settings_on_ranks(group: RankGroup, model: Path, mixture: Path, folder: Path) -> None:
    for name, (_, model_settings, trainer) in RANKS.items():
        model = mixture if name == "mixture" else model
        learner = learner_of(model, group, model_settings, **trainer)
        train(learner, group, 2)
        store = FileStore(f"file://{folder}/{name}")
        save_checkpoint(store, group, learner, Progress(2, 2, 0, 16, 2))
        result = {f"seen/{key}": value for key, value in seen(learner).items()}
        stats = learner.forward_backward(*share(make_samples(8, seed=7), 40, group))
        result |= {f"grad/{key}": value for key, value in master_gradients(learner).items()}
        result["grad_norm"] = torch.tensor(stats.grad_norm)
        if group.rank == 0:
            save_file(
                {key: value.contiguous() for key, value in result.items()}, folder / f"{name}.safetensors"
            )


def test_copies_must_divide_the_ranks(model: Path, group: RankGroup):
    with pytest.raises(ConfigError, match="replicas = 2 does not divide the 1 ranks"):
        learner_of(model, group, replicas=2)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_give_the_same_gradients(model: Path, group: RankGroup):
    batch = share(make_samples(8), 40, group)
    plain, compiled = learner_of(model, group), learner_of(model, group, {"compile": True})
    for learner in (plain, compiled):
        learner.forward_backward(*batch)
    for name, gradient in master_gradients(plain).items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (master_gradients(compiled)[name] - gradient).abs().max() <= 1e-3 * scale, name
