"""metrics.jsonl: one JSON object per line, appended as things happen, with names that stay.

A line per step (it has `reward/mean`), and a line per held-out evaluation as it arrives (it has
`eval/reward`; its `step` is that of the measured version, which is older than the lines around it). Numbers
that do not exist, or are not finite, are null.

    step                           optimizer steps made, this one included
    version                        newest version published
    incarnation                    of the trainer, one more after every start
    time                           of writing, seconds since the epoch

    reward/mean, /min, /max        of the samples trained, as the environment gave them (a run has one environment)
    samples, groups                trained
    tokens, tokens/mean            loss tokens, in all and per sample
    length/mean, /min, /max        tokens of a completion
    finish/length                  part of the samples that were cut off at max_tokens
    lag/mean, /p50, /p95, /max     optimizer steps, of the samples trained
    lag/in_flight_mean, /in_flight_max   the part that grew while the sample was generated: from the oldest to the
                                   newest policy in it
    lag/in_queue_mean, /in_queue_max     the rest: since the newest policy in it
    dropped/<reason>               groups since the orchestrator's start (stale: leases that were stopped, and
                                   leased again); of this step's batch for trainer_lag, trainer_version and
                                   trainer_malformed

    loss                           as minimised, but for what the routers of a mixture add
    grad_norm                      before clipping
    learning_rate                  of this step
    entropy                        of the policy, nats per token
    ratio/mean, /max               pi / mu, each at most 20
    ess/token, /sequence           effective sample size of the weights pi / mu, as a share: of tokens; of samples,
                                   whose weight is the product over their tokens
    chi_square                     mean of (pi / mu - 1)²: chi-square divergence
    clip/positive, /negative       part of the tokens that the loss masked, clipped or truncated, by the sign of their
                                   advantage
    mismatch/abs_logprob           |log pi - log mu|, mean over loss tokens
    mismatch/kl_k3, /kl_k3_max     k3 estimate of KL, mean over loss tokens, and of the worst of them
    mismatch_lag0/tokens           loss tokens whose sample is, so far, all by the policy being trained
    mismatch_lag0/abs_logprob      over those tokens
    mismatch_lag0/kl_k3            over those tokens
    reference/kl_k3                k3 estimate of the KL to the frozen reference; 0 without one
    updates                        of the optimizer in this step (trainer.minibatches)
    alerts/<name>                  steps since the trainer's start at which an alert held (docs/losses.md)
    refused                        1 where this step's update was refused as not finite, else 0
    refused/total                  steps refused, those before a resume included
    checkpoint/late                since the trainer's start: due while the one before was still on its way
    checkpoint/failed              since the trainer's start: given up, the store was away

    tokens_per_s                   loss tokens over the time of the step
    waiting                        part of the step's time that was a wait for a batch
    mfu                            model FLOPs over what the devices can do, while they computed; null where that is
                                   not known (trainer.peak_tflops)
    time/step_s                    the whole step, and its parts:
    time/wait_batch_s              for a batch from the orchestrator
    time/forward_backward_s
    time/optimizer_s
    time/publish_s                 for a copy of the weights, and up to merge_after_s for the version before
    time/checkpoint_s              for a copy of the state where one was due, else 0 or so

    eval/reward, eval/prompts      mean over a held-out evaluation, and of how many prompts
    eval/version                   measured; `step` is this version's
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from async_rl.errors import ConfigError
from async_rl.wire import EvalScore

__all__ = ["MetricsFile", "plain"]

Value = float | int | str | None


class MetricsFile:
    """Appends; a resumed run goes on in the same file. `None` as the folder writes nothing (ranks other
    than 0)."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ConfigError for a folder that can't be written."""
        self._file = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"can't write metrics into {folder}: {error.strerror}",
                    hint="set trainer.out to another folder",
                ) from error

    def write(self, values: Mapping[str, Value]) -> None:
        """One line, on disk when this returns as far as the operating system is concerned."""
        if self._file is not None:
            line = {"time": round(time.time(), 3)} | {name: plain(value) for name, value in values.items()}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def eval(self, score: EvalScore) -> None:
        self.write(
            {
                "step": score.step,
                "eval/version": score.version,
                "eval/reward": score.reward,
                "eval/prompts": score.prompts,
            }
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain(value: Value) -> Value:
    """As it is written: six digits, and None for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
