"""A part of a full version, read by ranges from real stores: with tiles of their real size, over several requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from async_rl.errors import Corrupt
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.weights.codec import TILE
from async_rl.weights.config import WeightsConfig
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.subscriber import Subscriber
from tests.servers import S3Server
from tests.weights_support import History, state_of

CONFIG = WeightsConfig(fetch_part_bytes=5 << 20)  # two tiles to a request
SHAPES = {"a.weight": (6, TILE // 2 + 100), "a.norm": (300,), "b.weight": (3, TILE)}
# One tensor parallel rank's: some rows, from somewhere in a tile to somewhere in another; what is small, whole.
NEEDS = {"a.weight": (TILE + 7, 2 * TILE + 9), "a.norm": (0, 300), "b.weight": (2 * TILE, 3 * TILE)}
NEEDED_BYTES = 2 * (2 * TILE + 300 + TILE)


@pytest.fixture(params=["file", "seaweedfs"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    if request.param == "file":
        url = (tmp_path / "a run").as_uri()
    else:
        server: S3Server = request.getfixturevalue("seaweed")
        server.activate(monkeypatch)
        url = server.new_url()
    with closing(open_store(url, StoreConfig(part_bytes=5 << 20, retry_limit_s=30))) as opened:
        yield opened


def test_a_part_of_a_full_version_comes_by_ranges_and_is_verified(
    store: ObjectStore, tmp_path: Path
) -> None:
    history = History(tmp_path, store, SHAPES, pack_bytes=9 << 20)
    manifest = history.full(history.random(1))
    assert len(manifest.way.packs) == 2
    with closing(Subscriber(store, history.run, tmp_path / "part", CONFIG, NEEDS)) as reader:
        local = reader.fetch(manifest)
        assert local.fetched_bytes == NEEDED_BYTES
        here = state_of(history.run, local.shards)
        for name, (start, stop) in NEEDS.items():
            there = history.states[0][name].reshape(-1)
            assert np.array_equal(here[name].reshape(-1)[start:stop], there[start:stop]), name
        assert not here["b.weight"].reshape(-1)[: 2 * TILE].any(), "what is not needed is a hole"
        following = history.delta(history.changed(0.001, 2))
        moved = state_of(history.run, reader.fetch(following).shards)
        assert np.array_equal(moved["b.weight"][2], history.states[1]["b.weight"][2])

    tiles = FullTiles(history.run, manifest.way, "it")
    number = manifest.way.weight_map["b.weight"]
    wanted = list(tiles.in_pack(number))[-1]
    key = manifest.way.packs[number].key
    data = bytearray(store.get(key))
    data[wanted.offset + wanted.size // 2] ^= 4
    store.put(key, bytes(data))
    with closing(Subscriber(store, history.run, tmp_path / "damaged", CONFIG, NEEDS)) as reader:
        with pytest.raises(Corrupt, match=f"{key} in .*differs from its digest, twice"):
            reader.fetch(manifest)
        assert reader.needed_versions == ()
    elsewhere = {"b.weight": (0, 2 * TILE)}  # the damaged tile is not needed, and so not read
    with closing(Subscriber(store, history.run, tmp_path / "elsewhere", CONFIG, elsewhere)) as reader:
        assert reader.fetch(manifest).fetched_bytes == 4 * TILE
