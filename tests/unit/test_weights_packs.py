"""How a state is cut into safetensors packs, and that only whole ones are read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from async_rl.errors import Corrupt
from async_rl.weights.packs import TensorSpec, assign_owners, header, plan_packs, read_header, schedule

shape_lists = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=20)


def table_of(shapes: list[list[int]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{n}", tuple(shape)) for n, shape in enumerate(shapes))


def write_pack(path: Path, table: tuple[TensorSpec, ...], dtype: str = "bfloat16") -> Path:
    path.write_bytes(header(table, dtype) + bytes(sum(tensor.nbytes for tensor in table)))
    return path


@given(shape_lists, st.integers(1, 4000))
def test_every_tensor_stands_in_one_pack_and_packs_keep_to_their_size(
    shapes: list[list[int]], limit: int
) -> None:
    table = table_of(shapes)
    plans = plan_packs(table, "bfloat16", limit)
    assert [tensor for plan in plans for tensor in plan.tensors] == list(table)
    assert all(
        len(plan.tensors) == 1 or sum(t.nbytes for t in plan.tensors) <= max(limit, 0) for plan in plans
    )


def test_a_large_state_is_cut_so_that_ranks_and_readers_can_share_the_work() -> None:
    table = table_of([[1024, 1024]] * 512)  # 1 GiB
    assert len(plan_packs(table, "bfloat16", 512 << 20)) == 16


@given(shape_lists, st.integers(1, 2000), st.integers(1, 5))
def test_the_schedule_sends_every_tensor_once_to_its_packs_owner_in_pack_order(
    shapes: list[list[int]], limit: int, ranks: int
) -> None:
    plans = plan_packs(table_of(shapes), "bfloat16", limit)
    owners = assign_owners([plan.nbytes for plan in plans], ranks)
    order = list(schedule(plans, owners, ranks))
    for pack, plan in enumerate(plans):
        mine = [transfer for transfer in order if transfer.pack == pack]
        assert tuple(transfer.tensor for transfer in mine) == plan.tensors
        assert {transfer.owner for transfer in mine} == {owners[pack]}
        assert [t.first for t in mine] == [True] + [False] * (len(mine) - 1)
        assert [t.last for t in mine] == [False] * (len(mine) - 1) + [True]
    for rank in range(ranks):  # an owner has one pack open at a time
        packs = [transfer.pack for transfer in order if transfer.owner == rank]
        assert packs == sorted(packs)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_owners_differ_by_at_most_the_largest_pack(sizes: list[int], ranks: int) -> None:
    owners = assign_owners(sizes, ranks)
    load = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    assert max(load) - min(load) <= max(sizes)


def test_owners_take_turns() -> None:
    plans = plan_packs(table_of([[100]] * 8), "bfloat16", 800)
    owners = assign_owners([plan.nbytes for plan in plans], 2)
    assert [transfer.owner for transfer in schedule(plans, owners, 2)] == [0, 1] * 4


@given(shapes=shape_lists, dtype=st.sampled_from(["bfloat16", "float16"]))
def test_the_safetensors_library_reads_our_packs(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: str
) -> None:
    table = table_of(shapes)
    path = write_pack(tmp_path_factory.mktemp("packs") / "pack", table, dtype)
    with safe_open(path, framework="np") as pack:
        assert pack.metadata() == {"format": "pt"}
        assert {name: tuple(pack.get_slice(name).get_shape()) for name in pack.keys()} == {  # noqa: SIM118
            tensor.name: tensor.shape for tensor in table
        }
    assert read_header(path, dtype) == {tensor.name: tensor for tensor in table}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def damaged(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        damaged("{") + bytes(4),
        damaged("[]") + bytes(4),
        damaged(json.dumps({"a": ENTRY})) + bytes(3),
        damaged(json.dumps({"a": ENTRY})) + bytes(5),
        damaged(json.dumps({"a": {**ENTRY, "dtype": "F32"}})) + bytes(4),
        damaged(json.dumps({"a": {**ENTRY, "shape": [3]}})) + bytes(4),
        damaged(json.dumps({"a": {**ENTRY, "data_offsets": [2, 6]}})) + bytes(6),
        damaged(json.dumps({"a": ENTRY, "b": ENTRY})) + bytes(4),
        damaged(json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}})) + bytes(8),
    ],
    ids=[
        "empty",
        "endless",
        "cut",
        "no object",
        "short",
        "long",
        "dtype",
        "shape",
        "hole",
        "twice",
        "overlap",
    ],
)
def test_a_pack_that_is_not_what_it_says_is_corrupt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pack"
    path.write_bytes(content)
    with pytest.raises(Corrupt, match="pack"):
        read_header(path, "bfloat16")


def test_sizes_count_two_bytes_per_element() -> None:
    assert TensorSpec("scalar", ()).nbytes == 2
    assert TensorSpec("matrix", (3, 5)).nbytes == 2 * math.prod((3, 5))
    assert TensorSpec("nothing", (0, 5)).nbytes == 0
