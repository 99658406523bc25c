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
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from async_rl.store.base import BLOCK_BYTES, ObjectStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.deltas import Tile, pack_tiles, table_of, tile_hash
from async_rl.weights.files import part_file, sha256_of, write_at
from async_rl.weights.lineage import Pack
from async_rl.weights.packs import TensorSpec

__all__ = ["BadPack", "Fetcher", "Turns", "holds"]

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
    """A pack on its way. It is hashed in order while it arrives, by the threads that bring its parts: from memory
    where a part comes in its turn, from the file where it came early."""

    def __init__(self, pack: Pack, path: Path, part_bytes: int) -> None:
        self.pack, self.path = pack, path
        self.part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        self.starts = deque(range(0, pack.size, part_bytes) or [0])
        """Where the parts that nobody has begun to bring begin."""
        self.begun = False
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._early: set[int] = set()  # parts (where they start) that are in the file, not yet hashed
        self._hashing = False

    def length(self, start: int) -> int:
        """Of the part there."""
        return min(self._part_bytes, self.pack.size - start)

    def bring(self, start: int, blocks: Iterable[tuple[int, bytes]]) -> bool:
        """Put a part, in blocks and with their places, into the file. Whether the whole pack is there now, and hashed
        (said to one thread only)."""
        with self._lock:
            in_turn = start == self._hashed and not self._hashing
            self._hashing |= in_turn
        for at, block in blocks:
            write_at(self.part, at, block)
            if in_turn:
                self._sha256.update(block)
        with self._lock:
            if in_turn:
                self._hashed += self.length(start)
            else:
                self._early.add(start)
                if self._hashing:
                    return False  # the other one sees to it
                self._hashing = True
        return self._hash_early()

    def _hash_early(self) -> bool:
        """Hash the parts that follow and are in the file; whether that was the last one. By one thread at a time."""
        while True:
            with self._lock:
                at = self._hashed
                if at not in self._early:
                    self._hashing = False
                    return at == self.pack.size
                self._early.remove(at)
            end = at + self.length(at)
            with self.part.open("rb", buffering=0) as file:
                file.seek(at)
                while at < end and (block := file.read(min(BLOCK_BYTES, end - at))):
                    self._sha256.update(block)
                    at += len(block)
            self._hashed = end

    @property
    def right(self) -> bool:
        return self._sha256.hexdigest() == self.pack.sha256


class Turns:
    """Which part a thread brings next: the next one of the pack it brought one of last; else the first of a pack that
    nobody has begun; else it helps with the pack of which most is left. Thread-safe."""

    def __init__(self, packs: Sequence[_Whole]) -> None:
        self._packs = packs
        self._lock = threading.Lock()
        self._mine: dict[int, _Whole] = {}  # by thread

    def next(self) -> tuple[_Whole, int]:
        """To be asked as often as there are parts."""
        with self._lock:
            mine = self._mine.get(threading.get_ident())
            if mine is None or not mine.starts:
                fresh = (each for each in self._packs if not each.begun)
                mine = next(fresh, None) or max(self._packs, key=lambda each: len(each.starts))
                self._mine[threading.get_ident()] = mine
            mine.begun = True
            return mine, mine.starts.popleft()


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

    def whole(self, wanted: Sequence[tuple[Pack, Path]], report: Report) -> None:
        """Every pack under its path, verified. Those that are whole stay when another one fails.

        Raises BadPack, StoreErrors, OSError.
        """
        packs = [_Whole(pack, path, self._config.fetch_part_bytes) for pack, path in wanted]
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
        except Exception:
            pool.shutdown(wait=True, cancel_futures=True)  # nobody writes to a file that is to be removed
            raise
        except BaseException:  # Ctrl-C does not wait for gets that hang: they write to no new file
            self._stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _bring(self, each: _Whole, start: int) -> int:
        length = each.length(start)
        if each.bring(start, self._blocks(each.pack, start, length)):
            self._finish(each)
        return length

    def _finish(self, each: _Whole) -> None:
        """All parts are there: verify, once more after a second fetch."""
        pack = each.pack
        if not each.right:
            log.warning("a pack's bytes differ from their hash, fetching it again", key=pack.key)
            for at, block in self._blocks(pack, 0, pack.size):
                write_at(each.part, at, block)
            if sha256_of(each.part) != pack.sha256:
                raise BadPack(
                    pack.key,
                    f"{pack.key} in {self._store.url} differs from the hash in its manifest, twice",
                    hint="the object is damaged: `async-rl weights verify` tells which versions are affected",
                )
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
