"""What a reader that needs only some elements fetches of a path: tiles, by ranged gets, each verified by itself.

    delta     its packs' tables, then the tiles that are needed (fetch.py)
    full      the tiles that are needed, of all packs side by side; headers are made, not read
              (versions of runs before format 5 have no digests of tiles: their packs are read and verified whole, and
              of the bytes the needed ones are kept)

All of it lies in sparse files, named and laid out as the whole packs would be. A fetch of a full state that was cut
off goes on where it was: tiles that are in the file are not read again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from async_rl.errors import Corrupt
from async_rl.store.base import ObjectStore
from async_rl.weights.deltas import Tile
from async_rl.weights.fetch import BadPack, Fetcher, PackTiles
from async_rl.weights.files import disk_errors, write_at
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.lineage import Pack, Way
from async_rl.weights.parallel import side_by_side
from async_rl.weights.run import RunInfo
from async_rl.weights.shadow import THREADS, Ranges

__all__ = ["Needed", "mapped_bytes"]

Report = Callable[[int], None]
"""Called with the bytes of packs that are dealt with."""


class Needed:
    """`folder`: where packs lie under their hashes. Used by one thread at a time."""

    def __init__(
        self, store: ObjectStore, run: RunInfo, fetcher: Fetcher, folder: Path, ranges: Ranges
    ) -> None:
        """`ranges`: whole tiles, per tensor."""
        self._store, self._run, self._fetcher = store, run, fetcher
        self._folder, self._ranges = folder, ranges

    def tile(self, tile: Tile) -> bool:
        """Whether a delta's tile is needed. Raises Corrupt for one that is needed in part."""
        start, stop = self._ranges[tile.tensor]
        if tile.start >= stop or tile.start + tile.elements <= start:
            return False
        if tile.start < start or tile.start + tile.elements > stop:
            name = self._run.tensors[tile.tensor].name
            raise Corrupt(
                f"a tile at {tile.start}+{tile.elements} of {name} crosses a multiple of the tile size"
            )
        return True

    def fetch(self, way: Way, what: str, report: Report) -> None:
        """Raises BadPack, Corrupt (naming `what`, where it is the way's description), StoreErrors, WeightsError."""
        if way.base < 0:
            tiles = FullTiles(self._run, way, what)
            with disk_errors(self._folder, way.total_bytes):
                (self._of_full if tiles.known else self._of_whole_packs)(way, tiles, report)
        else:
            self._of_delta(way, report)

    def _file_of(self, pack: Pack) -> Path:
        return self._folder / pack.sha256

    def _of_delta(self, way: Way, report: Report) -> None:
        done = 0
        for pack in way.packs:

            def fetched(now: int, done: int = done) -> None:
                report(done + now)

            with disk_errors(self._folder, pack.size):
                self._fetcher.tiles(pack, self._file_of(pack), self._run.tensors, self.tile, fetched)
            done += pack.size
            report(done)

    def _of_full(self, way: Way, tiles: FullTiles, report: Report) -> None:
        def missing(number: int) -> PackTiles:
            pack = way.packs[number]
            path = self._file_of(pack)
            wanted = list(tiles.in_pack(number, self._ranges))
            if _prepare(path, tiles.header(number), pack.size) and wanted:
                content = mapped_bytes(path)
                wanted = [
                    tile
                    for tile in wanted
                    if not tile.right(content[tile.offset : tile.offset + tile.size])
                ]
            return PackTiles(pack, path, wanted)

        lacking = side_by_side(missing, range(len(way.packs)), THREADS)
        wanted = max(1, sum(tile.size for each in lacking for tile in each.tiles))
        self._fetcher.full_tiles(lacking, lambda now: report(way.total_bytes * now // wanted))

    def _of_whole_packs(self, way: Way, tiles: FullTiles, report: Report) -> None:
        done = 0
        for number, pack in enumerate(way.packs):
            wanted = list(tiles.in_pack(number, self._ranges))
            path, whole = self._file_of(pack), self._folder / f"{pack.sha256}.whole"
            head = tiles.header(number)
            path.unlink(missing_ok=True)
            _prepare(path, head, pack.size)
            if wanted:
                self._fetcher.whole([(pack, whole)], lambda now, done=done: report(done + now))  # type: ignore[misc]
                try:
                    content = mapped_bytes(whole)
                    if content[: len(head)] != head:
                        raise BadPack(
                            pack.key, f"{pack.key} in {self._store.url} has another header than it should"
                        )
                    for tile in wanted:
                        write_at(path, tile.offset, content[tile.offset : tile.offset + tile.size])
                finally:
                    whole.unlink()
            done += pack.size
            report(done)


def _prepare(path: Path, head: bytes, size: int) -> bool:
    """A file of `size` bytes that begins with `head`, the rest a hole; whether there was one like this already."""
    if path.is_file() and path.stat().st_size == size:
        with path.open("rb") as file:
            if file.read(len(head)) == head:
                return True
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return False


def mapped_bytes(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
