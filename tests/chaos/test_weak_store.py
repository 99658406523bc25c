"""Trainers on a store that does not enforce conditional puts (JuiceFS' gateway, an old MinIO): real processes that
race, one that sleeps through its successor's start, and answers that are lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.forks import Forks
from tests.chaos.matrix import play_two_trainers, play_zombie
from tests.chaos.s3_proxy import S3Proxy
from tests.chaos.world import Trainer, World, Wrong
from tests.servers import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

SETTLE = {"settle_s": 2.0}
ROUNDS = 20
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def weak_forks(juicefs: S3Server) -> Iterator[Forks]:
    with Forks(juicefs.env) as forks:
        yield forks


@pytest.fixture
def world(
    on_seaweed: None,
    juicefs: S3Server,
    weak_forks: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    juicefs.activate(monkeypatch)
    with World(juicefs, weak_forks, tmp_path, probe=True, store=SETTLE) as world:
        yield world


def goes_on(trainer: Trainer) -> bool:
    """Publishes one more version; whether it could."""
    while not trainer.committed:  # the one it begins with
        if trainer.hear() is None:
            return False
    before = len(trainer.committed)
    try:
        trainer.child.link.tell({"do": "publish", "count": 1})
    except (BrokenPipeError, ConnectionResetError):
        return False
    while len(trainer.committed) == before:
        if trainer.hear() is None:
            return False
    return True


def race(world: World, delay_s: float) -> None:
    # Whoever begins with nothing begins here, in whichever incarnation.
    world.lives.update(dict.fromkeys(range(3), (-1, 0)))
    first = world.trainer()
    threading.Event().wait(delay_s)  # the race's seed, no wait for anything
    racers = [first, world.trainer()]
    for _ in range(ROUNDS):
        going = [each for each in racers if goes_on(each)]
        if len(going) < 2:
            break
    (winner,) = going
    (loser,) = [each for each in racers if each is not winner]
    loser.listen()
    assert "Fenced" in loser.error and not winner.error, (loser.error, winner.error)
    winner.publish(2)
    assert max(world.truth()) == winner.committed[-1]
    world.check_newest("after the race")
    world.check_recent("after the race")


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 30))])
def test_of_two_trainers_that_race_exactly_one_goes_on(world: World, seed: int) -> None:
    race(world, random.Random(seed).choice([0.0, 0.0, 0.02, 0.1, 0.5, 1.9, 2.1]))


@pytest.mark.parametrize(
    "point",
    [
        "PUT versions/+2.json: before",
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("PUT versions/+2.json: after", "PUT packs/+2-own-0-0: before")
        ),
    ],
)
def test_a_zombie_that_wakes_spoils_nothing_of_the_newer_trainer(world: World, point: str) -> None:
    play_two_trainers(world, point)


@pytest.mark.long
def test_a_zombie_that_commits_between_a_claim_and_its_first_version_is_ignored(world: World) -> None:
    play_zombie(world)


def test_without_the_probe_the_zombie_does_spoil_them(
    on_seaweed: None,
    juicefs: S3Server,
    weak_forks: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the tests above can fail: a trainer that trusts the store replaces what others wrote."""
    juicefs.activate(monkeypatch)
    with World(juicefs, weak_forks, tmp_path, probe=False, store=SETTLE) as world, pytest.raises(Wrong):
        play_two_trainers(world, "PUT versions/+2.json: before")


def test_lost_answers_are_no_conflict_with_oneself(world: World, juicefs: S3Server) -> None:
    with S3Proxy(juicefs.endpoint) as proxy:
        for part in ("run.json", "incarnations/", "versions/", "versions/"):
            proxy.once("lose", "PUT", part)
        trainer = world.live([{"do": "publish", "count": 3}], store={"endpoint_url": proxy.endpoint})
        assert not trainer.error and len(trainer.committed) == 4, trainer.error
        assert proxy.pending() == 0
    world.check_newest("after lost answers")
