"""Hostile bytes, thinned: `python -m tests.chaos.fuzz` plays a million."""

from __future__ import annotations

import logging

import pytest

from async_rl import wire
from async_rl.errors import Malformed
from orchestrator import acceptance, control
from tests.chaos.fuzz import GROWTH_MB, HUGE, Fuzz, rss_mb, seeds


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_message_ends_an_orchestrator_fills_its_memory_or_passes_a_wrong_group():
    fuzz = Fuzz(seed=7)
    fuzz.play_messages(2_000)
    before = rss_mb()
    fuzz.play_messages(20_000)
    assert rss_mb() - before < GROWTH_MB
    assert fuzz.counts["Ack"] > 100 and fuzz.counts["Nack"] > 2000, "both sides of the rules were met"
    assert set(map(type, map(wire.decode, seeds()))) >= set(wire.AnyMessage.__args__) - {wire.Status}


def test_the_fuzz_finds_an_orchestrator_that_does_not_look(monkeypatch):
    monkeypatch.setattr(control, "examine", lambda made, need, versions: ((0,),) * len(made.samples))
    with pytest.raises((AssertionError, acceptance.Malformed, ValueError)):
        Fuzz(seed=7).play_messages(2_000)


@pytest.mark.parametrize("header", HUGE)
def test_a_size_that_is_not_there_is_refused_before_anything_is_made_for_it(header):
    before = rss_mb()
    for frame in seeds():
        for at in range(len(frame)):
            try:
                wire.decode(frame[:at] + header + frame[at:])
            except Malformed:
                continue
    assert rss_mb() - before < GROWTH_MB
