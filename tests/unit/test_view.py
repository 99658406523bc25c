"""The view of a run: why a worker lags, who is over the limit, and what the orchestrator's Status becomes."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from async_rl import wire
from async_rl.cli.lag_view import histogram, render_view
from async_rl.view.model import View, WorkerView, clusters_of, of_status, over
from async_rl.view.why import REASONS, why
from tests.orchestration import TRAINER, Play

SERVING = WorkerView(
    worker="w", state="serving", version=3, lag=0, lag_versions=0, age_s=5.0, oldest_s=1.0, last_seen_s=0.5
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "current"),
        ({"lag_versions": 1}, "not fetching"),
        ({"lag_versions": 1, "lag_s": 30.0}, "not fetching"),
        ({"lag_versions": 1, "lag_s": 0.8}, "unknown"),  # of a heartbeat of 2 s: it may fetch it already
        ({"lag_versions": 1, "fetching_version": 4}, "fetching"),
        ({"lag_versions": 1, "state": "updating", "running": 3, "tokens_per_s": 40.0}, "applying"),
        ({"lag_versions": 1, "state": "updating", "running": 3, "tokens_per_s": 0.0}, "paused"),
        ({"oldest_s": 6.0}, "long samples"),
        ({"lag_versions": 2, "lacks": 5}, "no way"),
        ({"lag_versions": 0, "lacks": 5}, "current"),
        ({"lag_versions": 2, "lacks": 5, "fetching_version": 6}, "fetching"),
        ({"state": "starting", "version": None, "fetching_version": 4}, "starting"),
        ({"state": "draining", "last_seen_s": 99.0}, "draining"),
        ({"state": "quarantined", "last_seen_s": 9.0}, "quarantined"),
        ({"last_seen_s": 5.1, "lag_versions": 1, "fetching_version": 4}, "silent"),
        ({"state": "gone", "last_seen_s": 99.0}, "gone"),
        ({"lag_versions": None}, "unknown"),
    ],
)
def test_why_a_worker_lags(changes, reason):
    assert why(msgspec.structs.replace(SERVING, **changes), 2.0) == reason
    assert reason in REASONS


def test_where_no_heartbeat_is_promised_nobody_is_silent():
    assert why(msgspec.structs.replace(SERVING, last_seen_s=50.0), None) == "current"


def test_a_lag_that_nobody_knows_is_over_every_limit_and_a_worker_that_makes_nothing_is_not():
    workers = (
        WorkerView(worker="fine", state="serving", version=2, lag=2),
        WorkerView(worker="late", state="serving", version=1, lag=3),
        WorkerView(worker="stranger", state="serving", version=9, lag=None),
        WorkerView(worker="gone", state="gone", version=0, lag=50),
        WorkerView(worker="kept", state="quarantined", version=0, lag=50),
        WorkerView(worker="starting", state="starting"),
    )
    view = View(source="here", workers=workers)
    assert [each.worker for each in over(view, 2)] == ["late", "stranger"]
    assert [each.worker for each in over(view, 3)] == ["stranger"]


def test_a_cluster_is_as_late_as_its_latest_worker_that_is_neither_gone_nor_in_quarantine():
    a1 = WorkerView(worker="a1", cluster="a", state="serving", version=3, lag=1, lag_versions=1, lag_s=2.0)
    a1 = msgspec.structs.replace(a1, tokens_per_s=10.0, sync_bytes=5, idle_s=1.0, serving_s=10.0)
    a2 = msgspec.structs.replace(a1, worker="a2", version=1, lag=4, lag_versions=3, lag_s=9.0, idle_s=5.0)
    a3 = msgspec.structs.replace(a1, worker="a3", state="gone", version=0, lag=9, tokens_per_s=0.0)
    b = WorkerView(worker="b", cluster="b")
    a4 = msgspec.structs.replace(a3, worker="a4", state="quarantined")
    first, second = clusters_of((a2, b, a3, a4, a1))
    assert (first.cluster, first.workers, first.quarantined, first.gone) == ("a", 3, 1, 1)
    assert (first.oldest_version, first.newest_version) == (1, 3)
    assert (first.lag, first.lag_versions, first.lag_s) == (4, 3, 9.0)
    assert (first.tokens_per_s, first.sync_bytes, first.idle) == (20.0, 20, 0.3)
    assert (second.lag, second.tokens_per_s, second.idle) == (None, None, None)


def test_the_orchestrator_knows_the_lag_in_steps_in_versions_and_in_seconds():
    play = Play(max_lag=9)
    play.attach()
    worker = play.join(version=0)
    play.say(TRAINER, wire.Published(1, 1, 2), after=3.0)
    play.say(TRAINER, wire.Published(1, 2, 4), after=4.0)
    beat = wire.Heartbeat(0, "serving", (), 2, 0.25, 80.0, 5, 1, 900, 0.01, 0.5, 3.0, 1.5, (7,))
    play.say(worker, beat, after=1.0)
    view = of_status(play.status(), "here")
    (seen,) = view.workers
    assert (seen.lag, seen.lag_versions, seen.lag_s) == (4, 2, 5.0)
    assert (seen.fetching_version, seen.fetched_fraction, seen.why) == (2, 0.25, "fetching")
    assert (seen.cache_used, seen.oldest_s, seen.idle_s, seen.sync_bytes) == (0.5, 3.0, 1.5, 900)
    play.beat(worker, version=2, after=10.0)
    (seen,) = of_status(play.status()).workers
    assert (seen.lag, seen.lag_versions, seen.lag_s, seen.serving_s) == (0, 0, 0.0, 10.0)


def test_versions_of_the_trainers_life_before_count_as_far_as_its_branch_goes():
    play = Play(max_lag=9)
    play.attach(version=1, version_step=1, step=1)
    play.say(TRAINER, wire.Published(1, 2, 2, 1))
    play.say(TRAINER, wire.Published(1, 3, 3, 2))
    play.attach(incarnation=2, step=2, version=4, version_step=2, parent=2, peer=b"trainer:2")
    play.join(version=1)
    (seen,) = of_status(play.status()).workers
    assert seen.lag_versions == 2, "2 and 4; 3 lies on another branch"


def test_who_waits_for_whom_is_said():
    play = Play(batch_groups=1, max_lag=0)
    assert of_status(play.status()).leasing_waits_for == "a trainer"
    play.attach()
    play.ask(0)
    view = of_status((play.wait(4.0), play.status())[1])
    assert (view.trainer_waited_s, view.trainer_here_s) == (4.0, 4.0)
    assert (view.batch_waits_for, view.leasing_waits_for) == ("0 of 1 groups", "")
    worker = play.join()
    (lease,) = play.leases(worker)
    assert "1 of 1 groups are admitted" in of_status(play.status()).leasing_waits_for
    play.deliver(worker, lease)
    play.wait(6.0)
    view = of_status(play.status())
    assert (view.trainer_waited_s, view.trainer_here_s, view.batch_waits_for) == (4.0, 10.0, "")


def test_a_resumed_trainer_repeats_its_steps_before_anything_new_is_leased():
    play = Play(batch_groups=1, max_lag=0)
    play.attach()
    worker = play.join()
    (lease,) = play.leases(worker)
    play.deliver(worker, lease)
    play.ask(0)
    play.attach(incarnation=2, step=0, version=1, peer=b"trainer:2")
    assert "repeats 1 steps first" in of_status(play.status()).leasing_waits_for


def test_connections_that_the_door_refuses_are_shown_with_the_messages():
    play = Play()
    play.control._turned_away = {"key_unknown": 3}
    play.say(b"stranger", wire.Bye("x"))
    play.say(b"stranger", wire.Credit(1, 0))
    assert play.status().refused == {"unknown": 1, "connection_key_unknown": 3}


def test_a_histogram_has_a_bar_for_each_lag_and_one_for_the_rest():
    assert histogram({0: 8, 1: 4, 3: 1}).plain == "█▄ ▁  lag 0 to 3   0: 62%  1: 31%  3: 8%"
    assert "23+: 50%" in histogram({0: 1, 400: 1}).plain


def test_the_picture_of_an_unknown_run_has_no_invented_number():
    view = View(source="s3://b/r", workers=(WorkerView(worker="w1"),), clusters=())
    out = io.StringIO()
    Console(width=100, file=out).print(render_view(view))
    row = next(line for line in out.getvalue().splitlines() if line.startswith("w1"))
    assert row.split() == ["w1", "unknown", *"-------"]
    assert "what only the orchestrator knows is not shown" in out.getvalue()


def test_names_that_are_markup_or_escapes_are_shown_as_they_are_and_break_nothing():
    worker = WorkerView(
        worker="[/x]\x1b[2J", cluster="[red]", state="updating", running=1, oldest_s=float("inf")
    )
    late = WorkerView(
        worker="[bold", cluster="[/]", state="[/]\n", pause_s=float("nan"), why="paused", running=1
    )
    view = View(source="", run="[/run]", workers=(worker, late), clusters=clusters_of((worker, late)))
    out = io.StringIO()
    Console(width=200, file=out).print(render_view(view))
    shown = out.getvalue()
    assert all(name in shown for name in ("[/x]", "[red]", "[bold", "[/run]", "[/]")), shown
    assert "\x1b" not in shown
