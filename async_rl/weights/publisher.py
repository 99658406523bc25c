"""The trainer's side: every rank takes part in writing a version, in the background of the next step.

    main thread, every rank
        publish(step)           one still on its way: merge with the next; else copy the local shards, 16 bit
    background thread, every rank
        encode and upload       its own rows against its own baseline, nothing is gathered (changes.py)
        everyone                exchange which packs there are, with their hashes
        rank 0                  meanwhile looked for a newer trainer; manifest by put_if_absent; looks again
        everyone                exchange reports: committed, once more, or given up
        everyone                after the commit, and only then: the copy becomes the baseline
    another one, now and then   a full state of a committed version, as a further way to it (anchors.py)

The first version of a trainer has no baseline: it is full, streamed to rotating owners (full.py), or, where its
weights are its parent's, a delta without packs.

A failure is the same error on every rank, and surfaces at the next `publish`, `catch_up` or `flush`. What has not
been committed stays out of the baseline, so the next version carries it. Versions never queue: one that can't be
published yet is pending, and the weights travel with the next `publish`, or with `catch_up` while the trainer
waits for a batch.

Memory per rank: two 16-bit copies of its rows, baseline and snapshot, on the host or beside the parameters
(`weights.baseline`); two packs (of deltas in memory; of full states only what is on its way); while an anchor is
sent, at most a third copy, of the tensors not yet sent.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import msgspec
from msgspec import Struct

from async_rl.errors import AlreadyExists, AsyncRLError, Fenced, StoreUnavailable, WaitTimeout, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.threads import Lookout
from async_rl.weights import lineage
from async_rl.weights.anchors import Anchors, AnchorWriter
from async_rl.weights.changes import ChangedPacks, warm_up
from async_rl.weights.config import WeightsConfig
from async_rl.weights.drafts import DeltaDraft, Draft, Finished, WholeDraft
from async_rl.weights.full import FullPacks
from async_rl.weights.lineage import Claim, Manifest, Verdict
from async_rl.weights.ranks import RankLost, Ranks, Report, exchange, open_ranks, raise_first
from async_rl.weights.readers import newest_lack
from async_rl.weights.rows import Published
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Shards, State

__all__ = ["Publisher"]

log = get_logger(__name__)

_PAUSE_S = (0.5, 15.0)
"""Between attempts: the first, doubled each time, and the longest. The store has already retried inside each."""

_LAST_ATTEMPT_S = 90.0
"""An attempt begun just before the limit has the store's own retry limit (60 s) still before it."""

_FRESH_S = 2.0
"""Rank 0 looks for a newer trainer while packs are uploaded, which saves a round trip; after a longer upload it looks
once more. (Correctness does not hang on it: it looks again after the commit, and readers ignore a zombie's.)"""

_LOOK_AT_READERS_S = 10.0
"""While a batch is awaited: whether readers are stuck. Some small requests."""


class _Baseline(Struct, frozen=True):
    """What this trainer committed last."""

    version: int
    digest: int
    state: State


class _Outcome(Struct, frozen=True):
    """What one rank says at the end of an attempt; all but the report is rank 0's word."""

    report: Report = Report()
    version: int = -1  # committed
    anchor: bool = False  # of it is due
    last_try: bool = False  # the limit is over, or the publisher closes


class _Standing(Struct, frozen=True):
    """What one rank says in the foreground about the version before."""

    busy: bool
    report: Report = Report()
    rescue: bool = False  # readers are stuck: they need an anchor of the baseline's version (rank 0's word)


class Publisher:
    """Collective: all ranks construct it, publish, catch up, flush and close at the same points of their loops.

    `parameters` maps the run's tensor names to live parameters (see shards.py for the placements); they are
    read at each `publish`. `parent` is the version this trainer's weights came from (the checkpoint's), -1
    for none. `on_commit` is called with the manifest on rank 0, in the background thread.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        claim: Claim,
        parameters: Mapping[str, Published],
        config: WeightsConfig,
        *,
        parent: int = -1,
        on_commit: Callable[[Manifest], None] | None = None,
    ) -> None:
        """Raises on every rank what any of them finds: ModelMismatch, or WeightsError for a placement."""
        self._store, self._run, self._claim, self._config = store, run, claim, config
        self._on_commit = on_commit
        limit_s = config.publish_limit_s + _LAST_ATTEMPT_S
        # A group per thread: what one thread says must not answer another's question.
        self._front: Ranks = open_ranks(limit_s)
        self._ranks: Ranks = open_ranks(limit_s)
        anchor_ranks = open_ranks(limit_s)
        try:
            on_device = config.baseline == "device"
            self._shards = Shards(run, parameters, self._ranks.rank, self._ranks.size, on_device=on_device)
            report = Report()
        except AsyncRLError as error:
            report = Report.of(error)
        reports = exchange(self._ranks, report)
        if any(each.kind for each in reports):
            for ranks in (self._front, self._ranks, anchor_ranks):
                ranks.close()
            raise_first(reports)
        self._full = FullPacks(store, run, self._ranks, self._shards, config.pack_bytes)
        self._anchors = Anchors(store, config, self._full.nbytes)
        anchor_full = FullPacks(store, run, anchor_ranks, self._shards, config.pack_bytes)
        self._anchor_writer = AnchorWriter(
            store, run, anchor_ranks, self._shards, anchor_full, claim.incarnation
        )
        self._anchor_wanted = False
        self._elements = max(1, sum(spec.nbytes for spec in run.tensors) // 2)
        self._parent = parent
        self._next = claim.first_version
        self._newest = self._step = -1
        self._baseline: _Baseline | None = None
        self.publish_s = 0.0
        """Of the last version that was committed: from its snapshot to its commit."""
        self._stuck = Lookout(lambda: newest_lack(store), _LOOK_AT_READERS_S)
        self._rescue = False
        self._rescued = -1  # readers that lack a version up to this one have been helped
        self._pending: int | None = None  # step whose weights no version has taken yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = False  # the error is final: this publisher will never publish again
        self._closing = threading.Event()
        warm_up()

    @property
    def committed(self) -> int:
        """The newest version this trainer's weights stand in: published by it, or its parent; -1 for
        none."""
        return self._parent

    @property
    def newest(self) -> int:
        """The number that was given out last, by `publish`, `catch_up` or `flush`; -1: none yet."""
        return self._newest

    def publish(self, step: int) -> int:
        """Snapshot the weights after `step` optimizer steps and write them as a version in the background.

        Returns the number the version will have. (If a zombie has taken that number meanwhile, it gets the
        next: `on_commit` has the last word.) Returns -1 where the version before is still on its way after
        merge_after_s: these weights then wait for the next `publish`, `catch_up` or `flush`. Raises the error of
        the publish before.
        """
        before, self._pending = self._pending, step
        if self._settled(self._config.merge_after_s):
            return self._begin(step)
        if before is None:
            log.info("the version before is still on its way: merging", step=step)
        return -1

    def catch_up(self, step: int) -> bool:
        """Publish now what is pending, if nothing is on its way; whether something still is pending. Never waits.

        For the trainer's wait for a batch: where admission waits for newer weights and the trainer for a batch,
        nobody else would ever publish them. `step`: optimizer steps in the weights as they are now. Raises the
        error of the publish before.

        It also helps readers whose last way was lost with an object of the bucket: while they are stuck, no
        batch may come, without a batch there is no new version, and so no anchor that would set them free.
        """
        settled = self._settled(0.0, rescue=self._readers_stuck())
        if settled and self._rescue and self._baseline is not None:
            self._rescued = self._baseline.version
            if self._ranks.rank == 0:
                log.warning("readers find no whole way: writing an anchor", version=self._rescued)
            self._anchor_writer.start(self._rescued, self._baseline.digest, self._baseline.state.share())
        if self._pending is None:
            return False
        if settled:
            self._begin(step)
        return not settled

    def flush(self, timeout_s: float | None = None, *, step: int | None = None) -> None:
        """Until the last published version, and what is pending, is committed. Raises what stopped it (Fenced,
        StoreUnavailable, …), and WaitTimeout. Without a limit of its own it outlasts publish_limit_s, so that the
        cause is raised. `step`: optimizer steps in the weights as they are now, where some followed the last
        `publish`."""
        if timeout_s is None:
            timeout_s = self._config.publish_limit_s + _LAST_ATTEMPT_S
        while True:
            if not self._settled(timeout_s):
                name = self._thread.name if self._thread is not None else "publish"
                raise WaitTimeout(
                    f"{name}: the version was not committed within {timeout_s:g} s",
                    hint="the store is slow or away: see the log; weights.publish_limit_s is the limit",
                )
            if self._pending is None:
                return
            self._begin(self._pending if step is None else step)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop. A version on its way gets to the end of its present attempt, not another one; an anchor is given
        up. Raises nothing about it: call `flush` before, if it matters."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("a version was still being published at the end", thread=self._thread.name)
        self._anchor_writer.close(max(0.0, deadline - time.monotonic()))
        if self._thread is None or not self._thread.is_alive():
            self._ranks.close()  # not before: its group must not be taken away under it
        self._front.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ foreground

    def _readers_stuck(self) -> bool:
        """Rank 0: whether a reader says that it lacks a way which an anchor of our newest version would be."""
        if self._ranks.rank or self._baseline is None or self._anchor_writer.busy:
            return False
        try:
            lack = self._stuck.answer()
        except AsyncRLError as error:
            log.debug("could not look whether readers are stuck", reason=error.message)
            return False
        return lack is not None and self._rescued < lack <= self._baseline.version

    def _settled(self, limit_s: float, rescue: bool = False) -> bool:
        """Collective. Waits up to `limit_s` for the version on its way; whether none is any more, on any rank.
        Raises on every rank what stopped it on any."""
        if self._thread is not None:
            self._thread.join(limit_s)
        busy = self._thread is not None and self._thread.is_alive()
        error = None if busy else self._error
        standing = _Standing(busy, Report() if error is None else _report_of(error), rescue)
        ranks = [standing] if self._closing.is_set() else exchange(self._front, standing)
        self._rescue = ranks[0].rescue
        if any(each.busy for each in ranks):
            return False
        self._thread = None
        if self._pending is None and any(each.report.kind for each in ranks):
            self._pending = self._step  # no version has these weights: whoever goes on has them published
        if error is not None:
            self._error = error if self._over else None
            raise error
        raise_first(each.report for each in ranks)
        return True

    def _begin(self, step: int) -> int:
        state = self._shards.take()
        # A number is never used for two snapshots: the put of one that failed may have succeeded unheard.
        version, self._next = self._next, self._next + 1
        self._newest, self._step, self._pending = version, step, None
        self._thread = threading.Thread(
            target=self._background, args=(version, step, state), name=f"publish-{version}", daemon=True
        )
        self._thread.start()
        return version

    # ------------------------------------------------------------ background thread

    def _background(self, version: int, step: int, state: State) -> None:
        try:
            self._write_version(version, step, state)
            return
        except (Fenced, RankLost) as error:
            self._error, self._over = error, True
        except AsyncRLError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001  a bug must surface in publish() or flush(), not end in a thread
            self._error, self._over = error, True

    def _write_version(self, version: int, step: int, state: State) -> None:
        started = time.monotonic()
        try:
            draft = self._draft(version, state)
            outcome, manifest = self._until_committed(version, step, draft, started)
        except BaseException:
            state.release()  # the baseline stays what was committed: the next version carries this change too
            raise
        assert draft.finished is not None
        before, self._baseline = (
            self._baseline,
            _Baseline(outcome.version, draft.finished.digest, state),
        )
        if before is not None:
            before.state.release()
        self._parent = outcome.version
        self._next = max(self._next, outcome.version + 1)
        self._newest = max(self._newest, outcome.version)
        if outcome.anchor:
            self._anchor_writer.start(outcome.version, draft.finished.digest, state.share())
        if manifest is not None:
            self._log(manifest, draft, time.monotonic() - started)
            if self._on_commit is not None:
                self._on_commit(manifest)
            self._look_at_anchors(manifest, outcome.anchor)

    def _draft(self, version: int, state: State) -> Draft:
        prefix = f"packs/{version:010}-{self._claim.incarnation:08}-"
        if self._baseline is None:
            return WholeDraft(
                self._ranks,
                self._store,
                self._run,
                self._shards,
                self._full,
                state,
                self._parent,
                lambda owner, pack: f"{prefix}{owner}-{pack}",
            )
        packs = ChangedPacks(
            self._store,
            self._run,
            list(self._shards.parts()),
            self._baseline.state,
            state,
            lambda pack: f"{prefix}{self._ranks.rank}-{pack}",
            pack_bytes=self._config.delta_pack_bytes,
            small=self._config.codec == "small",
        )
        return DeltaDraft(self._ranks, packs, self._baseline.version, self._baseline.digest)

    def _until_committed(
        self, version: int, step: int, draft: Draft, started: float
    ) -> tuple[_Outcome, Manifest | None]:
        """Rank 0's outcome on every rank, the manifest on rank 0."""
        deadline = started + self._config.publish_limit_s
        pause_s = _PAUSE_S[0]
        while True:
            failure, manifest = self._attempt(version, step, draft)
            outcomes = exchange(
                self._ranks,
                _Outcome(
                    Report() if failure is None else Report.of(failure),
                    manifest.version if manifest else -1,
                    self._anchor_wanted,
                    time.monotonic() > deadline or self._closing.is_set(),
                ),
            )
            if outcomes[0].version >= 0:
                return outcomes[0], manifest
            reports = [each.report for each in outcomes]
            if not {each.kind for each in reports} <= {"", StoreUnavailable.__name__}:
                raise_first(reports)
            reason = next((each.message for each in reports if each.kind), "")
            if outcomes[0].last_try:
                raise StoreUnavailable(
                    f"version {version} was given up after {time.monotonic() - started:.0f} s: {reason}",
                    hint="see that the store can be reached; weights.publish_limit_s is the limit",
                )
            if self._ranks.rank == 0:
                log.warning("version not published yet, trying again", version=version, reason=reason)
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    def _attempt(
        self, version: int, step: int, draft: Draft
    ) -> tuple[AsyncRLError | None, Manifest | None]:
        """This rank's own failure; the manifest on rank 0, once it is committed."""
        if self._ranks.rank != 0:
            return draft.attempt(), None
        with ThreadPoolExecutor(1, thread_name_prefix="look") as beside:
            looked = time.monotonic()
            look = beside.submit(lineage.check_not_fenced, self._store, self._claim)
            failure = draft.attempt()
            if failure is not None or draft.finished is None:
                return failure, None
            try:
                look.result()
                if time.monotonic() > looked + _FRESH_S:
                    lineage.check_not_fenced(self._store, self._claim)
                return None, self._commit(version, step, draft.finished)
            except AsyncRLError as error:
                return error, None

    def _look_at_anchors(self, manifest: Manifest, begun: bool) -> None:
        """Rank 0, once the version is announced: whether the next one shall have an anchor."""
        self._anchors.committed(manifest)
        if begun:
            self._anchor_wanted = False
        landed = self._anchor_writer.landed()
        if landed >= 0:
            self._anchors.landed(landed)
        if not self._anchor_writer.busy:
            reason = self._anchors.due(manifest)
            self._anchor_wanted = bool(reason)
            if reason:
                log.info("the next version gets an anchor", version=manifest.version, reason=reason)

    def _log(self, manifest: Manifest, draft: Draft, seconds: float) -> None:
        self.publish_s = seconds
        way = manifest.way
        log.info(
            "version committed",
            version=manifest.version,
            step=manifest.step,
            kind=way.kind,
            bytes=way.total_bytes,
            packs=len(way.packs),
            changed_percent=100.0 * (way.changed if way.base >= 0 else self._elements) / self._elements,
            encode_s=draft.encode_s,
            upload_s=draft.upload_s,
            seconds=seconds,
        )

    def _commit(self, version: int, step: int, finished: Finished) -> Manifest:
        """After a look for newer trainers: the manifest as it stands in the store. Raises Fenced, StoreErrors."""
        wanted = Manifest(
            version=version,
            step=step,
            incarnation=self._claim.incarnation,
            nonce=self._claim.nonce,
            parent=self._parent,
            dtype=self._run.dtype,
            way=finished.way,
            digest=f"{finished.digest:016x}",
            created=time.time(),
        )
        manifest = self._put_manifest(lineage.sealed(wanted))
        # A claim made between the look and the put may begin at this very number: then readers ignore it.
        lineage.check_not_fenced(self._store, self._claim)
        return manifest

    def _put_manifest(self, wanted: Manifest) -> Manifest:
        while True:
            try:
                self._store.put_if_absent(lineage.version_key(wanted.version), msgspec.json.encode(wanted))
                return wanted
            except AlreadyExists:
                found = lineage.read_manifest(self._store, wanted.version)
            verdict = lineage.decide(self._claim, wanted, found)
            if verdict is Verdict.DONE:
                return found
            if verdict is Verdict.FENCED:
                raise lineage.fenced(self._store, self._claim, found.incarnation)
            log.warning(
                "version number taken, skipped", version=wanted.version, incarnation=found.incarnation
            )
            parent = found.version if found.nonce == self._claim.nonce else wanted.parent
            wanted = lineage.sealed(
                msgspec.structs.replace(wanted, version=wanted.version + 1, parent=parent)
            )


def _report_of(error: BaseException) -> Report:
    if isinstance(error, AsyncRLError):
        return Report.of(error)
    return Report.of(WeightsError(f"publishing failed on another rank: {type(error).__name__}: {error}"))
