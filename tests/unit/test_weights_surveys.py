"""Versions compared where the weights lie (here on a CPU, with the same code) are those compared on the host, and
what can go wrong there is told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.weights import changes, lineage, shards, surveys
from async_rl.weights.changes import Cut, cut_tiles
from async_rl.weights.codec import encode_found, encode_tile
from async_rl.weights.config import WeightsConfig
from async_rl.weights.hashed import tiles_of_rows
from async_rl.weights.lineage import Manifest, claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.shards import Shards
from async_rl.weights.surveys import Surveys, windows
from tests.weights_support import SHAPES, MemoryStore, write_model_dir

LIMIT_S = 20.0
CONFIG = WeightsConfig(delta_pack_bytes=40, pack_bytes=100, merge_after_s=LIMIT_S)
Codec = Literal["default", "small"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that toy tensors have several, in several windows."""
    monkeypatch.setattr(changes, "TILE", 7)
    monkeypatch.setattr(surveys, "WINDOW", 15)


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Any bits, NaNs among them."""
    draw = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(draw.integers(-(2**15), 2**15, shape, np.int16)).view(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def run_of(
    tmp_path: Path, parameters: dict[str, torch.Tensor], store: MemoryStore | None = None
) -> RunInfo:
    return ensure_run(store or MemoryStore(), write_model_dir(tmp_path / "model"), parameters)


def published(tmp_path: Path, config: WeightsConfig) -> tuple[MemoryStore, list[Manifest]]:
    """Five versions: all new, two weights changed, none, one tensor, all."""
    store, parameters = MemoryStore(), random_weights(0)
    run = run_of(tmp_path, parameters, store)
    with Publisher(store, run, claim(store), parameters, config) as publisher:
        for step in range(5):
            if step == 1:
                parameters["layer.weight"].view(torch.int16).view(-1)[[3, 17]] += 1
            for name, tensor in random_weights(step).items():
                if step == 4 or (step == 3 and name == "embed.weight"):
                    parameters[name].copy_(tensor)
            publisher.publish(step)
            publisher.flush(LIMIT_S)
    return store, [read_manifest(store, version) for version in lineage.list_versions(store)]


@pytest.mark.parametrize("codec", ["default", "small"])
def test_packs_and_digests_are_the_same_wherever_versions_are_compared(
    tmp_path: Path, codec: Codec
) -> None:
    config = msgspec.structs.replace(CONFIG, codec=codec)
    host, expected = published(tmp_path, config)
    device, found = published(tmp_path, msgspec.structs.replace(config, baseline="device"))
    assert [(each.way, each.digest) for each in found] == [(each.way, each.digest) for each in expected]
    assert [each.way.base for each in found] == [-1, 0, 1, 2, 3] and len(found[4].way.packs) > 2
    packs = [key for key in host.objects if key.startswith("packs/")]
    assert packs and all(host.objects[key] == device.objects[key] for key in packs)


def two_states(tmp_path: Path) -> tuple[RunInfo, Shards, list[Cut], shards.State, shards.State]:
    parameters = random_weights(1)
    run = run_of(tmp_path, parameters)
    rows = Shards(run, parameters, 0, 1, on_device=True)
    before = rows.take()
    for name, tensor in random_weights(2).items():
        if name != "layer.bias":
            parameters[name].copy_(tensor)
    return run, rows, list(cut_tiles(list(rows.parts()))), before, rows.take()


@pytest.mark.parametrize("first", [0, 3])
def test_every_tile_is_found_once_by_whichever_thread_asks_and_then_forgotten(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, cuts, before, after = two_states(tmp_path)
    surveyed: list[int] = []
    survey = surveys.survey

    def counted(*args: object, **options: object) -> object:
        surveyed.append(1)
        return survey(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(surveys, "survey", counted)
    there = Surveys(run, cuts, before, after, small=False)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(there.found, range(first, len(cuts))))
    for cut, each in zip(cuts[first:], found, strict=True):
        name = run.tensors[cut.tensor].name
        rows = slice(cut.start - cut.row_start, cut.stop - cut.row_start)
        expected = encode_tile(before.bits(name)[rows], after.bits(name)[rows], cut.place)
        assert (each and encode_found(each)) == expected
        assert (each is None) == (name == "layer.bias")
    assert len(surveyed) == len(list(windows(cuts))) - (first == 3)
    assert not there._surveyed or first == 3  # of a window that a failed attempt had begun, the rest


def test_the_digest_there_is_the_digest_here(tmp_path: Path) -> None:
    run, rows, _, before, after = two_states(tmp_path)
    here = Shards(run, random_weights(1), 0, 1)
    expected = tiles_of_rows(run, here, here.take())
    assert (tiles_of_rows(run, rows, before) == expected).all()
    assert (tiles_of_rows(run, rows, after) != expected).any()


def test_windows_are_tiles_of_one_tensor_that_follow_one_another() -> None:
    cuts = [
        Cut(0, 3, 7, 3, 0),
        Cut(0, 7, 14, 3, 0),
        Cut(0, 14, 21, 3, 0),
        Cut(1, 0, 7, 0, 0),
        Cut(2, 0, 99, 0, 0),
    ]
    assert list(windows(cuts)) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert list(windows([])) == []


def test_a_copy_on_the_device_is_not_the_parameters_themselves(tmp_path: Path) -> None:
    parameters = random_weights(1)
    rows = Shards(run_of(tmp_path, parameters), parameters, 0, 1, on_device=True)
    state = rows.take()
    for tensor in parameters.values():
        tensor.zero_()
    for name, tensor in random_weights(1).items():
        assert torch.equal(state.values(name), tensor.view(torch.int16).view(-1))
        assert torch.equal(state.block(name, 2, 8), tensor.view(-1)[1:4].view(torch.uint8))


# ---------------------------------------------------------------- a device without room


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    store, parameters = MemoryStore(), random_weights(0)
    run = run_of(tmp_path, parameters, store)
    config = msgspec.structs.replace(CONFIG, baseline="device")
    with Publisher(store, run, claim(store), parameters, config) as made:
        made.publish(0)
        made.flush(LIMIT_S)
        next(iter(parameters.values())).view(torch.int16).view(-1)[1] += 1
        yield made


def full(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_no_room_for_a_copy_is_told_with_the_way_out_and_holds_nothing(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = publisher._shards.buffers
    empty, left = torch.empty, [1, 1]

    def nearly_full(*shape: object, **options: object) -> torch.Tensor:
        return empty(*shape, **options) if left and left.pop() else full()  # type: ignore[call-overload,no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", nearly_full)
        with pytest.raises(
            WeightsError, match=r'no memory left for a copy of .*weights\.baseline = "host"'
        ):
            publisher.publish(1)
    publisher.publish(1)
    publisher.flush(LIMIT_S)
    assert publisher._shards.buffers == 2 * buffers


def test_no_room_to_compare_is_told_with_the_way_out_and_the_weights_are_published_later(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(surveys, "survey", full)
        publisher.publish(1)
        with pytest.raises(
            WeightsError, match=r'no memory left for comparing .*weights\.baseline = "host"'
        ):
            publisher.flush(LIMIT_S)
    publisher.flush(LIMIT_S)
    assert publisher.committed == 2
