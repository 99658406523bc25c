"""The demo's own parts; tests of whole runs start the processes."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from async_rl.cli import demo_view
from async_rl.cli.demo import LORA, fresh_folder, run_tables, run_toml
from async_rl.cli.demo_view import Progress, Results, WeightSync, line, summary
from async_rl.cli.plot import Metrics
from async_rl.cli.runfile import read_run_file
from async_rl.config import load_toml
from async_rl.envs import make_environment
from async_rl.errors import ConfigError
from async_rl.weights.report import Row
from async_rl.wire import EvalScore, Status, WorkerStatus
from workers.tiny_model import TASKS

ROOT = Path(__file__).parents[2]
PLACES = {"run": {"store": "s3://b/demo"}, "model": {"path": "/m"}}


def status(step: int = 3, **fields: object) -> Status:
    worker = WorkerStatus(
        "demo-1", "demo", "serving", 2, 1, 0.5, -1, 0.0, 2310.0, 4, 32, 0, 17, 1, 0.01, 0.2
    )
    values: dict[str, object] = {
        "run": "r",
        "incarnation": 1,
        "trainer": "training",
        "step": step,
        "newest_version": step,
        "newest_version_step": step,
        "newest_version_age_s": 0.1,
        "max_lag": 4,
        "batch_groups": 32,
        "buffered": 5,
        "outstanding": 6,
        "admitted_limit": 100,
        "trained_groups": 96,
        "lag_p50": 1.0,
        "lag_p95": 2.0,
        "lag_max": 3,
        "lag_counts": {1: 5},
        "dropped": {},
        "reward": 0.5,
        "evals": (EvalScore(0, 0, 0.38, 64),),
        "workers": (worker,),
        "uptime_s": 9.0,
    }
    return Status(**(values | fields))  # type: ignore[arg-type]


def shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return out.getvalue()


# ---------------------------------------------------------------- folder and run file


def test_every_run_gets_a_folder_of_its_own(tmp_path: Path):
    wanted = tmp_path / "runs" / "demo"
    assert fresh_folder(wanted) == wanted
    assert fresh_folder(wanted) == wanted, "it is still empty"
    (wanted / "run.toml").write_text("")
    assert fresh_folder(wanted) == tmp_path / "runs" / "demo-2"
    (tmp_path / "runs" / "demo-2" / "x").write_text("")
    assert fresh_folder(wanted) == tmp_path / "runs" / "demo-3"


def test_a_folder_that_can_not_be_made_is_an_error_of_ours(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--dir"):
        fresh_folder(tmp_path / "file" / "demo")


def test_the_run_file_it_writes_reads_back_as_what_was_meant(tmp_path: Path):
    overrides = ("trainer.steps=7", 'environment.args.alphabet=ab"c', "eval.every=3")
    path = tmp_path / "run.toml"
    path.write_text(run_toml(run_tables(PLACES, overrides)))
    config = read_run_file(path)
    assert config.run.store == "s3://b/demo" and config.model.path == "/m"
    assert config.trainer.steps == 7 and config.eval.every == 3
    assert config.environment.args == {"min_length": 4, "max_length": 4, "alphabet": 'ab"c'}
    assert config.sampling.group_size == load_toml(ROOT / "examples/demo.toml")["sampling"]["group_size"]


def test_with_adapters_the_rest_of_the_run_is_the_same_and_what_is_set_still_counts(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(run_toml(run_tables(PLACES, ())))
    whole = read_run_file(path)
    path.write_text(run_toml(run_tables(PLACES, (*LORA, "model.lora_alpha=8"))))
    adapted = read_run_file(path)
    assert whole.model.lora_rank == 0 and adapted.model.lora_rank == 16 and adapted.model.lora_alpha == 8
    assert adapted.trainer.learning_rate > whole.trainer.learning_rate
    learning_rate = whole.trainer.learning_rate
    assert msgspec.structs.replace(adapted.trainer, learning_rate=learning_rate) == whole.trainer


def test_the_example_is_the_run_file_that_comes_with_the_package():
    assert (ROOT / "examples/demo.toml").read_bytes() == (ROOT / "async_rl/cli/demo.toml").read_bytes()


def test_the_demos_task_is_the_one_the_tiny_model_is_warmed_up_on():
    environment = read_run_file(ROOT / "examples/demo.toml").environment
    ours, warmed_up = make_environment(environment), make_environment(TASKS["reverse"].environment)
    assert [ours.prompt("train", i) for i in range(50)] == [warmed_up.prompt("train", i) for i in range(50)]


def test_the_jsonl_example_works_in_its_own_folder(monkeypatch):
    monkeypatch.chdir(ROOT / "examples/jsonl")
    monkeypatch.syspath_prepend(str(ROOT / "examples/jsonl"))
    config = read_run_file(Path("run.toml"), ("run.store=s3://b/q", "model.path=m"))
    environment = make_environment(config.environment)
    assert environment.prompt("train", 0).answer and environment.prompt("eval", 0).answer


# ---------------------------------------------------------------- what it shows


def test_a_status_fits_in_a_line_with_reward_lag_and_speed():
    assert line(status(), 120) == (
        "step 3/120  version 3  reward 0.500  held out 0.380 (v0)  lag p50 1 max 3 of 4  "
        "demo-1 serving v2 2310 tokens/s"
    )
    assert line(status(0, reward=float("nan"), evals=(), workers=()), 120).endswith("of 4  no worker yet")
    starting = status(0, reward=float("nan"), evals=(), workers=(), trainer="absent")
    assert line(starting, 120).endswith("of 4  the trainer is starting"), "whom it waits for"


def test_without_a_terminal_a_line_comes_every_five_seconds_and_no_control_codes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(demo_view.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False), 120) as progress:
        for _ in range(21):
            progress.show(status())
            now[0] += 0.5
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in out.getvalue()
    assert lines[1].startswith("[   5 s] step 3/120")


def test_on_a_terminal_the_live_picture_shows_progress_and_the_workers():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=120), 120) as progress:
        progress.waiting()
        progress.show(status())
    assert "step 3 of 120" in out.getvalue() and "demo-1" in out.getvalue()


def results(**fields: object) -> Results:
    steps = [{"step": n, "version": n, "tokens": 1000, "reward/mean": 0.5} for n in (1, 2)]
    evals = [{"eval/version": v, "eval/reward": r} for v, r in ((0, 0.38), (2, 0.94))]
    values: dict[str, object] = {
        "folder": Path("/runs/demo [1]"),
        "store_url": "s3://async-rl/demo",
        "plot": Path("/runs/demo [1]/p.png"),
        "metrics": Metrics(steps, evals),
        "status": status(),
        "wall_s": 301.4,
        "objects": 9,
        "object_bytes": 12_300_000,
        "sync": WeightSync(2, 1_000_000, 2_000_000, 0.4),
    }
    return Results(**(values | fields))  # type: ignore[arg-type]


def test_the_summary_says_what_came_out_where_it_is_and_how_to_look_further():
    text = shown(summary(results(), 0.9))
    for words in (
        "0.380 at version 0, 0.940 at the end",
        "5 min 1 s",
        "p50 1  p95 2  max 3 optimizer steps (limit 4)",
        "3 (0 to 2)",
        "2 deltas of 0.500 MB on average, 4.0x less than full versions (2.00 MB); 40 % of the weights change",
        "2,000 tokens",
        "9 objects, 12.3 MB",
        "/runs/demo [1]/trainer/metrics.jsonl",
        "async-rl store up --dir '/runs/demo [1]/store'",
        "async-rl weights ls --store s3://async-rl/demo",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_a_run_that_was_not_measured_says_so():
    empty = results(metrics=Metrics([], []), status=None)
    assert empty.reward_end is None and "not measured at version 0" in shown(summary(empty, 0.9))


@pytest.mark.parametrize(("measured", "end"), [(1, None), (2, 0.94), (3, 0.94)])
def test_the_end_is_the_last_measurement_unless_it_is_of_an_older_version(measured: int, end: float | None):
    """3: the last step was merged into a version after its line was written."""
    steps = [{"step": 2, "version": 2, "tokens": 1, "reward/mean": 0.5}]
    evals = [{"eval/version": v, "eval/reward": r} for v, r in ((0, 0.38), (measured, 0.94))]
    assert results(metrics=Metrics(steps, evals)).reward_end == end


def test_the_summary_counts_deltas_but_no_empty_ones_and_no_full_versions():
    def row(kind: str, nbytes: int, changed: int | None) -> Row:
        part = None if changed is None else changed / 100
        return Row(1, 1, 0, 0, kind, nbytes, 1, changed, part, None, (), False, False, "", 0.0)

    sync = WeightSync.of(
        [row("full", 200, None), row("delta", 0, 0), row("delta", 40, 10), row("delta", 60, 30)], 200
    )
    assert sync == WeightSync(2, 100, 200, 0.2)
    assert WeightSync.of([], 200).describe() == "no deltas"
