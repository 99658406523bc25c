"""Whether a worker's behaviour logprobs fit the policy that it says it sampled from. Pure: measurements go in, a
finding per worker comes out.

The trainer measures each group in the forward pass that it makes anyway (async_rl/algo/mismatch.py): `kl`, how far
the sampling distribution is from the policy trained; `ratio` and `surprise`, which have mean 0 for whoever samples
as it says, however old its policy. They are held against a reference:

    basis       kl                                      ratio                          surprise
    lag 0       0: it is the very policy                0                              0, and the others
    others      twice the others', two or more others   0, and the others              0, and the others
    alone       1 nat per token                         0                              0

`others`: workers with tokens in the same step; of their means the median, of two middle ones the one that speaks for
the worker. For kl, which grows with the lag, only their tokens of the same lag, so of the same version, and of
them those that they sampled before an update met their sample: after one they are nearer to the policy trained.
`0, and the others`: what is far from 0 must be far from the others, too, to count. A filter (groups whose rewards are
all equal are left out) moves the zeros a little, for all workers alike; and between two workers who differ, it is
the one far from 0 that is wrong. kl has no zero at a lag: of two workers who differ either may be the one, the
other saying a wrong version; so two others are needed.
`alone`: tokens at a lag above 0 that nobody else's can be compared with. There the policy itself may have moved by
more than any bound; a worker can become suspect by it, and nothing more. To stop the only worker would be to stop
the run.

With x_i the worker's means in its groups i, x̄ their mean by tokens, and SE its standard error, the groups of one step
counted as one observation (they share a reference, and what the policy just did):

    sure = |x̄| - 5 SE        (kl: x̄ - 5 SE)        guilty: sure > limit        suspect: sure > limit / 2

and nothing is said before 16 groups, 2000 tokens and 4 steps have been seen. The limits are far above the arithmetic
of honest engines, so that a false alarm needs a mean of thousands of bounded numbers to be off by several
standard errors *and* several times what an engine in 16 bits or 8 bits differs by. What does not
reach the limits is left alone: the loss corrects for it.

What this does not find: a worker that computes the trainer's own logprobs for tokens it got elsewhere and takes care
of their surprise; one that lies in few of its groups; and, where all samples lag, wrong weights in a fleet that has
them everywhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from async_rl.wire import Key, Measured
from orchestrator.config import VerifyConfig

__all__ = ["Finding", "Verifier"]

SURE = 5.0
"""Standard errors. With the fewest steps it is what chance exceeds in one of a hundred cases, at a true mean of
exactly the limit; an honest mean is a tenth of that or less."""
MIN_STEPS = 4
MIN_TOKENS = 2000
"""A distribution's rare tokens must have had their chance to occur: one that holds a quarter of a nat of the surprise
has a probability of 1.5 % or more, and is missing among so many with 1e-13."""
WINDOW = 4
"""Times the least evidence that is remembered."""
MOST_ROWS = 4096
OFTEN = 4
"""Findings for each min_groups groups: a millisecond each, while nobody is served."""
ABSURD = 1e6
"""No mean of clamped numbers is that large, and NaN is not smaller."""
LONE_KL = 1.0
"""Nats per token. Beyond it the loss has nothing to correct any more, whoever is wrong."""


class Finding(NamedTuple):
    """`sure`: the worst measure over its limit; 1 is the limit."""

    state: str  # unjudged, good, suspect, guilty
    reason: str
    groups: int
    sure: float = 0.0


class _Row(NamedTuple):
    """One worker's tokens of one group, at one lag. `refs`: what others had in the same step."""

    ordinal: int
    step: int
    lag: int
    tokens: int
    values: tuple[float, float, float]  # kl, ratio, surprise
    refs: tuple[float | None, float | None, float | None]


class Verifier:
    def __init__(self, config: VerifyConfig) -> None:
        self._config = config
        self._rows: dict[str, deque[_Row]] = {}
        self._findings: dict[str, Finding] = {}
        self._unseen: Counter[str] = Counter()  # rows since a worker's last finding

    def add(self, step: int, rows: Iterable[Measured], worker_of: Callable[[Key], str]) -> set[str]:
        """What one step has shown; the workers it is about. `worker_of`: who delivered a group, "" where that is
        not known any more. A group that was seen before (a resumed trainer repeats steps) counts once."""
        by_worker: dict[str, list[Measured]] = defaultdict(list)
        for row in rows:
            worker = worker_of(row.key)
            if worker and row.tokens and all(abs(getattr(row, name)) < ABSURD for name in _NAMES):
                by_worker[worker].append(row)
        means = {worker: _means(mine) for worker, mine in by_worker.items()}
        ordered = [sorted(each[at] for each in means.values()) for at in (1, 2)]
        kls = _kls(by_worker)
        ordered_kls = {lag: sorted(of_lag.values()) for lag, of_lag in kls.items()}
        for worker, mine in by_worker.items():
            known = {row.ordinal for row in self._rows.get(worker, ())}
            ratio, surprise = (_median_near(means[worker][at], ordered[at - 1]) for at in (1, 2))
            for row in mine:
                if row.key.ordinal not in known:
                    own = kls[row.lag].get(worker) if row.lag in kls else None
                    others = _without(own, ordered_kls.get(row.lag, []))
                    kl = others[len(others) // 2] if len(others) >= 2 else None
                    values = (row.kl, row.ratio, row.surprise)
                    kept = _Row(row.key.ordinal, step, row.lag, row.tokens, values, (kl, ratio, surprise))
                    self._keep(worker, kept)
        seen = set(by_worker)
        for worker in seen:
            if self._unseen[worker] * OFTEN >= self._config.min_groups:
                self._unseen[worker] = 0
                self._findings[worker] = self._find(worker)
        return seen

    def forget(self, worker: str) -> None:
        self._rows.pop(worker, None)
        self._findings.pop(worker, None)
        self._unseen.pop(worker, None)

    def finding(self, worker: str) -> Finding:
        return self._findings.get(worker, Finding("unjudged", "", 0))

    # ---------------------------------------------------------------- inside

    def _find(self, worker: str) -> Finding:
        rows = self._rows.get(worker, ())
        groups = len({row.ordinal for row in rows})
        found: list[tuple[float, bool, str]] = []
        for basis in _BASES:
            chosen = [row for row in rows if basis.covers(row)]
            if self._enough(chosen):
                found += self._judged(basis, chosen)
        if not found:
            return Finding("unjudged", "", groups)
        guilty = [each for each in found if each[0] > 1 and each[1]]
        sure, _, reason = max(guilty or found, key=lambda each: each[0])
        state = "guilty" if guilty else "suspect" if sure > 0.5 else "good"
        return Finding(state, reason if state != "good" else "", groups, sure)

    def _keep(self, worker: str, row: _Row) -> None:
        rows = self._rows.setdefault(worker, deque(maxlen=MOST_ROWS))
        rows.append(row)
        self._unseen[worker] += 1
        tokens = sum(row.tokens for row in rows)
        while (
            len(rows) > WINDOW * self._config.min_groups and tokens - rows[0].tokens > WINDOW * MIN_TOKENS
        ):
            tokens -= rows.popleft().tokens

    def _enough(self, rows: Sequence[_Row]) -> bool:
        return (
            len({row.ordinal for row in rows}) >= self._config.min_groups
            and len({row.step for row in rows}) >= MIN_STEPS
            and sum(row.tokens for row in rows) >= MIN_TOKENS
        )

    def _judged(self, basis: _Basis, rows: Sequence[_Row]) -> list[tuple[float, bool, str]]:
        """Of each measure that can be judged: how sure over the limit, whether it may be guilt, and in words."""
        limits = (self._config.kl_limit, self._config.ratio_limit, self._config.surprise_limit)
        tokens = sum(row.tokens for row in rows)
        judged = []
        for at, (name, limit) in enumerate(zip(_NAMES, limits, strict=True)):
            if at == 0 and basis.name == "alone":
                limit = LONE_KL
            chosen = rows
            if basis.name == "others" and any(row.refs[at] is None for row in rows):
                chosen = [row for row in rows if row.refs[at] is not None]
                if not self._enough(chosen):
                    continue
            elif (mean := abs(sum(row.values[at] * row.tokens for row in rows)) / tokens) <= limit / 2:
                # No standard error can make it worse: the usual case.
                judged.append((mean / limit, False, ""))
                continue
            sure, guilt, against = _sure(basis, at, chosen)
            mean, _ = _mean([row.values[at] for row in chosen], chosen)
            lags = sorted({row.lag for row in chosen})
            where = f"lag {lags[0]}" if len(lags) == 1 else f"lags {lags[0]} to {lags[-1]}"
            groups = len({row.ordinal for row in chosen})
            what = (
                f"{name} {mean:+.3g} per token {against}, the limit is {limit:g} ({groups} groups, {where})"
            )
            judged.append((sure / limit, guilt, what))
        return judged


def _sure(basis: _Basis, at: int, rows: Sequence[_Row]) -> tuple[float, bool, str]:
    """How much of a measure is no chance, whether it may be guilt, and what it was held against."""
    mean, se = _mean([row.values[at] for row in rows], rows)
    refs = [ref for row in rows if (ref := row.refs[at]) is not None]
    alone = _AGAINST.get(basis.name, "")
    if at == 0 and basis.name != "others":
        return mean - SURE * se, basis.name == "lag 0", alone
    if (basis.name, at) == ("lag 0", 1) or len(refs) < len(rows):
        # At lag 0 nothing but chance moves the ratio; a filter can move the surprise.
        return abs(mean) - SURE * se, (basis.name, at) == ("lag 0", 1), alone
    others, _ = _mean(refs, rows)
    if at == 0:
        over, se = _mean([row.values[0] - 2.0 * ref for row, ref in zip(rows, refs, strict=True)], rows)
        return over - SURE * se, True, f"where others have {others:.3g}"
    off, se_off = _mean([row.values[at] - ref for row, ref in zip(rows, refs, strict=True)], rows)
    return min(abs(mean) - SURE * se, abs(off) - SURE * se_off), True, f"where others have {others:+.3g}"


_NAMES = ("kl", "ratio", "surprise")


class _Basis(NamedTuple):
    name: str
    covers: Callable[[_Row], bool]


_BASES = (
    _Basis("lag 0", lambda row: row.lag == 0),
    _Basis("others", lambda row: row.refs[1] is not None),
    _Basis("alone", lambda row: row.lag > 0 and row.refs[1] is None),
)
_AGAINST = {"lag 0": "from the very policy", "alone": "with no other worker to compare with"}


def _means(rows: Sequence[Measured]) -> tuple[float, float, float]:
    tokens = sum(row.tokens for row in rows)
    kl, ratio, surprise = (sum(getattr(row, name) * row.tokens for row in rows) / tokens for name in _NAMES)
    return kl, ratio, surprise


def _kls(by_worker: dict[str, list[Measured]]) -> dict[int, dict[str, float]]:
    """By lag, of each worker: of what was sampled before an update met its sample."""
    kls: dict[int, dict[str, float]] = defaultdict(dict)
    for worker, rows in by_worker.items():
        for lag in {row.lag for row in rows if row.pure}:
            kls[lag][worker] = _means([row for row in rows if row.pure and row.lag == lag])[0]
    return kls


def _without(value: float | None, ordered: list[float]) -> list[float]:
    """`ordered` less one `value` that it holds."""
    if value is None:
        return ordered
    at = bisect_left(ordered, value)
    return ordered[:at] + ordered[at + 1 :]


def _median_near(value: float, ordered: list[float]) -> float | None:
    """Of the others than `value`, the median; of two middle ones, the nearer."""
    others = _without(value, ordered)
    if not others:
        return None
    middle = (others[(len(others) - 1) // 2], others[len(others) // 2])
    return min(middle, key=lambda each: abs(each - value))


def _mean(values: Sequence[float], rows: Sequence[_Row]) -> tuple[float, float]:
    """The mean over tokens of `values`, one for each row, and its standard error with the rows of one step as one
    observation."""
    tokens = sum(row.tokens for row in rows)
    mean = sum(value * row.tokens for value, row in zip(values, rows, strict=True)) / tokens
    off: dict[int, float] = defaultdict(float)
    for value, row in zip(values, rows, strict=True):
        off[row.step] += row.tokens * (value - mean)
    steps = len(off)
    if steps < 2:
        return mean, math.inf
    square = sum(each * each for each in off.values()) * steps / (steps - 1)
    return mean, math.sqrt(square) / tokens
