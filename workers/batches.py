"""From the orchestrator's groups to what the learner trains, the same on every rank.

    BatchFeed.next(step)   rank 0 waits for enough fresh groups; every rank gets the same bytes, or the same error
    prepare(batch, …)      advantages, lag of every token along the lineage, and a last check of what came in

The orchestrator has admitted the groups and dropped those that grew too old. `prepare` looks again, because
the limit on lag is a promise about what is *trained*, and only the trainer knows that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from async_rl.algo.advantages import (
    AdvantageConfig,
    batch_advantages,
    group_advantages,
    overlong_penalty,
)
from async_rl.algo.packing import TrainSample
from async_rl.algo.staleness import Node, Tree, newest_lag, sample_lag, span_lags, version_lag
from async_rl.errors import (
    AsyncRLError,
    Corrupt,
    Malformed,
    NotFound,
    ProtocolError,
    StoreError,
    WaitTimeout,
)
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.threads import Lookout
from async_rl.transport.link import TrainerLink
from async_rl.weights.lineage import read_manifest
from async_rl.weights.ranks import Report
from async_rl.wire import MAX_BATCH_BYTES, Batch, Group, Sample, decode, encode
from workers.checks import Slot, checked, slots_of
from workers.process_group import RankGroup

__all__ = ["BatchFeed", "Lineage", "Prepared", "prepare"]

log = get_logger(__name__)

_SLICE_S = 2.0
"""The wait for a batch is cut into slices: after each, ranks agree on whether to stop, and hear that rank 0
lives."""

_SLICE_PENDING_S = 0.2
"""While weights wait to be published (the batch that is awaited may be waiting for them), or a checkpoint is on its
way: between slices it gets on."""

_CHECK_S = 5.0
"""While a batch is awaited, a newer trainer is looked for this often: one list request."""


class Lineage:
    """The tree of versions as far as it is needed: `nodes`, and `newest`, the version on our own branch.

    `now`: the one of them that the lags of a batch are counted from, the same on every rank."""

    def __init__(self) -> None:
        self.nodes = Tree()
        self.newest = -1
        self.pinned = -1  # set when a batch is handed out

    @property
    def now(self) -> int:
        return self.pinned if self.pinned >= 0 else self.newest

    def committed(self, version: int, parent: int, step: int, digest: str = "") -> None:
        self.nodes.add(version, Node(parent, step, digest))
        self.newest = version

    def connect(self, version: int, store: ObjectStore) -> bool:
        """Read from the store what is missing between `version` and `now` (after a resume, groups may
        have been sampled on the branch before). False for a version that does not exist or is not of this
        tree."""
        while True:
            try:
                version_lag(self.nodes, version, self.now, 0)
                return True
            except KeyError as error:
                missing = error.args[0]
            if not isinstance(missing, int) or missing < 0:
                return False
            if not self.look_up(missing, store):
                return False

    def look_up(self, version: int, store: ObjectStore) -> bool:
        """Read a version of the tree from the store. False where it can't be read."""
        if version in self.nodes:
            return True
        try:
            manifest = read_manifest(store, version)
        except (NotFound, Corrupt) as error:
            log.warning("a version can't be read", version=version, reason=error.message)
            return False
        self.nodes.add(version, Node(manifest.parent, manifest.step, manifest.digest))
        return True


class _Told(Struct, frozen=True):
    """What rank 0 tells the others at the end of a slice."""

    frame: bytes = b""  # of the Batch; empty: still waiting
    nodes: dict[int, tuple[int, int, str]] = {}  # versions that are new to them: parent, step, digest
    newest: int = -1
    failure: Report | None = None


class BatchFeed:
    """`link`, `store` and `lineage` are those of rank 0; other ranks pass None, None and an empty Lineage,
    which is kept equal."""

    def __init__(
        self,
        group: RankGroup,
        link: TrainerLink | None,
        store: ObjectStore | None,
        lineage: Lineage,
        *,
        incarnation: int,
        limit_s: float,
        stopping: Callable[[], bool],
        check_ours: Callable[[], None] = lambda: None,
        catch_up: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """`catch_up` is called on every rank before each slice, with the steps done: it publishes what is pending,
        and says whether something still is (Publisher.catch_up, Saver.advance). Without it a batch that admission
        holds back until newer weights are out, and weights that wait for the next publish, would wait for each other.

        `check_ours` raises Fenced once a newer trainer has taken the run. Rank 0 asks it while it waits: the
        workers follow the newer trainer's versions, so a batch may never come, and without a batch there is
        no publish that would find out."""
        self._group, self._link, self._store, self._lineage = group, link, store, lineage
        self._incarnation, self._limit_s, self._stopping = incarnation, limit_s, stopping
        self._ours = Lookout(check_ours, _CHECK_S)
        self._catch_up = catch_up
        self._told: set[int] = set()  # versions all ranks know
        self._resumable = 0

    def may_resume_from(self, step: int) -> None:
        """The oldest step that a later trainer may resume from; the orchestrator keeps what it would need."""
        self._resumable = step

    def checked(self, step: int, slots: list[Slot], measured: tuple[tuple[float, ...], ...]) -> None:
        """Rank 0 tells how well the behaviour logprobs of step `step` fit. Never waits."""
        if self._link is not None and slots:
            self._link.checked(checked(self._incarnation, step, slots, measured))

    def next(self, step: int) -> Batch | None:
        """The batch for step `step`; None when any rank was asked to stop. Raises WaitTimeout after the
        limit, and whatever rank 0 met, on every rank."""
        started = time.monotonic()
        while True:
            stop = torch.tensor([float(self._stopping())])
            self._group.max(stop)
            if stop.item():
                return None
            slice_s = _SLICE_PENDING_S if self._catch_up(step) else _SLICE_S
            told = self._slice(step, started, slice_s) if self._link is not None else _Told()
            told = msgspec.msgpack.decode(self._group.broadcast(msgspec.msgpack.encode(told)), type=_Told)
            if told.failure is not None:
                raise told.failure.error()
            if told.frame:
                if self._link is None:
                    # Not on rank 0: what it told is older than what its publisher's thread has committed since.
                    for version, node in told.nodes.items():
                        self._lineage.nodes.add(version, Node(*node))
                    self._lineage.newest = self._lineage.pinned = told.newest
                batch = decode(told.frame, limit=MAX_BATCH_BYTES)
                assert isinstance(batch, Batch)
                return batch

    def _slice(self, step: int, started: float, slice_s: float) -> _Told:
        """Rank 0: ask for one slice of time."""
        assert self._link is not None
        left = self._limit_s - (time.monotonic() - started)
        last = left <= slice_s  # only then is a picture of the orchestrator worth its price
        try:
            slice_s = min(slice_s, max(left, 0.1))
            batch = self._link.next_batch(
                self._incarnation, step, slice_s, resumable=self._resumable, explain=last
            )
            return self._tell(batch)
        except WaitTimeout as error:
            if not last:
                return self._still_ours()
            failure = WaitTimeout(
                f"no batch for step {step} within batch_wait_s = {self._limit_s:g} s: {error.message}",
                hint="see `async-rl lag`: is a rollout worker serving, and is it getting on?",
            )
            return _Told(failure=Report.of(failure))
        except AsyncRLError as error:
            return _Told(failure=Report.of(error))

    def _still_ours(self) -> _Told:
        try:
            self._ours.answer()
        except StoreError as error:  # the store's word is missing, not against us
            log.debug("could not look for a newer trainer", reason=error.message)
        except AsyncRLError as error:
            return _Told(failure=Report.of(error))
        return _Told()

    def _tell(self, batch: Batch) -> _Told:
        assert self._store is not None
        # Read once: the publisher's thread may commit the next version meanwhile.
        newest = self._lineage.pinned = self._lineage.newest
        for version in _versions(batch):
            self._lineage.connect(version, self._store)
        known = list(self._lineage.nodes.items())
        nodes = {v: (n.parent, n.step, n.digest) for v, n in known if v not in self._told}
        self._told.update(nodes)
        return _Told(frame=encode(batch), nodes=nodes, newest=newest)


def _versions(batch: Batch) -> set[int]:
    return {version for group in batch.groups for sample in group.samples for version, _ in _spans(sample)}


def _spans(sample: Sample) -> list[tuple[int, int]]:
    flat = sample.spans.numpy()
    if len(flat) % 2:
        raise Malformed(f"version spans come in pairs, got {len(flat)} numbers")
    return [(int(version), int(tokens)) for version, tokens in flat.reshape(-1, 2)]


@dataclass
class Prepared:
    """What is trained of one batch."""

    samples: list[TrainSample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # [samples]
    lags: list[int] = field(default_factory=list)  # [samples], optimizer steps
    queued_lags: list[int] = field(
        default_factory=list
    )  # [samples], the part since the newest policy in the sample
    groups: int = 0
    slots: list[Slot] = field(default_factory=list)  # what each part of the batch is measured as
    cut_off: int = 0  # samples that ended at max_tokens
    lengths: list[int] = field(default_factory=list)  # [samples], completion tokens
    dropped: dict[str, int] = field(default_factory=dict)  # groups, by reason

    @property
    def loss_tokens(self) -> int:
        return int(sum(np.count_nonzero(sample.mask_C) for sample in self.samples))


def prepare(
    batch: Batch,
    lineage: Lineage,
    *,
    step: int,
    max_lag: int,
    vocab_size: int,
    longest: int = 0,
    advantage: AdvantageConfig = AdvantageConfig(),  # noqa: B008  # frozen
    max_tokens: int = 0,
) -> Prepared:
    """`batch` as samples to train after `step` steps. A group that is too old, of an unknown version, or
    broken is left out whole (an advantage needs all of its group), with a warning and a count. `max_tokens`: of a
    sample, as sampled; for advantage.truncated = "penalty". `longest`: tokens that the model allows; 0: no limit."""
    prepared = Prepared()
    shaped_GS: list[list[float]] = []
    for group in batch.groups:
        try:
            samples, lags, queued, slots = _prepare_group(
                group, lineage, step, vocab_size, longest, batch.replayed, len(prepared.slots)
            )
            # What an earlier life of ours has trained in this step was admitted then.
            reason = "trainer_lag" if max(lags) > max_lag and not batch.replayed else ""
            detail = f"lag {max(lags)} over the limit of {max_lag}"
        except KeyError as error:
            reason, detail = "trainer_version", f"version {error} is not of this run's tree"
        except (ValueError, ProtocolError) as error:
            reason, detail = "trainer_malformed", str(error)
        if reason:
            prepared.dropped[reason] = prepared.dropped.get(reason, 0) + 1
            log.warning(
                "group left out of the batch", group=str(group.key), worker=group.worker, reason=detail
            )
            continue
        prepared.groups += 1
        prepared.samples += samples
        prepared.lags += lags
        prepared.queued_lags += queued
        prepared.slots += slots
        lengths = [len(sample.tokens_C) for sample in samples]
        prepared.lengths += lengths
        prepared.rewards += [sample.reward for sample in group.samples]
        shaped_GS.append(
            [
                sample.reward + overlong_penalty(length, max_tokens, advantage)
                for sample, length in zip(group.samples, lengths, strict=True)
            ]
        )
        prepared.cut_off += sum(sample.finish == "length" for sample in group.samples)
        if advantage.truncated == "mask":
            prepared.samples[-len(samples) :] = _without_cut_off(group, samples)
    advantages = [each for group_S in batch_advantages(shaped_GS, advantage) for each in group_S.tolist()]
    prepared.samples = [
        replace(sample, advantage=each) for sample, each in zip(prepared.samples, advantages, strict=True)
    ]
    return prepared


def _without_cut_off(group: Group, samples: list[TrainSample]) -> list[TrainSample]:
    """Those that were cut off without loss tokens."""
    return [
        replace(train, mask_C=np.zeros_like(train.mask_C)) if sample.finish == "length" else train
        for sample, train in zip(group.samples, samples, strict=True)
    ]


def _prepare_group(
    group: Group,
    lineage: Lineage,
    step: int,
    vocab_size: int,
    longest: int,
    replayed: bool,
    first_slot: int,
) -> tuple[list[TrainSample], list[int], list[int], list[Slot]]:
    """Samples still without their advantages, their lags, and of these the queued parts. A step that is repeated has
    the lags that it had: the policies of the branch before come again, one by one, so each is as far away as it was.

    Raises KeyError for an unknown version, ValueError or Malformed for what can't be trained."""
    group_advantages([sample.reward for sample in group.samples])  # refuses what has none
    prompt_P = group.prompt.numpy()
    samples, lags, queued = [], [], []
    slots: dict[Slot, int] = {}
    for sample in group.samples:
        spans = _spans(sample)
        if replayed:
            by_span = [(step - lineage.nodes[version].step, tokens) for version, tokens in spans]
        else:
            by_span = span_lags(spans, lineage.nodes, lineage.now, step)
        lags_C = _token_lags(by_span)
        train = TrainSample(
            prompt_P=prompt_P,
            tokens_C=sample.tokens.numpy(),
            logprobs_C=sample.logprobs.numpy(),
            mask_C=sample.mask.numpy(),
            lags_C=lags_C,
            advantage=0.0,
            slots_C=slots_of(group.key, lags_C, spans, slots, first_slot),
        )
        _check_values(train, vocab_size, longest)
        samples.append(train)
        lags.append(sample_lag(by_span))
        queued.append(newest_lag(by_span))
    return samples, lags, queued, list(slots)


def _token_lags(by_span: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """[C]: of the oldest policy that had a part in each token. After an update in mid-sample a newer policy
    samples, but from the cache that the older one computed."""
    lags_C = np.repeat([lag for lag, _ in by_span], [tokens for _, tokens in by_span])
    return np.maximum.accumulate(lags_C)


def _check_values(sample: TrainSample, vocab_size: int, longest: int) -> None:
    if longest and (length := len(sample.prompt_P) + len(sample.tokens_C)) > longest:
        raise ValueError(f"{length} tokens with the prompt, the model allows {longest}")
    for ids in (sample.prompt_P, sample.tokens_C):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"token ids must lie in [0, {vocab_size}), found {ids.min()} to {ids.max()}")
    behaviour = sample.logprobs_C[sample.mask_C != 0]
    if not (behaviour <= 1e-4).all():  # NaN compares false; rounding may lift a probability of 1 a little
        raise ValueError("behaviour logprobs must be numbers of at most 0")
