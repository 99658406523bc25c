"""The publisher of a single process: what a version holds, what a failing store does to it, who may go
on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import AccessDenied, Fenced, ModelMismatch, StoreUnavailable, WaitTimeout, WeightsError
from async_rl.store import ObjectStore
from async_rl.store.file import FileStore
from async_rl.weights import lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest, claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import Report
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.subscriber import Subscriber
from tests.weights_support import SHAPES, ScriptedStore, raises, write_model_dir

LIMIT_S = 20.0
SMALL = WeightsConfig(pack_bytes=60, publish_limit_s=LIMIT_S)  # several packs


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.weights.publisher._PAUSE_S", (0.0, 0.0))


class Trainer:
    """Parameters, a run and a publisher."""

    def __init__(
        self, store: ScriptedStore, folder: Path, config: WeightsConfig = SMALL, parent: int = -1
    ) -> None:
        torch.manual_seed(0)
        self.store = store
        self.parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.run: RunInfo = ensure_run(store, write_model_dir(folder / "model"), self.parameters)
        self.claim = claim(store)
        self.commits: list[Manifest] = []
        self.publisher = Publisher(
            store,
            self.run,
            self.claim,
            self.parameters,
            config,
            parent=parent,
            on_commit=self.commits.append,
        )

    def step(self) -> None:
        for tensor in self.parameters.values():
            tensor.add_(torch.randn_like(tensor))

    def rounded(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.parameters.items()}


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(FileStore(f"file://{tmp_path}/store"))


Start = Callable[..., Trainer]


@pytest.fixture
def start(store: ScriptedStore, tmp_path: Path) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def make(config: WeightsConfig = SMALL, parent: int = -1) -> Trainer:
        trainers.append(Trainer(store, tmp_path, config, parent))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.publisher.close()


def fetched(trainer: Trainer, version: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    return load(trainer.store, trainer.run, version, tmp_path)


def load(store: ObjectStore, run: RunInfo, version: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    local = Subscriber(store, run, tmp_path / "cache", WeightsConfig()).fetch(read_manifest(store, version))
    result: dict[str, torch.Tensor] = {}
    for shard in local.shards:
        result |= load_file(shard)
    return result


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


# ---------------------------------------------------------------- what a version holds


def test_a_version_holds_the_weights_of_the_moment_it_was_asked_for(start: Start, tmp_path: Path) -> None:
    trainer = start()
    gate = threading.Event()
    trainer.store.on("upload", "packs/", lambda: gate.wait(LIMIT_S), times=1)
    at_publish = trainer.rounded()
    assert trainer.publisher.publish(step=3) == 0
    trainer.step()  # while the version is still being written
    gate.set()
    trainer.publisher.flush(LIMIT_S)
    manifest = read_manifest(trainer.store, 0)
    assert (manifest.step, manifest.parent, manifest.incarnation, len(manifest.way.packs) > 1) == (
        3,
        -1,
        0,
        True,
    )
    assert trainer.commits == [manifest]
    assert equal(fetched(trainer, 0, tmp_path), at_publish)


def test_parameters_that_are_16_bit_already_are_copied_too(store: ScriptedStore, tmp_path: Path) -> None:
    parameters = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    gate = threading.Event()
    store.on("upload", "packs/", lambda: gate.wait(LIMIT_S))
    with Publisher(store, run, claim(store), parameters, SMALL) as publisher:
        at_publish = {name: tensor.clone() for name, tensor in parameters.items()}
        publisher.publish(0)
        for tensor in parameters.values():
            tensor.zero_()
        gate.set()
        publisher.flush(LIMIT_S)
    assert equal(load(store, run, 0, tmp_path), at_publish)


def test_rounding_is_torchs_own_for_ties_denormals_and_infinity(start: Start, tmp_path: Path) -> None:
    trainer = start()
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x00000001, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    trainer.parameters["layer.bias"].copy_(bits.view(torch.float32))
    trainer.publisher.publish(0)
    trainer.publisher.flush(LIMIT_S)
    assert equal(fetched(trainer, 0, tmp_path), trainer.rounded())


def test_versions_count_up_and_name_their_parent(start: Start, tmp_path: Path) -> None:
    trainer = start()
    trainer.publisher.publish(0)
    trainer.step()
    assert trainer.publisher.publish(1) == 1
    trainer.publisher.flush(LIMIT_S)
    assert [(m.version, m.step, m.parent) for m in trainer.commits] == [(0, 0, -1), (1, 1, 0)]
    assert trainer.commits[0].digest != trainer.commits[1].digest
    assert trainer.publisher.committed == 1

    resumed = start(parent=0)  # from the checkpoint that held version 0
    assert resumed.publisher.publish(0) == 2
    resumed.publisher.flush(LIMIT_S)
    assert (resumed.commits[0].parent, resumed.commits[0].incarnation) == (0, 1)
    assert resumed.commits[0].digest == trainer.commits[0].digest  # the same weights, the same digest


def test_a_second_name_of_a_tied_parameter_is_not_written(store: ScriptedStore, tmp_path: Path) -> None:
    parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    parameters["lm_head.weight"] = parameters["embed.weight"].detach()  # as state_dict() gives it
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    with Publisher(store, run, claim(store), parameters, SMALL) as publisher:
        publisher.publish(0)
        publisher.flush(LIMIT_S)
    assert read_manifest(store, 0).way.weight_map.keys() == SHAPES.keys()


def test_parameters_that_are_not_the_runs_are_refused(start: Start) -> None:
    trainer = start()

    def publisher(**changes: torch.Tensor) -> Publisher:
        changed = {name.replace("_", "."): tensor for name, tensor in changes.items()}
        return Publisher(
            trainer.store, trainer.run, trainer.claim, {**trainer.parameters, **changed}, SMALL
        )

    with pytest.raises(ModelMismatch, match=r"layer\.bias has shape \(6,\), in the run \(5,\)"):
        publisher(layer_bias=torch.zeros(6))
    with pytest.raises(ModelMismatch, match=r"'extra\.weight' is not among the run's"):
        publisher(extra_weight=torch.zeros(1))
    del trainer.parameters["norm.weight"]
    with pytest.raises(ModelMismatch, match=r"no parameter 'norm\.weight'"):
        publisher()


# ---------------------------------------------------------------- a store that fails


@pytest.mark.parametrize(
    ("operation", "prefix", "lost_answer"),
    [
        ("upload", "packs/", False),
        ("list_after", "incarnations/", False),
        ("put_if_absent", "versions/", False),
        ("put_if_absent", "versions/", True),
    ],
)
def test_a_store_that_is_away_for_a_while_costs_time_only(
    start: Start, tmp_path: Path, operation: str, prefix: str, lost_answer: bool
) -> None:
    trainer = start()
    away = raises(StoreUnavailable("no route"))
    trainer.store.on(operation, prefix, away, times=3, lost_answer=lost_answer)
    trainer.publisher.publish(0)
    trainer.publisher.flush(LIMIT_S)
    assert equal(fetched(trainer, 0, tmp_path), trainer.rounded())
    assert lineage.list_versions(trainer.store) == [0]


def test_packs_that_are_whole_are_not_sent_again(start: Start) -> None:
    trainer = start()
    trainer.store.on("upload", "packs/0000000000-00000000-0-1", raises(StoreUnavailable("no route")))
    trainer.publisher.publish(0)
    trainer.publisher.flush(LIMIT_S)
    uploads = [key for operation, key in trainer.store.calls if operation == "upload"]
    assert len(uploads) == len(trainer.commits[0].way.packs) + 1
    assert len(set(uploads)) == len(trainer.commits[0].way.packs)


def test_beyond_the_limit_the_trainer_is_told_and_can_go_on(start: Start, tmp_path: Path) -> None:
    trainer = start(WeightsConfig(pack_bytes=60, publish_limit_s=1e-6))
    trainer.store.on("upload", "packs/", raises(StoreUnavailable("no route")))
    trainer.publisher.publish(0)
    with pytest.raises(StoreUnavailable, match=r"version 0 was given up after .* no route"):
        trainer.publisher.publish(1)
    assert trainer.publisher.publish(1) == 1  # numbers are not used twice
    trainer.publisher.flush(LIMIT_S)
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())


def test_a_version_given_up_whose_put_had_succeeded_is_not_taken_for_the_next(
    start: Start, tmp_path: Path
) -> None:
    """Version 0 is a zombie's, so our first is put as 1, unheard, and given up: the second wants 1 too."""
    zombie = start()
    trainer = start(WeightsConfig(pack_bytes=60, publish_limit_s=1e-6))
    write_as_zombie(zombie, 0)
    trainer.store.on(
        "put_if_absent", "versions/0000000001", raises(StoreUnavailable("no answer")), lost_answer=True
    )
    trainer.publisher.publish(0)
    with pytest.raises(StoreUnavailable):
        trainer.publisher.flush(LIMIT_S)
    trainer.step()
    trainer.publisher.publish(1)
    trainer.publisher.flush(LIMIT_S)
    assert [(m.version, m.step, m.parent) for m in trainer.commits] == [(2, 1, 1)]
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


def test_an_error_that_time_will_not_heal_surfaces_at_once(start: Start) -> None:
    trainer = start()
    trainer.store.on("upload", "packs/", raises(AccessDenied("not yours", hint="ask for PutObject")))
    trainer.publisher.publish(0)
    with pytest.raises(AccessDenied, match="ask for PutObject"):
        trainer.publisher.flush(LIMIT_S)
    assert trainer.commits == []


def test_an_error_nobody_thought_of_surfaces_as_well(start: Start) -> None:
    trainer = start()
    trainer.store.on("upload", "packs/", raises(RuntimeError("a bug")))
    trainer.publisher.publish(0)
    with pytest.raises(WeightsError, match="RuntimeError: a bug"):
        trainer.publisher.flush(LIMIT_S)
    trainer.store.on("put_if_absent", "versions/", raises(ZeroDivisionError("a bug")))
    trainer.publisher.publish(1)
    with pytest.raises(ZeroDivisionError):
        trainer.publisher.flush(LIMIT_S)


def test_a_wait_for_a_version_is_bounded(start: Start) -> None:
    trainer = start()
    gate = threading.Event()
    trainer.store.on("upload", "packs/", lambda: gate.wait(LIMIT_S))
    trainer.publisher.publish(0)
    with pytest.raises(WaitTimeout, match="publish-0"):
        trainer.publisher.flush(0.01)
    gate.set()
    trainer.publisher.flush(LIMIT_S)
    assert [manifest.version for manifest in trainer.commits] == [0]


def test_closing_ends_the_retries(start: Start) -> None:
    trainer = start()
    failing = threading.Event()

    def fail() -> None:
        failing.set()
        raise StoreUnavailable("no route")

    trainer.store.on("upload", "packs/", fail, times=10**9)
    trainer.publisher.publish(0)
    assert failing.wait(LIMIT_S)
    trainer.publisher.close(LIMIT_S)
    with pytest.raises(StoreUnavailable, match="given up"):
        trainer.publisher.flush(0.0)


# ---------------------------------------------------------------- two trainers


def write_as_zombie(trainer: Trainer, version: int) -> None:
    """What a trainer commits that looked for newer ones just before they claimed."""
    inner = trainer.store.inner
    newer = [info.key for info in inner.list_after("incarnations/")][trainer.claim.incarnation + 1 :]
    hidden = {key: inner.get(key) for key in newer}
    for key in hidden:
        inner.delete(key)
    trainer.publisher.publish(version)
    trainer.publisher.flush(LIMIT_S)
    for key, data in hidden.items():
        inner.put(key, data)


def test_of_two_trainers_exactly_one_goes_on(start: Start) -> None:
    first = start()
    first.publisher.publish(0)
    first.publisher.flush(LIMIT_S)
    second = start(parent=0)
    first.publisher.publish(1)
    assert second.publisher.publish(0) == 1
    second.publisher.flush(LIMIT_S)
    with pytest.raises(Fenced, match="incarnation 1 has taken the run"):
        first.publisher.flush(LIMIT_S)
    with pytest.raises(Fenced):  # for good
        first.publisher.publish(2)
    second.publisher.publish(1)
    second.publisher.flush(LIMIT_S)
    assert [(m.version, m.incarnation) for m in second.commits] == [(1, 1), (2, 1)]
    assert [m.version for m in first.commits] == [0]


def test_a_trainer_that_sees_a_newer_one_writes_no_manifest(start: Start) -> None:
    first = start()
    claim(first.store)
    first.publisher.publish(0)
    with pytest.raises(Fenced):
        first.publisher.flush(LIMIT_S)
    assert lineage.list_versions(first.store) == []


def test_a_trainer_fenced_between_its_look_and_its_put_does_not_announce_the_version(
    start: Start, tmp_path: Path
) -> None:
    first = start()
    second: list[Trainer] = []
    first.store.on("put_if_absent", "versions/", lambda: second.append(start()))
    first.publisher.publish(0)
    with pytest.raises(Fenced):
        first.publisher.flush(LIMIT_S)
    assert first.commits == []
    subscriber = Subscriber(first.store, first.run, tmp_path / "cache", WeightsConfig())
    assert lineage.list_versions(first.store) == [0] and subscriber.newest() is None  # a zombie's
    second[0].publisher.publish(5)
    second[0].publisher.flush(LIMIT_S)
    newest = subscriber.newest()
    assert newest is not None and (newest.version, newest.step, newest.parent) == (1, 5, -1)
    assert second[0].publisher.publish(6) == 2


# ---------------------------------------------------------------- what ranks tell each other


def test_an_error_keeps_its_kind_message_and_hint_between_ranks() -> None:
    error = Report.of(AccessDenied("no", hint="ask")).error()
    assert isinstance(error, AccessDenied) and (error.message, error.hint) == ("no", "ask")
    assert type(Report(kind="Unheard", message="of").error()) is WeightsError
