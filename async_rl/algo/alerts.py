"""When the numbers of a step say that the samples no longer speak for the policy. Pure: lines in, sentences out.

Each alert is told once, the first time, and counted at every step that it holds: a run that goes on in trouble must
not fill its log, and must not look healthy either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["Alerts", "AlertsConfig"]


class AlertsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[trainer.alerts]`: limits on what a step shows. 0 switches one off."""

    ess_below: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Effective sample size of the tokens' weights, as a share of the tokens: with half, the step is as noisy as one
    of half the batch. Log ratios that are normal with variance v have exp(-v), and a mismatch KL of v/2: 0.5 is
    reached at a KL of 0.35, or by a few tokens with giant ratios long before that."""
    ess_steps: Annotated[int, Meta(ge=1)] = 5
    """Steps in a row under `ess_below`: one such step is bad luck (a single token can do it)."""
    ratio_low: Annotated[float, Meta(ge=0)] = 0.5
    """Of the mean ratio pi / mu, whose expectation is 1 at every lag as long as mu is what the tokens were drawn
    from; so far off, the logprobs are not those of the sampler, or a few tokens are the whole batch."""
    ratio_high: Annotated[float, Meta(ge=0)] = 2.0
    """Likewise."""
    kl_above: Annotated[float, Meta(ge=0)] = 0.1
    """Mean mismatch KL (k3), nats per token. Engines in 16 bits and a few steps of lag make 0.001 to 0.02."""


_HINT = 'see docs/losses.md, "When an alert speaks"'


class Alerts:
    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._low_ess = 0  # steps in a row
        self.counts = {"low_ess": 0, "ratio_mean": 0, "mismatch_kl": 0}
        """Steps at which each held, since the trainer's start."""

    def look(self, line: Mapping[str, float | int | str | None]) -> list[str]:
        """At the metrics of a step (names as in metrics.jsonl). What is to be told now, for the first time."""
        c = self._config
        ess, ratio, kl = (_number(line.get(name)) for name in ("ess/token", "ratio/mean", "mismatch/kl_k3"))
        self._low_ess = self._low_ess + 1 if ess is not None and ess < c.ess_below else 0
        found = {
            "low_ess": f"the effective sample size of the tokens was under {c.ess_below:g} for {c.ess_steps} steps "
            f"(now {_shown(ess)}): a part of them is the whole gradient"
            if self._low_ess >= c.ess_steps
            else "",
            "ratio_mean": f"the mean ratio pi / mu is {_shown(ratio)}, it should be near 1"
            if ratio is not None and not _within(ratio, c.ratio_low, c.ratio_high)
            else "",
            "mismatch_kl": f"the policy is {_shown(kl)} nats per token from the behaviour policy, over {c.kl_above:g}"
            if kl is not None and c.kl_above and kl > c.kl_above
            else "",
        }
        told = []
        for name, sentence in found.items():
            if sentence:
                self.counts[name] += 1
                if self.counts[name] == 1:
                    told.append(f"{sentence}; {_HINT}")
        return told


def _within(ratio: float, low: float, high: float) -> bool:
    return ratio >= low and (not high or ratio <= high)


def _number(value: float | int | str | None) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
