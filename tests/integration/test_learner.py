"""The learner: packing and ranks change nothing but rounding, and what is not finite changes nothing at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.algo.losses import DppoTv, LossInputs, policy_loss
from async_rl.algo.packing import TrainSample, pack
from async_rl.store.file import FileStore
from tests.learner_support import (
    CPU,
    gradients,
    make_learner,
    make_samples,
    on_ranks,
    save_checkpoint,
    save_tiny_model,
    share,
)
from workers import checkpoints
from workers.checkpoints import Progress
from workers.learner import Learner, _turn_off_dropout, compute_dtype, warmup_factor
from workers.pretrained import load_causal_lm
from workers.process_group import RankGroup, rank_group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    with rank_group(CPU, 60.0) as alone:
        yield alone


def rounded_model(model: Path):
    """The model as everyone serves it, in plain transformers: weights rounded to bfloat16, arithmetic in float32."""
    plain = load_causal_lm(model, dtype=torch.float32, attention="eager")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    return plain


def alone(plain, sample: TrainSample, temperature: float) -> torch.Tensor:
    """log pi [C] of one sample's completion, computed with nothing else in the batch."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_P, sample.tokens_C]))
    logits = plain(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt_P) - 1 : -1]
    table = (logits / temperature).log_softmax(-1)
    return table[torch.arange(len(sample.tokens_C)), torch.from_numpy(sample.tokens_C)]


def reference_gradients(
    model: Path, samples: list[TrainSample], temperature: float
) -> dict[str, torch.Tensor]:
    """Of the mean loss over all loss tokens: plain transformers, one sample at a time, no sharding."""
    plain = rounded_model(model)
    total = torch.zeros(())
    for sample in samples:
        mask = torch.from_numpy(sample.mask_C != 0)
        inputs = LossInputs(
            alone(plain, sample, temperature),
            torch.from_numpy(sample.logprobs_C),
            torch.full((len(mask),), sample.advantage),
            mask,
            torch.from_numpy(sample.lags_C),
            torch.zeros(len(mask), dtype=torch.int64),
            1,
        )
        total = total + policy_loss(inputs, DppoTv()).total
    (total / sum(int(np.count_nonzero(s.mask_C)) for s in samples)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        scale = wanted[name].abs().max().clamp(min=1e-3)
        assert (found[name] - wanted[name]).abs().max() <= 2e-5 * scale, name


def bits(learner: Learner) -> dict[str, torch.Tensor]:
    """Everything an update may change."""
    return {
        f"{name}/{piece}": tensor.clone()
        for name, row in learner.rows().items()
        for piece, tensor in row.tensors.items()
    }


def test_logprobs_of_packed_samples_equal_those_computed_alone(model: Path, group: RankGroup):
    samples = make_samples(9)
    # Two samples of a single input token side by side, and one first in the row: the hardest boundaries to see.
    one = [
        TrainSample(np.array([i]), np.array([i + 1]), np.zeros(1, np.float32), np.ones(1), np.zeros(1), 1.0)
        for i in range(3)
    ]
    samples = [dataclasses.replace(s, mask_C=np.ones(len(s.tokens_C))) for s in samples + one]
    learner = make_learner(model, group, temperature=0.7)
    plain = rounded_model(model)
    [[row]] = pack(samples, limit=1000, ranks=1)
    with torch.no_grad():
        packed, _, kept = learner.logprobs(row)
        wanted = [alone(plain, sample, 0.7) for sample in sorted(samples, key=lambda s: -s.inputs)]
    assert row.position_ids_T[-3:].tolist() == [0, 0, 0]
    assert kept.tolist() == np.flatnonzero(row.loss_mask_T).tolist()
    assert torch.allclose(packed, torch.cat(wanted), atol=2e-5)


def test_the_packed_logprobs_would_differ_if_samples_saw_each_other(model: Path, group: RankGroup):
    [[row]] = pack(make_samples(6), limit=1000, ranks=1)
    learner = make_learner(model, group)
    running_on = dataclasses.replace(row, position_ids_T=np.arange(row.tokens))
    with torch.no_grad():
        apart, together = learner.logprobs(row)[0], learner.logprobs(running_on)[0]
    assert (apart - together).abs().max() > 1e-2


def test_a_pass_without_gradients_holds_no_weights_that_the_next_one_would_see(
    model: Path, group: RankGroup
):
    """Neither the check of the model at the start, nor log-probabilities alone."""
    learner = make_learner(model, group)
    sample = dataclasses.replace(make_samples(1)[0], mask_C=np.ones(len(make_samples(1)[0].tokens_C)))
    [[row]] = pack([sample], limit=1000, ranks=1)
    plain = rounded_model(model)
    for _ in range(2):
        with torch.no_grad():
            for rows in learner.rows().values():
                rows.tensors["param"].mul_(0.5)
            for parameter in plain.parameters():
                parameter.mul_(0.5)
            learner.restored(1)
            assert torch.allclose(learner.logprobs(row)[0], alone(plain, sample, 1.0), atol=2e-5)


@pytest.mark.parametrize("limit", [8, 40, 1000])
def test_gradients_equal_a_plain_loop_over_samples_however_they_are_packed(
    model: Path, group: RankGroup, limit: int
):
    samples = make_samples(12)
    learner = make_learner(model, group, temperature=0.7)
    stats = learner.forward_backward(*share(samples, limit, group))
    assert_same(gradients(learner), reference_gradients(model, samples, 0.7))
    norm = torch.cat([g.flatten() for g in gradients(learner).values()]).norm().item()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


def test_activation_checkpointing_changes_no_gradient(model: Path, group: RankGroup):
    samples = make_samples(6)
    learner = make_learner(model, group, activation_checkpointing=True)
    learner.forward_backward(*share(samples, 64, group))
    assert_same(gradients(learner), reference_gradients(model, samples, 1.0))


def test_nothing_is_dropped_while_activations_are_checkpointed():
    """Then the model is in its training mode, and OPT's rates of dropout and of dropped layers are plain numbers."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    noisy = OPTForCausalLM(OPTConfig(vocab_size=40, word_embed_proj_dim=16, layerdrop=0.5, **sizes))
    _turn_off_dropout(noisy)
    noisy.train()
    ids = torch.arange(8)[None]
    first = noisy(input_ids=ids).logits
    assert all(torch.equal(noisy(input_ids=ids).logits, first) for _ in range(4))


def test_an_untied_head_is_trained_too(tmp_path: Path, group: RankGroup):
    untied = save_tiny_model(tmp_path, tie_word_embeddings=False)
    samples = make_samples(6)
    learner = make_learner(untied, group)
    assert "lm_head.weight" in learner.parameters()
    learner.forward_backward(*share(samples, 64, group))
    assert_same(gradients(learner), reference_gradients(untied, samples, 1.0))


def test_bfloat16_products_give_nearly_the_same_gradients(model: Path, group: RankGroup):
    samples = make_samples(12)
    learner = make_learner(model, group, dtype="bfloat16")
    learner.forward_backward(*share(samples, 64, group))
    found = torch.cat([g.flatten() for g in gradients(learner).values()])
    wanted = torch.cat([g.flatten() for g in reference_gradients(model, samples, 1.0).values()])
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.999


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_of_two_ranks_is_the_learner_of_one(model: Path, group: RankGroup, tmp_path: Path):
    """Gradients, updates and checkpoints: one rank, then two, then one again."""
    store = FileStore(f"file://{tmp_path / 'run'}")
    one = make_learner(model, group)
    one.optimizer_step(one.forward_backward(*share(make_samples(12, seed=1), 40, group)))
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    save_checkpoint(store, group, one, Progress(1, 1, 0, 12, 1))
    saved_bits = bits(one)

    on_ranks(_two_ranks, 2, model, tmp_path)

    after_two = checkpoints.choose(store, "1", "f")
    assert after_two is not None and after_two.name == "00000001-0000000001" and len(after_two.tables) == 2
    back = make_learner(model, group)
    torch.manual_seed(6)
    checkpoints.restore(store, after_two, 0, back.rows())
    back.restored(1)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(saved_bits[name], value) for name, value in bits(back).items())

    stats = one.forward_backward(*share(make_samples(12, seed=2), 40, group))
    found = load_file(tmp_path / "two_ranks.safetensors")
    assert_same(
        {n.removeprefix("grad/"): g for n, g in found.items() if n.startswith("grad/")}, gradients(one)
    )
    assert found["loss"].item() == pytest.approx(stats.loss, rel=1e-5)
    assert found["grad_norm"].item() == pytest.approx(stats.grad_norm, rel=1e-5)
    assert found["fresh_kl_k3"].item() == pytest.approx(stats.fresh_kl_k3, rel=1e-4)
    assert found["ratio_max"].item() == pytest.approx(stats.ratio_max, rel=1e-5)
    measured = torch.tensor(one.forward_backward(*share(in_slot_0(12, seed=2), 40, group), 1).measured)
    assert found["measured"][0, 0] == stats.tokens
    assert torch.allclose(found["measured"], measured, rtol=1e-4), "the sums are over both ranks"
    assert one.optimizer_step(stats)
    for name, parameter in one.parameters().items():
        # Adam divides by the gradient's own size: where that is rounding, so is the update.
        difference = (found[f"param/{name}"] - parameter.full_tensor()).abs()
        assert (difference > 2e-3).float().mean() < 0.01, name


@pytest.mark.parametrize("limit", [8, 1000])
def test_each_slot_measures_its_own_tokens_however_they_are_packed(
    model: Path, group: RankGroup, limit: int
):
    samples = make_samples(9)
    slotted = [
        dataclasses.replace(s, slots_C=np.full(len(s.tokens_C), i % 3)) for i, s in enumerate(samples)
    ]
    learner = make_learner(model, group, temperature=0.7)
    stats = learner.forward_backward(*share(slotted, limit, group), 4)
    plain = rounded_model(model)
    wanted = np.zeros((4, 4))
    for index, sample in enumerate(samples):
        with torch.no_grad():
            ours = alone(plain, sample, 0.7).numpy()
        for log_pi, log_mu, kept in zip(ours, sample.logprobs_C, sample.mask_C, strict=True):
            if kept:
                d = np.clip(log_pi - log_mu, -2, 2)
                wanted[index % 3][:3] += (1, np.expm1(d) - d, np.expm1(d))
    found = np.array(stats.measured)
    assert np.allclose(found[:, :3], wanted[:, :3], rtol=1e-4, atol=1e-4)
    assert (found[3] == 0).all() and np.abs(found[:3, 3]).min() > 0
    unmeasured = learner.forward_backward(*share(samples, limit, group))
    assert unmeasured == dataclasses.replace(stats, measured=()), "measuring changes nothing"


def in_slot_0(count: int, seed: int) -> list[TrainSample]:
    return [
        dataclasses.replace(s, slots_C=np.zeros(len(s.tokens_C), np.int64))
        for s in make_samples(count, seed)
    ]


def _two_ranks(group: RankGroup, model: Path, folder: Path) -> None:
    store = FileStore(f"file://{folder / 'run'}")
    learner = make_learner(model, group)
    newest = checkpoints.choose(store, "latest", "f")
    assert newest is not None
    checkpoints.restore(store, newest, group.rank, learner.rows())
    learner.restored(newest.progress.updates)
    save_checkpoint(store, group, learner, Progress(1, 1, 1, 12, 1), parent=newest.name)
    stats = learner.forward_backward(*share(make_samples(12, seed=2), 64, group))
    result = {f"grad/{name}": gradient for name, gradient in gradients(learner).items()}
    for name in ("loss", "grad_norm", "fresh_kl_k3", "ratio_max"):
        result[name] = torch.tensor(getattr(stats, name))
    slotted = share(in_slot_0(12, seed=2), 64, group)
    result["measured"] = torch.tensor(learner.forward_backward(*slotted, 1).measured)
    assert learner.optimizer_step(stats)
    result |= {f"param/{name}": p.full_tensor().detach() for name, p in learner.parameters().items()}
    # One rank without any sample of its own still takes part.
    learner.forward_backward(*share(make_samples(1, seed=3), 64, group))
    if group.rank == 0:
        save_file(result, folder / "two_ranks.safetensors")


@pytest.mark.parametrize("broken", ["nan advantage", "infinite advantage", "infinite gradient"])
def test_a_step_that_is_not_finite_changes_not_one_bit(model: Path, group: RankGroup, broken: str):
    learner = make_learner(model, group)
    learner.optimizer_step(learner.forward_backward(*share(make_samples(4), 64, group)))
    before, shown = bits(learner), {n: p.full_tensor().clone() for n, p in learner.parameters().items()}

    advantage = {"nan advantage": float("nan"), "infinite advantage": float("inf")}.get(broken, 1.0)
    samples = make_samples(4)
    samples[1] = dataclasses.replace(
        samples[1], advantage=advantage, mask_C=np.ones_like(samples[1].mask_C)
    )
    stats = learner.forward_backward(*share(samples, 64, group))
    if broken == "infinite gradient":
        stats = dataclasses.replace(stats, grad_norm=float("inf"))
    assert not stats.finite
    assert not learner.optimizer_step(stats)
    assert learner.updates == 1
    assert all(torch.equal(value, before[name]) for name, value in bits(learner).items())
    assert all(torch.equal(p.full_tensor(), shown[n]) for n, p in learner.parameters().items())

    good = learner.forward_backward(*share(make_samples(4), 64, group))
    assert good.finite and learner.optimizer_step(good)  # nothing of it is left in the gradients


def test_a_batch_without_loss_tokens_moves_nothing(model: Path, group: RankGroup):
    learner = make_learner(model, group)
    learner.optimizer_step(learner.forward_backward(*share(make_samples(4), 64, group)))
    before = bits(learner)
    stats = learner.forward_backward(*share([], 64, group))
    assert (stats.tokens, stats.loss, stats.grad_norm) == (0, 0.0, 0.0)
    assert not learner.optimizer_step(stats)
    assert all(torch.equal(value, before[name]) for name, value in bits(learner).items())


def test_the_same_batches_give_the_same_bits(model: Path, group: RankGroup):
    def train() -> dict[str, torch.Tensor]:
        learner = make_learner(model, group)
        for seed in range(3):
            learner.optimizer_step(learner.forward_backward(*share(make_samples(8, seed), 40, group)))
        return bits(learner)

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_too_small_for_bfloat16_add_up_in_the_masters(model: Path, group: RankGroup, dtype: str):
    learner = make_learner(model, group, learning_rate=1e-5, dtype=dtype)
    shown = {name: p.full_tensor().bfloat16() for name, p in learner.parameters().items()}
    batch = share(make_samples(4), 64, group)
    learner.optimizer_step(learner.forward_backward(*batch))
    masters = {name: row.tensors["param"].clone() for name, row in learner.rows().items()}
    for name, parameter in learner.parameters().items():
        now = parameter.full_tensor()
        assert torch.equal(now.bfloat16(), masters[name].bfloat16()), (
            name
        )  # what is published is what is seen
        if dtype == "float32":
            assert torch.equal(now, now.bfloat16().float()), name
    moved = torch.cat([(masters[n].bfloat16() != shown[n]).flatten() for n in shown]).float().mean()
    assert 0 < moved < 0.2
    for _ in range(20):
        learner.optimizer_step(learner.forward_backward(*batch))
    now = {name: p.full_tensor().bfloat16() for name, p in learner.parameters().items()}
    assert torch.cat([(now[n] != shown[n]).flatten() for n in shown]).float().mean() > 2 * moved


def test_a_large_gradient_is_clipped_to_the_limit(model: Path, group: RankGroup):
    samples = make_samples(8)
    loud = [dataclasses.replace(sample, advantage=1000 * sample.advantage) for sample in samples]
    learner = make_learner(model, group, clip_norm=0.5)
    stats = learner.forward_backward(*share(loud, 64, group))
    assert stats.grad_norm > 5.0
    wanted = {name: 0.5 * g / stats.grad_norm for name, g in gradients(learner).items()}
    assert learner.optimizer_step(stats)
    # After the first update Adam's first moment is (1 - beta1) times the gradient it was given.
    assert_same({name: row.tensors["exp_avg"] / 0.1 for name, row in learner.rows().items()}, wanted)


def test_statistics_of_fresh_tokens_are_none_where_there_are_none(model: Path, group: RankGroup):
    stale = [dataclasses.replace(s, lags_C=np.ones_like(s.lags_C)) for s in make_samples(4)]
    learner = make_learner(model, group)
    stats = learner.forward_backward(*share(stale, 64, group))
    assert stats.fresh_tokens == 0 and stats.fresh_kl_k3 is None and stats.fresh_abs_logprob is None
    assert stats.kl_k3 > 0
    fresh = [dataclasses.replace(s, lags_C=np.zeros_like(s.lags_C)) for s in make_samples(4)]
    stats = learner.forward_backward(*share(fresh, 64, group))
    assert stats.fresh_kl_k3 == pytest.approx(stats.kl_k3)
    assert stats.fresh_abs_logprob == pytest.approx(stats.abs_logprob)


def test_the_learning_rate_warms_up_by_updates_and_stays():
    assert [warmup_factor(n, 4) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


def test_the_product_type_is_what_was_asked_for():
    assert compute_dtype("bfloat16", CPU) is torch.bfloat16
    assert compute_dtype("float32", CPU) is torch.float32
    assert compute_dtype("auto", torch.device("cuda", 0)) is torch.bfloat16
