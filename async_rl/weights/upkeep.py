"""What the store needs beside new versions: skip deltas and garbage collection, in a thread of the trainer.

    committed(manifest)   from the publisher's thread; only leaves a note
    the thread            waits for: a version newer than the last one it looked at (others are passed over);
                          then compaction, then, after every gc_every versions, garbage collection

Nothing waits for it. What fails is logged and tried again after a later version; training goes on, with longer
ways for late readers and more bytes in the bucket.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from async_rl.errors import AsyncRLError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.threads import give_way
from async_rl.weights import gc
from async_rl.weights.compactor import Compactor
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import temporary_folder
from async_rl.weights.lineage import Manifest
from async_rl.weights.run import RunInfo

__all__ = ["Upkeep"]

log = get_logger(__name__)

STOP_LIMIT_S = 10.0
"""A tile range takes less than a second, a request to a store that is away at most its retry limit; the thread is a
daemon and can be left behind."""

_LOOK_S = 60.0
"""The thread wakes now and then even if nobody calls."""


class Upkeep:
    """On rank 0 of the trainer. A context: leaving it stops the thread."""

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        config: WeightsConfig,
        *,
        on_done: Callable[[int], None] | None = None,
    ) -> None:
        """`on_done` is called with every version that was looked after, in the thread, successful or not."""
        self._store, self._config, self._on_done = store, config, on_done
        self._holding = ExitStack()
        self._scratch = self._holding.enter_context(temporary_folder())
        self._stopping = threading.Event()
        self._compactor = Compactor(store, run, config, self._scratch, stopping=self._stopping.is_set)
        self._wake = threading.Condition()
        self._newest: Manifest | None = None
        self._compacted: int | None = None  # the last version after which compaction was complete
        self._collected: int | None = None  # the last version after which garbage was collected
        self._thread = threading.Thread(target=self._loop, name="upkeep", daemon=True)
        self._thread.start()

    def committed(self, manifest: Manifest) -> None:
        """Returns at once."""
        with self._wake:
            self._newest = manifest
            self._wake.notify()

    def stop(self, timeout_s: float = STOP_LIMIT_S) -> None:
        """What it is at is left undone; another trainer, or `async-rl weights compact` and `gc`, can do it."""
        with self._wake:
            self._stopping.set()
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("upkeep is still at work and is left behind", waited_s=timeout_s)
        else:
            self._holding.close()

    def __enter__(self) -> Upkeep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _loop(self) -> None:
        give_way()  # the trainer's own threads come first
        while True:
            with self._wake:
                while self._newest is None and not self._stopping.is_set():
                    self._wake.wait(_LOOK_S)
                manifest, self._newest = self._newest, None
            if self._stopping.is_set() or manifest is None:
                return
            self._look_after(manifest)
            if self._on_done is not None:
                self._on_done(manifest.version)

    def _look_after(self, manifest: Manifest) -> None:
        for work in (self._compact, self._collect):
            try:
                work(manifest)
            except (AsyncRLError, OSError) as error:
                log.warning(
                    "upkeep failed, a later version tries again",
                    version=manifest.version,
                    reason=str(error),
                )
            except Exception as error:  # noqa: BLE001  (a mistake in here must not cost the run)
                log.error(
                    "upkeep failed, a later version tries again",
                    version=manifest.version,
                    error=repr(error),
                )
                log.debug(traceback.format_exc())

    def _compact(self, manifest: Manifest) -> None:
        if self._compacted is None:  # what the trainer before this one may have left undone
            self._compacted = max(-1, manifest.version - max(self._config.skip_spans, default=0) - 1)
        self._compactor.run(self._compacted, manifest)
        if not self._stopping.is_set():
            self._compacted = manifest.version

    def _collect(self, manifest: Manifest) -> None:
        every = self._config.gc_every
        if self._collected is None:
            self._collected = manifest.version
        if every and manifest.version // every > self._collected // every and not self._stopping.is_set():
            gc.collect(self._store, self._config)
            self._collected = manifest.version
