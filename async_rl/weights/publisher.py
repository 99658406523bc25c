"""The trainer's side: every rank takes part in writing a version, in the background of the next step.

    main thread, every rank
        publish(step)           wait for the version before; copy the local shards to host memory, 16 bit
    background thread, every rank
        for each tensor         its rows, rank by rank and block by block ──► the owner's pack, as a stream
        everyone                exchange which packs are whole, with their hashes
        rank 0                  look for a newer trainer; manifest by put_if_absent; look again
        everyone                exchange reports: committed, once more, or given up

No rank ever holds more of the model than its own shards, one block on its way, and the parts its uploads
have in flight. All ranks follow one schedule, so a rank whose store fails goes on receiving (and throws
away) until the end of the attempt, where everyone learns of it; the next attempt sends only the packs that
are not whole yet. A failure is the same error on every rank, and surfaces at the next `publish` or `flush`.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType

import msgspec
import torch

from async_rl.errors import AlreadyExists, AsyncRLError, Fenced, StoreUnavailable, WaitTimeout, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore, Upload
from async_rl.weights import lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, Manifest, Pack, Verdict, Way
from async_rl.weights.packs import Transfer, assign_owners, plan_packs, schedule
from async_rl.weights.ranks import RankLost, Ranks, Report, open_ranks
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import Snapshot

__all__ = ["Publisher"]

log = get_logger(__name__)

BLOCK_BYTES = 8 << 20
"""A tensor's rows travel between ranks in blocks of this size: large enough for gloo to be at line rate
(from about 1 MiB on), small enough to cost no memory."""

_PAUSE_S = (
    0.5,
    15.0,
)  # between attempts, doubled each time; the store has already retried inside each of them
_LAST_ATTEMPT_S = (
    90.0  # an attempt begun just before the limit has the store's own retry limit (60 s) still before it
)
_SHA_BYTES = 32


class Publisher:
    """Collective: all ranks construct it, publish, flush and close at the same points of their loops.

    `parameters` maps the run's tensor names to live parameters (see shards.py for the placements); they are
    read at each `publish`. `parent` is the version this trainer's weights came from (the checkpoint's), -1
    for none. `on_commit` is called with the manifest on rank 0, in the background thread.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        claim: Claim,
        parameters: Mapping[str, torch.Tensor],
        config: WeightsConfig,
        *,
        parent: int = -1,
        on_commit: Callable[[Manifest], None] | None = None,
    ) -> None:
        """Raises on every rank what any of them finds: ModelMismatch, or WeightsError for a placement."""
        self._store, self._run, self._claim, self._config = store, run, claim, config
        self._on_commit = on_commit
        self._ranks: Ranks = open_ranks(config.publish_limit_s + _LAST_ATTEMPT_S)
        self._plans = plan_packs(run.tensors, run.dtype, config.pack_bytes)
        self._owners = assign_owners([plan.nbytes for plan in self._plans], self._ranks.size)
        try:
            self._snapshot = Snapshot(run, parameters, self._ranks.rank, self._ranks.size)
            report = Report()
        except AsyncRLError as error:
            report = Report.of(error)
        reports = self._ranks.reports(report)
        if any(each.kind for each in reports):
            self._ranks.close()
            _raise_first(reports)
        self._parent = parent
        self._next = claim.first_version
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = False  # the error is final: this publisher will never publish again
        self._closing = threading.Event()

    @property
    def committed(self) -> int:
        """The newest version this trainer's weights stand in: published by it, or its parent; -1 for
        none."""
        return self._parent

    def publish(self, step: int) -> int:
        """Snapshot the weights after `step` optimizer steps and write them as a version in the background.

        Returns the number the version will have. (If a zombie has taken that number meanwhile, it gets the
        next: `on_commit` has the last word.) Raises the error of the publish before, or WaitTimeout if that
        hangs.
        """
        self.flush()
        self._snapshot.take()
        # A number is never used for two snapshots: the put of one that failed may have succeeded unheard.
        version, self._next = self._next, self._next + 1
        self._thread = threading.Thread(
            target=self._background, args=(version, step), name=f"publish-{version}", daemon=True
        )
        self._thread.start()
        return version

    def flush(self, timeout_s: float | None = None) -> None:
        """Until the last published version is committed. Raises what stopped it (Fenced, StoreUnavailable, …),
        and WaitTimeout. Without a limit of its own it outlasts publish_limit_s, so that the cause is raised."""
        if timeout_s is None:
            timeout_s = self._config.publish_limit_s + _LAST_ATTEMPT_S
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise WaitTimeout(
                    f"{self._thread.name}: the version was not committed within {timeout_s:g} s",
                    hint="the store is slow or away: see the log; weights.publish_limit_s is the limit",
                )
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = error if self._over else None
            raise error

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop. A version on its way gets to the end of its present attempt, not another one. Raises
        nothing about it: call `flush` before, if it matters."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("a version was still being published at the end", thread=self._thread.name)
                return  # its group must not be taken away under it
            self._thread = None
        self._ranks.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ background thread

    def _background(self, version: int, step: int) -> None:
        try:
            self._write_version(version, step)
        except (Fenced, RankLost) as error:
            self._error, self._over = error, True
        except AsyncRLError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001  a bug must surface in publish() or flush(), not end in a thread
            self._error, self._over = error, True

    def _write_version(self, version: int, step: int) -> None:
        started = time.monotonic()
        deadline = started + self._config.publish_limit_s
        whole = torch.zeros(len(self._plans), 1 + _SHA_BYTES, dtype=torch.uint8)  # [packs]: flag, SHA-256
        pause_s = _PAUSE_S[0]
        while True:
            failure = self._send_packs(version, whole)
            manifest = None
            if failure is None and self._ranks.rank == 0 and bool(whole[:, 0].all()):
                try:
                    manifest = self._commit(version, step, whole)
                except AsyncRLError as error:
                    failure = error
            report = Report.of(failure) if failure is not None else Report()
            report = msgspec.structs.replace(
                report,
                version=manifest.version if manifest else -1,
                last_try=time.monotonic() > deadline or self._closing.is_set(),
            )
            reports = self._ranks.reports(report)
            if reports[0].version >= 0:
                break
            if not {each.kind for each in reports} <= {"", StoreUnavailable.__name__}:
                _raise_first(reports)
            reason = next((each.message for each in reports if each.kind), "")
            if reports[0].last_try:
                raise StoreUnavailable(
                    f"version {version} was given up after {time.monotonic() - started:.0f} s: {reason}",
                    hint="see that the store can be reached; weights.publish_limit_s is the limit",
                )
            if self._ranks.rank == 0:
                log.warning("version not published yet, trying again", version=version, reason=reason)
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _PAUSE_S[1])
        self._parent = reports[0].version
        self._next = max(self._next, reports[0].version + 1)
        if manifest is not None:
            took = time.monotonic() - started
            log.info(
                "version committed",
                version=manifest.version,
                step=step,
                bytes=manifest.way.total_bytes,
                packs=len(manifest.way.packs),
                seconds=took,
            )
            if self._on_commit is not None:
                self._on_commit(manifest)

    def _send_packs(self, version: int, whole: torch.Tensor) -> AsyncRLError | None:
        """One attempt at the packs that are not whole, in step with the other ranks. Fills `whole` with
        what all ranks have reached; returns this rank's own failure."""
        mine = torch.zeros_like(whole)
        failure: AsyncRLError | None = None
        writer: _PackWriter | None = None
        block = torch.empty(0, dtype=torch.uint8)
        for transfer in schedule(self._plans, self._owners, self._ranks.size):
            if whole[transfer.pack, 0]:
                continue
            owned = transfer.owner == self._ranks.rank
            if owned and transfer.first:
                writer = _PackWriter(self._store, self._pack_key(version, transfer.pack))
                writer.write(self._plans[transfer.pack].header)
            if owned and block.numel() == 0 and self._ranks.size > 1:
                block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            self._move(transfer, writer if owned else None, block)
            if owned and transfer.last and writer is not None:
                digest = writer.finish()
                if digest is None:
                    failure = failure or writer.failure
                else:
                    mine[transfer.pack, 0] = 1
                    mine[transfer.pack, 1:] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
                writer = None
        self._ranks.total(mine)  # each pack's row is its owner's, everyone else adds zeros
        whole += mine
        return failure

    def _move(self, transfer: Transfer, writer: _PackWriter | None, block: torch.Tensor) -> None:
        """One tensor to its owner, who passes it to `writer`."""
        for source, size in self._snapshot.sources(transfer.tensor, transfer.owner):
            for start in range(0, size, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, size)
                if source == self._ranks.rank:
                    data = self._snapshot.local(transfer.tensor)[start:stop]
                    if writer is None:
                        self._ranks.send(data, transfer.owner)
                        continue
                elif writer is not None:
                    data = block[: stop - start]
                    self._ranks.receive(data, source)
                else:
                    continue
                writer.write(data.numpy().data)

    def _pack_key(self, version: int, pack: int) -> str:
        return f"packs/{version:010}-{self._claim.incarnation:08}-{self._owners[pack]}-{pack}"

    def _commit(self, version: int, step: int, whole: torch.Tensor) -> Manifest:
        """The manifest as it stands in the store. Raises Fenced, StoreErrors."""
        packs = tuple(
            Pack(self._pack_key(version, index), plan.nbytes, whole[index, 1:].numpy().tobytes().hex())
            for index, plan in enumerate(self._plans)
        )
        wanted = Manifest(
            version=version,
            step=step,
            incarnation=self._claim.incarnation,
            nonce=self._claim.nonce,
            parent=self._parent,
            dtype=self._run.dtype,
            way=Way(
                base=-1,
                packs=packs,
                total_bytes=sum(pack.size for pack in packs),
                weight_map={
                    spec.name: index for index, plan in enumerate(self._plans) for spec in plan.tensors
                },
            ),
            digest=lineage.state_digest(packs),
            created=time.time(),
        )
        lineage.check_not_fenced(self._store, self._claim)
        manifest = self._put_manifest(wanted)
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
            wanted = msgspec.structs.replace(wanted, version=wanted.version + 1, parent=parent)


class _PackWriter:
    """A pack on its way to the store. After a failure it swallows what follows: the ranks must stay in
    step."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.failure: AsyncRLError | None = None
        self._key = key
        self._sha256 = hashlib.sha256()
        self._context = ExitStack()
        self._guard(lambda: self._open(store))

    def write(self, data: bytes | memoryview) -> None:
        if self.failure is None:
            self._sha256.update(data)
            self._guard(lambda: self._upload.write(data))

    def finish(self) -> bytes | None:
        """Make the pack visible; its SHA-256, or None after a failure."""
        if self.failure is None:
            self._guard(self._upload.commit)
        if self.failure is None:
            self._guard(self._context.close)
        return self._sha256.digest() if self.failure is None else None

    def _open(self, store: ObjectStore) -> None:
        self._upload: Upload = self._context.enter_context(store.upload(self._key))

    def _guard(self, operation: Callable[[], None]) -> None:
        try:
            operation()
            return
        except AsyncRLError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  the store's edge: an unknown error must not make the others wait
            self.failure = WeightsError(f"writing {self._key} failed: {type(error).__name__}: {error}")
        try:
            self._context.close()  # without a commit: the upload is aborted
        except AsyncRLError as second:
            log.warning("an upload could not be aborted", key=self._key, reason=second.message)


def _raise_first(reports: list[Report]) -> None:
    """The most telling error: Fenced before all else, a passing one last."""
    failed = [report for report in reports if report.kind]
    order = {Fenced.__name__: 0, StoreUnavailable.__name__: 2}
    if failed:
        raise min(failed, key=lambda report: order.get(report.kind, 1)).error()
