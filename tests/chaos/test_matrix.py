"""The crash matrix, thinned: every suite with a part of its kills. `python -m tests.chaos.matrix` plays all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.forks import Forks
from tests.chaos.matrix import SUITES, Bench
from tests.servers import S3Server

pytestmark = pytest.mark.slow

PARTS = {
    "first life": 8,
    "first life, large": 5,
    "later life": 45,
    "later life, large": 20,
    "first life, two ranks": 24,
    "later life, two ranks": 90,
    "reader from nothing": 35,
    "reader from an older version": 28,
    "damaged": 4,
    "bits": 8,
    "two trainers": 6,
}
"""Of the kills of a suite one in so many is played here; the others are all played."""

SMALL_PARTS = {"later life": 57, "reader from an older version": 30, "damaged": 7}
"""The same with the small codec; the others have nothing to do with it."""


LONG = {"first life, large", "later life, large", "later life, two ranks", "reader from an older version"}
"""Left to `make chaos`: others of the same kind are played."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] if each in LONG else []) for each in SUITES]
)
def test_no_wrong_byte_and_the_run_goes_on(
    name: str, chaos_forks: Forks, seaweed: S3Server, tmp_path: Path
) -> None:
    play(name, Bench(seaweed, chaos_forks, tmp_path, parts=PARTS.get(name, 1)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SMALL_PARTS)
def test_the_same_with_deltas_that_need_the_weights(
    name: str, chaos_forks: Forks, seaweed: S3Server, tmp_path: Path
) -> None:
    play(name, Bench(seaweed, chaos_forks, tmp_path, parts=SMALL_PARTS[name], codec="small"))


def play(name: str, bench: Bench) -> None:
    SUITES[name](bench)
    assert bench.cases
    assert not bench.failures, "\n".join(
        f"{case.kind}: {case.name}: {case.failure}" for case in bench.failures
    )
