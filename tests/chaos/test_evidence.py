"""The checker of a run's log finds what must not be; each case is a right log with one thing wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.chaos.evidence import Left, Versions, failures, history_of

LEFT = Left(frozenset({6}), frozenset({7}), frozenset(), 8)


def made(ordinal, hash="h", rewards=(0.0, 1.0), lease=None):
    return {"made": ordinal, "lease": lease or 100 + ordinal, "hash": hash, "rewards": list(rewards)}


def acknowledged(ordinal, lease=None):
    return {"acknowledged": ordinal, "lease": lease or 100 + ordinal}


def step(number, *ordinals, incarnation=1, replayed=False, lags=(0,), hash="h"):
    return {
        "step": number,
        "incarnation": incarnation,
        "ordinals": list(ordinals),
        "hashes": [hash for _ in ordinals],
        "left_out": {},
        "replayed": replayed,
        "lags": list(lags),
        "now": number,
        "versions": [[[number]] for _ in ordinals][: len(lags)],
    }


def a_right_log():
    """Steps 0 to 2, a checkpoint after the first, a resume that repeats the other two; group 5 was too old."""
    groups = [each for ordinal in range(7) for each in (made(ordinal), acknowledged(ordinal))]
    return [
        {"life": 1, "resumed": 0},
        *groups,
        step(0, 0, 1),
        {"checkpoint": 1},
        step(1, 2, 3),
        {"settled": 5, "reason": "lag"},
        {"life": 2, "resumed": 1},
        step(1, 2, 3, incarnation=2, replayed=True),
        step(2, 4, incarnation=2),
    ]


def found(lines, left=LEFT):
    return failures(lines, history_of(lines), left)[0]


def test_a_right_log_has_no_fault_and_is_counted():
    lines = a_right_log()
    history = history_of(lines)
    assert found(lines) == []
    assert (history.repeated, history.lives, history.trained) == (1, 2, [0, 1, 2, 3, 4])
    assert failures(lines, history, LEFT)[1]["dropped"] == {"lag": 1}


WRONG = {
    "twice": [step(3, 0, incarnation=2)],
    "lost": [made(20), acknowledged(20)],
    "other bytes": [step(3, 6, incarnation=2, hash="other")],
    "to be trained again": [step(3, 6, incarnation=2)],
    "not [2, 3]": [{"life": 3, "resumed": 1}, step(1, 2, 4, incarnation=3)],
    "resumed at 0": [{"life": 3, "resumed": 0}],
    "steps [0, 1, 2, 9]": [step(9, incarnation=2)],
    "had one": [{"settled": 4, "reason": "no_signal"}],
    "left out": [{**step(3, incarnation=2), "left_out": {"trainer_lag": 1}}],
}


@pytest.mark.parametrize("what", WRONG)
def test_what_must_not_be_is_found(what):
    assert any(what in each for each in found([*a_right_log(), *WRONG[what]]))


def test_a_prompt_that_nobody_knows_any_more_is_found():
    assert any("nobody trained" in each for each in found(a_right_log(), Left(*LEFT[:3], frontier=10)))


def test_what_a_replaced_trainer_does_is_not_of_the_history():
    lines = [*a_right_log(), step(2, 9, incarnation=1)]
    assert found(lines) == [] and history_of(lines).zombies == 1


# ---------------------------------------------------------------- lags and weights


def versions():
    """0 … 3 of incarnation 1, one step each; 4 … 6 of incarnation 2, that resumed at step 1 and made other weights
    from step 2 on."""
    tree = Versions.__new__(Versions)
    rows = [(0, -1, 0, "a"), (1, 0, 1, "b"), (2, 1, 2, "c"), (3, 2, 3, "d")]
    rows += [(4, 1, 1, "b"), (5, 4, 2, "other"), (6, 5, 3, "another")]
    tree.claims = []
    tree.manifests = {
        version: SimpleNamespace(
            version=version, parent=parent, step=at, digest=digest, incarnation=1 if version < 4 else 2
        )
        for version, parent, at, digest in rows
    }
    return tree


@pytest.mark.parametrize(
    ("then", "now", "step", "lag"),
    [(1, 3, 3, 2), (3, 3, 3, 0), (1, 4, 1, 0), (3, 4, 1, 2), (3, 6, 3, 4), (0, 6, 3, 3)],
)
def test_a_lag_is_the_way_back_to_the_fork_and_forward_again(then, now, step, lag):
    assert versions().lag(then, now, step) == lag


def test_a_lag_over_the_limit_and_one_that_was_miscounted_are_found():
    old = {**step(3, 0, lags=[2]), "now": 3, "versions": [[[1]]]}
    history = history_of([old])
    assert versions().wrong([old], history, max_lag=2) == []
    assert "was trained with lags [2]" in versions().wrong([old], history, max_lag=1)[0]
    miscounted = {**old, "lags": [1]}
    assert "counted [1]" in versions().wrong([miscounted], history_of([miscounted]), max_lag=2)[0]


def test_weights_that_were_not_published_are_found():
    state = {"state": "x", "after": 1, "incarnation": 1}
    nothing = history_of([])
    right, wrong = {"served": 1, "hash": "x"}, {"served": 1, "hash": "y"}
    assert versions().wrong([state, right], nothing, 3) == []
    assert "served {'y'}" in versions().wrong([state, wrong], nothing, 3)[0]
    assert "does not count" in versions().wrong([state, {"served": 9, "hash": "x"}], nothing, 3)[0]
