"""What is reported of a run's versions is what stands in the store, and whatever is damaged there is found."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl.errors import WeightsError
from async_rl.weights.check import Verified, verify, verify_all
from async_rl.weights.config import WeightsConfig
from async_rl.weights.difference import difference
from async_rl.weights.gc import collect
from async_rl.weights.lineage import version_key, wanted_version
from async_rl.weights.report import full_bytes, list_rows, show, usage
from async_rl.weights.ways import FurtherWay, read_way
from tests.weights_support import History

SHAPES = {"embed.weight": (60, 20), "layer.weight": (33, 9), "norm.weight": (7,)}


def run_of(tmp_path, versions: int = 9, **fields: object) -> History:
    """Full, deltas, skips over 4, an anchor at 5."""
    history = History(tmp_path, shapes=SHAPES, **fields)
    history.full(history.random())
    for number in range(1, versions):
        history.delta(history.changed(0.03, seed=number))
    for number in range(4, versions, 4):
        history.skip(number - 4, number)
    if versions > 5:
        history.anchor(5)
    return history


def flip(history: History, key: str, at: int = -20) -> None:
    data = bytearray(history.store.get(key))
    data[at] ^= 1
    history.store.put(key, bytes(data))


def verdicts(verified: Verified) -> dict[tuple[int, int], str]:
    return {(way.base, way.version): way.verdict for way in verified.ways}


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("small", [False, True], ids=["default", "small"])
def test_a_sound_run_is_right_in_every_way(tmp_path, small):
    history = run_of(tmp_path, small=small)
    found = verify_all(history.store, history.run, tmp_path / "scratch")
    assert len(found.ways) == 9 + 2 + 1
    assert set(verdicts(found).values()) == {"right"}
    assert not found.wrong


@pytest.mark.parametrize("at", [-20, 300, 0], ids=["table", "tile", "header"])
def test_a_flipped_bit_is_found_and_what_depends_on_it_is_reached_another_way(tmp_path, at):
    history = run_of(tmp_path)
    flip(history, history.manifests[3].way.packs[0].key, at)
    found = verdicts(verify_all(history.store, history.run, tmp_path / "scratch"))
    assert found.pop((2, 3)) == "wrong"
    assert found.pop((3, 4)) == "unchecked", "nothing else leads to version 3"
    assert set(found.values()) == {"right"}


def test_wrong_digests_of_tiles_are_found_though_the_packs_are_whole(tmp_path):
    """Who reads all of the anchor would be content; who reads a part of it would not."""
    history = run_of(tmp_path)
    key = history.anchor(7)
    sound = msgspec.json.decode(history.store.get(key), type=FurtherWay)
    digests = bytearray(sound.way.tile_digests)
    digests[-8] ^= 1
    way = msgspec.structs.replace(sound.way, tile_digests=bytes(digests))
    history.store.put(key, msgspec.json.encode(msgspec.structs.replace(sound, way=way)))
    (wrong,) = verify_all(history.store, history.run, tmp_path / "scratch").wrong
    assert wrong.key == key
    assert "the tile of norm.weight at 0 has the digest" in wrong.reason


@pytest.mark.parametrize("which", ["skip", "anchor"])
def test_a_damaged_further_way_is_found(tmp_path, which):
    history = run_of(tmp_path)
    key = history.skip(1, 3) if which == "skip" else history.anchor(7)
    pack = msgspec.json.decode(history.store.get(key))["way"]["packs"][0]["key"]
    flip(history, pack)
    (wrong,) = verify_all(history.store, history.run, tmp_path / "scratch").wrong
    assert wrong.key == key
    assert pack in wrong.reason


def test_two_ways_that_lead_to_different_bits_are_told_apart(tmp_path):
    """All hashes are right: only the decoded state shows that the skip was made from something else."""
    history = run_of(tmp_path, 4)
    history.states[3] = history.changed(0.03, seed=77)
    key = history.skip(1, 3)
    (wrong,) = verify_all(history.store, history.run, tmp_path / "scratch").wrong
    assert wrong.key == key
    assert "digest" in wrong.reason


def test_a_manifest_with_another_digest_is_wrong(tmp_path):
    history = run_of(tmp_path, 4)
    history.delta(history.changed(0.03, seed=4), digest="0" * 16)
    found = verdicts(verify_all(history.store, history.run, tmp_path / "scratch"))
    assert found[(3, 4)] == "wrong"


def test_a_missing_pack_and_an_unreadable_manifest_are_told(tmp_path):
    history = run_of(tmp_path)
    history.store.delete(history.manifests[7].way.packs[0].key)
    history.store.put(version_key(8), b"{")
    found = verify_all(history.store, history.run, tmp_path / "scratch")
    assert {(way.version, way.verdict) for way in found.wrong} == {(7, "wrong"), (8, "wrong")}


def test_what_was_collected_as_garbage_is_gone_and_not_wrong(tmp_path):
    history = run_of(tmp_path)
    config = WeightsConfig(keep_versions=1, gc_grace_s=10.0)
    for history.store.now in (1000.0, 2000.0):
        assert collect(history.store, config).notes == ()
    found = verify_all(history.store, history.run, tmp_path / "scratch")
    assert not found.wrong
    assert "gone" in verdicts(found).values()
    assert verdicts(found)[7, 8] == "stranded", "kept for who holds version 7, which is gone itself"


def test_a_zombies_version_is_not_verified(tmp_path):
    history = run_of(tmp_path)
    history.commit(
        history.states[3], lambda _: history.manifests[4].way, version=9, nonce="somebody else's"
    )
    found = verify_all(history.store, history.run, tmp_path / "scratch")
    assert found.ignored == (9,)
    assert not found.wrong


def test_one_version_is_verified_by_all_its_ways(tmp_path):
    history = run_of(tmp_path)
    found = verify(history.store, history.run, history.manifests[8], tmp_path / "scratch")
    assert verdicts(found) == {(7, 8): "right", (4, 8): "right"}
    assert all(path.startswith("version ") for path in found.paths)
    flip(history, history.manifests[8].way.packs[0].key)
    found = verify(history.store, history.run, history.manifests[8], tmp_path / "scratch")
    assert verdicts(found) == {(7, 8): "wrong", (4, 8): "right"}


# ---------------------------------------------------------------- diff


@pytest.mark.parametrize("pair", [(2, 7), (7, 2), (0, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["from deltas", "from states"])
def test_a_difference_counts_the_weights_that_differ(tmp_path, pair, small):
    history = run_of(tmp_path, small=small)
    before, after = (history.manifests[version] for version in pair)
    found = difference(history.store, history.run, before, after)
    first, last = (history.states[version] for version in pair)
    changed = {name: int((first[name] != last[name]).sum()) for name in first}
    assert found.changed == sum(changed.values())
    assert {each.name: each.changed for each in found.tensors} == {n: k for n, k in changed.items() if k}
    assert sum(bucket.up + bucket.down for bucket in found.buckets) == found.changed


def test_steps_are_signed_and_the_furthest_weights_are_named(tmp_path):
    history = History(tmp_path, shapes=SHAPES)
    state = {name: np.full(shape, 0x3F80, np.uint16) for name, shape in SHAPES.items()}
    history.full(state)
    changed = {name: bits.copy() for name, bits in state.items()}
    changed["embed.weight"][5, 7] += 1000
    changed["layer.weight"][2, 3] -= 3
    changed["layer.weight"][2, 4] -= 4
    changed["norm.weight"][6] += 1
    history.delta(changed)
    found = difference(history.store, history.run, history.manifests[0], history.manifests[1])
    assert [(b.least, b.most, b.up, b.down) for b in found.buckets] == [
        (1, 1, 1, 0),
        (3, 4, 0, 2),
        (513, 1024, 1, 0),
    ]
    assert [(m.name, m.index, m.steps) for m in found.largest[:2]] == [
        ("embed.weight", (5, 7), 1000),
        ("layer.weight", (2, 4), -4),
    ]
    back = difference(history.store, history.run, history.manifests[1], history.manifests[0])
    assert [mover.steps for mover in back.largest] == [-mover.steps for mover in found.largest]


def test_a_difference_says_how_it_was_read(tmp_path):
    history = run_of(tmp_path)
    found = difference(history.store, history.run, history.manifests[5], history.manifests[6])
    assert found.how.startswith("from version 5")
    assert found.fetched_bytes == history.manifests[6].way.total_bytes


# ---------------------------------------------------------------- ls, show, du


def test_rows_tell_what_the_manifests_and_the_ways_say(tmp_path):
    history = run_of(tmp_path)
    rows = list_rows(history.store, history.run)
    assert [row.version for row in rows] == list(range(9))
    assert [row.kind for row in rows] == ["full"] + ["delta"] * 8
    assert [row.bases for row in rows][4:6] == [(3, 0), (4, -1)]
    way = history.manifests[6].way
    assert rows[6].changed == way.changed
    assert rows[6].bytes_per_changed == way.total_bytes / way.changed
    assert rows[6].changed_part == pytest.approx(way.changed / (60 * 20 + 33 * 9 + 7))
    assert rows[0].changed is None
    assert [row.version for row in list_rows(history.store, history.run, last=3)] == [6, 7, 8]


def test_rows_mark_zombies_what_is_gone_and_what_can_not_be_read(tmp_path):
    history = run_of(tmp_path)
    history.commit(
        history.states[3], lambda _: history.manifests[4].way, version=9, nonce="somebody else's"
    )
    config = WeightsConfig(keep_versions=1, gc_grace_s=10.0)
    history.store.now = 1000.0
    collect(history.store, config)
    history.store.put(version_key(3), b"{")
    rows = list_rows(history.store, history.run)
    assert [row.version for row in rows if row.ignored] == [3, 9]
    assert rows[3].kind == "unreadable"
    assert version_key(3) in rows[3].error
    assert [row.version for row in rows if row.gone]


def test_a_version_is_shown_with_its_ways_paths_and_tiles(tmp_path):
    history = run_of(tmp_path)
    shown = show(history.store, history.run, history.manifests[8])
    assert [(way.base, way.kind) for way in shown.ways] == [(7, "own"), (4, "further")]
    assert [path.start for path in shown.paths] == [-1, 7, 4]
    way = history.manifests[8].way
    assert sum(mode.changed for mode in shown.modes) == way.changed
    assert sum(tensor.nbytes for tensor in shown.tensors) + shown.table_bytes == way.total_bytes
    skip = show(history.store, history.run, history.manifests[8], base=4)
    assert skip.base == 4
    assert skip.packs[0].key.endswith("skip4-0")
    with pytest.raises(WeightsError, match="from version 3"):
        show(history.store, history.run, history.manifests[8], base=3)


def test_a_full_version_is_shown_too(tmp_path):
    history = run_of(tmp_path)
    shown = show(history.store, history.run, history.manifests[0])
    assert sum(tensor.nbytes for tensor in shown.tensors) == full_bytes(history.run)


def test_usage_counts_every_object_once_and_by_kind(tmp_path):
    history = run_of(tmp_path)
    history.store.put("packs/0000000002-00000000-9-9", b"x" * 10)
    history.store.put("checkpoints/00000000-0000000001/rank-00000.safetensors", b"x" * 50)
    found = usage(history.store, history.run)
    parts = {part.kind: part.nbytes for part in found.parts}
    assert found.nbytes == sum(info.size for info in history.store.list_after(""))
    assert sum(part.objects for part in found.parts) == len(list(history.store.list_after("")))
    assert parts["deltas"] == sum(history.manifests[n].way.total_bytes for n in range(1, 9))
    assert parts["of no version"] == 10
    assert parts["checkpoints"] == 50
    assert parts["skip deltas"] == sum(
        read_way(history.store, edge).way.total_bytes for edge in _edges(history) if edge.base >= 0
    )
    assert found.as_full_nbytes == 9 * full_bytes(history.run)


def _edges(history: History):
    from async_rl.weights.ways import list_edges

    return list(list_edges(history.store))


def test_the_wanted_version_counts_and_exists(tmp_path):
    history = run_of(tmp_path)
    history.commit(
        history.states[3], lambda _: history.manifests[4].way, version=9, nonce="somebody else's"
    )
    assert wanted_version(history.store, None).version == 8
    with pytest.raises(WeightsError, match="it has 0 to 9"):
        wanted_version(history.store, 12)
    with pytest.raises(WeightsError, match="does not count"):
        wanted_version(history.store, 9)
