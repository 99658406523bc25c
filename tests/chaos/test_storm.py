"""A storm of half a minute, and that the control plane's guards are missed by real processes too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Still
from tests.chaos.lives import play as play_story
from tests.chaos.storm import Plan, play
from tests.servers import S3Server

pytestmark = pytest.mark.slow

SEED = 5
SECONDS = 20.0

MISSED = {
    "fsync before the ack": ("trainer optimizer:after 8", "orchestrator send-Batch:after 9"),
    "the journal of assignments": ("trainer optimizer:after 7",),
    "one group per key": ("orchestrator send-Ack:before 12",),
}
"""The kills that each guard stands against."""


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.timeout(300)
def test_a_run_in_a_storm_loses_nothing_and_gets_on(
    s3_url: str, seaweed: S3Server, tmp_path: Path, tiny_model: Path
) -> None:
    outcome = play(Plan(SEED, SECONDS, workers=1), tmp_path, s3_url, seaweed, tiny_model)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.counts["trained"] >= 4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("guard", MISSED)
def test_without_a_guard_its_kills_do_harm(
    guard: str, tmp_path: Path, s3_url: str, tiny_model: Path
) -> None:
    """test_lives.py has them with the guard, and nothing is wrong there."""
    try:
        found = play_story(MISSED[guard], tmp_path, s3_url, tiny_model, steps=12, without=guard).failures
    except (TimeoutError, AssertionError) as error:
        found = [str(error)]
    assert [each for each in found if "nobody came" not in each]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_of_two_trainers_one_goes_on(
    s3_url: str, seaweed: S3Server, tmp_path: Path, tiny_model: Path
) -> None:
    outcome = play(Plan(SEED, 0.0, 1, "two_trainers"), tmp_path, s3_url, seaweed, tiny_model)
    assert not outcome.failures, "\n".join(outcome.failures)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_the_fence_the_older_one_does_harm(
    s3_url: str, seaweed: S3Server, tmp_path: Path, tiny_model: Path
) -> None:
    """It goes on for ever, or deletes the checkpoint from which the newer one would resume."""
    with pytest.raises(Still, match="the first trainer to stop|ended by itself"):
        play(Plan(SEED, 0.0, 1, "two_trainers", "the fence"), tmp_path, s3_url, seaweed, tiny_model)
