"""Packs from the store to files: parallel ranged gets, each straight into its place, and no file under its final name
whose hash was not verified.

    missing packs ─► parts, fetch_parallel at a time ─► each in its place in a file, and hashed in order
                                                             └─► the last one: renamed to its final name

Memory: fetch_parallel parts.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

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
from async_rl.weights.deltas import Tile, check_tiles, read_table, tile_hash
from async_rl.weights.files import part_file, sha256_of, write_at
from async_rl.weights.lineage import Pack
from async_rl.weights.packs import TensorSpec

__all__ = ["BadPack", "Fetcher", "holds"]

log = get_logger(__name__)

Report = Callable[[int], None]
"""Called with the bytes that are there so far, by the thread that asked for them."""

MERGE_GAP_BYTES = 64 << 10
"""Ranges with less than this between them are one request: a request takes as long as about this many bytes."""


class BadPack(Corrupt):
    """An object that can't be used: missing, cut short, damaged, or not what it should be. After a second try."""

    def __init__(self, key: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class _Whole:
    """A pack on its way. It is hashed in order while it arrives, by one of the threads that bring its parts: from
    memory where a part comes in its turn, from the file where it came early."""

    def __init__(self, pack: Pack, path: Path, part_bytes: int) -> None:
        self.pack, self.path = pack, path
        self.part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._early: set[int] = set()  # parts (where they start) that are in the file, not yet hashed
        self._hashing = False

    def arrived(self, start: int, data: bytes) -> bool:
        """A part is in the file. Whether the whole pack is there now, and hashed (said to one thread only)."""
        with self._lock:
            self._early.add(start)
            if self._hashing:
                return False  # the other one sees to it
            self._hashing = True
        while True:
            with self._lock:
                at = self._hashed
                if at not in self._early:
                    self._hashing = False
                    return at == self.pack.size
                self._early.remove(at)
            length = min(self._part_bytes, self.pack.size - at)
            if at != start:
                with self.part.open("rb") as file:
                    file.seek(at)
                    data = file.read(length)
            self._sha256.update(data)
            self._hashed = at + length

    @property
    def right(self) -> bool:
        return self._sha256.hexdigest() == self.pack.sha256


class Fetcher:
    def __init__(self, store: ObjectStore, config: WeightsConfig) -> None:
        self._store, self._config = store, config
        self._lock = threading.Lock()
        self._stopped = False
        self.downloaded = 0
        """Bytes of packs since it was made, whatever became of them."""

    def stop(self) -> None:
        """Whoever is fetching gets a WeightsError soon, and so does whoever tries to."""
        self._stopped = True

    def whole(self, wanted: Sequence[tuple[Pack, Path]], report: Report) -> None:
        """Every pack under its path, verified. Those that are whole stay when another one fails.

        Raises BadPack, StoreErrors, OSError.
        """
        size = self._config.fetch_part_bytes
        jobs: list[Callable[[], int]] = []
        begun = []
        try:
            for pack, path in wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                starts = range(0, pack.size, size)
                each = _Whole(pack, path, size)
                begun.append(each)
                with each.part.open("wb") as file:
                    file.truncate(pack.size)
                jobs += [lambda each=each, start=start: self._bring(each, start) for start in starts]  # type: ignore[misc]
                if not starts:
                    jobs.append(lambda each=each: self._finish(each))  # type: ignore[misc]
            self._run(jobs, report)
        finally:
            for each in begun:
                each.part.unlink(missing_ok=True)

    def tiles(
        self,
        pack: Pack,
        path: Path,
        table: Sequence[TensorSpec],
        needed: Callable[[Tile], bool],
        report: Report,
    ) -> None:
        """Of a delta pack only its table and the needed tiles, each in its place in a sparse file at `path`.

        The table is verified by the manifest's hash, the tiles by the table's. Raises BadPack, StoreErrors, OSError.
        """
        ref = pack.table
        if ref is None or ref.start + ref.size != pack.size:
            raise BadPack(pack.key, f"{pack.key} in {self._store.url} should end with a table of tiles")
        data = self.checked(
            pack,
            ref.start,
            ref.size,
            lambda got: hashlib.sha256(got).hexdigest() == ref.sha256,
            "its table",
        )
        try:
            rows = read_table(data, 0)
            first = ref.start - sum(tile.size for tile in rows)
            rows = [tile._replace(offset=tile.offset + first) for tile in rows]
            check_tiles(rows, table, ref.start, f"{pack.key} in {self._store.url}")
        except Corrupt as error:
            raise BadPack(pack.key, error.message, hint=error.hint) from error
        with part_file(path) as part:
            with part.open("wb") as file:
                file.truncate(pack.size)
            write_at(part, ref.start, data)
            groups = _merged([tile for tile in rows if needed(tile)], self._config.fetch_part_bytes)
            self._run([lambda g=group: self._bring_tiles(pack, part, g) for group in groups], report)  # type: ignore[misc]

    def checked(
        self, pack: Pack, start: int, length: int, right: Callable[[bytes], bool], what: str
    ) -> bytes:
        """A range of a pack that must be `right`, asked for twice where it is not: a second try tells a torn read
        from a damaged object. Raises BadPack, StoreErrors."""
        for _ in range(2):
            data = self._range(pack, start, length)
            if right(data):
                return data
            log.warning("bytes differ from their hash, fetching them again", key=pack.key, part=what)
        raise BadPack(
            pack.key,
            f"{pack.key} in {self._store.url}: {what} differs from its hash, twice",
            hint="the object is damaged: `async-rl weights verify` tells which versions are affected",
        )

    def _run(self, jobs: Iterable[Callable[[], int]], report: Report) -> None:
        done = 0
        pool = ThreadPoolExecutor(self._config.fetch_parallel, thread_name_prefix="fetch")
        try:
            futures: list[Future[int]] = [pool.submit(job) for job in jobs]
            for future in as_completed(futures):
                done += future.result()
                report(done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # nobody writes to a file that is to be removed

    def _bring(self, each: _Whole, start: int) -> int:
        length = min(self._config.fetch_part_bytes, each.pack.size - start)
        data = self._range(each.pack, start, length)
        write_at(each.part, start, data)
        if each.arrived(start, data):
            self._finish(each)
        return length

    def _finish(self, each: _Whole) -> int:
        """All parts are there: verify, once more after a second fetch."""
        pack = each.pack
        if not each.right:
            log.warning("a pack's bytes differ from their hash, fetching it again", key=pack.key)
            for start in range(0, pack.size, self._config.fetch_part_bytes):
                length = min(self._config.fetch_part_bytes, pack.size - start)
                write_at(each.part, start, self._range(pack, start, length))
            if sha256_of(each.part) != pack.sha256:
                raise BadPack(
                    pack.key,
                    f"{pack.key} in {self._store.url} differs from the hash in its manifest, twice",
                    hint="the object is damaged: `async-rl weights verify` tells which versions are affected",
                )
        each.part.replace(each.path)
        return 0

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
            part, start, self.checked(pack, start, length, right, f"a tile in {length} bytes at {start}")
        )
        return length

    def _range(self, pack: Pack, start: int, length: int) -> bytes:
        """Asked for twice where the answer is short or the object seems to be missing: a store may lag behind."""
        for attempt in (1, 2):
            if self._stopped:
                raise WeightsError(f"the fetch of {pack.key} was stopped: its reader is closed")
            try:
                data = self._store.get(pack.key, start, length)
            except (StoreUnavailable, AccessDenied, BucketMissing):
                raise
            except StoreError as error:  # not there, or shorter than what was asked for
                if attempt == 2:
                    raise self._explain(pack, error) from error
                continue
            with self._lock:
                self.downloaded += len(data)
            if len(data) == length:
                return data
        raise self._explain(
            pack,
            Corrupt(
                f"{pack.key} in {self._store.url} gave {len(data)} bytes at {start} where {length} were asked for"
            ),
        )

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


def _merged(tiles: Sequence[Tile], limit: int) -> list[list[Tile]]:
    """Neighbours together, up to about `limit` bytes."""
    groups: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda tile: tile.offset):
        if groups:
            begin, end = groups[-1][0].offset, groups[-1][-1].offset + groups[-1][-1].size
            if tile.offset - end <= MERGE_GAP_BYTES and tile.offset + tile.size - begin <= limit:
                groups[-1].append(tile)
                continue
        groups.append([tile])
    return groups
