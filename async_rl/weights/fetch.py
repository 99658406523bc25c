"""Packs from the store to files: parallel ranged gets, each straight into its place, and no file under its final name
whose hash was not verified.

    missing packs ─► parts, fetch_parallel at a time ─► block by block: into its place in a file, and hashed in order
                                                             └─► the last one: renamed to its final name

A thread keeps to one pack as long as it can: the parts of a pack then come in their order, and a block is received,
hashed and written while it is in the processor's cache. Memory: fetch_parallel blocks.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from async_rl.errors import (
    AccessDenied,
    BucketMissing,
    Corrupt,
    NotFound,
    StoreError,
    StoreUnavailable,
    WeightsError,
)
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import Tile, pack_tiles, table_of, tile_hash
from async_rl.weights.files import part_file, sha256_of, write_at
from async_rl.weights.full_tiles import FullTile
from async_rl.weights.lineage import Pack
from async_rl.weights.packs import TensorSpec
from async_rl.weights.whole import Suspects, Turns, WholePack

__all__ = ["BadPack", "Fetcher", "PackTiles", "holds"]

log = get_logger(__name__)

Report = Callable[[int], None]
"""Called with the bytes that are there so far, by the thread that asked for them."""

MERGE_GAP_BYTES = 64 << 10
"""Ranges with less than this between them are one request: a request takes as long as about this many bytes."""


class _Stretch(Protocol):
    """A tile of either kind: bytes of a pack."""

    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


AnyTile = TypeVar("AnyTile", bound=_Stretch)


class PackTiles(NamedTuple):
    """Tiles of a full pack, and the file that they belong into."""

    pack: Pack
    path: Path
    tiles: Sequence[FullTile]  # as they follow one another


class BadPack(Corrupt):
    """An object that can't be used: missing, cut short, damaged, or not what it should be. After a second try."""

    def __init__(self, key: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class Fetcher:
    """Brings packs, or parts of them, to files. Used by one thread at a time; only `stop` is called from others."""

    def __init__(self, store: ObjectStore, config: WeightsConfig) -> None:
        self._store, self._config = store, config
        self._lock = threading.Lock()
        self._stopped = False
        self.downloaded = 0
        """Bytes of packs since it was made, whatever became of them."""

    def stop(self) -> None:
        """Whoever is fetching gets a WeightsError soon, and so does whoever tries to."""
        self._stopped = True

    def whole(
        self, wanted: Sequence[tuple[Pack, Path]], report: Report, suspects: Suspects | None = None
    ) -> None:
        """Every pack under its path, verified. Those that are whole stay when another one fails. Of one that differs
        from its hash the `suspects` are fetched once more (None: all of it).

        Raises BadPack, StoreErrors, OSError.
        """
        packs = [WholePack(pack, path, self._config.fetch_part_bytes, suspects) for pack, path in wanted]
        turns = Turns(packs)
        try:
            for each in packs:
                each.path.parent.mkdir(parents=True, exist_ok=True)
                with each.part.open("wb") as file:
                    file.truncate(each.pack.size)
            parts = sum(len(each.starts) for each in packs)
            self._run([lambda: self._bring(*turns.next())] * parts, report)
        finally:
            for each in packs:
                each.part.unlink(missing_ok=True)

    def tiles(
        self,
        pack: Pack,
        path: Path,
        tensors: Sequence[TensorSpec],
        needed: Callable[[Tile], bool],
        report: Report,
    ) -> None:
        """Of a delta pack only its table and the needed tiles, each in its place in a sparse file at `path`.

        The table is verified by the manifest's hash, the tiles by the table's. Raises BadPack, StoreErrors, OSError.
        """
        what = f"{pack.key} in {self._store.url}"
        try:
            ref = table_of(pack, what)
            data = self._checked(
                pack,
                ref.start,
                ref.size,
                lambda got: hashlib.sha256(got).hexdigest() == ref.sha256,
                "its table",
            )
            rows = pack_tiles(pack, data, tensors, what)
        except BadPack:
            raise
        except Corrupt as error:
            raise BadPack(pack.key, error.message, hint=error.hint) from error
        with part_file(path) as part:
            with part.open("wb") as file:
                file.truncate(pack.size)
            write_at(part, ref.start, data)
            groups = _merged([tile for tile in rows if needed(tile)], self._config.fetch_part_bytes)
            self._run([lambda g=group: self._bring_tiles(pack, part, g) for group in groups], report)  # type: ignore[misc]

    def full_tiles(self, wanted: Sequence[PackTiles], report: Report) -> None:
        """Of full packs only these tiles, each verified and then put into its place in a file of the pack's size.
        Only tiles that follow one another are asked for together: no byte of another one is read. What is there
        stays when something fails. In memory: a tile per thread.

        Raises BadPack, StoreErrors, OSError.
        """
        limit = self._config.fetch_part_bytes
        groups = [(each, group) for each in wanted for group in _merged(each.tiles, limit, gap=0)]
        self._run([lambda e=each, g=group: self._bring_full(e, g) for each, group in groups], report)  # type: ignore[misc]

    def _checked(
        self, pack: Pack, start: int, length: int, right: Callable[[bytes], bool], what: str
    ) -> bytes:
        """A range of a pack that must be `right`, asked for twice where it is not: a second try tells a torn read
        from a damaged object. Raises BadPack, StoreErrors."""
        for _ in range(2):
            data = b"".join(block for _, block in self._blocks(pack, start, length))
            if right(data):
                return data
            log.warning("bytes differ from their hash, fetching them again", key=pack.key, part=what)
        raise self._damaged(pack, f": {what} differs from its hash, twice")

    def _run(self, jobs: Iterable[Callable[[], int]], report: Report) -> None:
        done = 0
        pool = ThreadPoolExecutor(self._config.fetch_parallel, thread_name_prefix="fetch")
        try:
            futures: list[Future[int]] = [pool.submit(job) for job in jobs]
            for future in as_completed(futures):
                done += future.result()
                report(done)
        except Exception:
            pool.shutdown(wait=True, cancel_futures=True)  # nobody writes to a file that is to be removed
            raise
        except BaseException:  # Ctrl-C does not wait for gets that hang: they write to no new file
            self._stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _bring(self, each: WholePack, start: int) -> int:
        length = each.length(start)
        if each.bring(start, self._blocks(each.pack, start, length)):
            self._finish(each)
        return length

    def _finish(self, each: WholePack) -> None:
        """All parts are there: verify, once more after a second fetch."""
        pack = each.pack
        if not each.right:
            again = each.suspects(pack, each.part) or [(0, pack.size)]
            nbytes = sum(length for _, length in again)
            log.warning(
                "a pack's bytes differ from their hash, fetching them again", key=pack.key, bytes=nbytes
            )
            for start, length in again:
                for at, block in self._blocks(pack, start, length):
                    write_at(each.part, at, block)
            if sha256_of(each.part) != pack.sha256:
                raise self._damaged(pack, " differs from the hash in its manifest, twice")
        each.part.replace(each.path)

    def _bring_tiles(self, pack: Pack, part: Path, tiles: list[Tile]) -> int:
        start = tiles[0].offset
        length = tiles[-1].offset + tiles[-1].size - start

        def right(data: bytes) -> bool:
            view = memoryview(data)
            return all(
                tile_hash(view[tile.offset - start : tile.offset - start + tile.size]) == tile.hash
                for tile in tiles
            )

        write_at(
            part, start, self._checked(pack, start, length, right, f"a tile in {length} bytes at {start}")
        )
        return length

    def _bring_full(self, wanted: PackTiles, tiles: Sequence[FullTile]) -> int:
        """Tiles without anything between them: in one request, but for those that come damaged."""
        pack, start = wanted.pack, tiles[0].offset
        length = tiles[-1].offset + tiles[-1].size - start
        buffer = memoryview(bytearray(max(tile.size for tile in tiles)))
        coming, filled = iter(tiles), 0
        tile = next(coming)
        for _, block in self._blocks(pack, start, length):
            left = memoryview(block)
            while left:
                taken = min(len(left), tile.size - filled)
                buffer[filled : filled + taken] = left[:taken]
                left, filled = left[taken:], filled + taken
                if filled == tile.size:
                    self._keep(wanted, tile, buffer[:filled])
                    tile, filled = next(coming, tile), 0
        return length

    def _keep(self, wanted: PackTiles, tile: FullTile, data: memoryview) -> None:
        """Into its place, if it is right; else after a second fetch, or not at all."""
        pack = wanted.pack
        if not tile.right(data):
            what = f"a tile ({tile.size} bytes at {tile.offset})"
            log.warning("bytes differ from their hash, fetching them again", key=pack.key, part=what)
            data = memoryview(b"".join(block for _, block in self._blocks(pack, tile.offset, tile.size)))
            if not tile.right(data):
                raise self._damaged(pack, f": {what} differs from its digest, twice")
        write_at(wanted.path, tile.offset, data)

    def _damaged(self, pack: Pack, what: str) -> BadPack:
        return BadPack(
            pack.key,
            f"{pack.key} in {self._store.url}{what}",
            hint="the object is damaged: `async-rl weights verify` tells which versions are affected",
        )

    def _blocks(self, pack: Pack, start: int, length: int) -> Iterator[tuple[int, bytes]]:
        """A range, block by block with their places. Asked for twice where the answer is short or the object seems to
        be missing: a store may lag behind."""
        at, end = start, start + length
        for attempt in (1, 2):
            self._check_stop(pack)
            try:
                for block in self._store.stream(pack.key, at, end - at) if at < end else ():
                    self._check_stop(pack)
                    with self._lock:
                        self.downloaded += len(block)
                    if at + len(block) > end:
                        break
                    yield at, block
                    at += len(block)
            except (StoreUnavailable, AccessDenied, BucketMissing):
                raise
            except StoreError as error:  # not there, or shorter than what was asked for
                if attempt == 2:
                    raise self._explain(pack, error) from error
                continue
            if at == end:
                return
        wrong = f"{pack.key} in {self._store.url} gave {at - start} bytes at {start} where {length} were asked for"
        raise self._explain(pack, Corrupt(wrong))

    def _check_stop(self, pack: Pack) -> None:
        if self._stopped:
            raise WeightsError(f"the fetch of {pack.key} was stopped: its reader is closed")

    def _explain(self, pack: Pack, error: StoreError | Corrupt) -> Exception:
        """What is wrong with the pack, if it is the pack; else `error`."""
        try:
            size = self._store.head(pack.key).size
        except NotFound:
            return BadPack(
                pack.key,
                f"{pack.key} is not in {self._store.url}, though a manifest names it",
                hint="it was removed as garbage, or the bucket lost an object",
            )
        if size != pack.size:
            return BadPack(
                pack.key,
                f"{pack.key} in {self._store.url} has {size} bytes, its manifest says {pack.size}",
            )
        return BadPack(pack.key, error.message) if isinstance(error, Corrupt) else error


def holds(path: Path, pack: Pack) -> bool:
    """Whether the file is this pack, by its hash."""
    return path.is_file() and path.stat().st_size == pack.size and sha256_of(path) == pack.sha256


def _merged(tiles: Iterable[AnyTile], limit: int, gap: int = MERGE_GAP_BYTES) -> list[list[AnyTile]]:
    """Neighbours with up to `gap` bytes between them together, up to about `limit` bytes."""
    groups: list[list[AnyTile]] = []
    for tile in sorted(tiles, key=lambda tile: tile.offset):
        if groups:
            begin, end = groups[-1][0].offset, groups[-1][-1].offset + groups[-1][-1].size
            if tile.offset - end <= gap and tile.offset + tile.size - begin <= limit:
                groups[-1].append(tile)
                continue
        groups.append([tile])
    return groups
