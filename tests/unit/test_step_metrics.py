"""What a step says of itself, and when that is cause for alarm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from async_rl.algo.alerts import Alerts, AlertsConfig
from async_rl.algo.losses import DppoTv, LossInputs, policy_loss
from async_rl.algo.losses.statistics import Greatest
from async_rl.wire import Batch
from workers.batches import Prepared
from workers.stats import StepStats, merged, stats_of
from workers.step_metrics import batch_metrics, learner_metrics, speed_metrics
from workers.utilisation import Utilisation, peak_of

FINE = {"ess/token": 0.9, "ratio/mean": 1.0, "mismatch/kl_k3": 0.01}


def stats(log_ratios: list[list[float]], grad_norm: float = 1.0) -> StepStats:
    """Of samples whose tokens have these log ratios."""
    flat = torch.tensor([x for sample in log_ratios for x in sample], dtype=torch.float64)
    count = len(flat)
    inputs = LossInputs(
        torch.full((count,), -1.0, dtype=torch.float64).requires_grad_(),
        -1.0 - flat,
        torch.ones(count, dtype=torch.float64),
        torch.ones(count, dtype=torch.bool),
        torch.zeros(count, dtype=torch.int64),
        torch.tensor([i for i, sample in enumerate(log_ratios) for _ in sample], dtype=torch.int64),
        len(log_ratios),
    )
    result = policy_loss(inputs, DppoTv())
    return stats_of(
        type(result.sums)(*(value.item() for value in result.sums)),
        Greatest(*(value.item() for value in result.greatest)),
        loss=result.sums.loss.item() / max(count, 1),
        entropy=2.0 * count,
        grad_norm=grad_norm,
        tokens=count,
    )


def test_equal_weights_have_the_whole_sample_size_and_one_giant_nearly_none():
    even = stats([[0.3, 0.3], [0.3, 0.3]])
    assert even.ess_token == pytest.approx(1.0) and even.ess_sequence == pytest.approx(1.0)
    assert even.chi_square == pytest.approx((math.exp(0.3) - 1) ** 2)
    giant = stats([[15.0], [0.0], [0.0], [0.0]])
    assert giant.ess_token == pytest.approx(0.25, rel=1e-4) and giant.ratio_max == 20.0
    assert giant.kl_k3_max == pytest.approx(math.expm1(15.0) - 15.0)
    apart = stats([[1.0, -1.0], [0.0, 0.0]])  # each sample's product is 1
    assert apart.ess_sequence == pytest.approx(1.0) and apart.ess_token < 0.7


def test_without_tokens_there_is_no_sample_size():
    nothing = stats([[]])
    assert nothing.ess_token is None and nothing.ess_sequence is None and nothing.ratio_max == 0.0


def test_a_step_without_tokens_alarms_nobody():
    alerts = Alerts(AlertsConfig())
    assert alerts.look(learner_metrics(stats([[]]), 1e-3)) == []
    assert sum(alerts.counts.values()) == 0


def test_several_updates_are_one_line():
    first, second = stats([[0.1, 0.2], [0.0]], 1.0), stats([[2.0]], 3.0)
    first = replace(first, measured=((3.0, 0.0, 0.0, 0.0),))
    both, whole = merged([first, second]), stats([[0.1, 0.2], [0.0], [2.0]])
    for name in (
        "ess_token",
        "ess_sequence",
        "chi_square",
        "kl_k3",
        "kl_k3_max",
        "ratio_mean",
        "ratio_max",
    ):
        assert getattr(both, name) == pytest.approx(getattr(whole, name)), name
    assert both.loss == pytest.approx(whole.loss) and both.entropy == pytest.approx(2.0)
    assert (both.tokens, both.grad_norm, both.measured) == (4, 3.0, first.measured)
    # The policy that the second update moves sampled none of its tokens.
    assert (both.fresh_tokens, both.fresh_kl_k3) == (first.fresh_tokens, first.fresh_kl_k3)
    assert both.fresh_abs_logprob == first.fresh_abs_logprob
    assert merged([first]) is first


def test_a_line_has_lengths_and_the_two_parts_of_the_lag():
    trained = Prepared(lags=[3, 1], queued_lags=[1, 1], rewards=[1.0, 0.0], lengths=[4, 6], cut_off=1)
    trained.samples = [None, None]  # type: ignore[list-item]
    trained.samples.clear()
    line = batch_metrics(replace(trained), Batch(0, 0, (), (), 0))
    assert (line["lag/in_flight_mean"], line["lag/in_flight_max"]) == (1.0, 2)
    assert (line["lag/in_queue_mean"], line["lag/in_queue_max"], line["lag/max"]) == (1.0, 1, 3)
    assert (line["length/min"], line["length/max"]) == (4, 6)


def test_every_name_of_a_line_is_documented():
    documented = (__import__("workers.metrics").metrics.__doc__ or "").replace(", /", " /")
    line = learner_metrics(stats([[0.1]]), 0.1) | batch_metrics(Prepared(), Batch(0, 0, (), (), 0))
    times = {f"time/{name}_s": 1.0 for name in ("step", "wait_batch", "forward_backward", "optimizer")}
    line |= speed_metrics(Prepared(), times, Utilisation(1.0, 1.0, 1.0, None))
    for name in line:
        stem, _, last = name.rpartition("/")
        assert name in documented or (stem in documented and f"/{last}" in documented), name


# ---------------------------------------------------------------- utilisation


class Shaped(torch.nn.Module):
    """The head is tied; one matrix of experts, of which a token meets a quarter."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.body = torch.nn.Linear(4, 8)
        self.mlp = torch.nn.Module()
        if experts:
            self.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False)])
        self.config = type("Config", (), {})()
        self.config.num_attention_heads, self.config.num_hidden_layers, self.config.hidden_size = 2, 3, 4
        self.config.num_experts, self.config.num_experts_per_tok = experts, experts // 4

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.embedding


def test_utilisation_counts_what_a_token_meets():
    of = Utilisation.of(Shaped(), 1000.0, 2)
    assert (of.body, of.head, of.attention, of.peak) == (32.0, 40.0, 12.0, 2000.0)
    assert Utilisation.of(Shaped(experts=8), None, 1).body == 32.0 + 16 / 4
    assert of.flops([2, 3], 4) == 6 * (32 * 5 + 40 * 4 + 12 * (4 + 9))
    assert of.of_peak(4000.0, 4.0) == 0.5
    assert replace(of, peak=None).of_peak(4000.0, 4.0) is None


def test_the_peak_of_a_cpu_is_known_only_where_it_was_told():
    cpu = torch.device("cpu")
    assert peak_of(cpu, torch.bfloat16) is None
    assert peak_of(cpu, torch.float32, tflops=0.5) == 5e11


# ---------------------------------------------------------------- alerts


def test_a_healthy_step_raises_nothing_and_neither_does_one_without_numbers():
    alerts = Alerts(AlertsConfig())
    assert alerts.look(FINE) == [] and alerts.look({}) == []
    assert alerts.look(dict.fromkeys(FINE)) == []
    assert alerts.counts == {"low_ess": 0, "ratio_mean": 0, "mismatch_kl": 0}


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"ratio/mean": 0.4}, "ratio_mean", "the mean ratio pi / mu is 0.4"),
        ({"ratio/mean": 2.5}, "ratio_mean", "the mean ratio pi / mu is 2.5"),
        ({"mismatch/kl_k3": 0.11}, "mismatch_kl", "0.11 nats per token"),
    ],
)
def test_an_alert_is_told_once_and_counted_always(changed: dict[str, float], name: str, said: str):
    alerts = Alerts(AlertsConfig())
    told = [alerts.look(line) for line in (FINE | changed, FINE | changed, FINE, FINE | changed)]
    assert [len(sentences) for sentences in told] == [1, 0, 0, 0]
    assert said in told[0][0] and "docs/losses.md" in told[0][0]
    assert alerts.counts[name] == 3 and sum(alerts.counts.values()) == 3


def test_a_low_sample_size_must_last():
    alerts = Alerts(AlertsConfig(ess_steps=3))
    low = FINE | {"ess/token": 0.2}
    told = [alerts.look(line) for line in (low, low, FINE, low, low, low, low)]
    assert [len(sentences) for sentences in told] == [0, 0, 0, 0, 0, 1, 0]
    assert alerts.counts["low_ess"] == 2


def test_a_limit_of_zero_is_no_limit():
    off = Alerts(AlertsConfig(ess_below=0.0, ratio_low=0.0, ratio_high=0.0, kl_above=0.0))
    for _ in range(9):
        assert off.look({"ess/token": 0.001, "ratio/mean": 19.0, "mismatch/kl_k3": 9.0}) == []
    assert sum(off.counts.values()) == 0
