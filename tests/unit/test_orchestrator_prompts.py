"""What is wrong with the prompts is said before the orchestrator is bound."""

from __future__ import annotations

import pytest

from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.errors import ConfigError, EnvironmentFailed
from async_rl.wire import Message, Prompt
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.prompts import check_prompts, prompt_of
from orchestrator.server import run_orchestrator
from tests.orchestration import Counting

EVAL, NO_EVAL = EvalConfig(every=1), EvalConfig(every=0)


class Broken(Counting):
    def __init__(self, answer):
        self.answer = answer

    def prompt(self, split, ordinal):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def jsonl(path, **args):
    return make_environment(EnvironmentConfig(name="jsonl", args={"path": str(path), **args}))


def test_a_missing_file_ends_the_process_before_it_listens(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl") as refused:
        run_orchestrator(
            environment=jsonl(tmp_path / "missing.jsonl"),
            environment_config=EnvironmentConfig(),
            sampling=SamplingConfig(),
            config=OrchestratorConfig(bind="tcp://127.0.0.1:0"),
            evaluation=NO_EVAL,
            seed=0,
            spool=tmp_path / "spool",
            address_file=tmp_path / "address",
        )
    assert refused.value.hint == "check environment.args.path"
    assert not (tmp_path / "address").exists()


def test_the_held_out_prompts_are_looked_at_where_there_are_evaluations(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n')
    environment = jsonl(tmp_path / "q.jsonl", eval_fraction=0)
    check_prompts(environment, NO_EVAL)
    with pytest.raises(ConfigError, match="eval split"):
        check_prompts(environment, EVAL)


def test_a_prompt_that_no_worker_could_read_is_named_and_not_leased_for_ever(monkeypatch):
    monkeypatch.setattr("orchestrator.prompts.MOST_CHARS", 20)
    short = Prompt(text="2+2?", answer="4", info={"level": "1"})
    assert prompt_of(Broken(short), "train", 3) == short
    for long in (Prompt(text="x" * 21), Prompt(messages=(Message("user", "x" * 20),), answer="4")):
        with pytest.raises(
            EnvironmentFailed, match="train prompt 3: 21 characters are over the limit of 20"
        ):
            prompt_of(Broken(long), "train", 3)


@pytest.mark.parametrize(
    ("answer", "says", "hint"),
    [
        (RuntimeError("no luck today"), "train prompt 3: RuntimeError: no luck today", "every ordinal"),
        (
            EnvironmentFailed("the disk is full", hint="free some"),
            "prompt 3: the disk is full",
            "free some",
        ),
        ("a question", "'a question' is no async_rl.wire.Prompt", "every ordinal"),
    ],
)
def test_whatever_else_an_environment_does_is_told_in_its_own_words(answer, says, hint):
    with pytest.raises(EnvironmentFailed, match="'counting'") as failed:
        prompt_of(Broken(answer), "train", 3)
    assert says in failed.value.message and hint in failed.value.hint
