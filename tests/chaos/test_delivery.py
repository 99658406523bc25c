"""Every end of the orchestrator and of the trainer, thinned; and that each guard is missed by some of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.chaos.delivery import GUARDS, Case, play, points_of, without

ONE_IN = 16
KEPT = (0.0, 0.5, 1.0)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def cases(who: str) -> list[Case]:
    kept = KEPT if who == "orchestrator" else (0.0,)
    return [Case(who, point, share) for point in range(1, points_of(who) + 1) for share in kept]


def failures(case: Case, folder: Path) -> list[str]:
    return play(case, folder / f"{case.who}-{case.point}-{case.kept}").failures()


def test_a_run_in_which_nobody_ends_trains_every_group_once(tmp_path):
    assert play(None, tmp_path / "spool").failures() == []


@pytest.mark.parametrize("who", ["orchestrator", "trainer"])
def test_whoever_ends_wherever_nothing_acknowledged_is_lost_or_trained_twice(who, tmp_path):
    played = cases(who)[:: ONE_IN if who == "orchestrator" else 1]
    assert len(played) > 30
    found = {case: failures(case, tmp_path) for case in played}
    assert not {case: each for case, each in found.items() if each}


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard, tmp_path):
    """The cases of this test are named by what ends where; at least one of them must fail without the guard."""
    with without(guard):
        played = cases("trainer") + cases("orchestrator")[::ONE_IN]
        for case in played:
            try:
                found = failures(case, tmp_path)
            except (AssertionError, ValueError) as error:
                found = [str(error)]
            if found:
                return
    pytest.fail(f"nothing misses {guard!r} in {len(played)} cases")
