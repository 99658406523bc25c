"""Every loss through the learner: gradients that depend on neither packing nor ranks, and are those of a plain loop
over samples; the frozen reference; a loss of one's own; several updates per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.algo.losses import REGISTRY, LossConfig, LossInputs, denominator, policy_loss, totals_of
from async_rl.algo.losses.custom import Custom
from async_rl.algo.losses.tokens import Decoupled, DppoTv, IcePop, Reinforce
from async_rl.algo.packing import TrainSample
from async_rl.errors import ConfigError
from async_rl.store.file import FileStore
from tests.integration.test_learner import alone, assert_same, bits, rounded_model
from tests.learner_support import (
    CPU,
    VOCABULARY,
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
from workers.learner import Learner
from workers.process_group import RankGroup, rank_group
from workers.updates import in_turn, minibatches_of, train_batch

MAX_TOKENS = 16
"""As make_learner has it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    torch.set_num_threads(1)
    with rank_group(CPU, 60.0) as alone:
        yield alone


def near_samples(model: Path, count: int, seed: int = 0) -> list[TrainSample]:
    """Behaviour logprobs around the policy's own, so that no loss is outside everywhere; the last is all masked."""
    plain = rounded_model(model)
    draw = np.random.default_rng(seed)
    samples = []
    for sample in make_samples(count, seed):
        with torch.no_grad():
            own = alone(plain, sample, 1.0).numpy()
        noisy = np.minimum(own + draw.normal(0, 0.3, len(own)), 0.0).astype(np.float32)
        samples.append(dataclasses.replace(sample, logprobs_C=noisy))
    samples[-1] = dataclasses.replace(samples[-1], mask_C=np.zeros_like(samples[-1].mask_C))
    return samples


def reference_gradients(
    model: Path, samples: list[TrainSample], loss: LossConfig, reference: Path
) -> dict[str, torch.Tensor]:
    """Plain transformers, one sample at a time: no packing, no sharding, no offload."""
    plain, frozen = rounded_model(model), rounded_model(reference)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_P, sample.tokens_C]))
        logits = plain(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt_P) - 1 : -1]
        table = logits.log_softmax(-1)
        with torch.no_grad():
            held = alone(frozen, sample, 1.0)
        inputs = LossInputs(
            table[torch.arange(len(sample.tokens_C)), torch.from_numpy(sample.tokens_C)],
            torch.from_numpy(sample.logprobs_C),
            torch.full((len(sample.tokens_C),), sample.advantage),
            torch.from_numpy(sample.mask_C != 0),
            torch.from_numpy(sample.lags_C),
            torch.zeros(len(sample.tokens_C), dtype=torch.int64),
            1,
            reference_T=held,
            entropy_T=-(table.exp() * table).sum(-1),
        )
        total = total + policy_loss(inputs, loss).total
    (total / denominator(loss, totals_of(samples), MAX_TOKENS)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def with_everything(name: str, normalise: str, reference: Path) -> LossConfig:
    return REGISTRY[name].config(
        normalise=normalise, reference_coef=0.1, reference=str(reference), entropy_coef=0.05
    )


CASES = [(name, REGISTRY[name].config().normalise) for name in REGISTRY]
CASES += [("dppo_tv", "sequence"), ("ppo_clip", "constant"), ("gspo", "token")]
OVER_RANKS = [
    ("dppo_tv", "sequence"),
    ("ppo_clip", "constant"),
    ("gspo", "sequence"),
    ("tis_sequence", "token"),
]


@pytest.mark.parametrize(("name", "normalise"), CASES)
def test_gradients_do_not_depend_on_the_packing(
    model: Path, other: Path, group: RankGroup, name: str, normalise: str
):
    """... and are those of a plain loop, with a reference and an entropy bonus."""
    samples = near_samples(model, 12)
    loss = with_everything(name, normalise, other)
    wanted = reference_gradients(model, samples, loss, other)
    learner = make_learner(model, group, loss=loss)
    assert max(g.abs().max().item() for g in wanted.values()) > 1e-4
    for limit in (8, 40, 1000):
        learner.forward_backward(*share(samples, limit, group))
        assert_same(gradients(learner), wanted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_have_the_gradients_of_one(model: Path, other: Path, group: RankGroup, tmp_path: Path):
    on_ranks(_two_ranks, 2, model, other, tmp_path)
    found = load_file(tmp_path / "two.safetensors")
    samples = near_samples(model, 11)
    for name, normalise in OVER_RANKS:
        learner = make_learner(model, group, loss=with_everything(name, normalise, other))
        stats = learner.forward_backward(*share(samples, 40, group))
        key = f"{name}/{normalise}/"
        assert_same(
            {n.removeprefix(key): g for n, g in found.items() if n.startswith(key)}, gradients(learner)
        )
        for number in ("loss", "kl_k3_max", "chi_square", "ess_token", "ess_sequence", "reference_kl"):
            told = found[f"stats/{key}{number}"].item()
            assert told == pytest.approx(getattr(stats, number), rel=1e-4), (name, number)


def _two_ranks(group: RankGroup, model: Path, other: Path, folder: Path) -> None:
    samples = near_samples(model, 11)
    result = {}
    for name, normalise in OVER_RANKS:
        learner = make_learner(model, group, loss=with_everything(name, normalise, other))
        stats = learner.forward_backward(*share(samples, 40, group))
        key = f"{name}/{normalise}/"
        result |= {key + n: gradient for n, gradient in gradients(learner).items()}
        for number in ("loss", "kl_k3_max", "chi_square", "ess_token", "ess_sequence", "reference_kl"):
            result[f"stats/{key}{number}"] = torch.tensor(getattr(stats, number), dtype=torch.float64)
    if group.rank == 0:
        save_file(result, folder / "two.safetensors")


# ---------------------------------------------------------------- the reference


def resumed(learner: Learner, model: Path, group: RankGroup, folder: Path, **settings) -> Learner:
    """Another learner, from a checkpoint of this one."""
    store = FileStore(f"file://{folder / 'run'}")
    checkpoint = save_checkpoint(store, group, learner, Progress(1, 1, 0, 0, learner.updates))
    again = make_learner(model, group, **settings)
    checkpoints.restore(store, checkpoint, 0, again.rows())
    again.restored(learner.updates)
    return again


def test_the_reference_is_the_initial_policy_and_stays_it(model: Path, group: RankGroup, tmp_path: Path):
    loss = DppoTv(reference_coef=0.1)
    learner = make_learner(model, group, loss=loss)
    batch = share(near_samples(model, 8), 64, group)
    first = learner.forward_backward(*batch)
    assert first.reference_kl == 0.0
    learner.optimizer_step(first)
    after = learner.forward_backward(*batch)
    assert after.reference_kl > 0.0
    again = resumed(learner, model, group, tmp_path, loss=loss)
    assert again.forward_backward(*batch).reference_kl == pytest.approx(after.reference_kl, rel=1e-6)


def test_a_reference_of_another_vocabulary_is_refused(model: Path, group: RankGroup, tmp_path: Path):
    wider = save_tiny_model(tmp_path, vocab_size=VOCABULARY + 8)
    with pytest.raises(ConfigError, match="vocabulary of 48 tokens, the policy one of 40"):
        make_learner(model, group, loss=DppoTv(reference_coef=0.1, reference=str(wider)))
    with pytest.raises(ConfigError, match="no model folder"):
        make_learner(model, group, loss=DppoTv(reference_coef=0.1, reference="nowhere"))


# ---------------------------------------------------------------- a loss of one's own


def doubled(inputs: LossInputs, config: Custom) -> torch.Tensor:
    return -config.args["by"] * inputs.advantages_T * inputs.logprobs_T


def means(inputs: LossInputs, config: Custom) -> torch.Tensor:
    return (inputs.advantages_T * inputs.logprobs_T).mean()


def without_gradient(inputs: LossInputs, config: Custom) -> torch.Tensor:
    return inputs.advantages_T * inputs.behaviour_T


def raising(inputs: LossInputs, config: Custom) -> torch.Tensor:
    raise KeyError("by")


def test_a_custom_loss_is_trained(model: Path, group: RankGroup):
    samples = near_samples(model, 6)
    custom = make_learner(model, group, loss=Custom(custom=f"{__name__}:doubled", args={"by": 2.0}))
    plain = make_learner(model, group, loss=Reinforce())
    custom.forward_backward(*share(samples, 64, group))
    plain.forward_backward(*share(samples, 64, group))
    assert_same(gradients(custom), {name: 2 * g for name, g in gradients(plain).items()})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "loss.custom is missing"),
        ("nowhere", "not of the form module:name"),
        (f"{__name__}:nothing", "does not exist"),
        (f"{__name__}:means", r"it returned the shape \(\), not \(5,\)"),
        (f"{__name__}:without_gradient", "has no gradient"),
        (f"{__name__}:raising", "it raised KeyError: 'by'"),
    ],
)
def test_what_is_no_loss_is_refused_at_the_start(model: Path, group: RankGroup, name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        make_learner(model, group, loss=Custom(custom=name))


# ---------------------------------------------------------------- several updates per step


def test_one_minibatch_is_the_step_as_it_was(model: Path, group: RankGroup):
    samples = near_samples(model, 8)
    plain = make_learner(model, group)
    stats = plain.forward_backward(*share(samples, 40, group))
    plain.optimizer_step(stats)
    learner = make_learner(model, group, microbatch_tokens=40)
    updates = train_batch(learner, group, samples, learner_settings(learner))
    assert updates.stats == stats and (updates.made, updates.wanted) == (1, 1)
    assert all(torch.equal(value, bits(plain)[name]) for name, value in bits(learner).items())


def learner_settings(learner: Learner):
    return learner._trainer


def test_minibatches_are_updates_one_after_the_other(model: Path, group: RankGroup):
    samples = near_samples(model, 9)
    by_hand = make_learner(model, group)
    for part in (samples[:3], samples[3:6], samples[6:]):
        stats = by_hand.forward_backward(*share(part, 40, group))
        assert by_hand.optimizer_step(stats)
    learner = make_learner(model, group, microbatch_tokens=40, minibatches=3)
    updates = train_batch(learner, group, samples, learner_settings(learner))
    assert (updates.made, learner.updates) == (3, 3)
    assert updates.stats.tokens == totals_of(samples).tokens
    assert all(torch.equal(value, bits(by_hand)[name]) for name, value in bits(learner).items())


def test_the_proximal_policy_is_the_one_before_the_first_update(model: Path, group: RankGroup):
    """Decoupled with its weight exactly 1 (mu is that policy) is PPO around it: only then the clip acts."""
    plain = rounded_model(model)
    samples = []
    for sample in make_samples(8):
        with torch.no_grad():
            own = alone(plain, sample, 1.0).numpy().clip(max=0.0)
        samples.append(dataclasses.replace(sample, logprobs_C=own, advantage=3 * sample.advantage))
    rates = {"learning_rate": 5e-2, "microbatch_tokens": 40, "minibatches": 2}

    def clipped(loss: LossConfig, **more: int) -> float:
        learner = make_learner(model, group, loss=loss, **rates | more)
        # The same samples twice: what the first update did to them, the second meets.
        stats = train_batch(learner, group, [*samples, *samples], learner_settings(learner)).stats
        return stats.masked_positive + stats.masked_negative

    assert clipped(Decoupled(weight_cap=1e9)) > 0.1
    assert clipped(Decoupled(weight_cap=1e9), minibatches=1) == 0.0
    assert clipped(IcePop(ratio_high=1e9)) > 0.1


def test_several_updates_from_a_checkpoint_give_the_same_bits(
    model: Path, group: RankGroup, tmp_path: Path
):
    """What a resume does: the proximal policy is made again from what the checkpoint holds, not remembered."""
    settings = {"minibatches": 3, "microbatch_tokens": 40, "loss": Decoupled(reference_coef=0.1)}
    first, second = near_samples(model, 9, seed=1), near_samples(model, 9, seed=2)
    learner = make_learner(model, group, **settings)
    train_batch(learner, group, first, learner_settings(learner))
    again = resumed(learner, model, group, tmp_path, **settings)
    stats = [train_batch(each, group, second, learner_settings(each)).stats for each in (learner, again)]
    assert stats[0] == stats[1]
    assert all(torch.equal(value, bits(learner)[name]) for name, value in bits(again).items())


def test_frozen_logprobs_are_always_those_of_the_policy_as_it_is(
    model: Path, group: RankGroup, tmp_path: Path
):
    """A pass without a backward pass must not leave its weights to the next one. (In bfloat16 FSDP has a copy.)"""
    learner = make_learner(model, group, dtype="bfloat16")
    rows, totals = share(near_samples(model, 6), 1000, group)

    @torch.no_grad()
    def frozen(learner: Learner) -> torch.Tensor:
        return learner.logprobs(rows[0])[0]

    stats = learner.forward_backward(rows, totals)
    before = frozen(learner)
    learner.optimizer_step(stats)
    after, wanted = frozen(learner), frozen(resumed(learner, model, group, tmp_path, dtype="bfloat16"))
    assert torch.equal(after, wanted) and not torch.equal(after, before)


def of_workers(samples: list[TrainSample], workers: int) -> list[TrainSample]:
    """One slot for each worker, whose samples are neighbours: a batch comes oldest group first."""
    return [
        dataclasses.replace(s, slots_C=np.full(len(s.tokens_C), i * workers // len(samples)))
        for i, s in enumerate(samples)
    ]


def tokens_of(samples: list[TrainSample], workers: int) -> list[float]:
    return [
        float(totals_of([s for s in samples if s.slots_C[0] == worker]).tokens) for worker in range(workers)
    ]


def test_one_share_of_a_batch_measures_workers_and_each_in_its_turn(model: Path, group: RankGroup):
    """By the policy before the first update, as if there were one share."""
    samples = of_workers(near_samples(model, 8), 4)
    wanted = tokens_of(samples, 4)
    for step in range(5):
        learner = make_learner(model, group, minibatches=4)
        settings = learner_settings(learner)
        measured = train_batch(learner, group, samples, settings, slots=4, step=step).stats.measured
        assert [row[0] for row in measured] == [wanted[i] if i == step % 4 else 0 for i in range(4)]
        alone = make_learner(model, group).forward_backward(*share(samples, 1000, group), 4)
        assert measured[step % 4] == pytest.approx(alone.measured[step % 4], rel=1e-4)


def test_where_the_loss_asks_for_the_proximal_policy_all_shares_measure_workers(
    model: Path, group: RankGroup
):
    """By the policy before the first update, as if there were one share."""
    samples = of_workers(near_samples(model, 8), 4)
    settings = {"minibatches": 4, "learning_rate": 5e-2, "loss": Decoupled()}
    learner = make_learner(model, group, **settings)
    measured = train_batch(
        learner, group, samples, learner_settings(learner), slots=4, step=3
    ).stats.measured
    alone = make_learner(model, group, loss=Decoupled()).forward_backward(*share(samples, 1000, group), 4)
    for ours, theirs in zip(measured, alone.measured, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_minibatches_begin_with_another_one_at_every_step():
    parts = minibatches_of(make_samples(7), 3)
    numbers = {id(part): number for number, part in enumerate(parts)}
    order = [[numbers[id(part)] for part in in_turn(parts, step)] for step in range(4)]
    assert order == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_a_minibatch_that_is_not_finite_is_left_out_alone(model: Path, group: RankGroup):
    samples = near_samples(model, 9)
    samples[4] = dataclasses.replace(
        samples[4], advantage=float("nan"), mask_C=np.ones_like(samples[4].mask_C)
    )
    learner = make_learner(model, group, minibatches=3)
    updates = train_batch(learner, group, samples, learner_settings(learner))
    assert (updates.made, updates.wanted, learner.updates) == (2, 3, 2)
    assert all(value.isfinite().all() for value in bits(learner).values())


@pytest.mark.parametrize(
    ("count", "parts", "lengths"), [(7, 3, [2, 2, 3]), (2, 5, [1, 1]), (0, 4, [0]), (5, 1, [5])]
)
def test_minibatches_are_even_and_never_empty(count: int, parts: int, lengths: list[int]):
    samples = make_samples(count)
    found = minibatches_of(samples, parts)
    assert [len(part) for part in found] == lengths
    assert [id(s) for part in found for s in part] == [id(s) for s in samples]
