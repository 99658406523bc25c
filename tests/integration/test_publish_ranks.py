"""A published version is the trainer's weights, bit by bit, whatever the number of ranks that wrote it."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.store import ObjectStore, open_store
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import claim, read_manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.run import ensure_run, open_run
from async_rl.weights.subscriber import Subscriber, pull
from async_rl.weights.ways import list_edges, read_way
from tests.integration.publish_rank import FUSED, SMALL, STATES, play, publish_states, state
from tests.ranks import as_ranks
from tests.weights_support import ScriptedStore, tiny_qwen3

LIMIT_S = 90
COPIES = 22
"""In the place of a number of ranks: 2 copies of 2 ranks."""


def publish_alone(store: ObjectStore, folder: Path, tied: bool) -> Any:
    """Version 0 by a single process without torch.distributed; the model."""
    model, model_dir = tiny_qwen3(folder, tied)
    parameters = dict(model.named_parameters())
    run = ensure_run(store, model_dir, parameters)
    with Publisher(store, run, claim(store), parameters, SMALL) as publisher:
        publisher.publish(0)
        publisher.flush(LIMIT_S)
    return model


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype == torch.bfloat16
        and torch.equal(left[name].view(torch.int16), right[name].view(torch.int16))
        for name in left
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_one_rank_from_pretrained_gives_the_trainers_16_bit_weights(
    s3_url: str, tmp_path: Path, tied: bool
) -> None:
    store = open_store(s3_url)
    model = publish_alone(store, tmp_path, tied)
    pulled = load(pull(store, 0, tmp_path / "pulled"))
    assert pulled.dtype == torch.bfloat16
    assert (pulled.lm_head.weight is pulled.model.embed_tokens.weight) is tied
    assert same_bits(pulled.state_dict(), model.to(torch.bfloat16).state_dict())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_two_ranks_under_fully_shard_publish_what_one_rank_publishes(s3_url: str, tmp_path: Path) -> None:
    as_ranks(play, 2, "fsdp", s3_url, tmp_path)
    for name, tied in (("tied", True), ("untied", False)):
        store = open_store(f"{s3_url}/{name}")
        alone = open_store(f"{s3_url}/{name}-alone")
        publish_alone(alone, tmp_path, tied)
        first, second = read_manifest(store, 0), read_manifest(store, 1)
        expected = read_manifest(alone, 0)
        assert (first.digest, first.way.weight_map) == (expected.digest, expected.way.weight_map)
        assert first.way.tile_digests == expected.way.tile_digests
        assert {pack.key.split("-")[2] for pack in first.way.packs} == {"0", "1"}  # both ranks wrote
        assert second.digest != first.digest and second.parent == 0

        pulled = load(pull(store, 1, tmp_path / f"pulled-{name}"))
        trained = load_file(tmp_path / f"{name}.safetensors")
        assert same_bits(dict(pulled.named_parameters()), trained)
        assert (pulled.lm_head.weight is pulled.model.embed_tokens.weight) is tied


def fetched(store: ObjectStore, version: int, cache: Path) -> dict[str, torch.Tensor]:
    with closing(Subscriber(store, open_run(store), cache, WeightsConfig())) as subscriber:
        result: dict[str, torch.Tensor] = {}
        for shard in subscriber.fetch(read_manifest(store, version)).shards:
            result |= load_file(shard)
        return {name: tensor.clone() for name, tensor in result.items()}  # not views of files that change


def rounded(number: int) -> dict[str, torch.Tensor]:
    """What stands in the files: matrices of experts apart."""
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in state(number).items()}
    gate_up, down = (whole.pop(name) for name in FUSED)
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        whole |= {f"experts.{expert}.gate": gate, f"experts.{expert}.up": up}
        whole[f"experts.{expert}.down"] = down[expert].T
    return whole


def same_objects_on_two_ranks(tmp_path: Path, host: ObjectStore) -> None:
    """Versions, digests and packs, the anchor's too, where ranks compare versions on the parameters' device."""
    device = open_store(f"file://{tmp_path}/2-device")
    as_ranks(play, 2, "device", device.url, tmp_path / "2-device-model")
    for version in range(STATES):
        there, here = read_manifest(device, version), read_manifest(host, version)
        assert (there.way, there.digest) == (here.way, here.digest)
    keys = [info.key for info in host.list_after("packs/")]
    assert keys == [info.key for info in device.list_after("packs/")]
    assert all(host.get(key) == device.get(key) for key in keys)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_states_and_digests_are_the_same_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """Uneven, short and empty shards, a scalar that all hold, experts of one tensor that are published apart: full,
    few changed, none changed, all changed, and an anchor. The last ones are two copies (HSDP) of two ranks each: the
    second copy writes nothing."""
    stores = {ranks: open_store(f"file://{tmp_path}/{ranks}") for ranks in (1, 2, 4, COPIES)}
    alone = ScriptedStore(stores[1])
    written = threading.Event()
    alone.on("put", "ways/", written.set, lost_answer=True)
    publish_states(alone, tmp_path / "alone", state(0), written)
    for ranks in (2, 4):
        as_ranks(play, ranks, "states", stores[ranks].url, tmp_path / f"{ranks}-model")
    as_ranks(play, 4, "copies", stores[COPIES].url, tmp_path / "copies-model")
    for version in range(STATES):
        manifests = {ranks: read_manifest(store, version) for ranks, store in stores.items()}
        assert len({manifest.digest for manifest in manifests.values()}) == 1
        assert len({manifest.way.changed for manifest in manifests.values()}) == 1
        assert len({manifest.way.tile_digests for manifest in manifests.values()}) == 1
        assert {manifest.way.base for manifest in manifests.values()} == {version - 1}
        if version == 2:
            assert all(not manifest.way.packs for manifest in manifests.values())
        for ranks, store in stores.items():
            assert same_bits(fetched(store, version, tmp_path / f"cache-{ranks}"), rounded(version))
    same_objects_on_two_ranks(tmp_path, stores[2])
    last = read_manifest(stores[4], 3).way
    anchors = [read_way(store, edge).way for store in stores.values() for edge in list_edges(store)]
    assert len({way.tile_digests for way in anchors}) == 1 and anchors[0].tile_digests
    assert {pack.key.split("-")[2] for pack in last.packs} == {"0", "1", "2", "3"}
    last = read_manifest(stores[COPIES], 3).way
    assert {pack.key.split("-")[2] for pack in last.packs} == {"0", "1"}
    for ranks, store in stores.items():
        (edge,) = list_edges(store)
        way = read_way(store, edge).way
        assert (edge.version, edge.base, way.base) == (2, -1, -1)
        owners = {pack.key.split("-")[2] for pack in way.packs}
        assert owners == {
            f"anchor{rank}" for rank in range(min(4 if ranks == COPIES else ranks, len(way.packs)))
        }
        anchored = tmp_path / f"anchored-{ranks}"
        assert same_bits(fetched(store, edge.version, anchored), rounded(2))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_four_ranks_stay_in_step_through_every_failure(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    as_ranks(play, 4, "failing", store.url, tmp_path)
    for version in (3, 6):
        expected = load_file(tmp_path / f"{version}.safetensors")
        assert same_bits(fetched(store, version, tmp_path / "cache"), expected)
