"""Rewards scored again, beside the loop, by an environment that may be slow, block or raise."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.envs.base import is_deterministic
from async_rl.wire import Array, Prompt
from orchestrator.judge import Judge
from orchestrator.rescoring import MOST_LOST, MOST_WAITING, Rescorer, Rescoring, difference
from orchestrator.texts import token_reader
from tests.orchestration import Counting, group, sample, train_key

RANGE = (0.0, 1.0)
ROOT = Path(__file__).parents[2]


def answered(*texts, rewards):
    samples = [sample(text=text, reward=reward) for text, reward in zip(texts, rewards, strict=True)]
    return group(train_key(7), samples=tuple(samples))


def rescoring(*texts, rewards, worker="w1"):
    return Rescoring(worker, Prompt(text="train 7", answer="7"), answered(*texts, rewards=rewards))


def outcomes(rescorer, count, limit_s=10.0):
    """The next ones, as the orchestrator's loop gets them."""
    found, deadline = [], time.monotonic() + limit_s
    pause = threading.Event()
    while len(found) < count:
        assert time.monotonic() < deadline, f"{found} after {limit_s} s"
        found += rescorer.turn(time.monotonic())
        pause.wait(0.002)
    return found


@pytest.fixture
def rescorer():
    made = Rescorer(Counting(), timeout_s=5.0)
    yield made
    made.close()


def test_rewards_that_fit_have_nothing_wrong_and_others_are_named(rescorer):
    rescorer.add(rescoring("it is 7", "8", rewards=(1.0, 0.0)))
    rescorer.add(rescoring("it is 7", "8", rewards=(1.0, 1.0), worker="w2"))
    good, bad = outcomes(rescorer, 2)
    assert (good.worker, good.wrong) == ("w1", "")
    assert bad.worker == "w2" and bad.key == train_key(7)
    assert bad.wrong == "train/7 sample 1: reward 1, and 0 when scored again"
    assert rescorer.idle


def test_rounding_is_no_difference_and_a_number_that_is_none_is_one():
    made = answered("7", rewards=(0.3,))
    assert difference(made, [0.1 + 0.2], RANGE) == ""
    assert difference(made, [0.30001], RANGE)
    assert difference(made, [0.30001], (-1000.0, 1000.0)) == ""
    assert difference(made, [float("nan")], RANGE)


# ---------------------------------------------------------------- in a process of its own

STRANGE = """
import os, re

class Environment:
    name = "strange"
    reward_range = (0.0, 1.0)

    def prompt(self, split, ordinal):
        raise NotImplementedError

    async def reward(self, prompt, completion):
        print("what it prints is not an answer")
        if completion == "ends":
            os._exit(3)
        if completion == "raises":
            raise ValueError("no such number")
        if completion.endswith("b"):
            re.fullmatch("(a|aa)+c", completion)  # for ever, and nobody else in the process goes on meanwhile
        return float(completion == prompt.answer)
"""


@pytest.fixture
def strange(tmp_path, monkeypatch):
    (tmp_path / "strange_judge.py").write_text(STRANGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvironmentConfig("strange_judge:Environment")
    judge = Judge(make_environment(config), config)
    made = Rescorer(judge, timeout_s=3.0)
    yield made
    made.close()
    judge.close()


def test_a_judge_in_its_process_says_what_the_environment_says(strange):
    strange.add(rescoring("7", "8", rewards=(1.0, 0.0)))
    strange.add(rescoring("7", "raises", rewards=(1.0, 0.0)))
    strange.add(rescoring("7", "ends", rewards=(1.0, 0.0)))
    strange.add(rescoring("7", "8", rewards=(1.0, 1.0), worker="w2"))
    found = outcomes(strange, 4)
    (bad,) = [each for each in found if each.worker == "w2"]
    good, raised, ended = [each for each in found if each.worker == "w1"]
    assert (good.wrong, good.failed) == ("", "")
    assert "ValueError: no such number" in raised.failed and "ended while it scored" in ended.failed
    assert bad.wrong == "train/7 sample 1: reward 1, and 0 when scored again"


def test_a_text_that_makes_the_judge_work_for_ever_holds_up_nobody(strange):
    strange.add(rescoring("a" * 60 + "b", rewards=(0.0,)))
    strange.add(rescoring("7", rewards=(1.0,)))
    turns = 0  # of the loop beside it, until the second one is scored
    while not (found := strange.turn(time.monotonic())):
        turns += 1
        threading.Event().wait(0.002)
        assert turns < 20_000
    assert found[0].wrong == "" and turns > 100


# ---------------------------------------------------------------- texts and tokens


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of four words, an end token, and one that only its settings call special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"it": 0, "is": 1, "7": 2, "8": 3, "<end>": 4, "<think>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="8"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": "<end>",
        "additional_special_tokens": [{"content": "<think>"}],
        "model_max_length": 9,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize(
    ("tokens", "text", "fitting"),
    [
        ([0, 1, 2], "it is 7", True),
        ([0, 1, 2, 4], "it is 7", True),
        ([0, 1, 2, 4], "it is 7<end>", True),
        ([5, 0, 1, 2], "it is7", True),
        ([0, 1, 3], "it is 7", False),
        ([0, 1, 2, 3], "it is 7", False),
        ([0], "", False),
        ([4], "", True),
    ],
)
def test_a_text_is_what_its_tokens_say_but_for_spaces_and_special_tokens(model, tokens, text, fitting):
    fits = token_reader(model)
    assert fits(sample(tokens=Array.of(tokens, "<i4"), text=text)) is fitting


def test_a_right_answer_that_the_tokens_do_not_say_is_no_right_answer(model):
    made = group(train_key(7), samples=(sample(tokens=Array.of([0, 1, 3], "<i4"), text="it is 7"),))
    assert difference(made, [1.0], RANGE) == ""
    found = difference(made, [1.0], RANGE, token_reader(model))
    assert found == "train/7 sample 0: its text is not what its tokens say"


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_without_a_tokenizer_texts_are_the_workers_word(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert token_reader(tmp_path) is None


@pytest.mark.slow
def test_what_a_worker_decodes_fits_its_tokens(tiny_model):
    """With transformers, as the worker does it."""
    from workers.rollout_groups import Texts

    texts, fits = Texts(tiny_model), token_reader(tiny_model)
    ids = list(range(40))
    made = sample(tokens=Array.of(ids, "<i4"), text=texts.completion(ids))
    assert fits(made)
    assert not fits(msgspec.structs.replace(made, text=made.text + "a"))


class Slow(Counting):
    """Raises for "raise", waits for ever for "wait", blocks for "block"."""

    def __init__(self):
        self.free = threading.Event()

    async def reward(self, prompt, completion):
        if completion == "raise":
            raise KeyError("answer")
        if completion == "wait":
            await asyncio.Event().wait()
        if completion == "block":
            self.free.wait()
        return await super().reward(prompt, completion)


@pytest.mark.parametrize("text", ["raise", "wait"])
def test_an_environment_that_raises_or_takes_too_long_says_nothing_about_the_worker(text):
    rescorer = Rescorer(Slow(), timeout_s=0.05)
    rescorer.add(rescoring(text, rewards=(1.0,)))
    rescorer.add(rescoring("7", rewards=(0.0,), worker="w2"))
    (outcome,) = outcomes(rescorer, 1)
    assert outcome.worker == "w2"
    rescorer.close()


def test_one_that_blocks_is_left_behind_and_after_some_nothing_is_scored_any_more():
    environment = Slow()
    rescorer = Rescorer(environment, timeout_s=1.0)
    for lost in range(MOST_LOST):
        rescorer.add(rescoring("block", rewards=(1.0,)))
        rescorer.turn(100.0 * lost)
        assert rescorer.turn(100.0 * lost + 5.9) == [] and not rescorer.idle
        assert rescorer.turn(100.0 * lost + 6.1) == [] and rescorer.idle
    rescorer.add(rescoring("7", rewards=(1.0,)))
    assert rescorer.idle
    environment.free.set()


def test_while_many_wait_further_ones_are_passed_over():
    environment = Slow()
    rescorer = Rescorer(environment, timeout_s=30.0)
    rescorer.add(rescoring("block", rewards=(0.0,)))
    rescorer.turn(time.monotonic())
    for _ in range(2 * MOST_WAITING):
        rescorer.add(rescoring("7", rewards=(1.0,)))
    environment.free.set()
    assert len(outcomes(rescorer, 1 + MOST_WAITING)) == 1 + MOST_WAITING and rescorer.idle
    rescorer.close()


def test_an_environment_says_whether_its_rewards_are_always_the_same():
    assert is_deterministic(Counting()) and is_deterministic(make_environment(EnvironmentConfig("reverse")))
    for deterministic in (True, False):
        args = {"path": "nowhere.jsonl", "deterministic": deterministic}
        assert is_deterministic(make_environment(EnvironmentConfig("jsonl", args))) is deterministic


def test_a_group_knows_its_worker_by_its_lease():
    made = msgspec.structs.replace(rescoring("7", rewards=(0.0,)), worker="w9")
    rescorer = Rescorer(Counting(), timeout_s=5.0)
    rescorer.add(made)
    assert outcomes(rescorer, 1)[0].worker == "w9" and made.group.worker == "w1"
    rescorer.close()


def test_a_group_that_was_only_just_begun_hears_of_the_end(recwarn):
    """Otherwise its coroutine is never awaited, and Python says so in whatever runs next."""
    rescorer = Rescorer(Counting(), timeout_s=5.0)
    before, free = set(threading.enumerate()), threading.Event()
    rescorer._thread().call_soon_threadsafe(
        free.wait
    )  # so that the begin and the end come in one turn of its loop
    (thread,) = set(threading.enumerate()) - before
    rescorer.add(rescoring("7", rewards=(1.0,)))
    rescorer.turn(0.0)
    rescorer.close()
    free.set()
    thread.join(10.0)
    del rescorer
    gc.collect()
    assert not [str(each.message) for each in recwarn if "never awaited" in str(each.message)]
