"""What every environment promises, and the refusals of `make_environment`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.envs import BUILT_IN, Environment, EnvironmentConfig, make_environment
from async_rl.envs.base import Split
from async_rl.envs.reverse import positions_right
from async_rl.errors import ConfigError, EnvironmentFailed
from async_rl.wire import Prompt

GENERATED = {
    "reverse": {"min_length": 2, "max_length": 6, "alphabet": "abcd"},
    "arithmetic": {"max_operand": 30},
}


def environment(name: str, **args: object) -> Environment:
    return make_environment(EnvironmentConfig(name, dict(args)))


def reward(env: Environment, prompt: Prompt, completion: str) -> float:
    return asyncio.run(env.reward(prompt, completion))


def question(prompt: Prompt) -> str:
    return prompt.messages[-1].content


# ---------------------------------------------------------------- generated tasks


@pytest.mark.parametrize("name", GENERATED)
@given(seed=st.integers(0, 2**31), ordinal=st.integers(0, 10**12), split=st.sampled_from(["train", "eval"]))
@settings(max_examples=60, deadline=None)
def test_a_prompt_depends_on_seed_split_and_ordinal_alone(name: str, seed: int, ordinal: int, split: Split):
    args = {**GENERATED[name], "seed": seed}
    one, other = environment(name, **args), environment(name, **args)
    other.prompt("train", 7)  # what was asked before must not matter
    prompt = one.prompt(split, ordinal)
    assert prompt == other.prompt(split, ordinal)
    assert prompt.messages and prompt.answer
    assert reward(one, prompt, prompt.answer) == one.reward_range[1] == 1.0


@pytest.mark.parametrize("name", GENERATED)
def test_no_held_out_problem_is_ever_drawn_for_training_whatever_the_seeds(name: str):
    def drawn(split: Split, seeds: tuple[int, ...], count: int) -> set[str]:
        envs = [environment(name, **GENERATED[name], seed=seed) for seed in seeds]
        return {question(env.prompt(split, ordinal)) for env in envs for ordinal in range(count)}

    train, held_out = drawn("train", (0, 1), 1500), drawn("eval", (2, 3), 300)
    assert len(train) > 300 and len(held_out) > 30
    assert not train & held_out


def test_the_same_strings_are_drawn_on_every_machine_and_in_every_release():
    """A resumed run, perhaps on another machine or a newer Python, must go on with the prompts it left."""
    env = environment("reverse", min_length=3, max_length=5, alphabet="abcdefgh", seed=7)
    assert [question(env.prompt("train", i)) for i in (0, 1, 10**9)] == PINNED_TRAIN
    assert [question(env.prompt("eval", i)) for i in (0, 1, 10**9)] == PINNED_EVAL


PINNED_TRAIN = ["bhdf", "eae", "ggedh"]
PINNED_EVAL = ["cdbe", "ccdd", "gdaad"]


@given(answer=st.text("abc", max_size=8), expected=st.text("abc", min_size=1, max_size=8))
def test_positions_right_is_one_only_for_the_expected_string(answer: str, expected: str):
    score = positions_right(answer, expected)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (answer == expected)
    assert positions_right(answer + "x" * 8, expected) <= score or answer == ""


def test_reverse_gives_partial_credit_by_position_and_none_for_padding():
    assert positions_right("olleh", "olleh") == 1.0
    assert positions_right("ollxx", "olleh") == 0.6
    assert positions_right("olleh" * 2, "olleh") == 0.5
    assert positions_right("", "olleh") == 0.0


def test_reverse_overlooks_spaces_around_the_answer_and_puts_the_instruction_first():
    env = environment("reverse", instruction="Reverse: ")
    prompt = env.prompt("train", 3)
    assert question(prompt) == "Reverse: " + prompt.answer[::-1]
    assert reward(env, prompt, f" {prompt.answer}\n") == 1.0


@given(ordinal=st.integers(0, 10**6))
@settings(deadline=None)
def test_arithmetic_asks_for_the_exact_result(ordinal: int):
    env = environment("arithmetic", max_operand=50)
    prompt = env.prompt("train", ordinal)
    assert question(prompt).endswith("=")
    assert int(prompt.answer) == eval(question(prompt)[:-1])
    assert reward(env, prompt, f" {prompt.answer}") == 1.0
    assert reward(env, prompt, prompt.answer + "0") == 0.0


def test_arithmetic_holds_out_a_sum_together_with_its_mirror_image():
    env = environment("arithmetic", max_operand=12, operators="+*")
    sides: dict[tuple[str, frozenset[str]], set[str]] = {}
    for split in ("train", "eval"):
        for ordinal in range(800):
            problem = question(env.prompt(split, ordinal))[:-1]
            operator = "+" if "+" in problem else "*"
            sides.setdefault((operator, frozenset(problem.split(operator))), set()).add(split)
    assert all(len(found) == 1 for found in sides.values())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("revrse", {}, ["no environment 'revrse'", "did you mean 'reverse'", "arithmetic", "module:Class"]),
        ("reverse", {"minlength": 3}, ["unknown key 'minlength'", "did you mean 'min_length'", "alphabet"]),
        ("reverse", {"min_length": "3"}, ["min_length", "expected `int`, got `str`"]),
        ("reverse", {"min_length": 5, "max_length": 4}, ["min_length 5", "max_length 4"]),
        ("reverse", {"alphabet": "aab"}, ["'aab'", "repeated"]),
        (
            "reverse",
            {"min_length": 1, "max_length": 1, "alphabet": "ab"},
            ["too few different problems", "eval"],
        ),
        ("arithmetic", {"operators": "+/"}, ["unknown operators ['/']", "+, -, *"]),
        ("jsonl", {}, ["path"]),
        ("no_such_module_at_all:Task", {}, ["no module 'no_such_module_at_all'", "current folder"]),
        ("tests.unit.test_envs:Oddity", {}, ["'Oddity' does not exist", "did you mean 'Odd'"]),
        ("tests.unit.test_envs:GENERATED", {}, ["not a class with the methods prompt and reward"]),
        ("subprocess:Popen", {"args": ["touch", "oops"]}, ["'Popen' is not a class with the methods"]),
        ("tests.unit.test_envs:Unranged", {}, ["it has no reward_range"]),
        ("tests.unit.test_envs:Odd", {"sizes": 3}, ["sizes", "valid arguments: size, fail"]),
        (":Odd", {}, ["module:name"]),
    ],
)
def test_what_can_not_be_built_is_refused_with_the_valid_choices(
    name: str, args: dict[str, object], says: list[str]
):
    with pytest.raises(ConfigError) as refused:
        environment(name, **args)
    for words in says:
        assert words in str(refused.value)


class Odd:
    """A user's own environment."""

    name = "odd"
    reward_range = (0.0, 1.0)

    def __init__(self, size: int = 1, fail: bool = False) -> None:
        if fail:
            raise RuntimeError("no luck today")
        self.size = size

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        return Prompt(text=f"{split}{ordinal}" * self.size)

    async def reward(self, prompt: Prompt, completion: str) -> float:
        return len(completion) % 2


class Unranged:
    name = "unranged"

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        return Prompt(text="?")

    async def reward(self, prompt: Prompt, completion: str) -> float:
        return 0.0


def test_a_users_own_class_is_built_with_its_arguments():
    env = environment("tests.unit.test_envs:Odd", size=2)
    assert env.prompt("eval", 3).text == "eval3eval3"
    assert reward(env, env.prompt("eval", 3), "abc") == 1


def test_a_users_class_that_raises_is_named_with_what_it_raised():
    with pytest.raises(EnvironmentFailed, match=r"tests\.unit\.test_envs:Odd.*RuntimeError: no luck today"):
        environment("tests.unit.test_envs:Odd", fail=True)


def test_a_module_whose_import_fails_is_told_apart_from_one_that_is_missing(tmp_path: Path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "raising_task.py").write_text("raise RuntimeError('half done')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match="it needs 'a_package_nobody_has'"):
        environment("broken_task:Task")
    with pytest.raises(ConfigError, match="RuntimeError: half done"):
        environment("raising_task:Task")


def test_building_environments_loads_nothing_heavy():
    code = (
        "import sys; from async_rl.envs import *; make_environment(EnvironmentConfig());"
        "print([m for m in ('torch', 'numpy.random', 'transformers', 'vllm', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in ("[]", "['numpy.random']")


def test_every_built_in_environment_has_the_name_it_is_listed_under():
    assert {name: cls.name for name, cls in BUILT_IN.items()} == {name: name for name in BUILT_IN}
