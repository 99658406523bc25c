"""How a rank of the trainer ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from async_rl.cli import trainer
from async_rl.cli.runfile import check_model, read_run_file
from async_rl.errors import ConfigError, TrainingError


class Left(BaseException):
    """The process has ended."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the rank does: "run", or the message of the error that it raises."""
    plan = ["run"]

    def run_rank(**_: object) -> None:
        if plan[0] != "run":
            raise TrainingError(plan[0])

    def leave(status: int) -> None:
        raise Left(status)

    stub = ModuleType("workers.trainer")
    stub.run_rank = run_rank  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workers.trainer", stub)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RANK", "1")
    return plan


def as_rank(tmp_path: Path, more: str = "") -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[run]\nstore = "file://{tmp_path}/run"\n[model]\npath = "{tmp_path}"\n{more}')
    trainer._under_torchrun(read_run_file(run_file, ()), run_file, "tcp://127.0.0.1:1", "latest", ())


def test_a_model_that_is_not_there_is_noticed_before_anything_starts(tmp_path: Path) -> None:
    run_file, model = tmp_path / "run.toml", tmp_path / "model"
    run_file.write_text(f'[run]\nstore = "file://{tmp_path}/run"\n[model]\npath = "{model}"\n')

    def said() -> str:
        done = CliRunner().invoke(trainer.command, [str(run_file)])
        assert isinstance(done.exception, ConfigError) and "save_pretrained" in done.exception.hint
        return done.exception.message

    assert said() == f"model.path = '{model}' is no model: nothing is there"
    model.mkdir()
    assert said().endswith("it has no config.json")
    (model / "config.json").write_text("{}")
    assert said().endswith("it has no *.safetensors")
    (model / "model.safetensors").touch()
    check_model(str(model))


def test_a_rank_of_several_whose_work_is_done_ends_without_the_interpreters_teardown(
    work: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Left) as left:
        as_rank(tmp_path)
    assert left.value.args == (0,)


def test_a_single_rank_ends_as_any_program(
    work: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    as_rank(tmp_path)


def test_a_rank_that_failed_says_so(
    work: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    work[0] = "its loss is not finite"
    with pytest.raises(TrainingError, match="not finite"):
        as_rank(tmp_path)


def test_a_choice_that_looks_like_a_mistake_is_told_once_by_the_first_rank(
    work: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    as_rank(tmp_path, '[loss]\nname = "reinforce"\n')
    assert "corrects for nothing" not in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    as_rank(tmp_path, '[loss]\nname = "reinforce"\n')
    assert capsys.readouterr().err.count("corrects for nothing, and max_lag = 2") == 1
    as_rank(tmp_path)
    assert capsys.readouterr().err == ""
