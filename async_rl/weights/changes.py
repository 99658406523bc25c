"""What this rank's rows have changed since a baseline, on its way to the store: encoded tiles in delta packs.

    encoding threads    tile by tile: compare, code, hash          ──► the pack that fills
                        (where the weights lie on a device they are compared there: surveys.py)
    uploading thread    the pack before: its table, SHA-256, upload

Nothing is gathered and nothing travels between ranks. At most two packs are in memory. Tiles are cut at multiples
of codec.TILE from the start of the *tensor* and at the rank's rows, so the same rows give the same packs, attempt
after attempt: a failed attempt goes on where the last whole pack ended.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np

from async_rl.errors import AsyncRLError, WeightsError
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import TILE, CodedTile, Mode, encode_found, encode_tile
from async_rl.weights.codec.digest import MASK
from async_rl.weights.deltas import DeltaPackWriter
from async_rl.weights.lineage import Pack
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Part, State
from async_rl.weights.surveys import Surveys

__all__ = ["ChangedPacks", "Cut", "cut_tiles", "warm_up"]

_THREADS = 2
"""Encoding at 1 GB/s each is faster than any store; more would take cores from the training step."""

_AHEAD = 2
"""Tiles coded per thread before the pack has taken the one before: a coded tile is at most 2 MiB or so."""


class Cut(NamedTuple):
    """One tile to encode."""

    tensor: int  # index into the run's tensors
    start: int  # element of the tensor
    stop: int
    row_start: int  # of the rank's rows, in elements of the tensor
    place: int  # of `start` in the whole state


def cut_tiles(parts: Sequence[Part]) -> Iterator[Cut]:
    for part in parts:
        start, end = part.start, part.start + part.elements
        while start < end:
            stop = min(end, (start // TILE + 1) * TILE)
            yield Cut(part.tensor, start, stop, part.start, part.place + start)
            start = stop


class ChangedPacks:
    """The packs of one version's delta that this rank writes; what is whole stays so over attempts.

    `base` and `new` must stay as they are until the last attempt has ended.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        parts: Sequence[Part],
        base: State,
        new: State,
        key: Callable[[int], str],
        *,
        pack_bytes: int,
        small: bool,
    ) -> None:
        self._store, self._run, self._key = store, run, key
        self._base, self._new = base, new
        self._cuts = list(cut_tiles(parts))
        self._pack_bytes, self._try_small = pack_bytes, small
        self._next = 0  # the first tile that is in no whole pack
        self._ended = False
        self.packs: list[Pack] = []
        self.changed = 0
        self.moved = 0
        self.small = False  # some tiles can't be read without the base
        self.encode_s = 0.0  # of all threads together
        self.upload_s = 0.0  # of the uploading thread, hashing and building tables included

    def attempt(self) -> AsyncRLError | None:
        """Until all packs are whole; what stopped that. Waits for: the store, within its own limits."""
        uploads = ThreadPoolExecutor(1, thread_name_prefix="delta-upload")
        try:
            self._fill(uploads)
        except AsyncRLError as error:
            return error
        except Exception as error:  # noqa: BLE001  the store's edge: an unknown error must not make the others wait
            name = self._key(len(self.packs))
            return WeightsError(f"writing {name} failed: {type(error).__name__}: {error}")
        finally:
            uploads.shutdown()
        return None

    def _fill(self, uploads: ThreadPoolExecutor) -> None:
        writer, small = DeltaPackWriter(), False
        travelling: Future[None] | None = None
        with closing(self._coded(self._next)) as tiles:
            for at, coded in tiles:
                if coded is not None:
                    cut = self._cuts[at]
                    writer.add(cut.tensor, cut.start, cut.stop - cut.start, coded)
                    small |= coded.mode == Mode.SMALL
                last = at == len(self._cuts) - 1
                if writer.nbytes and (last or writer.nbytes >= self._pack_bytes):
                    if travelling is not None:
                        travelling.result()
                    travelling = uploads.submit(self._upload, writer, at + 1, small)
                    writer, small = DeltaPackWriter(), False
        if travelling is not None:
            travelling.result()
        self._next = len(self._cuts)

    def _coded(self, first: int) -> Generator[tuple[int, CodedTile | None]]:
        """Tiles from number `first` on, in their order."""
        threads = max(1, min(_THREADS, len(os.sched_getaffinity(0))))
        surveys = None
        if self._new.on_device:
            surveys = Surveys(self._run, self._cuts, self._base, self._new, small=self._try_small)
        waiting: deque[tuple[int, Future[tuple[CodedTile | None, float]]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        try:
            for at in range(first, len(self._cuts) + _AHEAD * threads):
                if at < len(self._cuts):
                    waiting.append((at, pool.submit(self._encode, at, surveys)))
                if waiting and at - waiting[0][0] >= _AHEAD * threads:
                    number, future = waiting.popleft()
                    coded, seconds = future.result()
                    self.encode_s += seconds
                    yield number, coded
        finally:
            pool.shutdown(cancel_futures=True)

    def _encode(self, at: int, surveys: Surveys | None) -> tuple[CodedTile | None, float]:
        started = time.thread_time()
        if surveys is not None:
            found = surveys.found(at)
            return found and encode_found(found), time.thread_time() - started
        cut = self._cuts[at]
        name = self._run.tensors[cut.tensor].name
        rows = slice(cut.start - cut.row_start, cut.stop - cut.row_start)
        base, new = self._base.bits(name)[rows], self._new.bits(name)[rows]
        coded = encode_tile(base, new, cut.place, small=self._try_small)
        return coded, time.thread_time() - started

    def _upload(self, writer: DeltaPackWriter, upto: int, small: bool) -> None:
        """One pack, which holds the tiles before number `upto`."""
        started = time.monotonic()
        changed, moved = writer.changed, writer.moved
        pieces, pack = writer.finish(self._key(len(self.packs)))
        del writer  # the pieces go as they are written: parts on their way are copies
        pieces.reverse()
        try:
            with self._store.upload(pack.key) as upload:
                while pieces:
                    upload.write(pieces.pop())
                upload.commit()
        finally:
            self.upload_s += time.monotonic() - started
        self.packs.append(pack)
        self._next = upto
        self.changed += changed
        self.moved = (self.moved + moved) & MASK
        self.small |= small


def warm_up() -> None:
    """Compile the codec's kernels (or load them from their cache) now, not in the first version's way."""
    base = np.zeros(64, np.uint16)
    for small in (False, True):
        encode_tile(base, base + np.uint16(1), 0, small=small)
