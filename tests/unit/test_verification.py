"""Honest engines of every kind are left alone, and who lies is found within a stated number of groups.

Policies here are real distributions over 24 tokens; a worker samples from its own and says what it says. What the
trainer measures comes from async_rl/algo/mismatch.py, as in the trainer."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.algo.mismatch import token_measures
from async_rl.wire import Key, Measured
from orchestrator.config import VerifyConfig
from orchestrator.verification import Verifier

TOKENS, GROUP = 24, 150
"""Of the vocabulary; and trained tokens per group."""
FLOAT32, BFLOAT16, FP8 = 1e-4, 0.05, 0.15
"""Standard deviation of an engine's error in a logit: kl is half its square, 0.001 and 0.01."""


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Fleet:
    """A policy that drifts by `drift` per step in each logit, and workers that sample from it, `lags` steps late."""

    def __init__(self, seed, *, drift=0.1, lags=(0,), batch=8, groups=GROUP, **config):
        self.chance = np.random.default_rng(seed)
        self.drift, self.lags, self.batch, self.tokens = drift, lags, batch, groups
        self.verifier = Verifier(VerifyConfig(**config))
        # Places in a text: some where the next token is nearly certain, some where it is open.
        scale = self.chance.choice([0.5, 1.5, 4.0, 6.0], size=(64, 1))
        self.base = scale * self.chance.standard_normal((64, TOKENS))
        self.history = [self.base]
        self.step = 0
        self.delivered = {}
        self.groups = dict.fromkeys("abcdefgh", 0)

    def measured(self, ordinal, lag, lie=None, noise=BFLOAT16, filtered=False):
        """One group's row. `lie`: (logits) -> (logits sampled from, logprobs said)."""
        chance = self.chance
        places = chance.integers(64, size=self.tokens)
        now = log_softmax(self.history[-1])[places]
        then = self.history[max(0, len(self.history) - 1 - lag)]
        engine = (then + noise * chance.standard_normal(then.shape))[places]
        sampled, said = (engine, log_softmax(engine)) if lie is None else lie(self, engine, places)
        drawn = (log_softmax(sampled) + chance.gumbel(size=sampled.shape)).argmax(-1)
        at = np.arange(self.tokens)
        entropy = -(np.exp(now) * now).sum(-1)
        kl, ratio, surprise = token_measures(now[at, drawn], said[at, drawn], entropy).mean(-1)
        return Measured(Key("train", ordinal), lag, True, self.tokens, kl, ratio, surprise)

    def play(self, steps, **workers):
        """`workers`: name -> what `measured` is to do for it. The first finding of guilt: (worker, its groups)."""
        for _ in range(steps):
            rows = []
            for index in range(self.batch):
                name = [*workers][index % len(workers)]
                ordinal = len(self.delivered)
                self.delivered[ordinal] = name
                self.groups[name] += 1
                lag = self.lags[int(self.chance.integers(len(self.lags)))]
                rows.append(self.measured(ordinal, lag, **workers[name]))
            for name in sorted(self.verifier.add(self.step, rows, lambda key: self.delivered[key.ordinal])):
                if self.state(name) == "guilty":
                    return name, self.groups[name]
            self.step += 1
            self.history.append(
                self.history[-1] + self.drift * self.chance.standard_normal(self.base.shape)
            )
        return None

    def state(self, name):
        return self.verifier.finding(name).state


HONEST = {"a": {"noise": FLOAT32}, "b": {"noise": BFLOAT16}, "c": {"noise": FP8}, "d": {"noise": BFLOAT16}}


# ---------------------------------------------------------------- nobody is wrongly accused


@pytest.mark.parametrize("lags", [(0,), (1,), (0, 1, 2), (4,)], ids=str)
@pytest.mark.parametrize("names", ["a", "ac", "abc", "abcd"])
def test_honest_engines_of_different_kinds_are_good_at_every_lag(lags, names):
    fleet = Fleet(seed=len(names), lags=lags)
    assert fleet.play(20, **{name: HONEST[name] for name in names}) is None
    assert {fleet.state(name) for name in names} == {"good"}


def test_honest_workers_are_not_even_suspect_in_thousands_of_windows():
    """Each step looks again at the last groups of each worker; the rows are drawn again from measured ones."""
    fleet = Fleet(seed=1, lags=(0, 1, 2))
    for _ in range(3):
        fleet.history.append(
            fleet.history[-1] + fleet.drift * fleet.chance.standard_normal(fleet.base.shape)
        )
    pool = {
        name: [fleet.measured(0, lag, **HONEST[name]) for lag in (0, 1, 2) for _ in range(60)]
        for name in "abcd"
    }
    verifier, windows, ordinal = Verifier(VerifyConfig()), 0, 0
    for step in range(550):
        rows, who = [], {}
        for name in "abcdabcd":
            drawn = pool[name][int(fleet.chance.integers(90))]
            key = Key("train", ordinal := ordinal + 1)
            rows.append(Measured(key, drawn.lag, True, drawn.tokens, drawn.kl, drawn.ratio, drawn.surprise))
            who[key] = name
        for name in verifier.add(step, rows, who.__getitem__):
            finding = verifier.finding(name)
            assert finding.state in ("unjudged", "good"), finding
            windows += finding.state == "good"
    assert windows > 2000


def test_a_policy_that_moves_by_half_a_nat_makes_no_worker_guilty():
    fleet = Fleet(seed=2, drift=0.5, lags=(1, 2, 4))
    assert fleet.play(30, a=HONEST["a"], b=HONEST["b"], c=HONEST["c"]) is None


def test_the_same_number_for_all_is_no_evidence_against_one():
    """As where a filter leaves out easy prompts: everybody's tokens are more surprising than samples are."""
    verifier = Verifier(VerifyConfig())
    for step in range(40):
        rows = [Measured(Key("train", 8 * step + i), 1, True, 200, 0.01, 0.0, 0.6) for i in range(8)]
        verifier.add(step, rows, lambda key: "ab"[key.ordinal % 2])
    assert {verifier.finding(name).state for name in "ab"} == {"good"}


def test_nothing_is_said_before_there_is_enough():
    fleet = Fleet(seed=3)
    assert fleet.play(3, a={"lie": shifted(5.0)}) is None
    assert fleet.state("a") == "unjudged"


def test_a_group_that_a_resumed_trainer_trains_again_counts_once():
    verifier = Verifier(VerifyConfig(min_groups=4))
    for step in range(4):
        rows = [Measured(Key("train", step), 0, True, 600, 1.0, 0.0, 0.0)]
        for _ in range(3):
            verifier.add(step, rows, lambda key: "a")
    assert verifier.finding("a").groups == 4
    assert len(verifier._rows["a"]) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_numbers_that_are_none_are_left_out(value):
    verifier = Verifier(VerifyConfig())
    for step in range(30):
        verifier.add(step, [Measured(Key("train", step), 0, True, 900, 0.0, value, 0.0)], lambda key: "a")
    assert verifier.finding("a").groups == 0


# ---------------------------------------------------------------- who lies is found


def shifted(by):
    return lambda fleet, logits, places: (logits, log_softmax(logits) + by)


def hotter(temperature):
    """It samples at another temperature, and says so honestly."""
    return lambda fleet, logits, places: (logits / temperature, log_softmax(logits / temperature))


def without_temperature(temperature):
    """It samples at another temperature, and gives the logprobs of the one agreed on."""
    return lambda fleet, logits, places: (logits / temperature, log_softmax(logits))


def greedy(fleet, logits, places):
    return 1e3 * logits, log_softmax(logits)


def only_the_likely(fleet, logits, places):
    """top-p of 0.6, with the logprobs of the whole policy."""
    logprobs = log_softmax(logits)
    ordered = np.argsort(-logprobs, axis=-1)
    mass = np.take_along_axis(np.exp(logprobs), ordered, -1).cumsum(-1)
    cut = np.zeros_like(logprobs, dtype=bool)
    np.put_along_axis(cut, ordered, mass - np.take_along_axis(np.exp(logprobs), ordered, -1) > 0.6, -1)
    return np.where(cut, -1e9, logits), logprobs


def made_up(fleet, logits, places):
    return logits, np.full_like(logits, -0.5)


def other_weights(fleet, logits, places):
    """The policy of long ago, or of another run."""
    other = fleet.base + 1.5 * np.random.default_rng(9).standard_normal(fleet.base.shape)
    return other[places], log_softmax(other[places])


LIES = {
    "logprobs shifted by 0.2": shifted(0.2),
    "logprobs shifted by -0.2": shifted(-0.2),
    "temperature 2.5, honestly": hotter(2.5),
    "temperature 1.6, secretly": without_temperature(1.6),
    "temperature 0.5, secretly": without_temperature(0.5),
    "greedy": greedy,
    "top-p": only_the_likely,
    "logprobs made up": made_up,
    "other weights": other_weights,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("lags", [(0,), (2,)], ids=str)
def test_one_of_three_workers_that_lies_is_found_within_40_groups_and_nobody_else(lie, lags):
    fleet = Fleet(seed=4, lags=lags, batch=9)
    found = fleet.play(60, a=HONEST["a"], b={"lie": LIES[lie]}, c=HONEST["c"])
    assert found is not None and found[0] == "b" and found[1] <= 40, found
    fleet.verifier.forget("b")
    assert fleet.play(8, a=HONEST["a"], c=HONEST["c"]) is None


@pytest.mark.parametrize(
    "lie", ["logprobs shifted by 0.2", "temperature 1.6, secretly", "greedy", "made up"]
)
def test_of_two_workers_the_one_that_lies_is_found_at_a_lag(lie):
    fleet = Fleet(seed=5, lags=(1, 2))
    found = fleet.play(60, a=HONEST["b"], b={"lie": LIES.get(lie, made_up)})
    assert found is not None and found[0] == "b" and found[1] <= 60, found


@pytest.mark.parametrize("lie", ["temperature 2.5, honestly", "other weights"])
def test_of_two_workers_that_are_equally_honest_about_different_policies_neither_is_guilty_at_a_lag(lie):
    """Either may be the one: who names an older version than it serves looks nearer than it should."""
    fleet = Fleet(seed=6, lags=(2,))
    assert fleet.play(40, a=HONEST["b"], b={"lie": LIES[lie]}) is None
    assert fleet.state("a") == "good"


def test_a_worker_alone_at_a_lag_is_shown_and_goes_on_and_at_lag_0_is_guilty():
    fleet = Fleet(seed=7, lags=(2,))
    assert fleet.play(40, a={"lie": shifted(0.3)}) is None
    finding = fleet.verifier.finding("a")
    assert finding.state == "suspect" and "no other worker" in finding.reason
    found = Fleet(seed=7, lags=(0,)).play(40, a={"lie": shifted(0.3)})
    assert found is not None and found[1] <= 40


def test_what_an_update_in_mid_sample_brings_near_is_no_measure_for_others():
    """Tokens after an update are nearer to the policy trained: they are not held against a worker without updates."""
    verifier = Verifier(VerifyConfig())
    for step in range(40):
        rows = [Measured(Key("train", 9 * step), 2, True, 200, 0.4, 0.0, 0.0)]
        rows += [Measured(Key("train", 9 * step + i), 2, False, 200, 0.01, 0.0, 0.0) for i in range(1, 9)]
        verifier.add(step, rows, lambda key: "abc"[min(2, key.ordinal % 9)])
    assert verifier.finding("a").state == "good"


def test_the_reason_says_what_differs_by_how_much_and_from_what():
    fleet = Fleet(seed=8, lags=(1,), batch=9)
    fleet.play(60, a=HONEST["a"], b={"lie": other_weights}, c=HONEST["c"])
    reason = fleet.verifier.finding("b").reason
    assert reason.startswith("kl +") and "where others have" in reason and "lag 1" in reason
