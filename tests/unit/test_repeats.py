"""Whether a repeated step made the weights that it made before: who is compared with whom."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from async_rl.algo.staleness import Node, Tree
from async_rl.store.file import FileStore
from async_rl.weights.lineage import Manifest, Way, sealed, version_key
from workers.repeats import Repeats, made_before

TREE = {
    4: Node(3, 4, "four"),  # the checkpoint's
    5: Node(4, 5, "five"),
    6: Node(5, 6, "six"),
    7: Node(4, 4, "four"),  # a second life
    8: Node(7, 5, "five"),
    9: Node(2, 2, "two"),  # a third, from an older checkpoint, with other groups since
    10: Node(9, 4, "another four"),
    11: Node(10, 5, "another five"),
}


def test_a_step_is_compared_with_the_newest_life_that_had_the_same_past():
    assert made_before(Tree(TREE), 4, 5, first=12) == 8
    assert made_before(Tree(TREE), 7, 5, first=12) == 8
    assert made_before(Tree(TREE), 7, 6, first=12) == 6, "the same policy as 4, of another life"
    assert made_before(Tree(TREE), 4, 5, first=8) == 5
    assert made_before(Tree(TREE), 10, 5, first=12) == 11
    assert made_before(Tree(TREE), 4, 9, first=12) is None


def manifest(version: int, step: int, digest: str, parent: int) -> Manifest:
    return sealed(
        Manifest(version, step, 0, "n", parent, "bfloat16", Way(-1, (), 0), digest=digest, created=0.0)
    )


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """Version 1 is the checkpoint's; 2 and 3 were made of it."""
    store = FileStore(f"file://{tmp_path}")
    for version, digest in enumerate(["zero", "one", "two", "three"]):
        made = manifest(version, version, digest, version - 1)
        store.put(version_key(version), msgspec.json.encode(made))
    return store


def test_other_weights_are_told_once_with_both_digests(store: FileStore, caplog: pytest.LogCaptureFixture):
    repeats = Repeats(store, 4, 1)
    with caplog.at_level(logging.WARNING):
        repeats.committed(manifest(4, 1, "one", 1))
        repeats.expect(2)
        repeats.expect(3)
        repeats.committed(manifest(5, 2, "two", 4))
        assert repeats.different == 0 and not caplog.records
        repeats.committed(manifest(6, 3, "drei", 5))
        repeats.committed(manifest(7, 3, "trois", 5))
    assert repeats.different == 2 and len(caplog.records) == 1
    said = caplog.text
    assert all(word in said for word in ("drei", "three", "too old")), said


def test_a_step_with_groups_of_its_own_is_compared_with_nothing(
    store: FileStore, caplog: pytest.LogCaptureFixture
):
    repeats = Repeats(store, 4, 1)
    repeats.committed(manifest(5, 2, "other", 4))
    fresh = Repeats(store, 0, -1)
    fresh.expect(1)
    fresh.committed(manifest(0, 1, "other", -1))
    assert repeats.different == fresh.different == 0 and not caplog.records
