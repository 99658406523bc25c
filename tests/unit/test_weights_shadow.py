"""The shadow: any path leads to the same bits, and what is not exactly a version is never taken for one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import Corrupt
from async_rl.weights import shadow
from async_rl.weights.deltas import DeltaPackWriter
from async_rl.weights.lineage import version_key
from async_rl.weights.shadow import read_held
from async_rl.weights.subscriber import Subscriber
from tests.shadow_support import CONFIG, Branches


@pytest.fixture
def bucket(tmp_path: Path) -> Branches:
    return Branches(tmp_path)


# ---------------------------------------------------------------- paths


def test_any_path_from_any_version_to_any_other_gives_the_same_bytes_and_digest(bucket: Branches) -> None:
    reader = bucket.reader()
    paths = set()
    for start in (None, *range(5)):
        for end in range(5):
            for avoided in (None,) if start else (None, bucket.skip_key, bucket.anchor_key):
                if start is None:
                    reader.close()
                    shutil.rmtree(bucket.cache, ignore_errors=True)
                    reader = bucket.reader()
                else:
                    bucket.exact(reader.fetch(bucket.manifests[start]))
                kept = bucket.objects.pop(avoided, b"") if avoided else b""
                local = reader.fetch(bucket.manifests[end])
                if avoided:
                    bucket.objects[avoided] = kept
                bucket.exact(local)
                held = read_held(local.shards[0].parent)
                assert held is not None and held.digest == bucket.manifests[end].digest
                paths.add((start, end, local.path))
    assert len(paths) > 30
    assert any("4 (+4)" in path for start, end, path in paths if (start, end) == (0, 4))
    assert any("3 full" in path for start, end, path in paths if (start, end) == (None, 3))


def test_a_version_in_which_nothing_changed_costs_nothing(bucket: Branches) -> None:
    reader = bucket.at(4)
    local = reader.fetch(bucket.delta(bucket.states[4]))
    bucket.exact(local)
    assert local.fetched_bytes == 0 and local.path == "from version 4: 5 (+1) 0 MB; 0 MB in 1 hop"
    reader.close()
    assert bucket.reader().fetch(bucket.manifests[5]).path == "from version 5: nothing to read"


def test_the_files_stay_the_same_ones_so_that_a_delta_costs_no_copy(bucket: Branches) -> None:
    reader = bucket.at(0)
    before = {path: path.stat().st_ino for path in (bucket.cache / bucket.run.run / "shadow").iterdir()}
    local = reader.fetch(bucket.manifests[4])
    assert {path.stat().st_ino for path in local.shards} <= set(before.values())


def test_packs_are_gone_once_they_are_applied(bucket: Branches) -> None:
    bucket.at(0).fetch(bucket.manifests[4])
    assert [path.name for path in (bucket.cache / bucket.run.run / "incoming").iterdir()] == ["lock"]


@pytest.mark.parametrize("kind", ["truncated", "bit flipped", "swapped", "missing"])
def test_where_the_only_way_is_damaged_the_error_names_the_object_and_the_shadow_stays(
    tmp_path: Path, kind: str
) -> None:
    bucket = Branches(tmp_path, further=False)
    reader = bucket.at(1)
    key = bucket.manifests[2].way.packs[0].key
    content = bucket.objects[key]
    bucket.objects[key] = {
        "truncated": content[:-1],
        "bit flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "swapped": bucket.objects[bucket.manifests[3].way.packs[0].key],
        "missing": b"",
    }[kind]
    if kind == "missing":
        del bucket.objects[key]
    with pytest.raises(Corrupt, match=f"version 3 of .* can't be had: {key} .*`async-rl weights verify`"):
        reader.fetch(bucket.manifests[3])
    assert reader.needed_versions == (1,)
    bucket.objects[key] = content
    local = reader.fetch(bucket.manifests[3])
    bucket.exact(local)
    assert local.path.startswith("from version 1")


# ---------------------------------------------------------------- packs that are whole, and wrong


def wrong_tile_hash(writers: list[DeltaPackWriter]) -> None:
    rows = writers[0]._rows
    rows[0] = (*rows[0][:7], bytes(8))


def wrong_moved(writers: list[DeltaPackWriter]) -> None:
    rows = writers[0]._rows
    rows[0] = (*rows[0][:5], rows[0][5] ^ 1, *rows[0][6:])


def wrong_count(writers: list[DeltaPackWriter]) -> None:
    rows = writers[0]._rows
    rows[0] = (*rows[0][:4], rows[0][4] + 1, *rows[0][5:])


def out_of_bounds(writers: list[DeltaPackWriter]) -> None:
    rows = writers[0]._rows
    rows[0] = (*rows[0][:2], rows[0][2] + 1, *rows[0][3:])


def twice(writers: list[DeltaPackWriter]) -> None:
    writers.append(writers[0])


def other_tensor(writers: list[DeltaPackWriter]) -> None:
    rows = writers[0]._rows
    rows[-1] = (99, *rows[-1][1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_tile_hash, "differs from its hash"),
        (wrong_moved, "made from another state"),
        (wrong_count, "made from another state"),
        (out_of_bounds, "has a tile at"),
        (twice, "both change"),
        (other_tensor, "a tile of tensor 99"),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused_with_the_reason(
    bucket: Branches, change: Callable[[list[DeltaPackWriter]], None], said: str
) -> None:
    reader = bucket.at(4)
    manifest = bucket.crafted(5, change)
    with pytest.raises(Corrupt, match=f"packs/0000000005.*{said}"):
        reader.fetch(manifest)
    bucket.exact(reader.fetch(bucket.manifests[4]))
    bucket.anchor(5)
    bucket.exact(reader.fetch(manifest))


def test_a_way_that_counts_otherwise_than_its_packs_is_refused(tmp_path: Path) -> None:
    bucket = Branches(tmp_path, further=False)
    reader = bucket.at(3)
    way = msgspec.structs.replace(bucket.manifests[4].way, changed=1)
    with pytest.raises(Corrupt, match="says that 1 elements change"):
        reader.fetch(msgspec.structs.replace(bucket.manifests[4], way=way))
    assert reader.needed_versions == (3,)


def test_packs_whose_table_has_another_place_or_hash_are_refused(bucket: Branches) -> None:
    bucket.at(4)
    whole = bucket.delta(bucket.changed(0.3, seed=9))
    for field, said in (
        ("sha256", "its table differs from its hash"),
        ("start", "should end with a table"),
    ):
        table = whole.way.packs[0].table
        assert table is not None
        wrong = {"sha256": "0" * 64, "start": table.start - 1}[field]
        ref = msgspec.structs.replace(table, **{field: wrong})
        packs = (msgspec.structs.replace(whole.way.packs[0], table=ref), *whole.way.packs[1:])
        manifest = msgspec.structs.replace(whole, way=msgspec.structs.replace(whole.way, packs=packs))
        bucket.objects[version_key(5)] = msgspec.json.encode(manifest)
        other = Subscriber(bucket.store, bucket.run, bucket.cache.with_name(field), CONFIG)
        with pytest.raises(Corrupt, match=said):
            other.fetch(manifest)
        assert other.needed_versions == (), "nothing was touched for it"


def test_a_state_of_another_digest_is_not_served_though_every_hash_is_right(bucket: Branches) -> None:
    reader = bucket.at(4)
    bucket.full(bucket.random(5), digest="0123456789abcdef")
    with pytest.raises(Corrupt, match="should have the digest 0123456789abcdef"):
        reader.fetch(bucket.manifests[5])
    assert list(reader.needed_versions) == [4], "the one before is still there"
    wrong = bucket.delta(bucket.changed(0.3, 9, bucket.states[4]), base=4, digest="0123456789abcdef")
    with pytest.raises(Corrupt, match="should have the digest 0123456789abcdef"):
        reader.fetch(wrong)
    assert reader.needed_versions == ()
    bucket.exact(reader.fetch(bucket.full(bucket.random(6))))


def test_after_an_error_in_the_middle_of_an_apply_the_same_reader_starts_from_nothing(
    bucket: Branches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> object:
        raise MemoryError("no memory")

    reader = bucket.at(3)
    with monkeypatch.context() as patch:
        patch.setattr(shadow, "apply_tile", full)
        with pytest.raises(MemoryError):
            reader.fetch(bucket.manifests[4])
    local = reader.fetch(bucket.manifests[4])
    bucket.exact(local)
    assert local.path.startswith("from nothing")


def test_damage_to_the_shadow_is_found_when_a_delta_touches_it_and_mended_from_an_anchor(
    bucket: Branches,
) -> None:
    reader = bucket.at(4)
    state = {name: bits.copy() for name, bits in bucket.states[4].items()}
    state["norm.weight"].flat[0] ^= 3
    bucket.delta(state)
    shard = bucket.cache / bucket.run.run / "shadow" / "model-00003-of-00003.safetensors"
    damage(shard, -8)  # the first element of norm.weight, the last tensor
    local = reader.fetch(bucket.manifests[5])
    bucket.exact(local)
    assert local.path.startswith("from nothing")


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    with path.open("r+b") as file:
        file.write(content)


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("fault", ["none", "a bit", "cut", "gone", "another run's", "nonsense", "torn"])
def test_a_restart_takes_over_what_is_exactly_the_version_it_says_and_nothing_else(
    bucket: Branches, fault: str
) -> None:
    bucket.at(3).close()
    folder = bucket.cache / bucket.run.run / "shadow"
    shard, held = folder / "model-00002-of-00003.safetensors", folder / shadow.HELD
    if fault == "a bit":
        damage(shard, -1)
    elif fault == "cut":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif fault == "gone":
        shard.unlink()
    elif fault == "another run's":
        content = read_held(folder)
        assert content is not None
        held.write_bytes(msgspec.json.encode(msgspec.structs.replace(content, run="other")))
    elif fault == "nonsense":
        held.write_bytes(b"{")
    elif fault == "torn":
        held.unlink()
    reader = bucket.reader()
    local = reader.fetch(bucket.manifests[3])
    bucket.exact(local)
    assert local.path.startswith("from version 3" if fault == "none" else "from nothing")
    bucket.exact(reader.fetch(bucket.manifests[4]))


def test_a_shadow_that_says_it_is_another_version_is_not_believed(bucket: Branches) -> None:
    bucket.at(3).close()
    folder = bucket.cache / bucket.run.run / "shadow"
    held = read_held(folder)
    assert held is not None
    lie = msgspec.structs.replace(held, version=0, digest=bucket.manifests[0].digest)
    (folder / shadow.HELD).write_bytes(msgspec.json.encode(lie))
    bucket.exact(bucket.reader().fetch(bucket.manifests[4]))
