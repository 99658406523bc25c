"""The trainer for the exporter: rank 0's loop says what it did, scrapes read it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from async_rl.exporter import Health
from async_rl.gauges import Reading, by_reason, present
from async_rl.weights.lineage import Manifest

__all__ = ["ExportedTrainer"]

_DROPPED, _ALERTS = "dropped/", "alerts/"
_SHOWN = {
    "mismatch_kl_max": "mismatch/kl_k3_max",
    "ratio_mean": "ratio/mean",
    "ratio_max": "ratio/max",
    "ess_token_ratio": "ess/token",
    "ess_sequence_ratio": "ess/sequence",
    "chi_square": "chi_square",
    "truncated_ratio": "finish/length",
    "completion_tokens": "length/mean",
    "mfu_ratio": "mfu",
}
"""Gauges that are numbers of the line as they stand."""


def _counted(line: Mapping[str, float | int | None], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): n or 0 for name, n in line.items() if name.startswith(prefix)}


class ExportedTrainer:
    """A Source for the exporter. Told by the loop and by the publisher's thread, asked by the exporter's."""

    def __init__(
        self, run: str, incarnation: int, stuck_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stuck_s`: without a step for this long the trainer is not healthy."""
        self.run = run
        self._stuck_s, self._clock = stuck_s, clock
        self._lock = threading.Lock()
        self._moved = self._attached = clock()
        self._finished = False
        self._latest: dict[str, float | None] = {"incarnation": incarnation}
        self._sums: dict[str, float] = {}
        self._lags: Counter[int] = Counter()
        self._dropped: dict[str, float] = {}
        self._alerts: dict[str, float] = {}
        self._committed_at: float | None = None
        self._checkpoint: tuple[int, float] | None = None  # step, when it was first seen

    def attached(self, step: int, max_lag: int) -> None:
        with self._lock:
            self._attached = self._moved = self._clock()
            self._latest |= {"step": step, "max_lag_steps": max_lag}

    def committed(self, manifest: Manifest, seconds: float) -> None:
        """A version, and how long it took from its snapshot to its commit."""
        with self._lock:
            self._committed_at = self._clock()
            self._latest |= {
                "version": manifest.version,
                "version_step": manifest.step,
                "publish_seconds": seconds,
            }
            self._add("published_bytes", manifest.way.total_bytes)

    def step(
        self, line: Mapping[str, float | int | None], lags: Sequence[int], checkpoint: int | None
    ) -> None:
        """A step is done. `line`: as in metrics.jsonl; `lags`: of the samples trained; `checkpoint`: the step of the
        newest one, None: there is none."""
        with self._lock:
            now = self._moved = self._clock()
            tokens, seconds = line["tokens"] or 0, line["time/step_s"] or 0.0
            self._latest |= {
                "step": line["step"],
                "reward": line["reward/mean"],
                "loss": line["loss"],
                "grad_norm": line["grad_norm"],
                "entropy": line["entropy"],
                "mismatch_kl": line["mismatch/kl_k3"],
                "steps_refused": line["refused/total"],
                "step_seconds": seconds,
                "trained_tokens_per_second": tokens / seconds if seconds else None,
            }
            self._latest |= {name: line.get(of) for name, of in _SHOWN.items()}
            self._alerts = _counted(line, _ALERTS)
            self._add("trained_tokens", tokens)
            self._add("trainer_waited_seconds", line["time/wait_batch_s"] or 0.0)
            self._lags.update(lags)
            self._dropped = _counted(line, _DROPPED)
            if checkpoint is not None and (self._checkpoint is None or self._checkpoint[0] != checkpoint):
                self._checkpoint = checkpoint, now

    def _add(self, name: str, more: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + more

    def finished(self) -> None:
        """No more steps: what follows is the last evaluation, and has a limit of its own."""
        with self._lock:
            self._finished = True

    def readings(self) -> Iterable[Reading]:
        with self._lock:
            now = self._clock()
            values = {**self._latest, **self._sums, "trainer_up_seconds": now - self._attached}
            if self._committed_at is not None:
                values["version_age_seconds"] = now - self._committed_at
            if self._checkpoint is not None:
                values["checkpoint_step"] = self._checkpoint[0]
                values["checkpoint_age_seconds"] = now - self._checkpoint[1]
            lags, dropped, alerts = dict(self._lags), dict(self._dropped), dict(self._alerts)
        return [
            *present(values),
            Reading("async_rl_trained_lag_steps", lags),
            *by_reason("async_rl_groups_dropped", dropped),
            *by_reason("async_rl_alerts", alerts),
        ]

    def health(self) -> Health:
        with self._lock:
            still_s, step = self._clock() - self._moved, self._latest.get("step")
            finished = self._finished
        facts = {"run": self.run, "step": step, "since_step_s": round(still_s, 1), "finished": finished}
        if still_s > self._stuck_s and not finished:
            return Health(False, f"no step was finished for {still_s:.0f} s (metrics.stuck_s)", facts)
        return Health(True, "", facts)
