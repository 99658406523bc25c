"""Choices that can't be told from mistakes: settings that do nothing, or that lag makes unsafe."""

from __future__ import annotations

from async_rl.algo.losses.config import LossConfig
from async_rl.algo.losses.sequences import Gspo, TisSequence
from async_rl.algo.losses.tokens import Decoupled, DppoTv, IcePop, PpoClip, Reinforce

__all__ = ["cautions"]

GSPO_NARROW = 1e-2
"""A clip under it is for the minibatches of one batch: a step of lag moves the mean log ratio of a sample by about
this much."""


def cautions(config: LossConfig, max_lag: int, minibatches: int = 1) -> list[str]:
    """One sentence each, for the log, once at start. Empty: nothing to say. `max_lag` in optimizer steps;
    `minibatches` optimizer updates per step."""
    return [*_of_the_loss(config, max_lag, minibatches), *_of_the_extras(config)]


def _of_the_loss(config: LossConfig, max_lag: int, minibatches: int) -> list[str]:
    found = []
    if isinstance(config, Decoupled) and config.proximal == "recomputed" and minibatches == 1:
        found.append(
            "loss.name = decoupled with trainer.minibatches = 1 has no clip: the proximal policy is the policy "
            'itself. Set more minibatches, or loss.proximal = "interpolated"'
        )
    if (
        isinstance(config, Decoupled)
        and config.proximal == "interpolated"
        and not max_lag
        and minibatches == 1
    ):
        found.append(
            "loss.name = decoupled, interpolated, with max_lag = 0 and one minibatch clips nothing but the "
            "difference between engine and learner"
        )
    if isinstance(config, IcePop) and minibatches == 1 and _clip_changed(config):
        found.append(
            "loss.clip_low and clip_high of icepop do nothing with trainer.minibatches = 1: only ratio_low and "
            "ratio_high act"
        )
    if isinstance(config, Reinforce) and (max_lag or minibatches > 1):
        found.append(
            f"loss.name = reinforce corrects for nothing, and max_lag = {max_lag} (minibatches = {minibatches}) "
            "trains on samples of older policies: unstable, meant as a negative control"
        )
    if isinstance(config, TisSequence) and max_lag:
        found.append(
            f"loss.name = tis_sequence with max_lag = {max_lag}: the weight of a sample is a product over its "
            "tokens; with hundreds of tokens it is near 0 or at its cap (watch ess/sequence)"
        )
    if isinstance(config, Gspo) and max_lag and config.clip_high < GSPO_NARROW:
        found.append(
            f"loss.clip_high = {config.clip_high:g} of gspo with max_lag = {max_lag}: so narrow a clip is for "
            "minibatches of one batch; lag puts most samples outside (watch clip/positive)"
        )
    if isinstance(config, PpoClip) and max_lag and not config.dual_clip:
        found.append(
            f"loss.dual_clip = 0 with max_lag = {max_lag}: the ratio of a token with a negative advantage is not "
            "bounded, and one token may be the whole gradient"
        )
    if isinstance(config, DppoTv) and max_lag and config.tv_clip == 1:
        found.append(f"loss.tv_clip = 1 with max_lag = {max_lag}: nothing is ever masked")
    return found


def _of_the_extras(config: LossConfig) -> list[str]:
    found = []
    if config.reference_coef and config.reference_estimator == "k1":
        found.append(
            'loss.reference_estimator = "k1" has a gradient whose mean is zero: it adds noise and holds nothing; '
            'use "k2"'
        )
    if config.reference and not config.reference_coef:
        found.append("loss.reference does nothing with loss.reference_coef = 0")
    if config.length_budget and config.normalise != "constant":
        found.append(f'loss.length_budget does nothing with loss.normalise = "{config.normalise}"')
    return found


def _clip_changed(config: IcePop) -> bool:
    default = IcePop()
    return (config.clip_low, config.clip_high) != (default.clip_low, default.clip_high)
