"""The subscriber: which version is the newest, that nothing gets through which was not verified, folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.errors import Corrupt, StoreUnavailable, WeightsError
from async_rl.weights import files
from async_rl.weights.codec import TILE
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import FolderLock, scratch_folder
from async_rl.weights.lineage import Way, claim
from async_rl.weights.packs import header
from async_rl.weights.run import open_run
from async_rl.weights.subscriber import LocalVersion, Subscriber, export, pull
from tests.weights_support import (
    History,
    MemoryStore,
    ScriptedStore,
    State,
    raises,
    same_state,
    state_of,
)

CONFIG = WeightsConfig(fetch_part_bytes=37, fetch_parallel=3)  # several parts per pack, the last one short


class Bucket(History):
    """A history, and somebody who reads it."""

    store: ScriptedStore

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path, ScriptedStore(MemoryStore()), tile=7, pack_tiles=2)
        self.cache = tmp_path / "cache"
        self.subscriber = self.reader()

    def reader(self, **options: object) -> Subscriber:
        return Subscriber(self.store, self.run, self.cache, CONFIG, **options)  # type: ignore[arg-type]

    def grow(self, deltas: int) -> None:
        """A full version, and so many after it."""
        self.full(self.random(1))
        for number in range(deltas):
            self.delta(self.changed(0.1, seed=number))

    def here(self, local: LocalVersion) -> State:
        return state_of(self.run, local.shards)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())

    def fetched_keys(self) -> set[str]:
        return {
            key for operation, key in self.store.calls if operation == "get" and key.startswith("packs/")
        }


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


# ---------------------------------------------------------------- which one is the newest


def test_the_newest_is_the_greatest_after_what_one_has(bucket: Bucket) -> None:
    assert bucket.subscriber.newest() is None
    bucket.grow(2)
    assert bucket.subscriber.newest() == bucket.manifests[2]
    assert bucket.subscriber.newest(after=1) == bucket.manifests[2]
    assert bucket.subscriber.newest(after=2) is None


def test_zombies_are_ignored_also_by_a_subscriber_that_has_seen_the_old_owner(bucket: Bucket) -> None:
    bucket.grow(0)
    assert bucket.subscriber.newest() is not None
    newer = claim(bucket.store)
    bucket.full(bucket.random(2), version=1)  # the old owner, which has not noticed
    bucket.full(bucket.random(3), version=3)
    assert bucket.subscriber.newest(after=0) is None
    bucket.claim = newer
    ours = bucket.full(bucket.random(4), version=2)
    assert bucket.subscriber.newest(after=0) == ours


def test_a_zombie_that_commits_while_one_looks_is_ignored(bucket: Bucket) -> None:
    """The versions are listed first, the claims after: the claim is seen."""
    bucket.grow(0)

    def usurp() -> None:
        claim(bucket.store)
        bucket.full(bucket.random(2))

    bucket.store.on("list_after", "versions/", usurp)
    newest = bucket.subscriber.newest()
    assert newest is not None and newest.version == 0


def test_polls_of_a_fleet_are_spread(bucket: Bucket) -> None:
    pauses = [bucket.subscriber.next_poll_s() for _ in range(50)]
    assert all(0.5 * CONFIG.poll_s <= pause <= 1.5 * CONFIG.poll_s for pause in pauses)
    assert len(set(pauses)) > 1


# ---------------------------------------------------------------- fetching a full state


def test_a_fetched_version_is_here_byte_by_byte(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random(), version=4)
    fractions: list[float] = []
    local = bucket.subscriber.fetch(manifest, fractions.append)
    assert (local.version, local.step) == (4, 40)
    assert [path.read_bytes() for path in local.shards] == [
        bucket.store.get(p.key) for p in manifest.way.packs
    ]
    assert len(local.shards) > 1 and same_state(bucket.here(local), bucket.states[4])
    assert fractions == sorted(fractions) and (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(fractions) > len(local.shards) + 1
    assert local.path.startswith("from nothing: 4 full")
    assert bucket.files() == sorted([".async-rl.json", "lock", *(path.name for path in local.shards)])


def test_what_is_here_is_not_fetched_again_but_verified_again(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    local = bucket.subscriber.fetch(manifest)
    bucket.subscriber.close()
    bucket.store.calls.clear()
    again = bucket.reader()
    assert again.fetch(manifest).fetched_bytes == 0 and bucket.fetched_keys() == set()
    again.close()
    first, second = local.shards[:2]
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    repaired = bucket.reader().fetch(manifest)
    assert repaired.fetched_bytes == manifest.way.packs[1].size
    assert local.fetched_bytes == manifest.way.total_bytes
    assert bucket.fetched_keys() == {manifest.way.packs[1].key}
    assert second.read_bytes() == bucket.store.get(manifest.way.packs[1].key)
    assert first.read_bytes() == bucket.store.get(manifest.way.packs[0].key)


def test_packs_that_arrived_before_a_fetch_failed_are_not_fetched_again(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    last = manifest.way.packs[-1].key
    bucket.store.on("get", last, raises(StoreUnavailable("no route")))
    one_at_a_time = Subscriber(bucket.store, bucket.run, bucket.cache, WeightsConfig(fetch_parallel=1))
    with pytest.raises(StoreUnavailable):
        one_at_a_time.fetch(manifest)
    one_at_a_time.close()
    bucket.store.calls.clear()
    local = bucket.subscriber.fetch(manifest)
    assert bucket.fetched_keys() == {last} and local.fetched_bytes == manifest.way.packs[-1].size
    assert same_state(bucket.here(local), bucket.states[0])


@pytest.mark.parametrize("place", [0, 20, -1], ids=["length", "header", "last byte"])
def test_a_flipped_bit_is_never_accepted(bucket: Bucket, place: int) -> None:
    manifest = bucket.full(bucket.random())
    key = manifest.way.packs[1].key
    content = bytearray(bucket.store.get(key))
    content[place] ^= 1
    bucket.store.put(key, bytes(content))
    with pytest.raises(Corrupt, match=f"{key} in .* differs from the hash in its manifest, twice"):
        bucket.subscriber.fetch(manifest)
    assert not [name for name in bucket.files() if name.endswith(".safetensors")]


def test_a_torn_read_is_repaired_by_a_second_one(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    key = manifest.way.packs[0].key
    bucket.store.on("get", key, lambda: bytes(CONFIG.fetch_part_bytes))  # the right length, all zeros
    local = bucket.subscriber.fetch(manifest)
    assert local.shards[0].read_bytes() == bucket.store.get(key)
    assert local.fetched_bytes > manifest.way.total_bytes


def test_a_truncated_pack_is_corrupt(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    key = manifest.way.packs[1].key
    bucket.store.put(key, bucket.store.get(key)[:-1])
    with pytest.raises(Corrupt, match=f"{key} in .* has {manifest.way.packs[1].size - 1} bytes"):
        bucket.subscriber.fetch(manifest)


def test_a_short_answer_is_asked_for_again_and_never_taken_for_the_whole(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    bucket.store.on("get", manifest.way.packs[0].key, lambda: b"short")
    assert same_state(bucket.here(bucket.subscriber.fetch(manifest)), bucket.states[0])
    later = bucket.full(bucket.random(2))
    bucket.store.on("get", later.way.packs[0].key, lambda: b"short", times=99)
    with pytest.raises(Corrupt, match=f"{later.way.packs[0].key}.* gave 10 bytes"):
        bucket.subscriber.fetch(later)


def test_a_missing_pack_is_named(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    bucket.store.delete(manifest.way.packs[1].key)
    with pytest.raises(WeightsError, match=f"{manifest.way.packs[1].key} is not in"):
        bucket.subscriber.fetch(manifest)


def test_a_store_that_is_away_surfaces_and_the_next_fetch_succeeds(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    bucket.store.on("get", "packs/", raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        bucket.subscriber.fetch(manifest)
    assert bucket.subscriber.fetch(manifest).version == 0


@pytest.mark.parametrize("fault", ["one tensor fewer", "another shape", "another place", "another type"])
def test_packs_that_are_whole_but_not_the_runs_model_are_refused(bucket: Bucket, fault: str) -> None:
    manifest = bucket.full(bucket.random())
    said = {
        "one tensor fewer": "lacks 1 tensors",
        "another shape": r"has shape \(4, 9\)",
        "another place": r"embed\.weight is not in the pack",
        "another type": "is F16",
    }
    table = list(bucket.run.tensors)
    if fault == "one tensor fewer":
        table = table[1:]
    if fault == "another shape":
        table[0] = msgspec.structs.replace(table[0], shape=table[0].shape[::-1])
    data = header(table, "float16" if fault == "another type" else "bfloat16")
    data += b"".join(bucket.states[0][spec.name].tobytes() for spec in table)
    key = "packs/other"
    bucket.store.put(key, data)
    pack = msgspec.structs.replace(
        manifest.way.packs[0], key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    places = {spec.name: 0 for spec in table}
    if fault == "another place":
        places["embed.weight"] = 1
    way = Way(-1, (pack,), len(data), places)
    with pytest.raises(Corrupt, match=said[fault]):
        bucket.subscriber.fetch(msgspec.structs.replace(manifest, way=way))
    assert bucket.subscriber.needed_versions == ()


def test_a_version_of_another_type_is_refused(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    with pytest.raises(Corrupt, match="is float16, the run is bfloat16"):
        bucket.subscriber.fetch(msgspec.structs.replace(manifest, dtype="float16"))


def test_a_hash_that_is_a_path_is_refused(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    pack = msgspec.structs.replace(manifest.way.packs[0], sha256="../../../outside")
    way = msgspec.structs.replace(manifest.way, packs=(pack, *manifest.way.packs[1:]))
    with pytest.raises(Corrupt, match="a hash that is none"):
        bucket.subscriber.fetch(msgspec.structs.replace(manifest, way=way))


def test_a_full_disk_says_so_and_leaves_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manifest = bucket.full(bucket.random())
    with monkeypatch.context() as patch:
        patch.setattr("async_rl.weights.files.os.pwrite", full)
        with pytest.raises(WeightsError, match=r"No space left on device.*free some space"):
            bucket.subscriber.fetch(manifest)
    assert bucket.files() == ["lock"]


def test_where_two_copies_have_no_room_the_old_one_goes_first(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.grow(1)
    bucket.subscriber.fetch(bucket.manifests[0])
    wanted = bucket.full(bucket.random(7))
    monkeypatch.setattr(
        "async_rl.weights.follower.shutil.disk_usage",
        lambda _: type("Usage", (), {"free": wanted.way.total_bytes - 1}),
    )
    gone: list[bool] = []
    bucket.store.on(
        "get",
        wanted.way.packs[0].key,
        lambda: gone.append(not any(name.endswith(".safetensors") for name in bucket.files())),
    )
    local = bucket.subscriber.fetch(wanted)
    assert gone == [True] and same_state(bucket.here(local), bucket.states[2])


# ---------------------------------------------------------------- only what is needed


@pytest.fixture
def wide(tmp_path: Path) -> History:
    """Tensors of several tiles."""
    shapes = {"a.weight": (3, TILE), "b.weight": (TILE + 5,), "c.weight": (64,)}
    history = History(tmp_path, ScriptedStore(MemoryStore()), shapes, pack_bytes=1)
    history.full(history.random(1))
    for seed in (1, 2):
        history.delta(history.changed(0.001, seed))
    return history


def test_only_tiles_around_what_is_needed_are_read(wide: History, tmp_path: Path) -> None:
    store = wide.store
    assert isinstance(store, ScriptedStore)
    needs = {"a.weight": (TILE + 3, 2 * TILE), "b.weight": (TILE, TILE + 1)}
    reader = Subscriber(store, wide.run, tmp_path / "cache", WeightsConfig(), needs)
    reader.fetch(wide.manifests[0])
    assert ("get", wide.manifests[0].way.packs[2].key) not in store.calls, "a pack with nothing needed"
    assert ("get", wide.manifests[0].way.packs[1].key) in store.calls
    local = reader.fetch(wide.manifests[2])
    here, there = state_of(wide.run, local.shards), wide.states[2]
    assert np.array_equal(here["a.weight"][1], there["a.weight"][1])
    assert np.array_equal(here["b.weight"][TILE:], there["b.weight"][TILE:])
    assert not here["a.weight"][0].any() and not here["b.weight"][:TILE].any()
    whole = sum(wide.manifests[version].way.total_bytes for version in (1, 2))
    assert 0 < local.fetched_bytes < whole / 2
    assert reader.scrub()
    reader.close()
    again = Subscriber(store, wide.run, tmp_path / "cache", WeightsConfig(), needs)
    assert again.fetch(wide.manifests[2]).fetched_bytes == 0, "taken over after a restart"
    again.close()
    everything = Subscriber(store, wide.run, tmp_path / "cache", WeightsConfig())
    assert same_state(state_of(wide.run, everything.fetch(wide.manifests[2]).shards), there), (
        "holes are not taken for weights"
    )


def test_a_damaged_tile_among_those_needed_is_found_by_its_hash(wide: History, tmp_path: Path) -> None:
    store = wide.store
    reader = Subscriber(store, wide.run, tmp_path / "cache", WeightsConfig(), {"a.weight": (0, 10)})
    reader.fetch(wide.manifests[0])
    pack = wide.manifests[1].way.packs[0]
    content = bytearray(store.get(pack.key))
    content[len(content) // 100 + 200] ^= 1  # in the first of many tiles
    store.put(pack.key, bytes(content))
    with pytest.raises(Corrupt, match=f"{pack.key} .*a tile in .* differs from its hash, twice"):
        reader.fetch(wide.manifests[1])
    content[-1] ^= 1
    store.put(pack.key, bytes(content))
    with pytest.raises(Corrupt, match="its table differs from its hash, twice"):
        reader.fetch(wide.manifests[1])


def test_a_tile_that_is_needed_only_in_part_is_refused(wide: History, tmp_path: Path) -> None:
    """Where nobody holds what lies beside it, what it must do to the digest can't be told."""
    reader = Subscriber(wide.store, wide.run, tmp_path / "cache", WeightsConfig(), {"a.weight": (0, 10)})
    reader.fetch(wide.manifests[2])
    wide.tile = TILE // 2 + 1000
    with pytest.raises(Corrupt, match="crosses a multiple of the tile size"):
        reader.fetch(wide.delta(wide.changed(0.001, 3)))


def test_needs_that_the_run_does_not_have_are_refused(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="no elements 0 to 99"):
        bucket.reader(needs={"norm.weight": (0, 99)})


# ---------------------------------------------------------------- scrub, close


def test_a_scrub_finds_what_no_update_touches_and_the_next_fetch_starts_from_nothing(
    bucket: Bucket,
) -> None:
    bucket.grow(1)
    local = bucket.subscriber.fetch(bucket.manifests[0])
    assert bucket.subscriber.scrub()
    with local.shards[-1].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 0x10]))
    assert not bucket.subscriber.scrub()
    assert bucket.subscriber.needed_versions == ()
    local = bucket.subscriber.fetch(bucket.manifests[1])
    assert local.path.startswith("from nothing") and same_state(bucket.here(local), bucket.states[1])


def test_a_scrub_is_due_after_so_many_versions(bucket: Bucket) -> None:
    bucket.grow(3)
    config = msgspec.structs.replace(CONFIG, scrub_every=2)
    reader = Subscriber(bucket.store, bucket.run, bucket.cache, config)
    due = []
    for version in range(4):
        reader.fetch(bucket.manifests[version])
        due.append(reader.scrub_due)
        if reader.scrub_due:
            reader.scrub()
    assert due == [False, True, False, True]
    reader.config = msgspec.structs.replace(config, scrub_every=0)
    assert not reader.scrub_due


def test_two_readers_of_one_folder_are_told_apart(bucket: Bucket) -> None:
    bucket.grow(0)
    bucket.subscriber.fetch(bucket.manifests[0])
    with pytest.raises(WeightsError, match=rf"in use by another reader \(process {os.getpid()}\)"):
        bucket.reader().fetch(bucket.manifests[0])
    bucket.subscriber.close()
    assert bucket.reader().fetch(bucket.manifests[0]).version == 0


def test_another_process_is_kept_out_too(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from async_rl.weights.files import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(WeightsError, match=rf"process {other.pid}\)"):
            FolderLock(tmp_path)
        other.kill()
        other.wait()
        FolderLock(tmp_path).release()


def test_closing_ends_a_fetch_of_another_thread(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    arrived, go = threading.Event(), threading.Event()

    def hang() -> None:
        arrived.set()
        assert go.wait(10)

    bucket.store.on("get", "packs/", hang, times=99)
    errors: list[str] = []

    def fetch() -> None:
        try:
            bucket.subscriber.fetch(manifest)
        except WeightsError as error:
            errors.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert arrived.wait(10)
    closing = threading.Thread(target=bucket.subscriber.close)
    closing.start()
    while not bucket.subscriber._follower._fetcher._stopped:
        closing.join(0.001)
    go.set()
    closing.join(10)
    thread.join(10)
    assert "its reader is closed" in errors[0]
    assert bucket.reader().fetch(manifest).version == 0


def test_a_scratch_folder_is_in_memory_where_it_fits_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(files, "_SHARED_MEMORY", memory)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(disk))
    with scratch_folder(1000) as folder:
        assert folder.parent == memory
        (folder / "weights").write_bytes(b"1")
    with scratch_folder(1 << 60) as folder:
        assert folder.parent == disk
    assert not list(memory.iterdir()) and not list(disk.iterdir())


def test_a_killed_process_s_scratch_folder_is_removed_by_the_next_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SHARED_MEMORY", tmp_path)
    dead, young, alive, other = (
        tmp_path / name
        for name in ("async-rl-weights-dead", "async-rl-weights-young", "async-rl-weights-1", "x")
    )
    for folder in (dead, young, other):
        FolderLock(folder).release()
    lock = FolderLock(alive)
    for folder in (dead, alive, other):
        os.utime(folder, (0, 0))
    with scratch_folder(1):
        assert {path.name for path in tmp_path.iterdir()} >= {young.name, alive.name, "x"}
        assert not dead.exists()
    lock.release()


# ---------------------------------------------------------------- folders


def test_the_folder_is_what_from_pretrained_reads(bucket: Bucket) -> None:
    manifest = bucket.full(bucket.random())
    folder = bucket.subscriber.hf_folder(bucket.subscriber.fetch(manifest))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    count = len(manifest.way.packs)
    assert index["weight_map"] == {
        name: f"model-{place + 1:05}-of-{count:05}.safetensors"
        for name, place in manifest.way.weight_map.items()
    }
    assert all((folder / name).is_file() for name in index["weight_map"].values())
    assert (folder / "tokenizer.json").read_text() == '{"model": "characters"}'
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_single_pack_needs_no_index(bucket: Bucket) -> None:
    bucket.full(bucket.random())
    bucket.subscriber.hf_folder(bucket.subscriber.fetch(bucket.manifests[0]))
    bucket.pack_bytes = 1 << 20
    local = bucket.subscriber.fetch(bucket.full(bucket.random(2)))
    folder = bucket.subscriber.hf_folder(local)
    assert [path.name for path in local.shards] == ["model.safetensors"]
    assert not (folder / "model.safetensors.index.json").exists()
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_an_export_is_a_whole_folder_of_its_own(bucket: Bucket, tmp_path: Path) -> None:
    bucket.grow(3)
    told: list[str] = []
    out = export(bucket.store, 2, tmp_path / "out", CONFIG, describe=told.append)
    count = len(bucket.manifests[0].way.packs)
    shards = {f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)}
    names = {path.name for path in out.iterdir()}
    assert names == {*shards, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert not any(path.is_symlink() for path in out.iterdir())
    assert same_state(state_of(bucket.run, sorted(out.glob("*.safetensors"))), bucket.states[2])
    assert told[0].startswith("from nothing: 0 full")
    newest = export(bucket.store, None, tmp_path / "newest", CONFIG)
    assert same_state(state_of(bucket.run, sorted(newest.glob("*.safetensors"))), bucket.states[3])


@pytest.mark.parametrize("make", [pull, export])
def test_nothing_of_ones_own_is_overwritten(bucket: Bucket, tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    bucket.grow(0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("precious")
    with pytest.raises(WeightsError, match="not an empty folder"):
        make(bucket.store, 0, tmp_path / "out", CONFIG)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_text() == "precious"


def test_an_interrupted_export_shows_no_folder_and_goes_on_later(bucket: Bucket, tmp_path: Path) -> None:
    bucket.pack_bytes = 1 << 20
    bucket.full(bucket.random())
    bucket.pack_bytes = 60
    one = bucket.full(bucket.random(1))
    pull(bucket.store, 0, tmp_path / "out.partial", CONFIG)  # as an export of another version leaves it
    bucket.store.on("get", one.way.packs[0].key, raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        export(bucket.store, 1, tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()
    out = export(bucket.store, 1, tmp_path / "out", CONFIG)
    assert len(list(out.glob("*.safetensors"))) == len(one.way.packs)
    assert same_state(state_of(bucket.run, sorted(out.glob("*.safetensors"))), bucket.states[1])


def test_a_pulled_copy_follows_by_deltas_and_leaves_ones_own_files_alone(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.grow(3)
    out, told = tmp_path / "out", list[str]()
    assert pull(bucket.store, 1, out, CONFIG, describe=told.append) == out
    (out / "notes.txt").write_text("mine")
    for version in (3, 2, None):
        pull(bucket.store, version, out, CONFIG, describe=told.append)
        assert same_state(
            state_of(bucket.run, sorted(out.glob("*.safetensors"))),
            bucket.states[3 if version is None else version],
        )
    assert [path.partition(":")[0] for path in told] == [
        "from nothing",
        "from version 1",
        "from nothing",
        "from version 2",
    ]
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / ".incoming").exists() and (out / "config.json").is_file()


def test_an_interrupted_first_pull_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    bucket.grow(0)
    bucket.store.on("get", bucket.manifests[0].way.packs[0].key, raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        pull(bucket.store, 0, tmp_path / "out", CONFIG)
    pull(bucket.store, 0, tmp_path / "out", CONFIG)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert same_state(state_of(bucket.run, shards), bucket.states[0])


def test_a_copy_of_another_run_is_not_made_into_one_of_this(bucket: Bucket, tmp_path: Path) -> None:
    bucket.grow(0)
    other = Bucket(tmp_path / "other")
    other.grow(0)
    pull(bucket.store, 0, tmp_path / "out", CONFIG)
    with pytest.raises(WeightsError, match=f"a copy of another run \\({bucket.run.run}\\)"):
        pull(other.store, 0, tmp_path / "out", CONFIG)


@pytest.mark.parametrize("make", [pull, export])
def test_asking_for_a_version_that_is_not_there_says_what_is(bucket: Bucket, tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WeightsError, match="has no version yet"):
        make(bucket.store, None, tmp_path / "out")
    bucket.grow(1)
    with pytest.raises(WeightsError, match=r"has no version 7.*it has 0 to 1"):
        make(bucket.store, 7, tmp_path / "out")
    claim(bucket.store)
    bucket.full(bucket.random(3), version=2)
    with pytest.raises(WeightsError, match="version 2 does not count"):
        make(bucket.store, 2, tmp_path / "out")
    assert open_run(bucket.store) == bucket.run and not (tmp_path / "out").exists()
