"""Long prompts are trained as often as they are asked, however often those who work on them die."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.bias import GUARDS, play, without

SEED = 3


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_deaths_of_workers_and_trainers_take_no_prompt_away_for_its_length(tmp_path):
    world = play(SEED, tmp_path / "spool")
    long, short = world.table(long=True), world.table(long=False)
    assert world.failures() == []
    assert world.counts["long leases lost"] > 20 and world.counts["ends of the trainer"] > 3
    assert long.lost == short.lost == 0
    assert long.trained + long.in_hand + long.dropped_for_lag == long.reached > 30


@pytest.mark.parametrize("guard", GUARDS)
def test_where_what_is_interrupted_is_given_up_it_is_seen_in_the_lengths(guard, tmp_path):
    with without(guard):
        world = play(SEED, tmp_path / "spool")
    assert world.table(long=True).lost + world.table(long=False).lost > 0
