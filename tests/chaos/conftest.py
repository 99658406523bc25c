"""The warm process, once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.forks import Forks
from tests.servers import S3Server


@pytest.fixture(scope="session")
def chaos_forks(seaweed: S3Server) -> Iterator[Forks]:
    with Forks(seaweed.env) as forks:
        yield forks


@pytest.fixture(autouse=True)
def on_seaweed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those that use it; others start no server."""
    if "seaweed" in request.fixturenames:
        request.getfixturevalue("seaweed").activate(monkeypatch)
