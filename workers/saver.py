"""Checkpoints in the background: the loop stands still for a copy of its rows in host memory, and for no more.

    main thread, every rank
        step(progress)     a checkpoint is due: copy the rows (Snapshot), start the upload
        advance()          at every step and every slice of the wait for a batch: how far is the one on its way?
    a thread, every rank
        upload             part, then table (checkpoints.write_rank)
    a thread, rank 0       once every rank has uploaded, and the version that the checkpoint names is committed
        commit             by put_if_absent; then old ones are deleted, and it is looked how far a resume may go back

The threads take no part in collectives. What they did is handed over by the main threads, which exchange a few
bytes at each `advance` while a checkpoint is on its way: so there is no second group of processes that could
hang, what stops one rank is known to all at the next step, and a rank that died is noticed as it is in training.
That costs latency (an upload that is done waits for the next step), which nobody waits for.

Never two at a time. One that is due while another is on its way is late: it is taken, as of the step done by
then, as soon as the way is free. One that the store does not take is given up and the run goes on; the last one,
at the end or at a stop, is waited for, and its failure is the run's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from async_rl.errors import AsyncRLError, CheckpointError, StoreError, StoreUnavailable, WaitTimeout
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.threads import give_way
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import Report, raise_first
from workers import checkpoints
from workers.adapter_scale import NO_ADAPTERS, AdapterScale
from workers.batches import Lineage
from workers.checkpoints import Checkpoint, Progress, Snapshot
from workers.optimizers import OptimizerRows
from workers.process_group import RankGroup
from workers.settings import TrainerConfig

__all__ = ["Saver"]

log = get_logger(__name__)

T = TypeVar("T")

_SLICE_S = 0.2
"""While the last checkpoint is waited for, ranks tell each other this often how far they are."""

_CLOSE_S = 10.0
"""An upload that is broken off ends with the request it is in; the thread is a daemon and can be left behind."""


class _Standing(Struct, frozen=True):
    """What one rank says about the checkpoint on its way."""

    busy: bool = False
    report: Report = Report()
    sha256: str = ""  # of its table, once that is written
    expired: bool = False  # the limit of the wait for it is over


class _Committed(Struct, frozen=True):
    """What rank 0's thread found after the commit."""

    name: str
    resumable: int = -1  # the oldest step that a resume may go back to; -1: could not be looked up


class _Work(Generic[T]):
    """A function in a daemon thread, and what became of it."""

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self.result: T | None = None
        self.report = Report()
        self._function = function
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self, wait_s: float) -> bool:
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        give_way()
        try:
            self.result = self._function()
        except AsyncRLError as error:
            self.report = Report.of(error)
        except BaseException as error:  # noqa: BLE001  a bug must surface in the loop, not end in a thread
            self.report = Report.of(CheckpointError(f"writing failed: {type(error).__name__}: {error}"))


@dataclass
class _Job:
    """The checkpoint on its way."""

    progress: Progress
    version: int  # the number that was given out last when the rows were copied: the commit waits for it
    upload: _Work[str]
    tables: list[str] = field(default_factory=list)  # all ranks have uploaded: what to commit
    commit: _Work[_Committed] | None = None  # rank 0
    began: float = field(default_factory=time.monotonic)


class Saver:
    """Collective: all ranks call `step`, `advance` and `finish` at the same points of their loops. A context:
    leaving it breaks off what is on its way.

    `rows`: this rank's, live. `lineage`: rank 0's is asked which versions are committed. `resumable` is the oldest
    step that a later trainer may resume from, as far as this one knows; it is told to `on_resumable` whenever it
    moves, after the commit and after old checkpoints are gone (rank 0). `check_ours` raises Fenced once a newer
    trainer has taken the run."""

    def __init__(
        self,
        store: ObjectStore,
        group: RankGroup,
        trainer: TrainerConfig,
        rows: Callable[[], Mapping[str, OptimizerRows]],
        publisher: Publisher,
        lineage: Lineage,
        *,
        fingerprint: str,
        resumed: Checkpoint | None,
        check_ours: Callable[[], None],
        on_resumable: Callable[[int], None],
        adapters: AdapterScale = NO_ADAPTERS,
    ) -> None:
        """Raises StoreErrors (rank 0)."""
        self.late = self.failed = 0
        self._store, self._group, self._trainer = store, group, trainer
        self._rows, self._publisher, self._lineage = rows, publisher, lineage
        self._adapters = adapters
        self._fingerprint, self._check_ours, self._on_resumable = fingerprint, check_ours, on_resumable
        self._parent = resumed.name if resumed else ""
        self._saved = (
            resumed.progress.step if resumed else 0
        )  # step 0 is what a run without one begins with
        self._progress: Progress | None = None  # of the step done last
        self._due = False
        self._snapshot: Snapshot | None = None
        self._job: _Job | None = None
        self._closing = threading.Event()
        if group.rank == 0:
            on_resumable(checkpoints.resumable_step(store))

    @property
    def saved(self) -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return self._saved if self._parent else None

    def step(self, progress: Progress) -> None:
        """A step is done, its weights are given to the publisher. Raises what stopped the checkpoint before on any
        rank, unless that is only the store being away."""
        self._progress = progress
        every = self._trainer.checkpoint_every
        if every and (progress.step % every == 0 or progress.step == self._trainer.steps):
            self._due = True
            self.advance()
            if self._due:
                self.late += 1
                log.warning(
                    "a checkpoint is due while the one before is on its way: it has to wait",
                    step=progress.step,
                    before=self._job.progress.step if self._job else -1,
                )
        else:
            self.advance()

    def advance(self) -> bool:
        """Take note of what the threads have done, and start what can be started; whether a checkpoint is on its way.
        Never waits for the store."""
        self._settle(0.0)
        if self._due and self._job is None:
            self._begin()
        return self._job is not None

    def finish(self) -> None:
        """Until the state after the last step is committed, unless it is already. Raises what stopped that, and
        WaitTimeout after checkpoint_wait_s (for what was on its way before, and once more for the last one)."""
        progress = self._progress
        if progress is None or not self._trainer.checkpoint_every:
            return
        if self._job is not None and self._job.progress.step < progress.step:
            self._wait()
        if self._job is None and self._saved < progress.step:
            self._begin()
        if self._job is not None:
            # The commit waits for the version, and from here on nobody else would publish what is pending.
            self._publisher.flush(step=progress.step)
            self._wait(last=True)

    def close(self) -> None:
        self._closing.set()
        job, self._job = self._job, None
        work = job and (job.commit or job.upload)
        if job and work and not work.done(_CLOSE_S):
            log.warning("a checkpoint was still on its way at the end", step=job.progress.step)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ main thread

    def _begin(self) -> None:
        assert self._progress is not None
        progress, self._due = self._progress, False
        rows = self._rows()
        if self._snapshot is None:
            self._snapshot = Snapshot(rows)
        snapshot, name, rank = self._snapshot, checkpoints.name_of(progress), self._group.rank
        snapshot.take(rows)
        upload = _Work(
            f"checkpoint-{progress.step}",
            lambda: checkpoints.write_rank(self._store, name, rank, snapshot, self._go_on),
        )
        self._job = _Job(progress, self._publisher.newest, upload)

    def _wait(self, last: bool = False) -> None:
        deadline = time.monotonic() + self._trainer.checkpoint_wait_s
        while self._job is not None:
            self._settle(_SLICE_S, last=last, expired=time.monotonic() > deadline)

    def _settle(self, wait_s: float, *, last: bool = False, expired: bool = False) -> None:
        """Collective while a checkpoint is on its way. `last`: its failure is raised, whatever it is."""
        job = self._job
        if job is None:
            return
        mine = msgspec.structs.replace(self._standing(job, wait_s), expired=expired)
        told = self._group.gather(msgspec.json.encode(mine))
        standings = [msgspec.json.decode(each, type=_Standing) for each in told]
        busy = [rank for rank, each in enumerate(standings) if each.busy]
        if busy and any(each.expired for each in standings):
            raise _too_late(job, busy, self._trainer.checkpoint_wait_s)
        if busy:
            return
        try:
            raise_first(each.report for each in standings)
        except StoreUnavailable as error:
            self._job = None
            self.failed += 1
            if last:
                raise
            log.warning("checkpoint given up", step=job.progress.step, reason=error.message)
            return
        if not job.tables:
            job.tables = [each.sha256 for each in standings]
            self._begin_commit(job)
            return
        self._job, self._parent, self._saved = None, checkpoints.name_of(job.progress), job.progress.step
        if job.commit is not None and job.commit.result is not None:
            log.info("checkpoint committed", name=self._parent, seconds=time.monotonic() - job.began)
            if job.commit.result.resumable >= 0:
                self._on_resumable(job.commit.result.resumable)

    def _begin_commit(self, job: _Job) -> None:
        ready = self._group.rank == 0 and self._lineage.newest >= job.version
        if ready and job.commit is None:
            job.commit = _Work(f"commit-{job.progress.step}", lambda: self._commit(job))

    def _standing(self, job: _Job, wait_s: float) -> _Standing:
        work: _Work[str] | _Work[_Committed] | None = job.upload
        if job.tables and self._group.rank != 0:
            return _Standing()
        if job.tables:
            self._begin_commit(job)
            work = job.commit
        if work is None:
            self._closing.wait(wait_s)
            return _Standing(busy=True)
        if not work.done(wait_s):
            return _Standing(busy=True)
        return _Standing(report=work.report, sha256=job.upload.result or "")

    # ------------------------------------------------------------ threads

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise CheckpointError("the trainer ends before its checkpoint was written")

    def _commit(self, job: _Job) -> _Committed:
        self._check_ours()
        self._go_on()
        progress = msgspec.structs.replace(job.progress, version=self._version_at(job.progress.step))
        made = checkpoints.commit(
            self._store,
            progress,
            job.tables,
            fingerprint=self._fingerprint,
            parent=self._parent,
            adapters=self._adapters,
        )
        checkpoints.prune(self._store, self._trainer.keep_checkpoints, made.name)
        try:
            return _Committed(made.name, checkpoints.resumable_step(self._store))
        except StoreError as error:
            log.warning("could not look how far back a resume may go", reason=error.message)
            return _Committed(made.name)

    def _version_at(self, step: int) -> int:
        """The newest committed version that is not ahead of the checkpoint. (Weights that were merged into a later
        version have none of their own; lags are counted back to an ancestor, and an ancestor is never ahead.)"""
        version = self._lineage.newest
        while self._lineage.nodes[version].step > step:
            version = self._lineage.nodes[version].parent
        return version


def _too_late(job: _Job, busy: list[int], limit_s: float) -> WaitTimeout:
    doing = "the commit on rank 0" if job.tables else f"the upload of rank {', '.join(map(str, busy))}"
    return WaitTimeout(
        f"the checkpoint of step {job.progress.step} was not there within checkpoint_wait_s = {limit_s:g} s: "
        f"it waited for {doing}",
        hint="the store is slow or away: see the log. A resume goes on from the checkpoint before",
    )
