"""`async-rl lag` as scripts use it: its exit status, its JSON, its two sources."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from async_rl.cli import lag
from async_rl.cli.lag import OVER, command
from async_rl.store.file import FileStore
from async_rl.view.model import View, WorkerView
from async_rl.weights.readers import ReaderBeat, write_beat
from tests.unit.test_orchestrator_link import Running
from tests.weights_support import History


@pytest.fixture
def bucket(tmp_path):
    """A run of three versions, steps 0, 10 and 20, and a worker that serves the first."""
    store = FileStore(f"file://{tmp_path}/run")
    history = History(tmp_path, store)
    history.full(history.random())
    history.delta(history.changed(0.1, 1))
    history.delta(history.changed(0.1, 2))
    write_beat(store, ReaderBeat("w1", (0,), 300.0, version=0, cluster="far", state="serving"))
    return f"file://{tmp_path}/run"


def run(*argv):
    return CliRunner().invoke(command, argv)


def test_from_the_bucket_alone_the_lag_is_shown_and_can_fail_a_script(bucket):
    shown = run("--store", bucket)
    assert shown.exit_code == 0 and "not fetching" in shown.output and "w1" in shown.output
    assert run("--store", bucket, "--fail-over", "20").exit_code == 0
    late = run("--store", bucket, "--fail-over", "19")
    assert late.exit_code == OVER and "w1 20" in late.output


def test_the_json_of_both_sources_has_the_same_fields_and_null_for_what_is_unknown(bucket):
    running = Running()
    try:
        asked = json.loads(run("--json", "--orchestrator", running.address).output)
    finally:
        running.stop()
    looked = json.loads(run("--json", "--store", bucket).output)
    assert set(asked) == set(looked) and asked["schema"] == looked["schema"] == 1
    assert asked["trainer"] == "absent" and looked["trainer"] is None and looked["dropped"] is None
    assert looked["workers"][0]["lag"] == 20 and looked["workers"][0]["leases"] is None


def test_watching_ends_the_first_time_that_the_limit_is_exceeded(bucket, monkeypatch):
    monkeypatch.setattr(lag, "STORE_REFRESH_S", 0.0)
    views = iter(
        View(source=bucket, workers=(WorkerView(worker="w", state="serving", version=1, lag=behind),))
        for behind in (0, 2, 3, 9)
    )
    monkeypatch.setattr("async_rl.view.bucket.BucketWatch.look", lambda self: next(views))
    done = run("--store", bucket, "--json", "--watch", "--fail-over", "2")
    assert done.exit_code == OVER and "w 3" in done.output
    assert [
        json.loads(line)["workers"][0]["lag"] for line in done.output.splitlines() if line[0] == "{"
    ] == [
        0,
        2,
        3,
    ]


def test_who_is_late_is_said_without_what_its_name_does_to_a_terminal(bucket, monkeypatch):
    late = WorkerView(worker="w\x1b[2J\n\u202e", state="serving", version=1, lag=9)
    monkeypatch.setattr(
        "async_rl.view.bucket.BucketWatch.look", lambda self: View(source=bucket, workers=(late,))
    )
    done = run("--store", bucket, "--fail-over", "2")
    assert done.exit_code == OVER and "w\ufffd[2J\ufffd\ufffd 9" in done.stderr


def test_a_store_without_a_run_is_an_error(tmp_path):
    assert run("--store", f"file://{tmp_path}/nothing").exit_code == 1
