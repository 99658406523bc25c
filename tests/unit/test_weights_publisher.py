"""The publisher of a single process: what a version holds, what a failing store does to it, who may go
on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import (
    AccessDenied,
    Corrupt,
    Fenced,
    ModelMismatch,
    StoreUnavailable,
    WaitTimeout,
    WeightsError,
)
from async_rl.store import ObjectStore
from async_rl.store.file import FileStore
from async_rl.weights import lineage
from async_rl.weights.changes import cut_tiles
from async_rl.weights.codec import TILE, digest_of
from async_rl.weights.config import WeightsConfig
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.lineage import Manifest, Way, claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import Report
from async_rl.weights.readers import ReaderBeat, write_beat
from async_rl.weights.run import TILES_SINCE, RunInfo, ensure_run, open_run
from async_rl.weights.shards import Part
from async_rl.weights.subscriber import Subscriber
from async_rl.weights.ways import list_edges
from tests.weights_support import SHAPES, ScriptedStore, raises, write_model_dir

replace = msgspec.structs.replace
LIMIT_S = 20.0
SMALL = WeightsConfig(
    pack_bytes=60, delta_pack_bytes=1, publish_limit_s=LIMIT_S, merge_after_s=LIMIT_S
)  # several packs, a delta pack per tile, a version per publish
HASTY = replace(SMALL, merge_after_s=0.0)
BRIEF = replace(SMALL, publish_limit_s=1e-6)
ANCHORS = replace(SMALL, anchor_every=1, skip_spans=(2,))  # of every other version


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

    def publish(self, step: int) -> Manifest:
        """After a step, and committed."""
        self.step()
        version = self.publisher.publish(step)
        self.publisher.flush(LIMIT_S)
        return read_manifest(self.store, version)

    def rounded(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.parameters.items()}


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(FileStore(f"file://{tmp_path}/store"))


Start = Callable[..., Trainer]


Baseline = Literal["host", "device"]

EITHER = pytest.mark.parametrize("baseline", ["host", "device"])
"""Wherever the copies of the weights lie."""


@pytest.fixture
def baseline() -> Baseline:
    return "host"


@pytest.fixture
def start(store: ScriptedStore, tmp_path: Path, baseline: Baseline) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def make(config: WeightsConfig = SMALL, parent: int = -1) -> Trainer:
        trainers.append(Trainer(store, tmp_path, replace(config, baseline=baseline), parent))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.publisher.close()


def fetched(trainer: Trainer, version: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    return load(trainer.store, trainer.run, version, tmp_path)


def load(store: ObjectStore, run: RunInfo, version: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    with closing(Subscriber(store, run, tmp_path / "cache", WeightsConfig())) as subscriber:
        for shard in subscriber.fetch(read_manifest(store, version)).shards:
            result |= load_file(shard)
    return {name: tensor.clone() for name, tensor in result.items()}  # not views of files that change


def digest(weights: dict[str, torch.Tensor]) -> str:
    total, place = 0, 0
    for name in SHAPES:
        bits = weights[name].reshape(-1).view(torch.int16).numpy().view(np.uint16)
        total += digest_of(bits, place)
        place += len(bits)
    return f"{total % 2**64:016x}"


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


# ---------------------------------------------------------------- what a version holds


@EITHER
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


@EITHER
def test_parameters_that_are_16_bit_already_are_copied_too(
    store: ScriptedStore, tmp_path: Path, baseline: Baseline
) -> None:
    parameters = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    gate = threading.Event()
    store.on("upload", "packs/", lambda: gate.wait(LIMIT_S))
    config = replace(SMALL, baseline=baseline)
    with Publisher(store, run, claim(store), parameters, config) as publisher:
        at_publish = {name: tensor.clone() for name, tensor in parameters.items()}
        publisher.publish(0)
        for tensor in parameters.values():
            tensor.zero_()
        gate.set()
        publisher.flush(LIMIT_S)
    assert equal(load(store, run, 0, tmp_path), at_publish)


@EITHER
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


def test_a_full_version_says_the_digests_of_its_tiles_by_which_a_part_of_it_is_read(
    start: Start, tmp_path: Path
) -> None:
    trainer = start()
    trainer.publisher.publish(0)
    trainer.publisher.flush(LIMIT_S)
    manifest = trainer.commits[0]
    tiles = FullTiles(trainer.run, manifest.way, "it")
    assert tiles.known and f"{tiles.digest():016x}" == manifest.digest
    trainer.store.calls.clear()
    reader = Subscriber(
        trainer.store, trainer.run, tmp_path / "part", WeightsConfig(), {"layer.bias": (0, 5)}
    )
    with closing(reader):
        local = reader.fetch(manifest)
        assert local.fetched_bytes == 2 * 5
        shard = local.shards[local.weight_map["layer.bias"]]
        assert torch.equal(load_file(shard)["layer.bias"], trainer.rounded()["layer.bias"])
    assert [call for call in trainer.store.calls if call[0] == "get"] == [
        ("get", manifest.way.packs[local.weight_map["layer.bias"]].key)
    ]


def test_a_run_of_an_older_format_goes_on_without_digests_of_tiles(
    store: ScriptedStore, tmp_path: Path
) -> None:
    """Its readers may be older too: to them a manifest with such would seem to be edited."""
    parameters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    older = msgspec.structs.replace(run, format=TILES_SINCE - 1, seal="")
    store.put("run.json", msgspec.json.encode(older))
    with Publisher(store, open_run(store), claim(store), parameters, SMALL) as publisher:
        publisher.publish(0)
        publisher.flush(LIMIT_S)
    assert b"tile_digests" not in store.get("versions/0000000000.json")
    assert load(store, open_run(store), 0, tmp_path).keys() == SHAPES.keys()


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


# ---------------------------------------------------------------- deltas


@EITHER
def test_after_the_first_version_only_what_changed_is_written(start: Start, tmp_path: Path) -> None:
    trainer = start()
    first = trainer.publish(0)
    trainer.parameters["layer.weight"].view(-1)[[3, 17]] += 1.0
    trainer.publisher.publish(1)
    trainer.publisher.flush(LIMIT_S)
    second = trainer.commits[1]
    assert (first.way.base, second.way.base, second.way.changed, len(second.way.packs)) == (-1, 0, 2, 1)
    assert second.digest == digest(trainer.rounded()) != first.digest
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())


@EITHER
def test_where_nothing_changed_a_version_has_no_packs(start: Start, tmp_path: Path) -> None:
    trainer = start()
    trainer.publish(0)
    trainer.parameters["layer.weight"] += 1e-12  # less than rounding sees
    trainer.publisher.publish(1)
    trainer.publisher.flush(LIMIT_S)
    assert trainer.commits[1].way == Way(0, (), 0)
    assert trainer.commits[1].digest == trainer.commits[0].digest
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())


@EITHER
@pytest.mark.parametrize("codec", ["default", "small"])
def test_every_bit_pattern_survives_a_chain_of_deltas(
    store: ScriptedStore, tmp_path: Path, codec: Literal["default", "small"], baseline: Baseline
) -> None:
    """NaNs of all kinds, infinities, denormals, both zeros: random bits."""
    draw = np.random.default_rng(3)

    def random_bits(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(draw.integers(-(2**15), 2**15, shape, np.int16)).view(torch.bfloat16)

    parameters = {name: random_bits(shape) for name, shape in SHAPES.items()}
    run = ensure_run(store, write_model_dir(tmp_path / "model"), parameters)
    config = replace(SMALL, codec=codec, baseline=baseline)
    with Publisher(store, run, claim(store), parameters, config) as publisher:
        for step in range(4):
            publisher.publish(step)
            publisher.flush(LIMIT_S)
            found = load(store, run, step, tmp_path)
            for name, tensor in parameters.items():
                assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
                tensor.copy_(random_bits(tuple(tensor.shape)))
    assert [read_manifest(store, version).way.base for version in range(4)] == [-1, 0, 1, 2]


def test_tiles_are_cut_from_the_start_of_the_tensor_and_at_the_ranks_rows() -> None:
    parts = [Part(0, 0, 2 * TILE, 5), Part(3, TILE - 2, 5, 7 * TILE), Part(4, 3 * TILE + 1, 1, 0)]
    cuts = [(cut.tensor, cut.start, cut.stop, cut.place) for cut in cut_tiles(parts)]
    assert cuts == [
        (0, 0, TILE, 5),
        (0, TILE, 2 * TILE, TILE + 5),
        (3, TILE - 2, TILE, 8 * TILE - 2),
        (3, TILE, TILE + 3, 8 * TILE),
        (4, 3 * TILE + 1, 3 * TILE + 2, 3 * TILE + 1),
    ]


def test_the_manifest_comes_after_every_pack(start: Start) -> None:
    trainer = start()
    trainer.publish(0)
    trainer.publish(1)
    writes = [call for call in trainer.store.calls if call[0] in ("upload", "put_if_absent")]
    for manifest in trainer.commits:
        commit = writes.index(("put_if_absent", lineage.version_key(manifest.version)))
        assert manifest.way.packs
        assert all(writes.index(("upload", pack.key)) < commit for pack in manifest.way.packs)


# ---------------------------------------------------------------- the baseline


@EITHER
def test_a_version_given_up_stays_out_of_the_baseline(start: Start, tmp_path: Path) -> None:
    """The next one carries both changes."""
    trainer = start(BRIEF)
    trainer.publish(0)
    trainer.store.on("put_if_absent", "versions/", raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        trainer.publish(1)
    last = trainer.publish(2)
    assert (last.version, last.way.base, last.parent) == (2, 0, 0)
    assert last.digest == digest(trainer.rounded())
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


def test_a_commit_whose_answer_was_lost_moves_the_baseline_once(start: Start, tmp_path: Path) -> None:
    trainer = start()
    trainer.publish(0)
    away = raises(StoreUnavailable("no answer"))
    trainer.store.on("put_if_absent", "versions/", away, lost_answer=True)
    assert trainer.publish(1).way.base == 0
    assert trainer.publish(2).way.base == 1
    assert lineage.list_versions(trainer.store) == [0, 1, 2]
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


def test_a_delta_given_up_that_stands_in_the_store_all_the_same_harms_nothing(
    start: Start, tmp_path: Path
) -> None:
    """Its readers find the way to the next version all the same."""
    trainer = start(BRIEF)
    trainer.publish(0)
    trainer.store.on("put_if_absent", "versions/", raises(StoreUnavailable("no answer")), lost_answer=True)
    with pytest.raises(StoreUnavailable):
        trainer.publish(1)
    unheard = trainer.rounded()
    assert trainer.publish(2).way.base == 0
    assert equal(fetched(trainer, 1, tmp_path), unheard)
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


@EITHER
@pytest.mark.parametrize("pack", range(len(SHAPES)))
def test_an_attempt_that_fails_half_way_keeps_the_delta_packs_that_are_whole(
    start: Start, tmp_path: Path, pack: int
) -> None:
    trainer = start()
    trainer.publish(0)
    trainer.store.calls.clear()
    failing = f"packs/0000000001-00000000-0-{pack}"
    trainer.store.on("upload", failing, raises(StoreUnavailable("no route")), times=2)
    manifest = trainer.publish(1)
    uploads = [key for operation, key in trainer.store.calls if operation == "upload"]
    assert len(manifest.way.packs) == len(SHAPES)
    assert sorted(uploads) == sorted([pack.key for pack in manifest.way.packs] + 2 * [failing])
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())


# ---------------------------------------------------------------- where a trainer begins


@EITHER
def test_a_resumed_trainer_with_its_parents_weights_writes_no_packs(start: Start, tmp_path: Path) -> None:
    first = start()
    first.publish(0)
    first.publish(1)
    weights = first.rounded()
    resumed = start(parent=1)
    for name, tensor in resumed.parameters.items():
        tensor.copy_(first.parameters[name])
    resumed.publisher.publish(1)
    resumed.publisher.flush(LIMIT_S)
    (manifest,) = resumed.commits
    assert (manifest.way, manifest.parent) == (Way(1, (), 0), 1)
    assert manifest.digest == first.commits[1].digest
    assert equal(fetched(resumed, 2, tmp_path), weights)
    assert resumed.publish(2).way.base == 2
    assert equal(fetched(resumed, 3, tmp_path), resumed.rounded())


@EITHER
def test_a_trainer_with_other_weights_than_its_parents_begins_with_a_full_version(
    start: Start, tmp_path: Path
) -> None:
    start().publish(0)
    resumed = start(parent=0)
    resumed.parameters["layer.bias"] += 1.0
    assert (resumed.publish(0).way.base, resumed.commits[0].parent) == (-1, 0)
    assert equal(fetched(resumed, 1, tmp_path), resumed.rounded())


@pytest.mark.parametrize("what", ["pack", "manifest", "zombie"])
def test_a_parent_that_can_not_be_read_or_does_not_count_is_not_built_upon(
    start: Start, tmp_path: Path, what: str
) -> None:
    first = start()
    first.publisher.publish(0)
    first.publisher.flush(LIMIT_S)
    if what == "pack":
        first.store.delete(first.commits[0].way.packs[1].key)
    elif what == "manifest":
        first.store.put(lineage.version_key(0), b"{}")
    resumed = start(parent=0)
    if what == "zombie":  # its claim is another's now
        others = lineage.sealed(replace(first.claim, nonce="other"))
        first.store.put("incarnations/00000000.json", msgspec.json.encode(others))
    resumed.publisher.publish(0)
    resumed.publisher.flush(LIMIT_S)
    assert resumed.commits[0].way.base == -1
    assert equal(fetched(resumed, 1, tmp_path), resumed.rounded())


def test_a_store_that_is_away_when_the_parent_is_read_costs_time_only(start: Start) -> None:
    first = start()
    first.publisher.publish(0)
    first.publisher.flush(LIMIT_S)
    resumed = start(parent=0)
    resumed.store.on("get", "versions/", raises(StoreUnavailable("no route")), times=2)
    resumed.publisher.publish(0)
    resumed.publisher.flush(LIMIT_S)
    assert resumed.commits[0].way.base == 0


# ---------------------------------------------------------------- merging


def gated(trainer: Trainer, operation: str = "upload", prefix: str = "packs/") -> threading.Event:
    gate = threading.Event()
    trainer.store.on(operation, prefix, lambda: gate.wait(LIMIT_S))
    return gate


@EITHER
def test_while_a_version_is_on_its_way_the_next_ones_are_merged(start: Start, tmp_path: Path) -> None:
    trainer = start(HASTY)
    trainer.publisher.publish(0)
    trainer.publisher.flush(LIMIT_S)
    gate = gated(trainer)
    trainer.step()
    assert trainer.publisher.publish(1) == 1
    for step in (2, 3):
        trainer.step()
        assert trainer.publisher.publish(step) == -1
        assert trainer.publisher.newest == 1
    gate.set()
    trainer.publisher.flush(LIMIT_S)
    assert [(m.version, m.step, m.way.base) for m in trainer.commits] == [(0, 0, -1), (1, 1, 0), (2, 3, 1)]
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


def test_what_is_pending_is_published_as_soon_as_nothing_is_on_its_way(
    start: Start, tmp_path: Path
) -> None:
    trainer = start(HASTY)
    assert not trainer.publisher.catch_up(0)  # nothing pending, nothing published
    assert trainer.publisher.newest == -1
    gate = gated(trainer)
    trainer.publisher.publish(0)
    trainer.step()
    assert trainer.publisher.publish(1) == -1
    assert trainer.publisher.catch_up(1) and trainer.publisher.newest == 0
    gate.set()
    on_its_way = trainer.publisher._thread
    assert on_its_way is not None
    on_its_way.join(LIMIT_S)
    trainer.step()  # a step without a publish: the version must say so
    assert not trainer.publisher.catch_up(2)
    trainer.publisher.flush(LIMIT_S)
    assert [(m.version, m.step) for m in trainer.commits] == [(0, 0), (1, 2)]
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())


def test_catching_up_raises_what_stopped_the_version_before(start: Start) -> None:
    trainer = start(HASTY)
    trainer.store.on("upload", "packs/", raises(AccessDenied("not yours")))
    trainer.publisher.publish(0)
    on_its_way = trainer.publisher._thread
    assert on_its_way is not None
    on_its_way.join(LIMIT_S)
    with pytest.raises(AccessDenied):
        trainer.publisher.catch_up(1)
    assert trainer.publisher.publish(1) == 1


@EITHER
def test_weights_of_a_version_that_was_given_up_are_pending(start: Start, tmp_path: Path) -> None:
    """A checkpoint may swallow the error; synchronous training would then wait for them for ever."""
    trainer = start(BRIEF)
    trainer.publish(0)
    trainer.store.on("put_if_absent", "versions/", raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        trainer.publish(1)
    assert not trainer.publisher.catch_up(1)
    trainer.publisher.flush(LIMIT_S)
    assert [(m.version, m.step) for m in trainer.commits] == [(0, 0), (2, 1)]
    assert equal(fetched(trainer, 2, tmp_path), trainer.rounded())


def test_readers_whose_only_way_was_lost_get_an_anchor_though_no_version_follows(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta is damaged for good. The reader stays behind it, so no batch comes, so no version, so no anchor."""
    monkeypatch.setattr("async_rl.weights.publisher._LOOK_AT_READERS_S", 0.0)
    trainer = start(SMALL)
    trainer.publish(0)
    with closing(Subscriber(trainer.store, trainer.run, tmp_path / "cache", SMALL)) as reader:
        reader.fetch(trainer.commits[0])
        trainer.step()
        trainer.publish(1)
        trainer.store.delete(trainer.commits[1].way.packs[0].key)
        with pytest.raises(Corrupt):
            reader.fetch(trainer.commits[1])
        write_beat(trainer.store, ReaderBeat("w1", (0,), 60.0, reader.lacks))
        anchored = until_anchored(trainer)
        assert anchored == [1]
        reader.fetch(trainer.commits[1])
    assert equal(fetched(trainer, 1, tmp_path), trainer.rounded())
    write_beat(trainer.store, ReaderBeat("w1", (0,), 60.0, lacks=7))  # of no version of ours
    trainer.store.calls.clear()
    for _ in range(20):
        trainer.publisher.catch_up(1)
        looked = trainer.publisher._stuck._thread
        if looked is not None:
            looked.join(LIMIT_S)
    assert trainer.store.calls and not trainer.publisher._anchor_writer.busy
    assert until_anchored(trainer) == [1]


def until_anchored(trainer: Trainer) -> list[int]:
    """Versions with an anchor, after catching up until there is one."""
    pause = threading.Event()
    for _ in range(400):
        trainer.publisher.catch_up(1)
        found = [edge.version for edge in list_edges(trainer.store) if edge.base < 0]
        if found and not trainer.publisher._anchor_writer.busy:
            return found
        pause.wait(LIMIT_S / 400)
    raise AssertionError(f"no anchor within {LIMIT_S} s")


# ---------------------------------------------------------------- anchors


def anchor_ended(trainer: Trainer) -> None:
    thread = trainer.publisher._anchor_writer._thread
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def holders(trainer: Trainer, name: str) -> int:
    return sum(buffer.holders for buffer in trainer.publisher._shards._pool._all[name])


@EITHER
def test_an_anchor_holds_its_version_while_deltas_go_on(start: Start, tmp_path: Path) -> None:
    trainer = start(ANCHORS)
    trainer.publish(0)
    trainer.publish(1)
    copy = sum(2 * tensor.numel() for tensor in trainer.parameters.values())
    assert trainer.publisher._shards.buffers == 2 * copy
    gate = gated(trainer, "upload", "packs/0000000002-00000000-anchor0-0")
    trainer.publish(2)
    anchored = trainer.rounded()
    for step in (3, 4, 5):
        trainer.publish(step)
        assert trainer.publisher._shards.buffers <= 3 * copy
    assert trainer.publisher._shards.buffers == 3 * copy
    assert list(list_edges(trainer.store)) == []
    gate.set()
    anchor_ended(trainer)
    trainer.publish(6)
    assert trainer.publisher._shards.buffers == 2 * copy
    (edge,) = list_edges(trainer.store)
    assert (edge.version, edge.base) == (2, -1)
    for manifest in trainer.commits[:2]:  # the only way left is the anchor's
        for pack in manifest.way.packs:
            trainer.store.delete(pack.key)
    assert equal(fetched(trainer, 2, tmp_path), anchored)
    assert equal(fetched(trainer, 6, tmp_path), trainer.rounded())


@pytest.mark.parametrize(
    ("operation", "prefix", "error"),
    [
        ("upload", "packs/0000000002-00000000-anchor", StoreUnavailable("no route")),
        ("upload", "packs/0000000002-00000000-anchor", RuntimeError("a bug")),
        ("put", "ways/", AccessDenied("not yours")),
        ("put", "ways/", RuntimeError("a bug")),
    ],
)
def test_an_anchor_that_fails_is_tried_again_and_stops_nobody(
    start: Start, operation: str, prefix: str, error: Exception
) -> None:
    trainer = start(ANCHORS)
    trainer.store.on(operation, prefix, raises(error))
    for step in range(3):
        trainer.publish(step)
    anchor_ended(trainer)
    assert list(list_edges(trainer.store)) == []
    trainer.publish(3)
    trainer.publish(4)
    anchor_ended(trainer)
    assert [edge.version for edge in list_edges(trainer.store)] == [4]
    copy = sum(2 * tensor.numel() for tensor in trainer.parameters.values())
    assert trainer.publisher._shards.buffers == 2 * copy  # what failed gave its rows back


def test_there_is_one_anchor_at_a_time(start: Start) -> None:
    trainer = start(ANCHORS)
    gate = gated(trainer, "upload", "packs/0000000002-00000000-anchor")
    for step in range(7):
        trainer.publish(step)
    gate.set()
    anchor_ended(trainer)
    assert [edge.version for edge in list_edges(trainer.store)] == [2]


@EITHER
def test_closing_gives_an_anchor_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.weights.full._AGREE_BYTES", 1)
    trainer = start(ANCHORS)
    began, gate = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        gate.wait(LIMIT_S)

    trainer.store.on("upload", "packs/0000000002-00000000-anchor", wait)
    for step in range(3):
        trainer.publish(step)
    assert began.wait(LIMIT_S)
    closer = threading.Thread(target=trainer.publisher.close)
    closer.start()
    assert trainer.publisher._anchor_writer._closing.wait(LIMIT_S)
    gate.set()
    closer.join(LIMIT_S)
    anchor_ended(trainer)
    assert list(list_edges(trainer.store)) == []
    copies = trainer.store.inner.list_after("packs/0000000002-00000000-anchor")
    assert len(list(copies)) < len(trainer.commits[0].way.packs)


@EITHER
def test_a_baseline_that_was_damaged_in_memory_makes_no_anchor(start: Start) -> None:
    trainer = start(ANCHORS)
    trainer.publish(0)
    trainer.publish(1)
    gate, reached = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        gate.wait(LIMIT_S)

    trainer.store.on("put_if_absent", "versions/", hold)
    trainer.step()
    trainer.publisher.publish(2)
    assert reached.wait(LIMIT_S)  # encoded, with its digest; the anchor begins after the commit
    for buffer in trainer.publisher._shards._pool._all["layer.weight"]:
        assert buffer.data is not None
        buffer.data.view(torch.int16)[0, 0] ^= 1
    gate.set()
    trainer.publisher.flush(LIMIT_S)
    anchor_ended(trainer)
    assert list(list_edges(trainer.store)) == []
    trainer.publish(3)
    assert [holders(trainer, name) for name in SHAPES] == [1] * len(
        SHAPES
    )  # the baseline's; the anchor gave up its


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


@EITHER
def test_beyond_the_limit_the_trainer_is_told_and_can_go_on(start: Start, tmp_path: Path) -> None:
    trainer = start(BRIEF)
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
    trainer = start(BRIEF)
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
