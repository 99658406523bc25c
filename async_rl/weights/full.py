"""A full state on its way to the store: plain Hugging Face safetensors packs, streamed to the ranks that own them.

    every rank      for each tensor     its rows, rank by rank and block by block ──► the owner's pack
    each owner      a thread per pack   SHA-256 beside the upload of its parts

No rank ever holds more of the model than its own shards, the blocks on their way, and the parts its uploads have
in flight: an owner has few packs open, the last one fills while those before it are being finished; together they
hold 128 MiB or so, and never more than two packs of pack_bytes. All ranks follow one schedule, so a rank whose store
fails goes on receiving (and throws away) until the end of the attempt, where everyone learns of it; the next attempt
sends only the packs that are not whole yet.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from msgspec import UNSET, Struct

from async_rl.errors import AsyncRLError, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.full_tiles import tile_digests
from async_rl.weights.lineage import Pack, Way
from async_rl.weights.packs import PackPlan, Transfer, assign_owners, plan_packs, schedule
from async_rl.weights.ranks import Ranks, exchange
from async_rl.weights.run import TILES_SINCE, RunInfo
from async_rl.weights.shards import Shards, State

__all__ = ["FullPacks"]

log = get_logger(__name__)

Result = TypeVar("Result")

BLOCK_BYTES = 8 << 20
"""A tensor's rows travel between ranks in blocks of this size: large enough for gloo to be at line rate
(from about 1 MiB on), small enough to cost no memory."""

_BLOCKS_WAITING = 2
"""Blocks between the thread that receives and the one that hashes and uploads."""

_IN_FLIGHT_BYTES = 128 << 20
"""Small packs: so many are open at once as these bytes allow, at least two. (Of a large one, parts of 64 MiB or so
are in flight.)"""

_OPEN_PACKS_MAX = 8

_AGREE_BYTES = 256 << 20
"""So often ranks agree on whether to go on: a second or two at a trainer's usual bandwidth."""


class _Whole(Struct, frozen=True):
    """Packs that a rank has made whole: their hashes, by number."""

    packs: dict[int, str] = {}
    giving_up: bool = False


class FullPacks:
    """How a run's full states are cut and who writes what. Used by one thread at a time, the same on all
    ranks."""

    def __init__(
        self, store: ObjectStore, run: RunInfo, ranks: Ranks, shards: Shards, pack_bytes: int
    ) -> None:
        self._store, self._ranks, self._shards = store, ranks, shards
        self._says_tiles = run.format >= TILES_SINCE
        self.plans: tuple[PackPlan, ...] = plan_packs(run.tensors, run.dtype, pack_bytes)
        self._owners = assign_owners([plan.nbytes for plan in self.plans], ranks.size)
        largest = max(plan.nbytes for plan in self.plans)
        self._open_packs = min(_OPEN_PACKS_MAX, max(2, _IN_FLIGHT_BYTES // largest))

    @property
    def nbytes(self) -> int:
        """Of a full state in the store."""
        return sum(plan.nbytes for plan in self.plans)

    def send(
        self,
        state: State,
        whole: dict[int, str],
        key: Callable[[int, int], str],
        *,
        sent: Callable[[str], None] = lambda name: None,
        giving_up: Callable[[], bool] = lambda: False,
    ) -> AsyncRLError | None:
        """Collective. One attempt at the packs that are not in `whole` (number -> SHA-256), which is filled with
        what all ranks have reached; this rank's own failure.

        `key`: of a pack, from its owner and number. `sent` is told the names of tensors whose local rows are
        needed no more. Once `giving_up` says so on any rank, all soon leave the attempt.
        """
        outgoing = _Outgoing(self._open_packs)
        unagreed = 0
        over = True  # unless the last transfer is reached
        try:
            for transfer in schedule(self.plans, self._owners, self._ranks.size):
                if transfer.pack in whole:
                    continue
                owned = transfer.owner == self._ranks.rank
                if owned and transfer.first:
                    outgoing.open(self._store, key(transfer.owner, transfer.pack), transfer.pack)
                    outgoing.newest.write(self.plans[transfer.pack].header)
                self._move(state, transfer, outgoing.newest if owned else None)
                if owned:
                    outgoing.newest.afterwards(partial(sent, transfer.tensor.name))
                    if transfer.last:
                        outgoing.newest.end()
                else:
                    sent(transfer.tensor.name)
                unagreed += transfer.tensor.nbytes
                if unagreed >= _AGREE_BYTES:
                    unagreed = 0
                    said = exchange(self._ranks, _Whole(giving_up=giving_up()))
                    if any(each.giving_up for each in said):
                        break
            else:
                over = False
        finally:
            outgoing.close(abandon=over)
        for each in exchange(self._ranks, _Whole(outgoing.whole)):
            whole |= each.packs
        return outgoing.failure

    def way(self, whole: dict[int, str], key: Callable[[int, int], str], tiles: np.ndarray) -> Way | None:
        """To the state, once all of its packs are whole. `tiles`: uint64, the digests of its tiles."""
        if len(whole) < len(self.plans):
            return None
        packs = tuple(
            Pack(key(self._owners[index], index), plan.nbytes, whole[index])
            for index, plan in enumerate(self.plans)
        )
        weight_map = {spec.name: index for index, plan in enumerate(self.plans) for spec in plan.tensors}
        total = sum(pack.size for pack in packs)
        digests = tile_digests(tiles) if self._says_tiles else UNSET
        return Way(-1, packs, total, weight_map, tile_digests=digests)

    def _move(self, state: State, transfer: Transfer, writer: _PackWriter | None) -> None:
        """One tensor to its owner, who passes it to `writer`."""
        for source, size in self._shards.sources(transfer.tensor, transfer.owner):
            for start in range(0, size, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, size)
                if source == self._ranks.rank:
                    data = state.block(transfer.tensor.name, start, stop)
                    if writer is None:
                        self._ranks.send(data, transfer.owner)
                        continue
                elif writer is not None:
                    data = torch.empty(stop - start, dtype=torch.uint8)
                    self._ranks.receive(data, source)
                else:
                    continue
                writer.write(data.numpy().data)


class _Outgoing:
    """The packs that this rank has open, oldest first; what became of those before."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[tuple[int, _PackWriter]] = deque()
        self.whole: dict[int, str] = {}
        self.failure: AsyncRLError | None = None

    @property
    def newest(self) -> _PackWriter:
        return self._open[-1][1]

    def open(self, store: ObjectStore, key: str, pack: int) -> None:
        """Waits for: the oldest pack, where as many are open as may be."""
        self._finish(self._most - 1)
        self._open.append((pack, _PackWriter(store, key)))

    def close(self, *, abandon: bool) -> None:
        """Waits for: all of them. `abandon`: the newest has not come to its end, and shall not be seen."""
        for _, writer in self._open:
            writer.end(abandon=abandon)
        self._finish(0)

    def _finish(self, left: int) -> None:
        while len(self._open) > left:
            pack, writer = self._open.popleft()
            digest = writer.result()
            if digest is not None:
                self.whole[pack] = digest
            self.failure = self.failure or writer.failure


class _PackWriter:
    """A pack on its way to the store, on a thread of its own. After a failure it swallows what follows: the
    ranks must stay in step."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.failure: AsyncRLError | None = None
        self._store, self._key = store, key
        self._sha256 = hashlib.sha256()
        self._digest = ""
        self._ended = False
        self._acts: list[Callable[[], None]] = []
        self._queue: queue.Queue[memoryview | _End] = queue.Queue(_BLOCKS_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"write {key}", daemon=True)
        self._thread.start()

    def write(self, data: bytes | memoryview) -> None:
        """`data` must stay as it is until the pack has ended: it is not copied. Waits for: room in the queue, which
        the limits of the store bound."""
        self._queue.put(memoryview(data).toreadonly())

    def afterwards(self, act: Callable[[], None]) -> None:
        """Called when the pack has ended, however it ends, and what was written to it is needed no more."""
        self._acts.append(act)

    def end(self, *, abandon: bool = False) -> None:
        """Nothing more comes: make the pack visible, or don't."""
        if not self._ended:
            self._ended = True
            self._queue.put(_End(abandon))

    def result(self) -> str | None:
        """Waits for: the end of the upload. The pack's SHA-256; None after a failure or when abandoned."""
        self._thread.join()
        return self._digest or None

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            for act in self._acts:
                act()

    def _write_all(self) -> None:
        with ExitStack() as context:
            upload = self._guard(lambda: context.enter_context(self._store.upload(self._key)), context)
            while isinstance(item := self._queue.get(), memoryview):
                if upload is not None and self.failure is None:
                    self._guard(partial(upload.write, item), context)
                    self._sha256.update(item)  # while the parts before it travel
            if upload is None or self.failure is not None or item.abandon:
                return
            self._guard(upload.commit, context)
            self._guard(context.close, context)
            if self.failure is None:
                self._digest = self._sha256.hexdigest()

    def _guard(self, operation: Callable[[], Result], context: ExitStack) -> Result | None:
        try:
            return operation()
        except AsyncRLError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  the store's edge: an unknown error must not make the others wait
            self.failure = WeightsError(f"writing {self._key} failed: {type(error).__name__}: {error}")
        try:
            context.close()  # without a commit: the upload is aborted
        except AsyncRLError as second:
            log.warning("an upload could not be aborted", key=self._key, reason=second.message)
        return None


class _End(Struct, frozen=True):
    abandon: bool
