"""From groups to samples: advantages, lag of every token, and what is left out."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from async_rl.algo.advantages import AdvantageConfig
from async_rl.algo.staleness import Node
from async_rl.errors import Fenced, StoreUnavailable, WaitTimeout
from async_rl.store.file import FileStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import claim
from async_rl.weights.publisher import Publisher
from async_rl.weights.run import ensure_run
from async_rl.wire import Array, Batch, Group, Key, Sample
from tests.weights_support import SHAPES, write_model_dir
from workers import batches
from workers.batches import BatchFeed, Lineage, prepare

LIMIT_S = 20.0


def a_sample(reward: float = 0.0, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "tokens": [3, 4, 5],
        "logprobs": [-0.1, -0.2, -0.3],
        "mask": [1, 1, 1],
        "spans": [1, 3],
        "finish": "stop",
    }
    fields |= changes
    return Sample(
        tokens=Array.of(fields["tokens"], "<i4"),
        logprobs=Array.of(fields["logprobs"], "<f4"),
        mask=Array.of(fields["mask"], "|u1"),
        spans=Array.of(fields["spans"], "<i4"),
        reward=reward,
        finish=fields["finish"],
    )


def a_batch(*groups: tuple[Sample, ...], prompt: tuple[int, ...] = (1, 2)) -> Batch:
    return Batch(
        incarnation=1,
        step=2,
        groups=tuple(
            Group(Key("train", n), Array.of(prompt, "<i4"), samples) for n, samples in enumerate(groups)
        ),
        lags=(),
        frontier=len(groups),
    )


def a_lineage() -> Lineage:
    lineage = Lineage()
    for version, (parent, step) in enumerate([(-1, 0), (0, 1), (1, 2)]):
        lineage.committed(version, parent, step)
    return lineage


def prepared(
    batch: Batch, *, max_lag: int = 2, lineage: Lineage | None = None, longest: int = 0, **advantage: Any
):
    config = AdvantageConfig(**advantage)
    return prepare(
        batch,
        lineage or a_lineage(),
        step=2,
        max_lag=max_lag,
        vocab_size=10,
        advantage=config,
        max_tokens=4,
        longest=longest,
    )


def test_a_group_becomes_samples_with_advantages_and_lags():
    result = prepared(a_batch((a_sample(1.0), a_sample(0.0, spans=[1, 1, 2, 2], finish="length"))))
    assert [sample.advantage for sample in result.samples] == [0.5, -0.5]
    assert [sample.lags_C.tolist() for sample in result.samples] == [[1, 1, 1], [1, 1, 1]], (
        "the newer policy went on from the older one's cache"
    )
    assert result.lags == [1, 1]
    assert result.rewards == [1.0, 0.0]
    assert (result.groups, result.cut_off, result.loss_tokens) == (1, 1, 6)
    assert result.dropped == {}


def test_a_baseline_over_the_batch_is_over_what_is_trained():
    stale = (a_sample(9.0, spans=[0, 3]), a_sample(9.0))
    batch = a_batch((a_sample(1.0), a_sample(1.0)), stale, (a_sample(0.0), a_sample(0.0)))
    result = prepared(batch, max_lag=1, estimator="global")
    assert [sample.advantage for sample in result.samples] == [0.5, 0.5, -0.5, -0.5]
    assert result.rewards == [1.0, 1.0, 0.0, 0.0]


def test_what_was_cut_off_is_kept_masked_or_penalised():
    batch = a_batch((a_sample(1.0), a_sample(0.0, finish="length"), a_sample(0.5)))
    kept = prepared(batch)
    masked = prepared(batch, truncated="mask")
    assert masked.loss_tokens == 6 and not masked.samples[1].mask_C.any()
    assert [s.advantage for s in masked.samples] == [s.advantage for s in kept.samples], "it is in the mean"
    short = a_batch((a_sample(1.0, tokens=[3], logprobs=[-0.1], mask=[1], spans=[1, 1]), a_sample(1.0)))
    penalised = prepared(short, truncated="penalty", overlong_buffer=0.5, overlong_penalty=2.0)
    assert [s.advantage for s in penalised.samples] == [0.5, -0.5], "3 of 4 tokens: half of the penalty"
    assert penalised.rewards == [1.0, 1.0] and penalised.lengths == [1, 3]


def test_lag_is_split_into_what_grew_while_it_was_generated_and_the_rest():
    """Of version 0 and then 1, trained after step 2: 1 step in flight, 1 since."""
    result = prepared(a_batch((a_sample(1.0, spans=[0, 1, 1, 2]), a_sample(spans=[2, 3]))))
    assert result.lags == [2, 0] and result.queued_lags == [1, 0]


def test_a_group_over_the_limit_is_never_trained():
    fresh, stale = (a_sample(1.0), a_sample()), (a_sample(1.0), a_sample(spans=[0, 1, 2, 2]))
    result = prepared(a_batch(fresh, stale), max_lag=1)
    assert result.groups == 1 and len(result.samples) == 2
    assert result.dropped == {"trainer_lag": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spans": [7, 3]}, "trainer_version"),
        ({"spans": [1, 2]}, "trainer_malformed"),  # does not add up to the tokens
        ({"spans": [1]}, "trainer_malformed"),
        ({"tokens": [3, 4, 10]}, "trainer_malformed"),  # outside the vocabulary
        ({"tokens": [3, 4, -1]}, "trainer_malformed"),
        ({"logprobs": [-0.1, float("nan"), -0.3]}, "trainer_malformed"),
        ({"logprobs": [-0.1, 0.5, -0.3]}, "trainer_malformed"),
        ({"logprobs": [-0.1]}, "trainer_malformed"),
        ({"reward": float("nan")}, "trainer_malformed"),
    ],
)
def test_a_group_that_can_not_be_trained_is_left_out_whole_and_counted(
    changes: dict[str, Any], reason: str
):
    good = (a_sample(1.0), a_sample())
    result = prepared(a_batch(good, (a_sample(**changes), a_sample())))
    assert result.dropped == {reason: 1}
    assert result.groups == 1 and len(result.samples) == 2


def test_a_logprob_under_a_mask_may_be_anything():
    result = prepared(a_batch((a_sample(mask=[1, 0, 1], logprobs=[-0.1, float("nan"), -0.3]), a_sample())))
    assert result.groups == 1 and result.loss_tokens == 5


def test_a_behaviour_probability_of_zero_is_trained():
    assert prepared(a_batch((a_sample(logprobs=[-0.1, -np.inf, -0.3]), a_sample()))).groups == 1


def test_groups_of_the_branch_before_a_resume_count_the_way_back_and_forward(tmp_path: Path):
    lineage = Lineage()
    for version, node in {0: Node(-1, 0), 1: Node(0, 1), 2: Node(1, 2), 3: Node(1, 1)}.items():
        lineage.nodes.add(version, node)
    lineage.committed(4, 3, 2)  # resumed at step 1: versions 3 and 4
    result = prepared(a_batch((a_sample(1.0, spans=[2, 3]), a_sample(spans=[4, 3]))), lineage=lineage)
    assert result.lags == [2, 0]


def test_a_step_that_is_repeated_has_the_lags_that_it_had_and_is_not_dropped():
    """Whether the version that is equal to the old one has been committed yet must make no difference."""
    lineage = Lineage()
    for version, node in {0: Node(-1, 0), 1: Node(0, 1), 2: Node(1, 2)}.items():
        lineage.nodes.add(version, node)
    lineage.committed(3, 0, 0)  # resumed at step 0
    batch = a_batch((a_sample(1.0, spans=[1, 2, 2, 1]), a_sample(spans=[2, 3])))
    assert prepared(batch, lineage=lineage, max_lag=1).dropped == {"trainer_lag": 1}
    again = prepared(msgspec.structs.replace(batch, replayed=True), lineage=lineage, max_lag=1)
    assert again.lags == [1, 0] and again.dropped == {}


def test_lags_are_counted_from_the_version_that_was_pinned_with_the_batch():
    """A newer one may be equal to a version of another branch, of which less is known."""
    lineage = a_lineage()
    lineage.pinned = 2
    lineage.nodes.add(9, Node(8, 3, "same"))  # of another branch: 8 was never asked for
    lineage.committed(10, 2, 3, "same")
    assert prepared(a_batch((a_sample(1.0), a_sample())), lineage=lineage).lags == [1, 1]


def test_what_the_store_does_not_hold_connects_to_nothing(tmp_path: Path):
    assert a_lineage().connect(1, FileStore(f"file://{tmp_path}"))
    assert not a_lineage().connect(9, FileStore(f"file://{tmp_path}"))
    assert not a_lineage().connect(-1, FileStore(f"file://{tmp_path}"))


def test_a_version_committed_while_a_batch_is_handed_out_stays_the_newest(monkeypatch):
    """Rank 0's publisher commits between the reading of the lineage and the batch's arrival."""
    lineage = Lineage()
    lineage.committed(5, -1, 5)
    feed = BatchFeed(
        SoloGroup(),
        LinkThat(lambda: lineage.committed(6, 5, 6)),
        StoreThatIsNotRead(),
        lineage,
        incarnation=0,
        limit_s=5.0,
        stopping=lambda: False,
    )
    assert feed.next(6) is not None
    assert lineage.newest == 6 and lineage.now == 5, "all ranks count from the one that was told"


def test_a_trainer_that_waits_for_batches_in_vain_hears_that_it_was_replaced(monkeypatch):
    """The workers follow the newer trainer: no batch will come, so no publish will ever find out."""
    monkeypatch.setattr(batches, "_SLICE_S", 0.01)
    monkeypatch.setattr(batches, "_CHECK_S", 0.05)
    answers = iter([StoreUnavailable("away"), Fenced("trainer incarnation 1 has taken the run")])

    def check_ours() -> None:
        raise next(answers)

    feed = BatchFeed(
        SoloGroup(),
        LinkWithout(),
        StoreThatIsNotRead(),
        a_lineage(),
        incarnation=0,
        limit_s=20.0,
        stopping=lambda: False,
        check_ours=check_ours,
    )
    with pytest.raises(Fenced, match="incarnation 1"):
        feed.next(6)


def test_synchronous_training_never_waits_for_weights_that_wait_for_the_next_batch(tmp_path, monkeypatch):
    """max_lag 0: version n alone makes the batch of step n. Here each version's publishing ends only when the next
    batch is asked for, so all weights meet one that is on its way, and only the wait for a batch can publish them."""
    monkeypatch.setattr(batches, "_SLICE_PENDING_S", 0.01)
    store = FileStore(f"file://{tmp_path}/store")
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    lineage, link = Lineage(), SynchronousLink()

    def announce(manifest):
        lineage.committed(manifest.version, manifest.parent, manifest.step)
        link.announce(manifest.step)
        link.wait_for_request(manifest.step + 1)

    config = WeightsConfig(merge_after_s=0.0)
    with Publisher(store, run, claim(store), parameters, config, on_commit=announce) as publisher:
        feed = BatchFeed(
            SoloGroup(),
            link,
            store,
            lineage,
            incarnation=0,
            limit_s=LIMIT_S,
            stopping=lambda: False,
            catch_up=publisher.catch_up,
        )
        publisher.publish(0)
        for step in range(3):
            assert feed.next(step).step == step
            parameters["layer.bias"] += 1.0
            assert publisher.publish(step + 1) == -1
        link.end()
    assert [(node.parent, node.step) for node in lineage.nodes.values()] == [(-1, 0), (0, 1), (1, 2)]


class SynchronousLink:
    """Gives the batch of step n once a version with n steps is out."""

    def __init__(self):
        self._step = self._asked = -1
        self._changed = threading.Condition()

    def announce(self, step):
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def wait_for_request(self, step):
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked >= step, LIMIT_S)

    def end(self):
        with self._changed:
            self._asked = 1 << 30
            self._changed.notify_all()

    def next_batch(self, incarnation, step, timeout_s, **_):
        with self._changed:
            self._asked = max(self._asked, step)
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._step >= step, timeout_s):
                return Batch(incarnation=incarnation, step=step, groups=(), lags=(), frontier=0)
        raise WaitTimeout("no batch")


class LinkWithout:
    """No batch is ever ready."""

    def next_batch(self, incarnation, step, timeout_s, **_):
        time.sleep(timeout_s)
        raise WaitTimeout("no batch")


class SoloGroup:
    """One rank; `broadcast` is where another thread gets its chance."""

    rank, size = 0, 1

    def max(self, tensor):
        return tensor

    def broadcast(self, data):
        LinkThat.meanwhile()
        return data


class LinkThat:
    meanwhile = staticmethod(lambda: None)

    def __init__(self, meanwhile):
        LinkThat.meanwhile = staticmethod(meanwhile)

    def next_batch(self, incarnation, step, timeout_s, **_):
        return Batch(incarnation=incarnation, step=step, groups=(), lags=(), frontier=0)


class StoreThatIsNotRead:
    pass


def test_what_is_longer_than_the_model_allows_is_left_out_and_the_step_goes_on():
    """Also of a batch that was assigned before anybody looked: or every resume would end at it."""
    group = a_batch((a_sample(1.0), a_sample(0.0))).groups[0]
    length = len(group.prompt.numpy()) + len(group.samples[0].tokens.numpy())
    batch = a_batch((a_sample(1.0), a_sample(0.0)))
    assert prepared(batch, longest=length).groups == 1
    left = prepared(batch, longest=length - 1)
    assert left.groups == 0 and left.dropped == {"trainer_malformed": 1}
