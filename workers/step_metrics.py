"""The line of a step in metrics.jsonl (metrics.py says what each name means), from what the loop has in its hands."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.algo.staleness import summarise
from async_rl.wire import Batch
from workers.batches import Prepared
from workers.stats import StepStats
from workers.utilisation import Utilisation

__all__ = ["batch_metrics", "learner_metrics", "speed_metrics"]

Values = dict[str, float | None]


def batch_metrics(trained: Prepared, batch: Batch) -> Values:
    lag, queued = summarise(trained.lags), summarise(trained.queued_lags)
    in_flight = summarise([a - b for a, b in zip(trained.lags, trained.queued_lags, strict=True)])
    rewards, lengths, samples = trained.rewards, trained.lengths, len(trained.samples)
    dropped = {**batch.dropped, **trained.dropped}
    return {
        "reward/mean": sum(rewards) / samples if samples else None,
        "reward/min": min(rewards, default=None),
        "reward/max": max(rewards, default=None),
        "groups": trained.groups,
        "samples": samples,
        "tokens": trained.loss_tokens,
        "tokens/mean": trained.loss_tokens / samples if samples else None,
        "length/mean": sum(lengths) / samples if samples else None,
        "length/min": min(lengths, default=None),
        "length/max": max(lengths, default=None),
        "finish/length": trained.cut_off / samples if samples else None,
        "lag/mean": lag.mean,
        "lag/p50": lag.p50,
        "lag/p95": lag.p95,
        "lag/max": lag.max,
        "lag/in_flight_mean": in_flight.mean,
        "lag/in_flight_max": in_flight.max,
        "lag/in_queue_mean": queued.mean,
        "lag/in_queue_max": queued.max,
        **{f"dropped/{reason}": count for reason, count in sorted(dropped.items())},
    }


def learner_metrics(stats: StepStats, learning_rate: float) -> Values:
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "learning_rate": learning_rate,
        "entropy": stats.entropy,
        # Of no token there is no mean, and one of 0 would be an alarm.
        "ratio/mean": stats.ratio_mean if stats.tokens else None,
        "ratio/max": stats.ratio_max,
        "ess/token": stats.ess_token,
        "ess/sequence": stats.ess_sequence,
        "chi_square": stats.chi_square,
        "clip/positive": stats.masked_positive,
        "clip/negative": stats.masked_negative,
        "mismatch/abs_logprob": stats.abs_logprob,
        "mismatch/kl_k3": stats.kl_k3,
        "mismatch/kl_k3_max": stats.kl_k3_max,
        "mismatch_lag0/tokens": stats.fresh_tokens,
        "mismatch_lag0/abs_logprob": stats.fresh_abs_logprob,
        "mismatch_lag0/kl_k3": stats.fresh_kl_k3,
        "reference/kl_k3": stats.reference_kl,
    }


def speed_metrics(trained: Prepared, times: Mapping[str, float], utilisation: Utilisation) -> Values:
    """`times`: of the step, as in the line."""
    computing_s = times["time/forward_backward_s"] + times["time/optimizer_s"]
    flops = utilisation.flops([sample.inputs for sample in trained.samples], trained.loss_tokens)
    return {
        "tokens_per_s": trained.loss_tokens / times["time/step_s"] if times["time/step_s"] else None,
        "waiting": times["time/wait_batch_s"] / times["time/step_s"] if times["time/step_s"] else None,
        "mfu": utilisation.of_peak(flops, computing_s),
    }
