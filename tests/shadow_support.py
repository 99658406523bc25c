"""A run with several ways to its versions, and somebody who reads it: for tests of the shadow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.weights.codec import encode_tile
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import DeltaPackWriter
from async_rl.weights.lineage import Manifest, Way
from async_rl.weights.subscriber import LocalVersion, Subscriber
from tests.weights_support import History, MemoryStore, ScriptedStore, same_state, state_of

CONFIG = WeightsConfig(fetch_parallel=2)


class Branches(History):
    """Versions 0 (full) to 4, a skip delta 0 -> 4 that is cheaper than the way over 1, 2, 3, and an anchor of 3."""

    store: ScriptedStore

    def __init__(self, tmp_path: Path, *, further: bool = True) -> None:
        super().__init__(tmp_path, ScriptedStore(MemoryStore()), tile=7, pack_tiles=2)
        self.full(self.random(1))
        for seed in range(4):
            self.delta(self.changed(0.3, seed=seed))
        if further:
            self.skip_key = self.skip(0, 4)
            self.anchor_key = self.anchor(3)
        self.cache = tmp_path / "cache"

    @property
    def objects(self) -> dict[str, bytes]:
        inner = self.store.inner
        assert isinstance(inner, MemoryStore)
        return inner.objects

    def reader(self) -> Subscriber:
        return Subscriber(self.store, self.run, self.cache, CONFIG)

    def at(self, version: int) -> Subscriber:
        """A reader that holds `version`."""
        reader = self.reader()
        self.exact(reader.fetch(self.manifests[version]))
        return reader

    def exact(self, local: LocalVersion) -> None:
        assert same_state(state_of(self.run, local.shards), self.states[local.version])

    def keys(self, part: str) -> list[str]:
        return [key for key in sorted(self.objects) if part in key]

    def crafted(
        self, version: int, change: Callable[[list[DeltaPackWriter]], None], **fields: Any
    ) -> Manifest:
        """A delta from the newest version whose packs are whole and yet not what they should be."""
        base, state = self.newest, self.changed(0.3, seed=99)
        writers = [DeltaPackWriter()]
        place = 0
        for index, spec in enumerate(self.run.tensors):
            old, new = self.states[base][spec.name].reshape(-1), state[spec.name].reshape(-1)
            coded = encode_tile(old, new, place)
            if coded is not None:
                writers[0].add(index, 0, len(old), coded)
            place += math.prod(spec.shape)

        def way(number: int) -> Way:
            change(writers)
            packs = []
            for place, writer in enumerate(writers):
                pieces, pack = writer.finish(f"packs/{number:010}-00000000-crafted-{place}")
                self.store.put(pack.key, b"".join(pieces))
                packs.append(pack)
            size = sum(pack.size for pack in packs)
            return Way(base, tuple(packs), size, {}, sum(writer.changed for writer in writers))

        return self.commit(state, way, **fields)
