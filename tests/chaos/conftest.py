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
def on_seaweed(seaweed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seaweed.activate(monkeypatch)
