"""metrics.jsonl: one JSON object per line, appended as things happen, with names that stay.

A line per step (it has `reward/mean`), and a line per held-out evaluation as it arrives (it has
`eval/reward`; its `step` is that of the measured version, which is older than the lines around it). Numbers
that do not exist, or are not finite, are null.

    step, version, incarnation, time            after the step; newest version published; seconds since the
    epoch reward/mean, reward/min, reward/max         of the samples trained
    samples, groups, tokens, tokens/mean        trained; loss tokens; loss tokens per sample
    finish/length                               part of the samples that were cut off at max_tokens
    loss, grad_norm, learning_rate, entropy     grad_norm before clipping; entropy in nats per token
    ratio/mean, ratio/max                       pi / mu
    clip/positive, clip/negative                tokens outside the trust region, by the sign of their
    advantage lag/mean, lag/p50, lag/p95, lag/max         optimizer steps, of the samples trained
    mismatch/abs_logprob, mismatch/kl_k3        |log pi - log mu| and k3 KL, mean over loss tokens
    mismatch_lag0/abs_logprob, …/kl_k3, …/tokens   the same over the tokens sampled by the very policy being
    trained refused, refused/total                      this step's update was refused (1) as not finite;
    how many so far dropped/<reason>                            groups since the orchestrator's start, by
    reason time/step_s, time/wait_batch_s, time/forward_backward_s, time/optimizer_s, time/publish_s,
    time/checkpoint_s eval/reward, eval/version, eval/prompts     held-out evaluation of one version
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

__all__ = ["MetricsFile"]

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
            line = {"time": round(time.time(), 3)} | {name: _plain(value) for name, value in values.items()}
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


def _plain(value: Value) -> Value:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
