"""One rank of test_publish_ranks.py under torch.distributed.run: `publish_rank.py SCENARIO URL FOLDER`.

Any failed assertion ends the rank with an error, and with it the whole start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from async_rl.errors import AccessDenied, AsyncRLError, Fenced, StoreUnavailable, WeightsError
from async_rl.store import open_store
from async_rl.weights import lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, claim
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.weights.run import RunInfo, ensure_run
from tests.weights_support import ScriptedStore, raises, tiny_qwen3, write_model_dir

LIMIT_S = 30.0
SMALL = WeightsConfig(pack_bytes=4000)


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


def uneven_and_failing(url: str, folder: Path) -> None:
    """Shards that are short or empty, then what can go wrong on one rank and must be heard on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    whole = {
        "embed.weight": torch.randn(9, 4),  # 3, 3, 3, 0 rows on four ranks
        "two.weight": torch.randn(2, 300),
        "bias": torch.randn(5),
        "empty.weight": torch.randn(0, 3),
        "layer.weight": torch.randn(64, 33),
    }
    parameters: dict[str, torch.Tensor] = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()
    }
    parameters["scalar"] = whole["scalar"] = torch.tensor(3.0)  # on every rank, not sharded
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

    refused = {**parameters, "layer.weight": distribute_tensor(whole["layer.weight"], mesh, [Replicate()])}
    error = expect(WeightsError, lambda: Publisher(store, run, ours, refused, SMALL))
    assert "layer.weight is placed as (Replicate(),)" in str(error), error
    if rank == ranks - 1:  # what only one rank sees, all hear of
        del refused["layer.weight"]
    else:
        refused = parameters
    error = expect(WeightsError, lambda: Publisher(store, run, ours, refused, SMALL))
    assert "no parameter 'layer.weight'" in str(error), error

    with Publisher(
        store, run, ours, parameters, WeightsConfig(pack_bytes=600, publish_limit_s=LIMIT_S)
    ) as publisher:
        publisher.publish(0)
        publisher.flush(LIMIT_S)

        if rank == 1:
            store.on("upload", "packs/", raises(StoreUnavailable("a gateway restarts")), times=2)
        publisher.publish(1)
        publisher.flush(LIMIT_S)
        assert publisher.committed == 1

        if rank == 1:
            store.on("upload", "packs/", raises(AccessDenied("no PutObject for rank 1")))
        publisher.publish(2)
        error = expect(AccessDenied, lambda: publisher.publish(3))
        assert error.message == "no PutObject for rank 1"

        publisher.publish(3)
        publisher.flush(LIMIT_S)
        assert publisher.committed == 3, publisher.committed  # 2 is used up

        from_rank0(lambda: claim(store), Claim)  # another trainer starts
        publisher.publish(4)
        expect(Fenced, lambda: publisher.flush(LIMIT_S))
        expect(Fenced, lambda: publisher.publish(5))
    assert lineage.list_versions(store) == [0, 1, 3]
    error = expect(
        AccessDenied, lambda: from_rank0(lambda: raises(AccessDenied("rank 0 may not"))(), Claim)
    )
    assert error.message == "rank 0 may not"
    if rank == 0:
        save_file({n: t.to(torch.bfloat16) for n, t in whole.items()}, folder / "whole.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"fsdp": fsdp_model, "uneven": uneven_and_failing}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    dist.destroy_process_group()
