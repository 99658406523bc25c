"""On a GPU: the codec's passes over tensors are the host's, bit for bit, and a publisher that compares versions there
writes the same packs, without waiting for the training step. `pytest tests/gpu`, wherever there is one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.weights import lineage
from async_rl.weights.changes import cut_tiles
from async_rl.weights.codec import Mode, encode_tile
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest, claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.run import ensure_run
from async_rl.weights.shards import Shards
from async_rl.weights.surveys import Surveys, digests_there
from tests.tensor_checks import check_applied, check_digest, check_surveyed, extremes
from tests.unit.test_codec import bit_pairs, changes, coded_by, quick
from tests.weights_support import MemoryStore, write_model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

GPU = torch.device("cuda")
LIMIT_S = 60.0
TABLE = {"embed.weight": (5000, 512), "layer.weight": (1024, 1031), "norm.weight": (512,)}
LONG_CYCLES = 4_000_000_000  # two seconds or so of a GPU that does nothing else


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", extremes())
def test_every_bit_pattern_and_rate_of_change_goes_there_and_back(name: str, small: bool) -> None:
    base, new = extremes()[name]
    check_surveyed(base, new, 7 << 33, [len(base) // 3, len(base) - len(base) // 3], small, GPU)
    check_digest(new, 7 << 33, GPU)
    for mode in Mode if encode_tile(base, new, 0) else ():
        check_applied(base, new, 7 << 33, mode, coded_by(mode, base, new), GPU)


@quick
@given(changes(), st.booleans(), st.integers(0, 1 << 45))
def test_changes_of_every_kind_are_found_as_on_the_host(pair, small, place):  # type: ignore[no-untyped-def]
    base, new = pair
    check_surveyed(base, new, place, [len(base)], small, GPU)


@quick
@given(bit_pairs, st.booleans())
def test_any_two_bit_patterns_are_coded_as_on_the_host(pairs, small):  # type: ignore[no-untyped-def]
    base, new = np.array(pairs, np.uint16).T.copy()
    check_surveyed(base, new, 3 << 40, [len(base)], small, GPU)


def weights(step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """float32 masters after some steps that change few of their bfloat16 roundings."""
    draw = torch.Generator().manual_seed(3)
    made = {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in TABLE.items()}
    for _ in range(step):
        for tensor in made.values():
            tensor += 3e-6 * torch.randn(tensor.shape, generator=draw).sign()
    return {name: tensor.to(device) for name, tensor in made.items()}


def published(
    folder: Path, device: torch.device, config: WeightsConfig
) -> tuple[MemoryStore, list[Manifest], list[int]]:
    store, parameters = MemoryStore(), weights(0, device)
    run = ensure_run(store, write_model_dir(folder), parameters)
    memory = []
    with Publisher(store, run, claim(store), parameters, config) as publisher:
        for step in range(5):
            for name, tensor in weights(step, device).items():
                parameters[name].copy_(tensor)
            publisher.publish(step)
            for tensor in parameters.values():
                tensor.zero_()  # while it is on its way
            publisher.flush(LIMIT_S)
            memory.append(torch.cuda.memory_allocated())
    return store, [read_manifest(store, version) for version in lineage.list_versions(store)], memory


@pytest.mark.parametrize("codec", ["default", "small"])
@pytest.mark.parametrize("baseline", ["host", "device"])
def test_a_gpus_versions_are_those_of_the_host(
    tmp_path: Path, codec: Literal["default", "small"], baseline: Literal["host", "device"]
) -> None:
    config = WeightsConfig(delta_pack_bytes=100_000, merge_after_s=LIMIT_S, codec=codec)
    host, expected, _ = published(tmp_path / "host", torch.device("cpu"), config)
    config = msgspec.structs.replace(config, baseline=baseline)
    gpu, found, memory = published(tmp_path / "gpu", GPU, config)
    assert [(each.way, each.digest) for each in found] == [(each.way, each.digest) for each in expected]
    keys = [key for key in host.objects if key.startswith("packs/")]
    assert len(keys) > 5 and all(host.objects[key] == gpu.objects[key] for key in keys)
    assert memory[2] == memory[3] == memory[4]  # two copies, however many versions


def test_comparing_and_hashing_versions_does_not_wait_for_the_training_step(tmp_path: Path) -> None:
    parameters = weights(0, GPU)
    run = ensure_run(MemoryStore(), write_model_dir(tmp_path / "model"), parameters)
    shards = Shards(run, parameters, 0, 1, on_device=True)
    base = shards.take()
    for name, tensor in weights(1, GPU).items():
        parameters[name].copy_(tensor)
    new = shards.take()
    cuts = list(cut_tiles(list(shards.parts())))
    Surveys(run, cuts, base, new, small=False).found(0)  # kernels are loaded by now
    torch.cuda.synchronize()
    found = []

    def background() -> None:
        surveys = Surveys(run, cuts, base, new, small=True)
        found.extend(surveys.found(at) for at in range(len(cuts)))
        found.extend(digests_there(run, cuts, new))

    torch.cuda._sleep(LONG_CYCLES)
    step_done = torch.cuda.Event()
    step_done.record()
    thread = threading.Thread(target=background)
    thread.start()
    thread.join(LIMIT_S)
    assert not step_done.query(), (
        "the step was over before: LONG_CYCLES is too short, or the survey waited for it"
    )
    assert len(found) == 2 * len(cuts)


def test_a_copy_is_of_the_moment_it_was_asked_for_though_the_step_is_still_running(tmp_path: Path) -> None:
    parameters = weights(0, GPU)
    run = ensure_run(MemoryStore(), write_model_dir(tmp_path / "model"), parameters)
    shards = Shards(run, parameters, 0, 1, on_device=True)
    expected = {
        name: tensor.to(torch.bfloat16).view(torch.int16).view(-1).cpu()
        for name, tensor in parameters.items()
    }
    for tensor in parameters.values():
        tensor.zero_()
    torch.cuda._sleep(LONG_CYCLES // 10)
    for name, tensor in weights(0, torch.device("cpu")).items():
        parameters[name].copy_(tensor.pin_memory(), non_blocking=True)
    state = shards.take()
    for tensor in parameters.values():
        tensor.zero_()
    for name, bits in expected.items():
        assert torch.equal(state.block(name, 0, 2 * len(bits)).view(torch.int16), bits)
