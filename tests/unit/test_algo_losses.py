"""The loss against an independent reference: plain loops, plain floats, derivatives written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algo.losses import LossConfig, policy_loss

CONFIG = LossConfig()
INF = float("inf")
NAN = float("nan")


def reference(log_pi, log_mu, advantage, mask, config=CONFIG):
    """(loss, d loss / d log pi per token, sums), in Python floats."""
    loss, grads = 0.0, []
    names = ("tokens", "ratio", "abs_logprob", "kl_k3", "positive_masked", "negative_masked")
    sums = dict.fromkeys(names, 0.0)
    for lp, lm, a, m in zip(log_pi, log_mu, advantage, mask, strict=True):
        if not m:
            grads.append(0.0)
            continue
        raw = lp - lm
        d = min(20.0, max(-20.0, raw))
        slope = 1.0 if -20.0 <= raw <= 20.0 else 0.0
        uncapped = math.exp(d)
        r = min(uncapped, config.ratio_cap)
        change = math.exp(lp) - math.exp(lm)
        up = a > 0 and change > config.tv_clip
        down = a < 0 and change < -config.tv_clip
        grad = 2 * config.kl_coef * d * slope
        loss += config.kl_coef * d * d
        if not up and not down:
            loss -= r * a
            grad -= (uncapped if uncapped <= config.ratio_cap else 0.0) * a * slope
        grads.append(grad)
        sums["tokens"] += 1
        sums["ratio"] += r
        sums["abs_logprob"] += abs(d)
        sums["kl_k3"] += uncapped - 1 - d
        sums["positive_masked"] += up
        sums["negative_masked"] += down
    return loss, grads, sums


def run(log_pi, log_mu, advantage, mask, *, fresh=None, config=CONFIG, dtype=torch.float64):
    logprobs = torch.tensor(log_pi, dtype=dtype, requires_grad=True)
    loss, sums, greatest = policy_loss(
        logprobs,
        torch.tensor(log_mu, dtype=dtype),
        torch.tensor(advantage, dtype=dtype),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(fresh if fresh is not None else [False] * len(mask), dtype=torch.bool),
        config,
    )
    loss.backward()
    return loss, logprobs.grad, sums, greatest


logprob = st.floats(-1e4, 0.0) | st.floats(-3.0, 0.0)
token = st.tuples(logprob, logprob, st.floats(-2.0, 2.0) | st.just(0.0), st.booleans())


@given(st.lists(token, min_size=1, max_size=12))
def test_value_gradient_and_statistics_equal_the_reference(tokens):
    log_pi, log_mu, advantage, mask = map(list, zip(*tokens, strict=True))
    loss, grad, sums, _ = run(log_pi, log_mu, advantage, mask)
    want_loss, want_grad, want_sums = reference(log_pi, log_mu, advantage, mask)
    assert loss.item() == pytest.approx(want_loss, rel=1e-9, abs=1e-12)
    assert grad.tolist() == pytest.approx(want_grad, rel=1e-9, abs=1e-12)
    for name, value in want_sums.items():
        assert getattr(sums, name).item() == pytest.approx(value, rel=1e-9, abs=1e-9), name


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
    no_kl = LossConfig(kl_coef=0.0)
    _, grad, sums, _ = run([math.log(pi)], [math.log(mu)], [advantage], [1], config=no_kl)
    assert (grad.item() != 0.0) is kept
    assert sums.positive_masked + sums.negative_masked == (0 if kept else 1)


def test_a_ratio_over_the_cap_is_capped_and_has_no_policy_gradient():
    no_kl = LossConfig(kl_coef=0.0)
    loss, grad, _, greatest = run([-1.9], [-9.0], [1.0], [1], config=no_kl)
    assert loss.item() == -20.0
    assert greatest.item() == 20.0
    assert grad.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30, -1e30])
def test_nothing_at_a_masked_position_reaches_value_or_gradient(bad: float, dtype: torch.dtype):
    clean = run([-0.5, -1.0], [-0.6, -1.1], [1.0, -1.0], [1, 0], dtype=dtype)
    dirty = run([-0.5, bad], [-0.6, bad], [1.0, bad], [1, 0], dtype=dtype)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert [s.item() for s in clean[2]] == [s.item() for s in dirty[2]]
    assert clean[3].item() == dirty[3].item()


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_the_widest_gaps_stay_finite_in_float32(gap: float, advantage: float):
    log_pi, log_mu = (-1e-3, -1e-3 - gap) if gap > 0 else (-1e-3 + gap, -1e-3)
    loss, grad, sums, _ = run([log_pi], [log_mu], [advantage], [1], dtype=torch.float32)
    assert loss.isfinite() and grad.isfinite().all()
    assert all(value.isfinite() for value in sums)


def test_a_behaviour_probability_of_zero_counts_as_the_limit_of_the_ratio():
    loss, grad, sums, greatest = run([-3.0], [-INF], [1.0], [1], dtype=torch.float32)
    assert loss.isfinite() and grad.isfinite().all()
    assert greatest.item() == CONFIG.ratio_cap
    assert sums.abs_logprob.item() == 20.0


def test_all_masked_is_zero_with_zero_gradients():
    loss, grad, sums, greatest = run([NAN, -1.0], [NAN, -INF], [1.0, 1.0], [0, 0])
    assert loss.item() == 0.0 and greatest.item() == 0.0
    assert grad.tolist() == [0.0, 0.0]
    assert all(value.item() == 0 for value in sums)


def test_no_tokens_at_all_is_zero():
    loss, grad, _, greatest = run([], [], [], [])
    assert loss.item() == 0.0 and greatest.item() == 0.0 and grad.tolist() == []


def test_on_policy_it_is_the_policy_gradient():
    _, grad, sums, _ = run([-1.0, -2.0], [-1.0, -2.0], [0.5, -0.25], [1, 1])
    assert grad.tolist() == [-0.5, 0.25]
    assert sums.kl_k3.item() == 0.0


def test_fresh_sums_hold_the_tokens_of_lag_zero_only():
    _, _, sums, _ = run(
        [-1.0, -2.0, -3.0], [-1.1, -2.5, -9.0], [1.0] * 3, [1, 1, 0], fresh=[True, False, True]
    )
    assert sums.fresh_tokens.item() == 1
    assert sums.fresh_abs_logprob.item() == pytest.approx(0.1)
    assert sums.fresh_kl_k3.item() == pytest.approx(math.exp(0.1) - 1 - 0.1)


def test_a_small_kl_keeps_its_digits_in_float32():
    gap = 2.0**-10
    _, _, sums, _ = run([-1.0 + gap], [-1.0], [1.0], [1], dtype=torch.float32)
    assert sums.kl_k3.item() == pytest.approx(math.expm1(gap) - gap, rel=1e-3)
