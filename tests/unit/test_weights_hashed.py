"""The digests of tiles that ranks make together are those that one rank makes, however the rows are cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.weights import changes, full_tiles, hashed
from async_rl.weights.codec import digest_of
from async_rl.weights.hashed import sum_of, tiles_of_state
from async_rl.weights.ranks import Solo
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.shards import Part, rows_of
from tests.weights_support import MemoryStore, shapes, write_model_dir

TILE = 8
BITS = np.random.default_rng(7).integers(0, 1 << 16, 200, np.uint16)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunInfo:
    for module in (changes, full_tiles, hashed):
        monkeypatch.setattr(module, "TILE", TILE)
    return ensure_run(MemoryStore(), write_model_dir(tmp_path), shapes())


class Rows:
    """Shards and State of one rank in one: its rows of every tensor, cut as fully_shard cuts them."""

    on_device = False

    def __init__(self, run: RunInfo, rank: int, ranks: int) -> None:
        self._parts, self._bits = [], {}
        place = 0
        for index, spec in enumerate(run.tensors):
            rows, row = spec.shape[0], int(np.prod(spec.shape[1:]))
            start = min(rank * -(-rows // ranks), rows) * row
            count = rows_of(rank, rows, ranks) * row
            if count:
                self._parts.append(Part(index, start, count, place))
            self._bits[spec.name] = BITS[place + start : place + start + count]
            place += rows * row

    def parts(self) -> Iterator[Part]:
        yield from self._parts

    def bits(self, name: str) -> np.ndarray:
        return self._bits[name]


class Together:
    """Ranks in threads."""

    def __init__(self, rank: int, said: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(said)
        self._said, self._barrier = said, barrier

    def gather(self, mine: bytes) -> list[bytes]:
        self._said[self.rank] = mine
        self._barrier.wait(10)
        return list(self._said)


def tiles_by(run: RunInfo, ranks: int) -> list[np.ndarray]:
    """What each of them finds."""
    said, barrier = [b""] * ranks, threading.Barrier(ranks)

    def one(rank: int) -> np.ndarray:
        rows: Any = Rows(run, rank, ranks)
        together = Solo() if ranks == 1 else cast("Any", Together(rank, said, barrier))
        return tiles_of_state(together, run, rows, rows)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_a_tile_has_the_digest_of_its_elements(run: RunInfo) -> None:
    (tiles,) = tiles_by(run, 1)
    expected, place = [], 0
    for spec in run.tensors:
        size = int(np.prod(spec.shape))
        for start in range(0, size, TILE):
            stop = min(start + TILE, size)
            expected.append(digest_of(BITS[place + start : place + stop], place + start))
        place += size
    assert tiles.tolist() == expected
    assert sum_of(tiles) == digest_of(BITS[:place], 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_so_it_has_when_its_rows_lie_on_several_ranks(run: RunInfo, ranks: int) -> None:
    (alone,) = tiles_by(run, 1)
    for tiles in tiles_by(run, ranks):
        assert np.array_equal(tiles, alone)


def test_a_tile_that_is_cut_further_is_added_up(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = tiles_by(run, 1)
    monkeypatch.setattr(changes, "TILE", 3)
    monkeypatch.setattr(hashed, "TILE", TILE)
    (tiles,) = tiles_by(run, 1)
    assert sum_of(tiles) == sum_of(alone)
