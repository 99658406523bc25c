"""Texts that can't be scored again: evidence against a worker where others' can be, and nothing where they can't."""

from __future__ import annotations

import asyncio
import math
import random
import time

import msgspec
import pytest

from async_rl.wire import Prompt
from orchestrator.config import VerifyConfig
from orchestrator.rescoring import CONTROLS, Outcome, Rescorer, Rescoring
from orchestrator.turns import Turns
from orchestrator.unscored import WINDOW, Unscored, tail
from tests.orchestration import Counting, group, sample, train_key
from tests.unit.test_quarantine import QUICK, attached, standing
from tests.unit.test_rescoring import outcomes

LEAST = 3


def judged(*workers, least=LEAST):
    """States, of workers given as (texts, failures)."""
    unscored = Unscored()
    for name, (texts, failures) in enumerate(workers):
        for each in range(texts):
            unscored.add(str(name), "it raised" if each < failures else "")
    return [unscored.finding(str(name), least)[0] for name in range(len(workers))]


# ---------------------------------------------------------------- who it is


def test_a_worker_whose_texts_fail_where_nobody_elses_do_is_found():
    assert judged((5, 5), (64, 0)) == ["guilty", "good"]
    assert judged((64, 13), *[(64, 0)] * 3) == ["guilty", "good", "good", "good"], "one of five is enough"


def test_before_there_is_enough_it_is_suspect_and_two_failures_of_others_change_little():
    assert judged((2, 2), (64, 0))[0] == "suspect"
    assert judged((9, 9), (64, 2))[0] == "guilty"
    assert judged((1, 1), (64, 0))[0] == "good", "once may be anybody's"
    assert judged((5, 5), (64, 0), least=6)[0] == "suspect"


@pytest.mark.parametrize("failures", [1, 8, 32, 64])
def test_an_environment_that_fails_for_everybody_is_nobodys_fault(failures):
    assert set(judged(*[(64, failures)] * 4)) == {"good"}


def test_alone_a_worker_can_not_be_told_from_a_broken_environment():
    assert judged((64, 64)) == ["suspect"]
    assert judged((64, 2)) == ["good"]


def test_honest_workers_are_not_found_however_often_texts_fail():
    """A run's worth of looks, for each rate of failures."""
    draw = random.Random(7)
    for rate in (0.01, 0.1, 0.5):
        unscored = Unscored()
        for _ in range(3000):
            worker = f"w{int(5 * draw.random() ** 2)}"  # some are faster than others
            unscored.add(worker, "it raised" if draw.random() < rate else "")
            assert unscored.finding(worker, LEAST)[0] != "guilty"


def test_what_is_forgotten_or_long_past_counts_neither_for_it_nor_against_others():
    unscored = Unscored()
    for _ in range(WINDOW):
        unscored.add("liar", "it raised")
    unscored.forget("liar")
    assert unscored.finding("liar", LEAST) == ("good", "") and (unscored._texts, unscored._failures) == (
        0,
        0,
    )
    for failed in ["it raised"] * 9 + [""] * WINDOW:
        unscored.add("w", failed)
    assert unscored.finding("w", LEAST)[0] == "good" and unscored._failures == 0


def test_the_chance_is_that_of_drawing_without_putting_back():
    def exact(found, drawn, marked, whole):
        ways = [
            math.comb(marked, each) * math.comb(whole - marked, drawn - each)
            for each in range(found, min(drawn, marked) + 1)
            if drawn - each <= whole - marked
        ]
        return sum(ways) / math.comb(whole, drawn)

    for case in [(3, 5, 4, 20), (0, 5, 4, 20), (5, 64, 9, 300), (2, 3, 9, 10), (64, 64, 70, 5000)]:
        assert tail(*case) == pytest.approx(exact(*case), rel=1e-9, abs=1e-300)


# ---------------------------------------------------------------- whether it is the text


class Fragile(Counting):
    """Texts with "raise" or "wait" fail. A text with "spoil" makes all later ones fail, until it is renewed."""

    def __init__(self):
        self.spoiled = self.broken = False
        self.renewed = 0

    def renew(self):
        self.spoiled, self.renewed = False, self.renewed + 1

    async def reward(self, prompt, completion):
        if self.spoiled or self.broken or "raise" in completion:
            raise KeyError("answer")
        if "cancel" in completion:
            raise asyncio.CancelledError
        if "wait" in completion:
            await asyncio.Event().wait()
        self.spoiled = "spoil" in completion
        return await super().reward(prompt, completion)


def rescoring(text, worker="liar", *, reward_s=0.0, ordinal=7):
    made = group(train_key(ordinal), samples=(sample(text=text, reward=float("7" in text)),))
    made = msgspec.structs.replace(made, reward_s=reward_s)
    return Rescoring(worker, Prompt(text="train 7", answer="7"), made)


@pytest.fixture
def fragile():
    environment = Fragile()
    rescorer = Rescorer(environment, timeout_s=0.1, renew=environment.renew)
    yield environment, rescorer
    rescorer.close()


def scored(rescorer, *rescorings):
    """What comes of them, one after the other."""
    found = []
    for each in rescorings:
        rescorer.add(each)
        deadline = time.monotonic() + 10.0
        while not rescorer.idle:
            assert time.monotonic() < deadline
            found += rescorer.turn(time.monotonic())
    return found


@pytest.mark.parametrize(
    ("text", "why"), [("raise", "KeyError: 'answer'"), ("wait", "longer than the limit")]
)
def test_a_text_that_fails_where_another_worker_s_is_scored_is_told(fragile, text, why):
    good, failed = scored(fragile[1], rescoring("7", "good"), rescoring(text))
    assert (good.failed, failed.worker, failed.wrong) == ("", "liar", "")
    assert failed.failed.startswith("train/7: ") and why in failed.failed
    assert fragile[0].renewed == 3, "each in a fresh one"


def test_an_environment_that_was_never_seen_to_work_says_nothing_about_a_worker(fragile):
    assert scored(fragile[1], rescoring("raise")) == []


def test_an_environment_that_fails_on_what_it_has_scored_before_says_nothing(fragile):
    environment, rescorer = fragile
    scored(rescorer, rescoring("7", "good"))
    environment.broken = True
    assert scored(rescorer, rescoring("7"), rescoring("raise")) == []
    environment.broken = False
    (outcome,) = scored(rescorer, rescoring("7", "late"))
    assert (outcome.wrong, outcome.failed) == ("", "")


def test_a_text_that_spoils_the_environment_does_not_speak_against_the_next_one(fragile):
    found = scored(fragile[1], rescoring("spoil 7"), rescoring("7", "honest"))
    assert [(each.worker, each.wrong, each.failed) for each in found] == [
        ("liar", "", ""),
        ("honest", "", ""),
    ]


def test_a_text_that_its_worker_called_slow_is_no_evidence_where_it_takes_long(fragile):
    found = scored(fragile[1], rescoring("7", "good"), rescoring("wait", reward_s=0.06))
    assert [each.worker for each in found] == ["good"]


def test_an_environment_that_cancels_what_it_is_in_ends_nothing(fragile):
    assert scored(fragile[1], rescoring("cancel")) == []
    (good,) = scored(fragile[1], rescoring("7", "good"))
    assert (good.wrong, good.failed) == ("", "")


def test_a_text_on_which_the_tokenizer_fails_ends_nothing(fragile):
    environment = fragile[0]

    def fits(made):
        if "strange" in made.text:
            raise OverflowError("no such token")
        return True

    rescorer = Rescorer(environment, timeout_s=5.0, fits=fits)
    good, failed = scored(rescorer, rescoring("7", "good"), rescoring("strange 7"))
    assert not good.failed and "OverflowError: no such token" in failed.failed
    rescorer.close()


def test_what_failures_are_held_against_is_another_workers_and_few_are_kept(fragile):
    rescorer = fragile[1]
    scored(rescorer, *(rescoring("7", f"w{each}", ordinal=each) for each in range(5)))
    assert list(rescorer._good) == ["w3", "w4"] and len(rescorer._good) == CONTROLS
    assert rescorer._control("w4").worker == "w3" and rescorer._control("w3").worker == "w4"


# ---------------------------------------------------------------- whose turn it is


def test_a_worker_whose_texts_take_long_waits_and_others_do_not():
    turns = Turns(64, 1 << 20, len)
    for each in range(4):
        turns.add("slow", f"s{each}")
        turns.add("w1", f"a{each}")
        turns.add("w2", f"b{each}")
    order = []
    while turns:
        item = turns.pop()
        order.append(item)
        turns.spent({"s": "slow", "a": "w1", "b": "w2"}[item[0]], 60.0 if item[0] == "s" else 0.01)
    assert order[0] == "s0" and {*order[1:9]} == {f"{w}{each}" for w in "ab" for each in range(4)}
    assert order[9:] == ["s1", "s2", "s3"]


def test_who_has_the_most_waiting_makes_room_and_one_that_was_away_gets_no_arrears():
    turns = Turns(4, 1 << 20, len)
    assert all(turns.add("many", f"m{each}") for each in range(4)) and not turns.add("many", "m4")
    assert turns.add("few", "f0") and turns.add("few", "f1") and not turns.add("few", "f2")
    assert len(turns) == 4
    turns.spent("many", 100.0)
    turns.spent("few", 100.0)
    assert turns.pop() == "m0"
    turns.spent("many", 1.0)
    turns.add("new", "n0")
    assert turns.pop() == "f0", "as much as the least of those that wait, not nothing"


def test_who_comes_while_nobody_waits_is_not_favoured_over_one_that_was_always_there():
    turns = Turns(64, 1 << 20, len)
    for each in range(100):  # alone: its queue is empty whenever its turn has begun
        turns.add("old", f"o{each}")
        turns.pop()
        turns.spent("old", 1.0)
    turns.add("new", "n0")
    turns.add("old", "o100")
    turns.add("new", "n1")
    assert turns.pop() == "n0"
    turns.spent("new", 5.0)
    assert turns.pop() == "o100", "a hundred seconds of the new one are not waited for"


def test_what_is_too_large_is_passed_over_and_sizes_are_counted():
    turns = Turns(64, 10, len)
    assert turns.add("w1", "12345678") and not turns.add("w2", "123") and turns.add("w2", "12")
    turns.pop()
    assert turns.add("w2", "12345678")


# ---------------------------------------------------------------- what becomes of the worker


def test_a_worker_whose_texts_can_not_be_scored_is_quarantined_and_the_honest_one_is_not():
    verify = msgspec.structs.replace(QUICK, rescore_share=1.0)
    play = attached(verify=verify, rescoring_salt="salt")
    play.join("liar"), play.join("honest")
    for each in range(60):
        play._post(play.control.rescored(Outcome("honest", train_key(each), ""), play.now))
    for each in range(5):
        outcome = Outcome("liar", train_key(100 + each), "", f"train/{100 + each}: KeyError: 'answer'")
        play._post(play.control.rescored(outcome, play.now))
        state = standing(play, "liar").state if standing(play, "liar") else "good"
        assert state == ["good", "suspect", "suspect", "suspect", "quarantined"][each]
    assert "5 of its 5 groups could not be scored again, of others 0 of 60" in standing(play, "liar").reason
    assert standing(play, "honest") is None and play.status().refused["reward_fails"] == 5


def test_by_default_three_failures_are_the_least_and_a_window_holds_them():
    assert 1 < VerifyConfig().rescore_wrong <= WINDOW


def test_the_rescorer_gives_one_outcome_for_each_group_that_is_known(fragile):
    rescorer = fragile[1]
    for each in (rescoring("7", "good"), rescoring("raise"), rescoring("8", "good")):
        rescorer.add(each)
    found = {(each.worker, bool(each.failed), bool(each.wrong)) for each in outcomes(rescorer, 3)}
    assert found == {("good", False, False), ("liar", True, False)} and rescorer.idle
