"""All losses once more, independently: Python floats, one token after the other, and derivatives by dual numbers.

A Dual is a value with its derivative in the direction of one token's log pi; what has no gradient is used as a float.
Written from the papers' formulas (docs/losses.md), not from the code that it is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

FLOOR, LIMIT = -1e5, 20.0


@dataclass
class Dual:
    v: float
    g: float = 0.0

    def __add__(self, other):
        other = dual(other)
        return Dual(self.v + other.v, self.g + other.g)

    __radd__ = __add__

    def __neg__(self):
        return Dual(-self.v, -self.g)

    def __sub__(self, other):
        return self + -dual(other)

    def __mul__(self, other):
        other = dual(other)
        return Dual(self.v * other.v, self.v * other.g + self.g * other.v)

    __rmul__ = __mul__


def dual(x) -> Dual:
    return x if isinstance(x, Dual) else Dual(float(x))


def exp(x) -> Dual:
    x = dual(x)
    return Dual(math.exp(x.v), math.exp(x.v) * x.g)


def clip(x, low: float, high: float) -> Dual:
    x = dual(x)
    return Dual(min(max(x.v, low), high), x.g if low <= x.v <= high else 0.0)


def least(a: Dual, b: Dual) -> Dual:
    return a if a.v <= b.v else b


@dataclass
class Token:
    lp: float  # log pi
    lm: float  # log mu
    a: float
    lag: int = 0
    prox: float = 0.0
    ref: float = 0.0
    entropy: float = 0.0


Samples = list[list[Token]]
"""The loss tokens of each sample; a sample may be empty."""


def floor(x: float) -> float:
    return max(x, FLOOR)


def per_token(name: str, c: Any, sample: list[Token], live: list[Dual]) -> list[Dual]:
    """The losses of a sample's tokens. `live`: log pi with gradient."""
    n = len(sample)
    ds = [clip(x - floor(t.lm), -LIMIT, LIMIT) for x, t in zip(live, sample, strict=True)]
    if name == "gspo":
        total = Dual(0.0)
        for d in ds:
            total = total + d
        s = exp(total * (1.0 / n)) if n else Dual(1.0)
        return [_clipped(s, t.a, c.clip_low, c.clip_high) for t in sample]
    if name == "tis_sequence":
        weight = math.exp(min(max(sum(d.v for d in ds), -LIMIT), LIMIT))
        return [-(min(weight, c.weight_cap) * t.a) * x for x, t in zip(live, sample, strict=True)]
    return [_alone(name, c, t, x, d) for t, x, d in zip(sample, live, ds, strict=True)]


def _alone(name: str, c: Any, t: Token, x: Dual, d: Dual) -> Dual:
    r = exp(d)
    lp, lm = floor(t.lp), floor(t.lm)
    if name == "dppo_tv":
        change = math.exp(lp) - math.exp(lm)
        masked = (t.a > 0 and change > c.tv_clip) or (t.a < 0 and change < -c.tv_clip)
        push = Dual(0.0) if masked else clip(r, 0.0, c.ratio_cap) * t.a
        return c.kl_coef * (d * d) - push
    if name == "ppo_clip":
        loss = _clipped(r, t.a, c.clip_low, c.clip_high)
        if t.a < 0 and c.dual_clip and r.v > c.dual_clip:
            return Dual(-c.dual_clip * t.a)
        return loss
    if name in ("decoupled", "icepop"):
        prox = floor(t.prox)
        if name == "decoupled" and c.proximal == "interpolated":
            prox = lm + t.lag / (t.lag + 1) * (lp - lm)
        weight = math.exp(min(max(prox - lm, -LIMIT), LIMIT))
        low, high = (c.ratio_low, c.ratio_high) if name == "icepop" else (0.0, c.weight_cap)
        if not low <= weight <= high:
            return Dual(0.0)
        u = exp(clip(x - prox, -LIMIT, LIMIT))
        return weight * _clipped(u, t.a, c.clip_low, c.clip_high)
    if name == "tis_token":
        return -(min(r.v, c.weight_cap) * t.a) * x
    if name == "cispo":
        return -(min(max(r.v, 1 - c.clip_low), 1 + c.clip_high) * t.a) * x
    assert name == "reinforce"
    return -t.a * x


def _clipped(r: Dual, a: float, low: float, high: float) -> Dual:
    return -least(r * a, clip(r, 1 - low, 1 + high) * a)


def extra(c: Any, t: Token, x: Dual) -> Dual:
    k = clip(x - floor(t.ref), -LIMIT, LIMIT)
    kl = {"k1": k, "k2": 0.5 * (k * k), "k3": exp(-k) + k - 1.0}[c.reference_estimator]
    return c.reference_coef * kl - c.entropy_coef * t.entropy


def total(name: str, c: Any, samples: Samples) -> tuple[float, list[list[float]]]:
    """The weighted sum, and its derivative by each token's log pi."""

    def value(which: tuple[int, int] | None) -> Dual:
        result = Dual(0.0)
        for i, sample in enumerate(samples):
            live = []
            for j, t in enumerate(sample):
                slope = 1.0 if which == (i, j) and t.lp >= FLOOR else 0.0
                live.append(Dual(floor(t.lp), slope))
            weight = 1.0 / len(sample) if sample and c.normalise == "sequence" else 1.0
            for loss, t, x in zip(per_token(name, c, sample, live), sample, live, strict=True):
                result = result + weight * loss
                if c.reference_coef or c.entropy_coef:
                    result = result + weight * extra(c, t, x)
        return result

    grads = [[value((i, j)).g for j in range(len(sample))] for i, sample in enumerate(samples)]
    return value(None).v, grads
