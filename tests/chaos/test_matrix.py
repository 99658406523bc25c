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
    "later life": 16,
    "later life, large": 12,
    "reader from nothing": 10,
    "reader from an older version": 8,
    "damaged": 3,
    "bits": 8,
    "two trainers": 4,
}
"""Of the kills of a suite one in so many is played here; the others are all played."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SUITES)
def test_no_wrong_byte_and_the_run_goes_on(
    name: str, chaos_forks: Forks, seaweed: S3Server, tmp_path: Path
) -> None:
    bench = Bench(seaweed, chaos_forks, tmp_path, parts=PARTS.get(name, 1))
    SUITES[name](bench)
    assert bench.cases
    assert not bench.failures, "\n".join(
        f"{case.kind}: {case.name}: {case.failure}" for case in bench.failures
    )
