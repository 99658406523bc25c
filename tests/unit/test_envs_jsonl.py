"""The task over a user's own JSONL file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.envs import Environment, EnvironmentConfig, make_environment
from async_rl.envs.jsonl import split_prompts
from async_rl.errors import ConfigError, EnvironmentFailed
from async_rl.wire import Message, Prompt


def jsonl(path: Path, **args: object) -> Environment:
    return make_environment(EnvironmentConfig("jsonl", {"path": str(path), **args}))


def written(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return written(
        tmp_path / "q.jsonl",
        [{"prompt": f"q{i}", "answer": str(i), "level": i, "kind": "x"} for i in range(20)],
    )


def half(prompt: Prompt, completion: str) -> float:
    return 0.5 if completion == prompt.answer else 0.0


async def later(prompt: Prompt, completion: str) -> float:
    await asyncio.sleep(0)
    return float(prompt.info["level"])


def broken(prompt: Prompt, completion: str) -> float:
    raise RuntimeError("the judge is out of office")


def wordy(prompt: Prompt, completion: str) -> str:
    return "good"


def score(env: Environment, completion: str = "", **fields: object) -> float:
    return asyncio.run(env.reward(Prompt(**fields), completion))


# ---------------------------------------------------------------- prompts


def test_every_pass_gives_every_prompt_once_in_an_order_of_its_own(questions: Path):
    env = jsonl(questions)
    passes = [
        [env.prompt("train", turn * 18 + i).messages[0].content for i in range(18)] for turn in range(3)
    ]
    assert all(len(set(names)) == 18 for names in passes)
    assert passes[0] != passes[1] != passes[2]
    held_out = {env.prompt("eval", i).messages[0].content for i in range(4)}
    assert len(held_out) == 2 and not held_out & set(passes[0])


def test_prompts_are_the_same_when_asked_again_from_the_middle(questions: Path):
    one, other = jsonl(questions, seed=3), jsonl(questions, seed=3)
    expected = [one.prompt("train", i) for i in range(50)]
    assert [other.prompt("train", i) for i in reversed(range(50))] == expected[::-1]


def test_other_fields_reach_the_reward_function_as_strings(questions: Path):
    prompt = jsonl(questions).prompt("train", 0)
    assert prompt.info == {"level": prompt.answer, "kind": "x"}


def test_a_line_may_hold_messages_and_fields_can_be_renamed(tmp_path: Path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = written(tmp_path / "q.jsonl", [{"turns": chat, "gold": 4}, {"q": "1+1?", "gold": 2}])
    env = jsonl(path, messages="turns", prompt="q", answer="gold", system="Think.", eval_fraction=0)
    found = [env.prompt("train", i) for i in range(2)]
    assert {(prompt.messages, prompt.answer) for prompt in found} == {
        ((Message("system", "Be brief."), Message("user", "2+2?")), "4"),
        ((Message("system", "Think."), Message("user", "1+1?")), "2"),
    }


@given(st.lists(st.text("abc", max_size=3), min_size=1), st.floats(0, 0.9))
def test_a_prompt_that_occurs_twice_is_on_one_side(texts: list[str], fraction: float):
    prompts = [Prompt(messages=(Message("user", text),), answer=str(i)) for i, text in enumerate(texts)]
    splits = split_prompts(prompts, fraction)
    train, held_out = ({p.messages for p in splits[side]} for side in ("train", "eval"))
    assert not train & held_out
    assert sorted(splits["train"] + splits["eval"], key=lambda p: int(p.answer)) == prompts
    assert (len(held_out) > 0) == (fraction > 0)


def test_bad_lines_are_named_by_number_with_what_is_wrong(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"prompt": "fine"}\n\n{"prompt": "no end\n["a"]\n{"question": "x", "answer": "y"}\n{"prompt": 3}\n'
        '{"messages": [{"role": "user"}]}\n'
    )
    with pytest.raises(ConfigError) as refused:
        jsonl(path).prompt("train", 0)
    text = str(refused.value)
    assert "5 bad lines" in text and str(path) in text
    for number, words in [
        (3, "not a JSON object"),
        (4, "not a JSON object"),
        (5, "'question', 'answer'"),
        (6, "found int"),
        (7, "role and content"),
    ]:
        line = next(line for line in text.splitlines() if f"line {number}:" in line)
        assert words in line


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_a_file_that_is_missing_or_empty_is_refused_when_prompts_are_needed(
    tmp_path: Path, content: str | None
):
    path = tmp_path / "q.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"q\.jsonl"):
        jsonl(path).prompt("train", 0)


def test_a_split_without_prompts_is_refused(questions: Path):
    with pytest.raises(ConfigError, match="eval split"):
        jsonl(questions, eval_fraction=0).prompt("eval", 0)


# ---------------------------------------------------------------- rewards


def test_a_worker_scores_without_the_prompt_file(tmp_path: Path):
    env = jsonl(tmp_path / "only-on-the-trainers-machine.jsonl")
    assert score(env, " Paris\n", answer="Paris") == 1.0
    assert score(env, "London", answer="Paris") == 0.0


def test_plain_and_async_reward_functions_are_called_with_the_prompt(questions: Path):
    assert score(jsonl(questions, reward=f"{__name__}:half"), "7", answer="7") == 0.5
    assert score(jsonl(questions, reward=f"{__name__}:later"), info={"level": "0.25"}) == 0.25


def test_what_a_reward_function_raises_goes_through_and_no_number_is_an_error(questions: Path):
    with pytest.raises(RuntimeError, match="out of office"):
        score(jsonl(questions, reward=f"{__name__}:broken"))
    with pytest.raises(EnvironmentFailed, match="returned 'good'"):
        score(jsonl(questions, reward=f"{__name__}:wordy"))


def test_the_reward_range_is_the_users(questions: Path):
    assert jsonl(questions, reward_min=-1.0, reward_max=2.0).reward_range == (-1.0, 2.0)
    with pytest.raises(ConfigError, match="reward_min"):
        jsonl(questions, reward_min=1.0)


def test_a_missing_reward_function_is_refused_with_the_modules_own_ones(questions: Path):
    with pytest.raises(ConfigError) as refused:
        jsonl(questions, reward=f"{__name__}:halve")
    assert "did you mean 'half'" in str(refused.value) and "broken" in str(refused.value)
    assert "Path" not in refused.value.hint, "what the module imports is no choice"


@pytest.mark.parametrize("reward", ["os:system", "subprocess:Popen", "sys:path"])
def test_what_is_no_function_is_no_reward(questions: Path, reward: str):
    with pytest.raises(ConfigError, match="is not a function"):
        jsonl(questions, reward=reward)
