"""What one rank of test_publish_ranks.py does. Any failed assertion ends it with an error, and with it the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from async_rl.errors import AccessDenied, AsyncRLError, Fenced, StoreUnavailable, WeightsError
from async_rl.store import ObjectStore, open_store
from async_rl.weights import changes, lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, claim
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.weights.rows import Published, RowsOf
from async_rl.weights.run import RunInfo, ensure_run
from tests.weights_support import ScriptedStore, raises, tiny_qwen3, write_model_dir

LIMIT_S = 30.0
SMALL = WeightsConfig(pack_bytes=4000, delta_pack_bytes=100, merge_after_s=LIMIT_S)


def fsdp_model(url: str, folder: Path) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        publish_and_train(f"{url}/{name}", folder, tied, folder / f"{name}.safetensors")


def publish_and_train(url: str, folder: Path, tied: bool, trained: Path) -> None:
    """A Qwen3 model under fully_shard: version 0 as initialised, version 1 after a step of SGD."""
    model, model_dir = tiny_qwen3(folder, tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    store = open_store(url)
    run = from_rank0(lambda: ensure_run(store, model_dir, parameters), RunInfo)
    ours = from_rank0(lambda: claim(store), Claim)
    with Publisher(store, run, ours, parameters, SMALL) as publisher:
        publisher.publish(0)
        ids = torch.arange(12).reshape(2, 6) + dist.get_rank()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()  # while version 0 is on its way
        assert publisher.publish(1) == 1
        publisher.flush(LIMIT_S)
    whole = {name: tensor.full_tensor().detach().to(torch.bfloat16) for name, tensor in parameters.items()}
    if dist.get_rank() == 0:
        save_file(whole, trained)


SHAPES = {
    "embed.weight": (9, 4),  # 3, 3, 3, 0 rows on four ranks
    "two.weight": (2, 300),
    "bias": (5,),
    "empty.weight": (0, 3),
    "layer.weight": (64, 33),
    "scalar": (),  # on every rank, not sharded
    # Five experts: 3 and 2 on two ranks; 2, 2, 1, 0 on four.
    "experts.gate_up": (5, 6, 7),
    "experts.down": (5, 3, 7),  # transposed in the files
}
FUSED = tuple(name for name in SHAPES if name.startswith("experts."))
STATES = 4


def state(number: int) -> dict[str, torch.Tensor]:
    """Random, a few weights changed, nothing changed, everything changed."""
    source = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    for tensor in whole.values():
        if number in (1, 2) and tensor.numel():
            tensor.view(-1)[:: max(1, tensor.numel() // 7)] += 0.5
        if number == 3:
            tensor.mul_(-1.7)
    return whole


def as_files(trained: dict[str, torch.Tensor]) -> dict[str, Published]:
    """What is published of the trained tensors: each expert's matrices under names of their own."""
    result: dict[str, Published] = {name: each for name, each in trained.items() if name not in FUSED}
    for number in range(5):
        views = {
            "gate": ("experts.gate_up", (3, 7), (7, 1), number * 42),
            "up": ("experts.gate_up", (3, 7), (7, 1), number * 42 + 21),
            "down": ("experts.down", (7, 3), (1, 7), number * 21),
        }
        for name, (home, *view) in views.items():
            rows = RowsOf.of_view(trained[home], *view)
            assert rows is not None
            result[f"experts.{number}.{name}"] = rows
    return result


def sharded(whole: dict[str, torch.Tensor], copies: int = 1) -> dict[str, torch.Tensor]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,) if copies == 1 else (copies, ranks // copies))
    return {
        name: distribute_tensor(tensor, mesh, rows(mesh)) if tensor.ndim else tensor
        for name, tensor in whole.items()
    }


def rows(mesh: DeviceMesh) -> list[Placement]:
    return [Replicate()] * (mesh.ndim - 1) + [Shard(0)]


def assign(parameters: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in whole.items():
            sharding = isinstance(parameters[name], DTensor)
            mesh = parameters[name].device_mesh if sharding else None
            parameters[name].copy_(distribute_tensor(tensor, mesh, rows(mesh)) if mesh else tensor)


def publish_states(
    store: ObjectStore,
    folder: Path,
    parameters: dict[str, torch.Tensor],
    written: threading.Event | None,
    baseline: Literal["host", "device"] = "host",
) -> None:
    """Every state as a version. `written`: rank 0's; set when the anchor is there."""
    if written is not None:
        write_model_dir(folder / "model")
    published = as_files(parameters)
    run = from_rank0(lambda: ensure_run(store, folder / "model", published), RunInfo)
    ours = from_rank0(lambda: claim(store), Claim)
    config = msgspec.structs.replace(
        SMALL, anchor_every=1, skip_spans=(2,), baseline=baseline
    )  # an anchor of version 2
    with small_tiles(), Publisher(store, run, ours, published, config) as publisher:
        for number in range(STATES):
            assign(parameters, state(number))
            assert publisher.publish(number) == number
            publisher.flush(LIMIT_S)
        if written is not None:  # close would give it up
            assert written.wait(LIMIT_S)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Of 16 elements, so that they are cut by tensors, by tiles and by ranks."""
    with patch.object(changes, "TILE", 16):
        yield


def states_on_device(url: str, folder: Path) -> None:
    states(url, folder, "device")


def in_copies(url: str, folder: Path) -> None:
    """Each of two copies of the model over half of the ranks (HSDP)."""
    states(url, folder, copies=2)


def states(
    url: str, folder: Path, baseline: Literal["host", "device"] = "host", *, copies: int = 1
) -> None:
    store = ScriptedStore(open_store(url))
    written = threading.Event()
    store.on("put", "ways/", written.set, lost_answer=True)
    parameters = sharded(state(0), copies)
    publish_states(store, folder, parameters, written if dist.get_rank() == 0 else None, baseline)


def failing(url: str, folder: Path) -> None:
    """What can go wrong on one rank and must be heard on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = state(0)
    parameters = sharded(whole)
    store = ScriptedStore(open_store(url))
    model_dir = folder / "model"
    if rank == 0:
        write_model_dir(model_dir)
    run = from_rank0(lambda: ensure_run(store, model_dir, parameters), RunInfo)
    ours = from_rank0(lambda: claim(store), Claim)

    def expect(kind: type[AsyncRLError], act: Callable[[], object]) -> AsyncRLError:
        try:
            act()
        except kind as error:
            return error
        raise AssertionError(f"rank {rank}: no {kind.__name__}")

    mesh = parameters["layer.weight"].device_mesh
    refused = {**parameters, "layer.weight": distribute_tensor(whole["layer.weight"], mesh, [Replicate()])}
    error = expect(WeightsError, lambda: Publisher(store, run, ours, refused, SMALL))
    assert "layer.weight is placed as (Replicate(),)" in str(error), error
    if rank == ranks - 1:  # what only one rank sees, all hear of
        del refused["layer.weight"]
    else:
        refused = parameters
    error = expect(WeightsError, lambda: Publisher(store, run, ours, refused, SMALL))
    assert "no parameter 'layer.weight'" in str(error), error

    def step() -> None:
        for name, tensor in whole.items():
            whole[name] = tensor + 0.25
        assign(parameters, whole)

    waits = msgspec.structs.replace(SMALL, pack_bytes=600, publish_limit_s=LIMIT_S)
    with Publisher(store, run, ours, parameters, waits) as publisher:
        if rank == 1:
            store.on("upload", "packs/", raises(StoreUnavailable("a gateway restarts")), times=2)
        publisher.publish(0)
        publisher.flush(LIMIT_S)
        assert publisher.committed == 0

        step()
        if rank == 1:
            store.on("upload", "packs/", raises(StoreUnavailable("a gateway restarts")), times=2)
        publisher.publish(1)
        publisher.flush(LIMIT_S)
        assert publisher.committed == 1

        step()
        if rank == 1:
            store.on("upload", "packs/", raises(AccessDenied("no PutObject for rank 1")))
        publisher.publish(2)
        error = expect(AccessDenied, lambda: publisher.publish(3))
        assert error.message == "no PutObject for rank 1"

        step()
        publisher.publish(3)
        publisher.flush(LIMIT_S)
        assert publisher.committed == 3, publisher.committed  # 2 is used up
    whole_at = {3: dict(whole)}

    # One rank's upload hangs: all merge, and all go on together. Wherever versions are compared: here with torch.
    impatient = msgspec.structs.replace(waits, merge_after_s=0.0, baseline="device")
    with Publisher(store, run, ours, parameters, impatient, parent=3) as publisher:
        publisher._next = 4  # a second publisher of one life: only here
        publisher.publish(4)
        publisher.flush(LIMIT_S)
        gate = threading.Event()
        if rank == 1:
            store.on("upload", "packs/", lambda: gate.wait(LIMIT_S))
        step()
        assert publisher.publish(5) == 5
        step()
        assert publisher.publish(6) == -1
        assert publisher.catch_up(6)
        assert publisher.newest == 5
        gate.set()
        publisher.flush(LIMIT_S)
        assert publisher.committed == 6
        whole_at[6] = dict(whole)

        from_rank0(lambda: claim(store), Claim)  # another trainer starts
        publisher.publish(7)
        expect(Fenced, lambda: publisher.flush(LIMIT_S))
        expect(Fenced, lambda: publisher.publish(8))
        expect(Fenced, lambda: publisher.catch_up(8))
    assert lineage.list_versions(store) == [0, 1, 3, 4, 5, 6]
    assert [lineage.read_manifest(store, version).step for version in (4, 5, 6)] == [4, 5, 6]
    same = lineage.read_manifest(store, 4).way
    assert (same.base, same.packs) == (3, ())
    error = expect(
        AccessDenied, lambda: from_rank0(lambda: raises(AccessDenied("rank 0 may not"))(), Claim)
    )
    assert error.message == "rank 0 may not"
    if rank == 0:
        for version, tensors in whole_at.items():
            save_file(
                {n: t.to(torch.bfloat16) for n, t in tensors.items()}, folder / f"{version}.safetensors"
            )


SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    "fsdp": fsdp_model,
    "states": states,
    "device": states_on_device,
    "copies": in_copies,
    "failing": failing,
}


def play(scenario: str, url: str, folder: Path) -> None:
    """What each rank does."""
    dist.init_process_group("gloo")
    SCENARIOS[scenario](url, folder)
    dist.destroy_process_group()
