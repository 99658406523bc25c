"""The subscriber: which version is the newest, and that nothing gets through which was not verified."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import Corrupt, StoreUnavailable, WeightsError
from async_rl.store.file import FileStore
from async_rl.weights import lineage
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, Manifest, Pack, Way, claim, read_manifest
from async_rl.weights.packs import PackPlan, header, plan_packs
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.subscriber import Subscriber, pull
from tests.weights_support import SHAPES, ScriptedStore, raises, shapes, write_model_dir

CONFIG = WeightsConfig(fetch_part_bytes=37, fetch_parallel=3)  # several parts per pack, the last one short


class Bucket:
    """A run whose versions are written by hand: no torch, no publisher, every byte chosen here."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = ScriptedStore(FileStore(f"file://{tmp_path}/store"))
        self.run: RunInfo = ensure_run(self.store, write_model_dir(tmp_path / "model"), shapes())
        self.claim = claim(self.store)
        self.cache = tmp_path / "cache"
        self.subscriber = Subscriber(self.store, self.run, self.cache, CONFIG)

    def write(self, version: int, by: Claim | None = None, pack_bytes: int = 60) -> Manifest:
        by = by or self.claim
        plans = plan_packs(self.run.tensors, self.run.dtype, pack_bytes)
        return self.write_packs(version, by, [pack_content(plan, version) for plan in plans], plans)

    def write_packs(
        self, version: int, by: Claim, contents: list[bytes], plans: tuple[PackPlan, ...]
    ) -> Manifest:
        packs = []
        for number, content in enumerate(contents):
            key = f"packs/{version:010}-{by.incarnation:08}-0-{number}"
            self.store.put(key, content)
            packs.append(Pack(key, len(content), hashlib.sha256(content).hexdigest()))
        manifest = Manifest(
            version=version,
            step=10 * version,
            incarnation=by.incarnation,
            nonce=by.nonce,
            parent=version - 1,
            dtype=self.run.dtype,
            way=Way(
                base=-1,
                packs=tuple(packs),
                total_bytes=sum(pack.size for pack in packs),
                weight_map={spec.name: index for index, plan in enumerate(plans) for spec in plan.tensors},
            ),
            digest=lineage.state_digest(packs),
            created=0.0,
        )
        self.store.put_if_absent(lineage.version_key(version), msgspec.json.encode(manifest))
        return manifest

    def shards_in_cache(self) -> list[Path]:
        return sorted(self.cache.rglob("*.safetensors"))


def pack_content(plan: PackPlan, seed: int) -> bytes:
    size = sum(tensor.nbytes for tensor in plan.tensors)
    return plan.header + bytes((31 * seed + 7 * n) % 251 for n in range(size))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


# ---------------------------------------------------------------- which one is the newest


def test_the_newest_is_the_greatest_after_what_one_has(bucket: Bucket) -> None:
    assert bucket.subscriber.newest() is None
    manifests = [bucket.write(version) for version in (0, 1, 2)]
    assert bucket.subscriber.newest() == manifests[2]
    assert bucket.subscriber.newest(after=1) == manifests[2]
    assert bucket.subscriber.newest(after=2) is None


def test_zombies_are_ignored_also_by_a_subscriber_that_has_seen_the_old_owner(bucket: Bucket) -> None:
    bucket.write(0)
    assert bucket.subscriber.newest() is not None
    newer = claim(bucket.store)
    bucket.write(1)  # the old owner, which has not noticed
    bucket.write(3)
    assert bucket.subscriber.newest(after=0) is None
    ours = bucket.write(2, newer)
    assert bucket.subscriber.newest(after=0) == ours


def test_a_zombie_that_commits_while_one_looks_is_ignored(bucket: Bucket) -> None:
    """The versions are listed first, the claims after: the claim is seen."""
    bucket.write(0)

    def usurp() -> None:
        claim(bucket.store)
        bucket.write(1)

    bucket.store.on("list_after", "versions/", usurp)
    newest = bucket.subscriber.newest()
    assert newest is not None and newest.version == 0


def test_polls_of_a_fleet_are_spread(bucket: Bucket) -> None:
    pauses = [bucket.subscriber.next_poll_s() for _ in range(50)]
    assert all(0.5 * CONFIG.poll_s <= pause <= 1.5 * CONFIG.poll_s for pause in pauses)
    assert len(set(pauses)) > 1


# ---------------------------------------------------------------- fetching


def test_a_fetched_version_is_on_disk_byte_by_byte(bucket: Bucket) -> None:
    manifest = bucket.write(4)
    fractions: list[float] = []
    local = bucket.subscriber.fetch(manifest, fractions.append)
    assert (local.version, local.step) == (4, 40)
    assert [path.read_bytes() for path in local.shards] == [
        bucket.store.get(p.key) for p in manifest.way.packs
    ]
    assert len(local.shards) > 1
    assert fractions == sorted(fractions) and (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(fractions) > len(local.shards) + 1
    assert (
        sorted(path for path in bucket.cache.rglob("*") if path.is_file()) == local.shards
    )  # none half-done


def test_what_is_in_the_cache_is_not_fetched_again_but_verified_again(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    local = bucket.subscriber.fetch(manifest)
    first, second = local.shards[:2]
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    bucket.store.calls.clear()
    again = Subscriber(bucket.store, bucket.run, bucket.cache, CONFIG).fetch(manifest)
    assert again == msgspec.structs.replace(local, fetched_bytes=manifest.way.packs[1].size)
    assert local.fetched_bytes == manifest.way.total_bytes
    assert {key for operation, key in bucket.store.calls if operation == "get"} == {
        manifest.way.packs[1].key
    }
    assert second.read_bytes() == bucket.store.get(manifest.way.packs[1].key)
    assert first.read_bytes() == bucket.store.get(manifest.way.packs[0].key)


@pytest.mark.parametrize("place", [0, 20, -1], ids=["length", "header", "last byte"])
def test_a_flipped_bit_is_never_accepted(bucket: Bucket, place: int) -> None:
    manifest = bucket.write(0)
    key = manifest.way.packs[1].key
    content = bytearray(bucket.store.get(key))
    content[place] ^= 1
    bucket.store.put(key, bytes(content))
    with pytest.raises(Corrupt, match=key):
        bucket.subscriber.fetch(manifest)
    assert bucket.shards_in_cache() == []


def test_a_torn_read_is_repaired_by_a_second_one(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    key = manifest.way.packs[0].key
    bucket.store.on("get", key, lambda: bytes(CONFIG.fetch_part_bytes))  # the right length, all zeros
    local = bucket.subscriber.fetch(manifest)
    assert local.shards[0].read_bytes() == bucket.store.get(key)


def test_a_truncated_pack_is_corrupt(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    key = manifest.way.packs[1].key
    bucket.store.put(key, bucket.store.get(key)[:-1])
    with pytest.raises(Corrupt, match=f"{key} in .* has {manifest.way.packs[1].size - 1} bytes"):
        bucket.subscriber.fetch(manifest)
    assert bucket.shards_in_cache() == []


def test_a_short_answer_is_not_taken_for_the_whole(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    bucket.store.on("get", manifest.way.packs[0].key, lambda: b"short")
    with pytest.raises(Corrupt, match="gave 5 bytes"):
        bucket.subscriber.fetch(manifest)


def test_a_missing_pack_is_named(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    bucket.store.delete(manifest.way.packs[1].key)
    with pytest.raises(WeightsError, match=f"{manifest.way.packs[1].key} is not in"):
        bucket.subscriber.fetch(manifest)


def test_a_store_that_is_away_surfaces_and_the_next_fetch_succeeds(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    bucket.store.on("get", "packs/", raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        bucket.subscriber.fetch(manifest)
    assert bucket.subscriber.fetch(manifest).version == 0


def table_without(bucket: Bucket, name: str) -> tuple[PackPlan, ...]:
    kept = tuple(spec for spec in bucket.run.tensors if spec.name != name)
    return (PackPlan(kept, header(kept, bucket.run.dtype)),)


def table_reshaped(bucket: Bucket, name: str) -> tuple[PackPlan, ...]:
    table = tuple(
        msgspec.structs.replace(spec, shape=spec.shape[::-1]) if spec.name == name else spec
        for spec in bucket.run.tensors
    )
    return (PackPlan(table, header(table, bucket.run.dtype)),)


@pytest.mark.parametrize(
    ("plans_of", "said"), [(table_without, "lacks 1 tensors"), (table_reshaped, r"has shape \(4, 9\)")]
)
def test_packs_that_are_whole_but_not_the_runs_model_are_refused(
    bucket: Bucket, plans_of: Callable[[Bucket, str], tuple[PackPlan, ...]], said: str
) -> None:
    plans = plans_of(bucket, "embed.weight")
    manifest = bucket.write_packs(0, bucket.claim, [pack_content(plan, 0) for plan in plans], plans)
    with pytest.raises(Corrupt, match=said):
        bucket.subscriber.fetch(manifest)


def test_a_manifest_that_misplaces_tensors_is_refused(bucket: Bucket) -> None:
    manifest = bucket.write(0)
    moved = {**manifest.way.weight_map, "embed.weight": 1}
    with pytest.raises(Corrupt, match=r"embed\.weight is not in the pack"):
        way = msgspec.structs.replace(manifest.way, weight_map=moved)
        bucket.subscriber.fetch(msgspec.structs.replace(manifest, way=way))
    with pytest.raises(Corrupt, match="is float16, the run is bfloat16"):
        bucket.subscriber.fetch(msgspec.structs.replace(manifest, dtype="float16"))


def test_a_full_disk_says_so_and_leaves_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manifest = bucket.write(0)
    with monkeypatch.context() as patch:
        patch.setattr("async_rl.weights.subscriber.os.pwrite", full)
        with pytest.raises(WeightsError, match=r"No space left on device.*free some space"):
            bucket.subscriber.fetch(manifest)
    assert [path for path in bucket.cache.rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------- folders


def test_the_folder_is_what_from_pretrained_reads(bucket: Bucket) -> None:
    manifest = bucket.write(0)
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
    local = bucket.subscriber.fetch(bucket.write(0, pack_bytes=1 << 20))
    folder = bucket.subscriber.hf_folder(local)
    assert [path.name for path in local.shards] == ["model.safetensors"]
    assert not (folder / "model.safetensors.index.json").exists()


def test_pruning_keeps_the_newest(bucket: Bucket) -> None:
    for version in (1, 2, 10):
        bucket.subscriber.hf_folder(bucket.subscriber.fetch(bucket.write(version)))
    bucket.subscriber.prune(keep=2)
    folders = {int(path.parent.name) for path in bucket.shards_in_cache()}
    assert folders == {2, 10}
    assert (bucket.cache / bucket.run.run / "model" / "config.json").is_file()


def test_a_pulled_version_is_a_whole_folder_of_its_own(bucket: Bucket, tmp_path: Path) -> None:
    manifest = bucket.write(0)
    bucket.write(1)
    out = pull(bucket.store, 0, tmp_path / "out", CONFIG)
    names = {path.name for path in out.iterdir()}
    shards = {
        f"model-{n + 1:05}-of-{len(manifest.way.packs):05}.safetensors"
        for n in range(len(manifest.way.packs))
    }
    assert names == {*shards, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert not any(path.is_symlink() for path in out.iterdir())
    newest = pull(bucket.store, None, tmp_path / "newest", CONFIG)
    first = sorted(shards)[0]
    assert (newest / first).read_bytes() == bucket.store.get(
        read_manifest(bucket.store, 1).way.packs[0].key
    )


def test_a_pull_overwrites_nothing(bucket: Bucket, tmp_path: Path) -> None:
    bucket.write(0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(WeightsError, match="not an empty folder"):
        pull(bucket.store, 0, tmp_path / "out", CONFIG)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_interrupted_pull_shows_no_folder_and_goes_on_later(bucket: Bucket, tmp_path: Path) -> None:
    bucket.write(0, pack_bytes=1 << 20)
    one = bucket.write(1)
    pull(bucket.store, 0, tmp_path / "zero", CONFIG)
    (tmp_path / "zero").rename(tmp_path / "out.partial")  # left by a pull of another version
    bucket.store.on("get", one.way.packs[0].key, raises(StoreUnavailable("no route")))
    with pytest.raises(StoreUnavailable):
        pull(bucket.store, 1, tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()
    out = pull(bucket.store, 1, tmp_path / "out", CONFIG)
    assert len(list(out.glob("*.safetensors"))) == len(one.way.packs)


def test_a_version_that_is_not_there_or_does_not_count_is_not_pulled(
    bucket: Bucket, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="no version yet"):
        pull(bucket.store, None, tmp_path / "out")
    bucket.write(0)
    with pytest.raises(WeightsError, match=r"no version 7 \(it has 0 to 0\)"):
        pull(bucket.store, 7, tmp_path / "out")
    claim(bucket.store)
    bucket.write(1)
    with pytest.raises(WeightsError, match="version 1 does not count"):
        pull(bucket.store, 1, tmp_path / "out")
    assert len(SHAPES) == len(bucket.run.tensors)
