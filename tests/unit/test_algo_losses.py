"""Every loss against an independent reference in plain Python floats: values and gradients, at every extreme."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algo.losses import (
    REGISTRY,
    DppoTv,
    LossInputs,
    Totals,
    by_token,
    denominator,
    part_of,
    policy_loss,
    total_of,
    totals_of,
)
from async_rl.algo.losses.sequences import Gspo
from async_rl.algo.losses.tokens import Decoupled, PpoClip, Reinforce
from tests.unit.losses_reference import Token, total

INF = float("inf")
NAN = float("nan")
NAMES = sorted(REGISTRY)
CONFIGS = [REGISTRY[name].config() for name in NAMES] + [Decoupled(proximal="interpolated")]


def told(config) -> str:
    return config.name + ("/" + config.proximal if config.name == "decoupled" else "")


every_loss = pytest.mark.parametrize("config", CONFIGS, ids=told)


def inputs_of(samples, dtype=torch.float64, noise=None, **without) -> LossInputs:
    """The samples end to end. `noise`: what stands at a masked position after each sample."""
    rows, mask, of = [], [], []
    for index, sample in enumerate(samples):
        rows += sample
        mask += [True] * len(sample)
        of += [index] * len(sample)
        if noise is not None:
            rows.append(Token(noise, noise, noise, prox=noise, ref=noise, entropy=noise))
            mask.append(False)
            of.append(index)

    def column(name):
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    return LossInputs(
        column("lp").requires_grad_(),
        column("lm"),
        column("a"),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor([row.lag for row in rows], dtype=torch.int64),
        torch.tensor(of, dtype=torch.int64),
        len(samples),
        column("prox"),
        column("ref"),
        column("entropy").requires_grad_(),
    )._replace(**without)


def run(samples, config, **how):
    """Total, gradients, sums and greatest."""
    inputs = inputs_of(samples, **how)
    result = policy_loss(inputs, config)
    result.total.backward()
    return result.total, inputs.logprobs_T.grad, result.sums, result.greatest


def one(lp, lm, a, config=None, **how):
    return run([[Token(lp, lm, a, prox=lp)]], config or DppoTv(), **how)


logprob = st.floats(-3.0, 0.0) | st.floats(-1e4, 0.0)
near = st.floats(-0.5, 0.5) | st.floats(-25.0, 25.0) | st.just(0.0) | st.floats(-5e-4, 5e-4)


@st.composite
def tokens(draw) -> Token:
    lp = draw(logprob)
    return Token(
        lp,
        lp + draw(near),
        draw(st.floats(-2.0, 2.0) | st.just(0.0)),
        draw(st.integers(0, 8)),
        lp + draw(near),
        lp + draw(near),
        draw(st.floats(0.0, 5.0)),
    )


batches = st.lists(st.lists(tokens(), max_size=4), min_size=1, max_size=4)


def check(config, samples) -> None:
    value, grad, _, _ = run(samples, config)
    wanted, wanted_grads = total(config.name, config, samples)
    flat = [g for sample in wanted_grads for g in sample]
    scale = max(1.0, max(map(abs, flat), default=0.0))  # rounding of the ratio grows with the logprobs
    assert value.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9 * scale)
    assert grad.tolist() == pytest.approx(flat, rel=1e-9, abs=1e-9 * scale)


@every_loss
@settings(max_examples=12)
@given(samples=batches)
def test_value_and_gradient_equal_the_reference(config, samples):
    check(config, samples)


@pytest.mark.long
@every_loss
@settings(max_examples=300, deadline=None)
@given(samples=batches)
def test_value_and_gradient_equal_the_reference_on_many_more(config, samples):
    check(config, samples)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@settings(max_examples=12)
@given(
    samples=batches,
    name=st.sampled_from(NAMES),
    normalise=st.sampled_from(["token", "sequence", "constant"]),
)
def test_with_a_reference_an_entropy_bonus_and_every_normalisation(estimator, samples, name, normalise):
    config = REGISTRY[name].config(
        normalise=normalise, reference_coef=0.3, reference_estimator=estimator, entropy_coef=0.2
    )
    check(config, samples)
    inputs = inputs_of(samples)
    policy_loss(inputs, config).total.backward()
    weights = [1 / len(s) if normalise == "sequence" else 1.0 for s in samples for _ in s]
    assert inputs.entropy_T.grad.tolist() == pytest.approx([-0.2 * w for w in weights])


@every_loss
@pytest.mark.parametrize("gap", [1e4, -1e4, INF, -INF, "both"])
def test_the_widest_gaps_are_finite_and_right(config, gap):
    for dtype in (torch.float32, torch.float64):
        for advantage in (1.0, -1.0, 0.0):
            check_gap(config, gap, advantage, dtype)


def check_gap(config, gap, advantage, dtype):
    lp, lm = {"both": (-INF, -INF), INF: (-1e-3, -INF), -INF: (-INF, -1e-3)}.get(
        gap, (-1e-3, -1e-3 - gap) if gap == 1e4 else (-1e4, -1e-3)
    )
    samples = [[Token(lp, lm, advantage, 2, lp, lm), Token(-1.0, -1.0, advantage, prox=-1.0, ref=-1.0)], []]
    value, grad, sums, greatest = run(samples, config, dtype=dtype)
    wanted, (wanted_grad, _) = total(config.name, config, samples)
    close = 1e-4 if dtype == torch.float32 else 1e-9
    assert value.item() == pytest.approx(wanted, rel=close)
    assert grad.tolist() == pytest.approx(wanted_grad, rel=close, abs=1e-12)
    assert all(number.isfinite() for number in (*sums, *greatest))


@every_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
def test_nothing_at_a_masked_position_reaches_value_or_gradient(config, bad):
    for dtype in (torch.float32, torch.float64):
        check_mask(config, bad, dtype)


def check_mask(config, bad, dtype):
    samples = [[Token(-0.5, -0.6, 1.0, 1, -0.55, -0.7), Token(-2.0, -1.0, 1.0, 3, -1.5, -3.0)], []]
    samples.append([Token(-0.1, -1.2, -1.0, 1, -0.15, -0.7)])
    config = type(config)(reference_coef=0.1, entropy_coef=0.1, name=config.name)
    clean = run(samples, config, dtype=dtype)
    inputs = inputs_of(samples, dtype=dtype, noise=bad)
    dirty = policy_loss(inputs, config)
    dirty.total.backward()
    close = {"rtol": 1e-6, "atol": 0.0}  # zeros among the summands may change the order of adding
    assert torch.allclose(clean[0], dirty.total, **close)
    assert torch.equal(clean[1], inputs.logprobs_T.grad[inputs.mask_T])
    assert (
        not inputs.logprobs_T.grad[~inputs.mask_T].any() and not inputs.entropy_T.grad[~inputs.mask_T].any()
    )
    assert [s.item() for s in clean[2]] == pytest.approx([s.item() for s in dirty.sums], rel=1e-6)
    assert [s.item() for s in clean[3]] == [s.item() for s in dirty.greatest]


@every_loss
def test_all_masked_no_tokens_and_an_empty_sample_are_zero(config):
    inputs = inputs_of([[], []], noise=NAN)
    nothing = policy_loss(inputs, config)
    nothing.total.backward()
    assert nothing.total.item() == 0.0 and inputs.logprobs_T.grad.tolist() == [0.0, 0.0]
    assert all(number.item() == 0 for number in (*nothing.sums, *nothing.greatest))
    value, grad, sums, greatest = run([[]], config)
    assert value.item() == 0.0 and grad.tolist() == []
    assert all(number.item() == 0 for number in (*sums, *greatest))


@every_loss
def test_nan_at_a_loss_token_stays_so_that_the_step_is_refused(config):
    value, _, _, _ = run([[Token(NAN, -1.0, 1.0, prox=-1.0), Token(-1.0, -1.0, 1.0, prox=-1.0)]], config)
    assert value.isnan()


@every_loss
def test_on_policy_every_loss_has_the_policy_gradient(config):
    samples = [[Token(-1.0, -1.0, 0.5, prox=-1.0), Token(-2.0, -2.0, 0.5, prox=-2.0)]]
    samples.append([Token(-0.5, -0.5, -0.25, prox=-0.5)])
    config = type(config)(normalise="token", name=config.name)
    _, grad, sums, _ = run(samples, config)
    assert grad.tolist() == pytest.approx([-0.5, -0.5, 0.25])
    assert sums.kl_k3.item() == 0.0 and sums.positive_masked.item() == sums.negative_masked.item() == 0


@every_loss
@settings(max_examples=6)
@given(samples=batches, data=st.data())
def test_calls_that_share_out_the_samples_add_up_to_one_call(config, samples, data):
    cut = data.draw(st.integers(0, len(samples)))
    whole = run(samples, config)
    parts = [run(part, config) for part in (samples[:cut], samples[cut:]) if part]
    assert sum(part[0].item() for part in parts) == pytest.approx(whole[0].item(), rel=1e-9, abs=1e-9)
    assert torch.cat([part[1] for part in parts]).tolist() == pytest.approx(whole[1].tolist(), rel=1e-9)
    for name, value in whole[2]._asdict().items():
        assert sum(getattr(part[2], name).item() for part in parts) == pytest.approx(value.item(), rel=1e-6)


@every_loss
@settings(max_examples=6)
@given(samples=batches, cut=st.integers(0, 16))
def test_a_loss_by_token_may_be_computed_in_any_parts(config, samples, cut):
    config = type(config)(normalise="token", reference_coef=0.1, entropy_coef=0.1, name=config.name)
    assert by_token(config) == (config.name not in ("gspo", "tis_sequence"))
    assert not by_token(type(config)(normalise="sequence", name=config.name))
    if by_token(config):
        whole = inputs_of(samples)
        parts = [
            total_of(part_of(whole, k, whole.logprobs_T[k], whole.entropy_T[k]), config)
            for k in (slice(0, cut), slice(cut, None))
        ]
        assert sum(parts).item() == pytest.approx(policy_loss(whole, config).total.item(), abs=1e-9)


# ---------------------------------------------------------------- what makes each of them itself


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "kept"),
    [
        (0.71, 0.5, +1.0, False),
        (0.69, 0.5, +1.0, True),
        (0.71, 0.5, -1.0, True),  # likelier than before and bad: bring it down
        (0.29, 0.5, -1.0, False),
        (0.31, 0.5, -1.0, True),
        (0.29, 0.5, +1.0, True),
    ],
)
def test_only_a_push_out_of_the_trust_region_is_masked(pi: float, mu: float, advantage: float, kept: bool):
    _, grad, sums, _ = one(math.log(pi), math.log(mu), advantage, DppoTv(kl_coef=0.0))
    assert (grad.item() != 0.0) is kept
    assert sums.positive_masked + sums.negative_masked == (0 if kept else 1)


def test_a_ratio_over_the_cap_is_capped_and_has_no_policy_gradient():
    value, grad, _, greatest = one(-1.9, -9.0, 1.0, DppoTv(kl_coef=0.0))
    assert (value.item(), grad.item(), greatest.ratio.item()) == (-20.0, 0.0, 20.0)


def test_the_clip_of_ppo_is_wider_upwards_and_a_negative_advantage_has_a_limit_too():
    kept = {}
    for ratio, advantage in [(1.25, 1), (1.3, 1), (0.5, 1), (0.85, -1), (0.75, -1), (2.9, -1), (3.1, -1)]:
        _, grad, _, _ = one(math.log(ratio) - 5, -5.0, float(advantage), PpoClip())
        kept[ratio, advantage] = grad.item() != 0
    assert [pair for pair, has in kept.items() if not has] == [(1.3, 1), (0.75, -1), (3.1, -1)]
    _, grad, _, _ = one(math.log(3.1) - 5, -5.0, -1.0, PpoClip(dual_clip=0.0))
    assert grad.item() == pytest.approx(3.1)


def test_the_interpolated_policy_goes_with_the_lag_from_the_behaviour_policy_to_the_current_one():
    """With u = (pi / mu)^(1 / (lag + 1)): what a fresh token is clipped for, an old one is not."""
    config = Decoupled(proximal="interpolated", clip_high=0.2)
    for lag, kept in [(0, False), (1, False), (2, True)]:
        _, grad, _, _ = run([[Token(math.log(1.6) - 5, -5.0, 1.0, lag)]], config)
        assert (grad.item() != 0) is kept, lag


def test_without_a_proximal_policy_the_current_one_is_it_and_there_is_no_clip():
    inputs = inputs_of([[Token(-1.0, -2.0, 1.0, prox=NAN)]], proximal_T=None)
    policy_loss(inputs, Decoupled()).total.backward()
    assert inputs.logprobs_T.grad.item() == pytest.approx(-math.e)


def test_the_ratio_of_gspo_is_the_geometric_mean_of_its_sample():
    tokens_of = [Token(-1.0, -1.3, 1.0), Token(-2.0, -1.8, 1.0)]
    _, _, sums, _ = run([tokens_of, [Token(-1.0, -1.3, 1.0)]], Gspo(clip_high=0.1))
    assert sums.positive_masked.item() == 1  # exp(0.05) is inside, exp(0.3) outside


def test_reinforce_does_not_look_at_the_behaviour_policy():
    values = {one(-1.0, lm, 2.0, Reinforce())[0].item() for lm in (-0.5, -9.0, -INF)}
    assert values == {2.0}


# ---------------------------------------------------------------- what all have in common


def test_a_custom_function_may_return_the_losses_alone_and_is_normalised_like_any_other():
    def mine(inputs, config):
        return -inputs.advantages_T * inputs.logprobs_T

    config = Reinforce(normalise="sequence", reference_coef=0.1)
    samples = [[Token(-1.0, -2.0, 1.0, ref=-1.5), Token(-3.0, -2.0, 1.0)], [Token(-1.0, -2.0, -1.0)]]
    found = policy_loss(inputs_of(samples), config, mine).total
    assert found.item() == pytest.approx(total("reinforce", config, samples)[0])
    counted = policy_loss(inputs_of(samples, noise=NAN), Reinforce(), lambda i, c: i.logprobs_T * 0 + 1)
    assert counted.total.item() == 3, "whatever it gives for masked tokens is left out"


def test_a_coefficient_without_its_inputs_is_refused():
    bare = inputs_of([[Token(-1.0, -1.0, 1.0)]], reference_T=None, entropy_T=None)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(bare, Reinforce(reference_coef=0.1))
    with pytest.raises(ValueError, match="entrop"):
        policy_loss(bare, Reinforce(entropy_coef=0.1))


def test_the_sum_is_divided_by_a_number_of_the_whole_batch():
    class Sample:
        def __init__(self, *mask):
            self.mask_C = torch.tensor(mask).numpy()

    totals = totals_of([Sample(1, 1, 0), Sample(0, 0), Sample(1)])
    assert totals == Totals(tokens=3, samples=2)
    assert denominator(DppoTv(), totals, 256) == 3
    assert denominator(DppoTv(normalise="sequence"), totals, 256) == 2
    assert denominator(DppoTv(normalise="constant"), totals, 256) == 512
    assert denominator(DppoTv(normalise="constant", length_budget=100), totals, 256) == 200
    for how in ("token", "sequence", "constant"):
        assert denominator(DppoTv(normalise=how), Totals(0, 0), 1) == 1
    with pytest.raises(ValueError, match="length_budget"):
        denominator(DppoTv(normalise="constant"), totals, 0)


def test_the_settings_that_stand_in_the_docs_are_the_defaults():
    assert (DppoTv().tv_clip, DppoTv().ratio_cap, DppoTv().kl_coef) == (0.2, 20.0, 1e-3)
    assert Gspo().normalise == "sequence" and DppoTv().normalise == "token"


# ---------------------------------------------------------------- statistics


def test_fresh_sums_hold_the_tokens_of_lag_zero_only():
    _, _, sums, _ = run([[Token(-1.0, -1.1, 1.0, 0), Token(-2.0, -2.5, 1.0, 1)]], DppoTv())
    assert sums.fresh_tokens.item() == 1
    assert sums.fresh_abs_logprob.item() == pytest.approx(0.1)
    assert sums.fresh_kl_k3.item() == pytest.approx(math.exp(0.1) - 1 - 0.1)


def test_a_small_kl_keeps_its_digits_in_float32():
    gap = 2.0**-10
    _, _, sums, _ = one(-1.0 + gap, -1.0, 1.0, dtype=torch.float32)
    assert sums.kl_k3.item() == pytest.approx(math.expm1(gap) - gap, rel=1e-3)


@settings(max_examples=20)
@given(batches)
def test_the_sums_are_those_of_plain_loops(samples):
    _, _, sums, greatest = run(samples, DppoTv(reference_coef=0.1))
    want = dict.fromkeys(sums._fields, 0.0)
    most_ratio = most_k3 = 0.0
    for sample in samples:
        product = 0.0
        for t in sample:
            d = min(max(t.lp - t.lm, -20.0), 20.0)
            r, k3 = math.exp(d), math.expm1(d) - d
            product += d
            x = min(max(t.lp - t.ref, -20.0), 20.0)
            more = {"tokens": 1, "ratio": min(r, 20.0), "abs_logprob": abs(d), "kl_k3": k3, "weights": r}
            more |= {"weight_squares": r * r, "chi_square": (r - 1) ** 2}
            more |= {"positive": t.a > 0, "negative": t.a < 0, "reference_kl": math.expm1(-x) + x}
            for name, value in more.items():
                want[name] += value
            most_ratio, most_k3 = max(most_ratio, min(r, 20.0)), max(most_k3, k3)
        if sample:
            weight = math.exp(min(max(product, -20.0), 20.0))
            want["samples"] += 1
            want["sample_weights"] += weight
            want["sample_weight_squares"] += weight**2
    left_out = (
        "loss",
        "positive_masked",
        "negative_masked",
        "fresh_tokens",
        "fresh_abs_logprob",
        "fresh_kl_k3",
    )
    for name in set(want) - set(left_out):
        assert getattr(sums, name).item() == pytest.approx(want[name], rel=1e-9, abs=1e-9), name
    assert greatest.ratio.item() == pytest.approx(most_ratio) and greatest.kl_k3.item() == pytest.approx(
        most_k3
    )
