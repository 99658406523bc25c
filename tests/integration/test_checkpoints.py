"""Checkpoints: committed whole or not at all, bit-equal on any number of ranks, and clear about damage.

When what is written, in the background of training: test_saver.py; with real ranks: test_learner.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from async_rl.errors import CheckpointError, StoreUnavailable
from async_rl.store.base import ObjectStore, Upload
from async_rl.store.file import FileStore
from workers import checkpoints
from workers.checkpoints import FORMAT_1_TENSORS as PIECES
from workers.checkpoints import Checkpoint, Progress, Snapshot
from workers.optimizers import OptimizerRows

SHAPES = {"embed": (7, 3), "norm": (5,), "one": (1, 4), "head": (6, 2)}
Whole = dict[str, tuple[torch.Tensor, ...]]


def whole_state(seed: int = 0) -> Whole:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: tuple(torch.randn(shape, generator=draw) for _ in PIECES) for name, shape in SHAPES.items()
    }


def rows_of(whole: Whole, rank: int, ranks: int) -> dict[str, OptimizerRows]:
    """Rank's copy of its rows, by torch.chunk's rule: the last shards may be short or empty."""
    rows = {}
    for name, tensors in whole.items():
        count = tensors[0].shape[0]
        chunk = -(-count // ranks)
        first, stop = min(rank * chunk, count), min((rank + 1) * chunk, count)
        rows[name] = OptimizerRows(
            tuple(tensors[0].shape),
            first,
            {key: t[first:stop].clone() for key, t in zip(PIECES, tensors, strict=True)},
        )
    return rows


def save(
    store: ObjectStore,
    whole: Whole,
    ranks: int,
    *,
    step: int = 1,
    incarnation: int = 1,
    parent: str = "",
    fingerprint: str = "model",
) -> Checkpoint:
    progress = Progress(step, 10 + step, incarnation, 8 * step, step)

    def one(rank: int) -> str:
        rows = rows_of(whole, rank, ranks)
        snapshot = Snapshot(rows)
        snapshot.take(rows)
        return checkpoints.write_rank(store, checkpoints.name_of(progress), rank, snapshot)

    with ThreadPoolExecutor(ranks) as pool:
        tables = list(pool.map(one, range(ranks)))
    return checkpoints.commit(store, progress, tables, fingerprint=fingerprint, parent=parent)


def load(store: ObjectStore, checkpoint: Checkpoint, ranks: int) -> Whole:
    """What `ranks` ranks restore, put together again."""
    empty = {name: tuple(torch.full(shape, float("nan")) for _ in PIECES) for name, shape in SHAPES.items()}
    shards = [rows_of(empty, rank, ranks) for rank in range(ranks)]
    for rank, rows in enumerate(shards):
        checkpoints.restore(store, checkpoint, rank, rows)
    return {
        name: tuple(torch.cat([rows[name].tensors[piece] for rows in shards]) for piece in PIECES)
        for name in SHAPES
    }


def equal(left: Whole, right: Whole) -> bool:
    return all(torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True))


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(f"file://{tmp_path}")


@pytest.fixture(autouse=True)
def keep_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.lists(st.integers(1, 8), min_size=2, max_size=4))
def test_any_number_of_ranks_restores_every_bit(tmp_path_factory: pytest.TempPathFactory, path: list[int]):
    store = FileStore(f"file://{tmp_path_factory.mktemp('run')}")
    state = original = whole_state()
    for step, (writers, readers) in enumerate(pairwise(path)):
        state = load(store, save(store, state, writers, step=step), readers)
        assert equal(state, original)


def test_a_part_is_a_safetensors_file_that_any_tool_opens(store: FileStore, tmp_path: Path):
    whole = whole_state()
    save(store, whole, 2)
    parts = sorted(tmp_path.rglob("*.safetensors"))
    assert len(parts) == 2
    with safe_open(parts[0], framework="pt") as first, safe_open(parts[1], framework="pt") as second:
        for name, tensors in whole.items():
            for piece, tensor in zip(PIECES, tensors, strict=True):
                halves = [part.get_tensor(f"{name}/{piece}") for part in (first, second)]
                assert torch.equal(torch.cat(halves), tensor)


def test_the_newest_is_of_the_latest_incarnation_and_names_where_it_came_from(store: FileStore):
    save(store, whole_state(), 1, step=40, incarnation=1)
    old = save(store, whole_state(), 1, step=50, incarnation=1)
    save(store, whole_state(), 1, step=45, incarnation=2, parent=old.name)
    newest = checkpoints.choose(store, "latest", "model")
    assert newest is not None
    assert newest.progress == Progress(45, 55, 2, 360, 45)
    assert newest.parent == "00000001-0000000050"


def test_a_step_is_chosen_by_number_and_its_newest_incarnation(store: FileStore):
    for incarnation in (1, 2):
        save(store, whole_state(), 1, step=40, incarnation=incarnation)
    save(store, whole_state(), 1, step=60, incarnation=2)
    chosen = checkpoints.choose(store, "40", "model")
    assert chosen is not None and chosen.name == "00000002-0000000040"
    assert checkpoints.choose(store, "never", "model") is None
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 41.*40, 60"):
        checkpoints.choose(store, "41", "model")


def test_a_checkpoint_of_the_release_before_has_no_refused_steps(store: FileStore):
    save(store, whole_state(), ranks=1, step=3, incarnation=1)
    (key,) = [info.key for info in store.list_after("checkpoints/") if info.key.count("/") == 1]
    commit = json.loads(store.get(key))
    assert commit["progress"].pop("refused") == 0 and commit["progress"].pop("refused_in_a_row") == 0
    store.put(key, json.dumps(commit).encode())
    found = checkpoints.choose(store, "latest", "model")
    assert (found.progress.step, found.progress.refused, found.progress.refused_in_a_row) == (3, 0, 0)


def test_a_checkpoint_of_format_1_is_restored_bit_for_bit(store: FileStore):
    """Its tables do not name the tensors: they are AdamW's."""
    whole = whole_state()
    name = save(store, whole, ranks=2).name
    commit = json.loads(store.get(f"checkpoints/{name}.json")) | {"format": 1}
    for ref in commit["tables"]:
        table = json.loads(store.get(ref["key"]))
        for piece in table["pieces"].values():
            del piece["tensors"]
        store.put(ref["key"], data := json.dumps(table).encode())
        ref["sha256"] = hashlib.sha256(data).hexdigest()
    store.put(f"checkpoints/{name}.json", json.dumps(commit).encode())
    found = checkpoints.choose(store, "latest", "model")
    assert found is not None and equal(load(store, found, 3), whole)


def test_a_run_without_checkpoints_starts_anew(store: FileStore):
    assert checkpoints.choose(store, "latest", "model") is None


def test_a_checkpoint_of_another_model_is_refused(store: FileStore):
    save(store, whole_state(), 1, fingerprint="other")
    with pytest.raises(CheckpointError, match="another model"):
        checkpoints.choose(store, "latest", "model")


class FailingStore(FileStore):
    """Refuses to write keys that end like this."""

    def __init__(self, url: str, suffix: str) -> None:
        super().__init__(url)
        self.suffix = suffix

    def _check(self, key: str) -> None:
        if key.endswith(self.suffix):
            raise StoreUnavailable(f"scripted failure of {key}")

    def upload(self, key: str) -> Upload:
        self._check(key)
        return super().upload(key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._check(key)
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        self._check(key)
        super().put_if_absent(key, data)


@pytest.mark.parametrize("suffix", ["rank-00001.safetensors", "rank-00001.json", "0000000002.json"])
def test_what_is_half_written_is_never_chosen(store: FileStore, tmp_path: Path, suffix: str):
    good = save(store, whole_state(1), 2, step=1)
    with pytest.raises(StoreUnavailable, match="scripted failure"):
        save(FailingStore(f"file://{tmp_path}", suffix), whole_state(2), 2, step=2)
    newest = checkpoints.choose(store, "latest", "model")
    assert newest == good
    assert equal(load(store, newest, 1), whole_state(1))


def test_saving_the_same_again_is_not_an_error_but_another_state_is(store: FileStore):
    torch.manual_seed(3)
    first = save(store, whole_state(1), 2)
    assert save(store, whole_state(1), 2).tables == first.tables
    with pytest.raises(CheckpointError, match="already stands for another"):
        save(store, whole_state(2), 2)


def _overwrite(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_named(store: FileStore, tmp_path: Path):
    checkpoint = save(store, whole_state(), 2)
    part = next(tmp_path.rglob("rank-00001.safetensors"))
    _overwrite(part, part.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"damaged: the bytes of head in .*rank-00001.*--resume STEP"):
        load(store, checkpoint, 1)


def test_a_changed_table_is_found(store: FileStore, tmp_path: Path):
    checkpoint = save(store, whole_state(), 2)
    _overwrite(next(tmp_path.rglob("rank-00000.json")), 20)
    with pytest.raises(CheckpointError, match="rank-00000.json differs from its hash"):
        load(store, checkpoint, 1)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00001.json"])
def test_a_missing_object_is_named(store: FileStore, name: str):
    checkpoint = save(store, whole_state(), 2)
    store.delete(f"checkpoints/{checkpoint.name}/{name}")
    with pytest.raises(CheckpointError, match=f"{name} is gone"):
        load(store, checkpoint, 1)


def test_tensors_of_another_shape_are_refused(store: FileStore):
    checkpoint = save(store, whole_state(), 1)
    other = {"embed": tuple(torch.zeros(7, 4) for _ in PIECES)}
    with pytest.raises(CheckpointError, match=r"embed has shape \[7, 4\] .* of shape \[7, 3\]"):
        checkpoints.restore(store, checkpoint, 0, rows_of(other, 0, 1))
    unknown = {"more": tuple(torch.zeros(7, 4) for _ in PIECES)}
    with pytest.raises(CheckpointError, match="it is missing"):
        checkpoints.restore(store, checkpoint, 0, rows_of(unknown, 0, 1))


def test_torchs_random_state_is_restored(store: FileStore):
    torch.manual_seed(11)
    checkpoint = save(store, whole_state(), 1)
    wanted = torch.rand(3)
    torch.manual_seed(12)
    load(store, checkpoint, 1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_snapshot_does_not_change_with_the_rows_and_its_memory_is_used_again(store: FileStore):
    rows = rows_of(whole_state(1), 0, 1)
    snapshot = Snapshot(rows)
    snapshot.take(rows)
    memory = snapshot._floats.data_ptr()
    for row in rows.values():
        row.tensors["param"].fill_(7.0)
    taken = checkpoints.write_rank(store, "00000001-0000000001", 0, snapshot)
    made = checkpoints.commit(store, Progress(1, 1, 1, 8, 1), [taken], fingerprint="model", parent="")
    assert equal(load(store, made, 2), whole_state(1))
    snapshot.take(rows_of(whole_state(2), 0, 1))
    taken = checkpoints.write_rank(store, "00000001-0000000002", 0, snapshot)
    made = checkpoints.commit(store, Progress(2, 1, 1, 8, 1), [taken], fingerprint="model", parent="")
    assert equal(load(store, made, 1), whole_state(2)) and snapshot._floats.data_ptr() == memory


def test_only_the_last_ones_are_kept_and_leftovers_go(store: FileStore, tmp_path: Path):
    for step in (1, 2, 3):
        save(store, whole_state(), 2, step=step)
    with pytest.raises(StoreUnavailable):
        save(FailingStore(f"file://{tmp_path}", "rank-00001.json"), whole_state(), 2, step=4)
    newest = save(store, whole_state(), 2, step=5)
    # Of a newer trainer, about to commit: not ours to delete.
    with pytest.raises(StoreUnavailable):
        failing = FailingStore(f"file://{tmp_path}", "rank-00001.json")
        save(failing, whole_state(), 2, step=4, incarnation=2)
    checkpoints.prune(store, keep=2, newest=newest.name)
    assert checkpoints.list_committed(store) == ["00000001-0000000003", "00000001-0000000005"]
    left = {info.key.split("/")[1] for info in store.list_after("checkpoints/")}
    assert {name for name in left if not name.endswith(".json")} == {
        "00000001-0000000003",
        "00000001-0000000005",
        "00000002-0000000004",
    }
    assert equal(load(store, newest, 3), whole_state())
