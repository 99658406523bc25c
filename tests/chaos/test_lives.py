"""The kill matrix of the control plane, thinned: one story with a kill of each kind. `python -m tests.chaos.lives`
plays all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.lives import play

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_starts")]

KILLS = (
    "orchestrator write:half 9",
    "orchestrator send-Ack:after 4",
    "trainer optimizer:after 7",
    "rollout send-GroupDone:after 6",
)


@pytest.mark.timeout(300)
def test_what_was_acknowledged_is_trained_once_whoever_is_killed(
    tmp_path: Path, s3_url: str, tiny_model: Path
) -> None:
    outcome = play(KILLS, tmp_path, s3_url, tiny_model, steps=12)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.counts["steps repeated"] >= 1
