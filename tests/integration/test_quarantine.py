"""Real processes: one of two workers lies about its logprobs. It is found and stopped, and the run learns from the
other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from async_rl.errors import Malformed
from async_rl.procs import Child
from async_rl.wire import Standing
from orchestrator.framing import committed_bodies
from orchestrator.records import Arrived, Quarantined, Record, decode_record
from tests import liar
from tests.runs import LocalRun

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]

LIMIT_S = 100.0


def start_liar(run: LocalRun, name: str) -> Child:
    folder = run.folder / name
    folder.mkdir()
    argv = [sys.executable, liar.__file__, "rollout", "--store", run.store_url]
    argv += ["--orchestrator", run.address, "--worker-id", name, "--set", "rollout.engine=reference"]
    return run.fleet.start(name, argv, cwd=folder, log_path=run.folder / f"{name}.log")


def standings(run: LocalRun) -> dict[str, Standing]:
    status = run.status()
    return {each.worker: each for each in status.standings} if status is not None else {}


def journal(run: LocalRun) -> list[Record]:
    (spool,) = (run.trainer_folder / "out").glob("spool-*")
    bodies = [body for path in sorted(spool.glob("*.log")) for body in committed_bodies(path.read_bytes())]
    try:
        return [decode_record(body) for body in bodies]
    except Malformed as error:  # pragma: no cover
        raise AssertionError("the spool can't be read") from error


def test_of_two_workers_the_one_that_lies_is_quarantined_and_the_run_learns_from_the_other(
    tmp_path: Path, tiny_model: Path
):
    settings = {
        "sampling": {"group_size": 8, "max_tokens": 12},
        "orchestrator": {"batch_groups": 8},
        "trainer": {"steps": 400},
    }
    url = f"file://{tmp_path / 'run'}"
    with LocalRun(tmp_path, url, tiny_model, **settings) as run:
        trainer, honest = run.start_trainer(), run.start_worker("honest")
        lying = start_liar(run, "lying")
        children = (trainer, honest, lying)
        run.wait(
            "the liar to be in quarantine",
            lambda: "lying" in (now := standings(run)) and now["lying"].state == "quarantined",
            LIMIT_S,
            *children,
        )
        found = standings(run)["lying"]
        assert found.reason.startswith("ratio +0.4") or found.reason.startswith("ratio +0.5"), found
        goal = run.steps() + 5
        run.wait("five more steps", lambda: run.steps() >= goal, LIMIT_S, *children)
        assert standings(run)["honest"].state == "good"
        run.wait("the liar to hear of it", lambda: "in quarantine" in run.log("lying"), 30.0, *children)
        assert run.log("lying").count("in quarantine") < 5, "it neither spins nor floods its log"
        records = journal(run)
    at = next(index for index, each in enumerate(records) if isinstance(each, Quarantined))
    assert {each.worker for each in records[:at] if isinstance(each, Arrived)} == {"honest", "lying"}
    assert {each.worker for each in records[at:] if isinstance(each, Arrived)} == {"honest"}
