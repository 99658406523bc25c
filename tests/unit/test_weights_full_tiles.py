"""Full versions read by ranges: whatever is needed comes out as from a whole read, costs no byte of another tile, and
no byte of it counts that was not verified. Tiles of 8 elements, so that small tensors have many."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.errors import Corrupt, StoreUnavailable, WeightsError
from async_rl.weights import fetch, full_tiles, shadow
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import write_at
from async_rl.weights.full_tiles import FullTiles
from async_rl.weights.lineage import Manifest
from async_rl.weights.subscriber import Subscriber
from tests.weights_support import History, MemoryStore, ScriptedStore, raises, same_state, state_of

TILE = 8
SHAPES = {
    "embed.weight": (9, 5),
    "layer.weight": (4, 6),
    "layer.bias": (5,),
    "empty": (0, 3),
    "head.weight": (7, 7),
    "norm.weight": (16,),
}
CONFIG = WeightsConfig(fetch_part_bytes=48, fetch_parallel=3)  # three tiles to a request

Needs = dict[str, tuple[int, int]]


class Recording(ScriptedStore):
    """With the ranges that were asked for. `tear` may change what comes: (key, start, bytes) -> bytes."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.ranges: list[tuple[str, int, int]] = []
        self.tear: Callable[[str, int, bytes], bytes] = lambda key, start, data: data

    def mend(self) -> None:
        self._cues.clear()

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        self.ranges.append((key, start, length))
        data = self.tear(key, start, self.get(key, start, length))
        for at in range(0, len(data), 5):  # blocks that end inside of elements
            yield data[at : at + 5]


class Bucket(History):
    store: Recording

    def __init__(self, folder: Path, **options: bool) -> None:
        super().__init__(folder, Recording(), SHAPES, tile=TILE, pack_bytes=120, **options)
        self.folder = folder
        self.full(self.random(1))
        self.delta(self.changed(0.2, 2))
        self.readers = 0

    def reader(self, needs: Needs | None, cache: str = "") -> Subscriber:
        self.readers += 1
        folder = self.folder / (cache or f"cache-{self.readers}")
        return Subscriber(self.store, self.run, folder, CONFIG, needs)

    def objects(self) -> dict[str, bytes]:
        assert isinstance(self.store.inner, MemoryStore)
        return self.store.inner.objects

    def rounded(self, needs: Needs) -> Needs:
        """To whole tiles."""
        sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
        return {
            name: (start // TILE * TILE, min(sizes[name], -(-stop // TILE) * TILE))
            if start < stop
            else (0, 0)
            for name, (start, stop) in needs.items()
        }

    def right(self, shards: list[Path], version: int, needs: Needs) -> bool:
        """What is needed is there, and the rest is holes."""
        here, there = state_of(self.run, shards), self.states[version]
        for name, bits in here.items():
            start, stop = self.rounded(needs).get(name, (0, 0))
            wanted = np.zeros_like(there[name].reshape(-1))
            wanted[start:stop] = there[name].reshape(-1)[start:stop]
            if not np.array_equal(bits.reshape(-1), wanted):
                return False
        return True


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (full_tiles, shadow):
        monkeypatch.setattr(module, "TILE", TILE)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


@st.composite
def some_needs(draw: st.DrawFn) -> Needs:
    needs = {}
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        if draw(st.booleans()):
            needs[name] = (start, stop)
    return needs


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(needs=some_needs())
def test_whatever_is_needed_is_there_and_nothing_else_was_read(bucket: Bucket, needs: Needs) -> None:
    bucket.store.ranges.clear()
    reader = bucket.reader(needs)
    local = reader.fetch(bucket.manifests[0])
    assert bucket.right(local.shards, 0, needs)
    needed = sum(2 * (stop - start) for start, stop in bucket.rounded(needs).values())
    assert local.fetched_bytes == sum(length for _, _, length in bucket.store.ranges) == needed
    assert reader.scrub()
    local = reader.fetch(bucket.manifests[1])
    assert bucket.right(local.shards, 1, needs), "a delta goes on from it"
    reader.close()


def test_tiles_that_follow_one_another_are_one_request(bucket: Bucket) -> None:
    reader = bucket.reader({"embed.weight": (8, 40)})
    reader.fetch(bucket.manifests[0])
    assert sorted(length for _, _, length in bucket.store.ranges) == [16, 48], "up to fetch_part_bytes"


def test_what_lies_between_needed_tiles_is_not_read_however_little_it_is(bucket: Bucket) -> None:
    needs = {"layer.weight": (8, 16), "layer.bias": (0, 5)}
    reader = bucket.reader(needs)
    assert bucket.right(reader.fetch(bucket.manifests[0]).shards, 0, needs)
    assert sorted(length for _, _, length in bucket.store.ranges) == [10, 16]


def test_a_version_of_an_older_run_is_read_whole_and_of_it_the_needed_part_kept(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path, tile_digests=False)
    needs = {"head.weight": (3, 9)}
    assert b"tile_digests" not in bucket.objects()["versions/0000000000.json"]
    local = bucket.reader(needs).fetch(bucket.manifests[0])
    manifest = bucket.manifests[0]
    pack = manifest.way.packs[manifest.way.weight_map["head.weight"]]
    assert bucket.right(local.shards, 0, needs) and local.fetched_bytes == pack.size


# ---------------------------------------------------------------- damage


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def swap(data: bytes, first: int, second: int) -> bytes:
    """Two tiles, equally long."""
    size = 2 * TILE
    result = bytearray(data)
    result[first : first + size], result[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    return bytes(result)


@pytest.mark.parametrize("at", ["first tile", "last tile", "alone"])
def test_every_bit_of_a_tile_counts(bucket: Bucket, at: str) -> None:
    manifest, needs = bucket.manifests[0], {"embed.weight": (0, 45)}
    tiles = list(FullTiles(bucket.run, manifest.way, "it").in_pack(0))
    tile = {"first tile": tiles[0], "last tile": tiles[-1], "alone": tiles[2]}[at]
    if at == "alone":
        needs = {"embed.weight": (tile.start, tile.start + 1)}
    key = manifest.way.packs[0].key
    good = bucket.objects()[key]
    for bit in range(8 * tile.size):
        place = tile.offset + bit // 8
        bad = good[:place] + bytes([good[place] ^ 1 << bit % 8]) + good[place + 1 :]
        assert not tile.right(bad[tile.offset : tile.offset + tile.size]), bit
    bucket.objects()[key] = flip(good, tile.offset + 3)
    reader = bucket.reader(needs)
    with pytest.raises(Corrupt, match=f"{key} in .*: a tile .*differs from its digest, twice"):
        reader.fetch(manifest)
    assert reader.needed_versions == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, tiles: swap(data, tiles[0].offset, tiles[2].offset),
        lambda data, tiles: data[: tiles[1].offset] + bytes(2 * TILE) + data[tiles[2].offset :],
        lambda data, tiles: data[: tiles[0].offset] + data[tiles[0].offset + 2 :] + b"\0\0",
        lambda data, tiles: data[: tiles[1].offset + 3],
        lambda data, tiles: data + b"\0",
        lambda data, tiles: b"",
    ],
    ids=["swapped", "zeros", "moved by an element", "truncated", "longer", "empty"],
)
def test_a_damaged_pack_is_never_served(
    bucket: Bucket, damage: Callable[[bytes, list[full_tiles.FullTile]], bytes]
) -> None:
    manifest = bucket.manifests[0]
    pack = manifest.way.packs[0]
    good = bucket.objects()[pack.key]
    tiles = list(FullTiles(bucket.run, manifest.way, "it").in_pack(0))
    bad = bucket.objects()[pack.key] = damage(good, tiles)
    reader = bucket.reader({"embed.weight": (0, 45)})
    if len(bad) > len(good):  # what is beyond the pack's end is not read
        assert bucket.right(reader.fetch(manifest).shards, 0, {"embed.weight": (0, 45)})
        return
    with pytest.raises(Corrupt, match=pack.key):
        reader.fetch(manifest)
    assert reader.needed_versions == ()


def test_packs_of_one_size_that_changed_places_are_found_out(tmp_path: Path) -> None:
    """Whole objects, each with the right bytes of the other."""
    history = History(tmp_path, Recording(), {"a": (16,), "b": (16,)}, tile=TILE, pack_bytes=1)
    manifest = history.full(history.random(3))
    one, two = (pack.key for pack in manifest.way.packs)
    first, second = history.store.get(one), history.store.get(two)
    history.store.put(one, second)
    history.store.put(two, first)
    reader = Subscriber(history.store, history.run, tmp_path / "cache", CONFIG, {"a": (0, 8)})
    with pytest.raises(Corrupt, match="differs from its digest, twice"):
        reader.fetch(manifest)


def once(store: Recording, torn: str, at: int) -> None:
    """The next answer with this byte of that pack has a bit flipped in it."""
    left = [1]

    def tear(key: str, start: int, data: bytes) -> bytes:
        if left and key == torn and start <= at < start + len(data):
            left.pop()
            return flip(data, at - start)
        return data

    store.tear = tear


def test_a_tile_that_was_torn_once_is_fetched_again_alone(bucket: Bucket) -> None:
    needs = {"embed.weight": (0, 45)}
    way = bucket.manifests[0].way
    second = list(FullTiles(bucket.run, way, "it").in_pack(0))[1]
    once(bucket.store, way.packs[0].key, second.offset + 5)
    local = bucket.reader(needs).fetch(bucket.manifests[0])
    assert bucket.right(local.shards, 0, needs)
    assert sorted(length for _, _, length in bucket.store.ranges) == [16, 42, 48]
    assert (second.offset, 16) in [(start, length) for _, start, length in bucket.store.ranges]


@pytest.mark.parametrize("where", ["a tile", "the header"])
def test_a_whole_read_fetches_again_only_what_was_torn(bucket: Bucket, where: str) -> None:
    manifest = bucket.manifests[0]
    pack = manifest.way.packs[0]
    tiles = FullTiles(bucket.run, manifest.way, "it")
    third = list(tiles.in_pack(0))[2]
    once(bucket.store, pack.key, third.offset if where == "a tile" else 11)
    local = bucket.reader(None).fetch(manifest)
    assert same_state(state_of(bucket.run, local.shards), bucket.states[0])
    again = third.size if where == "a tile" else len(tiles.header(0))
    assert local.fetched_bytes == manifest.way.total_bytes + again
    assert again < pack.size


def test_a_fetch_that_was_cut_off_goes_on_with_the_tiles_that_lack(bucket: Bucket) -> None:
    needs = {name: (0, int(np.prod(shape))) for name, shape in SHAPES.items()}
    last = bucket.manifests[0].way.packs[-1].key
    bucket.store.on("get", last, raises(StoreUnavailable("no route")), times=99)
    reader = bucket.reader(needs, "cut")
    with pytest.raises(StoreUnavailable):
        reader.fetch(bucket.manifests[0])
    reader.close()
    before = sum(length for key, _, length in bucket.store.ranges if key != last)
    assert before > 0
    bucket.store.mend()
    bucket.store.ranges.clear()
    local = bucket.reader(needs, "cut").fetch(bucket.manifests[0])
    assert bucket.right(local.shards, 0, needs)
    assert {key for key, _, _ in bucket.store.ranges} == {last}


def test_what_was_left_behind_is_verified_before_it_is_used(bucket: Bucket) -> None:
    """A process that was killed, or a disk, may have left anything in the file."""
    needs = {"embed.weight": (0, 45)}
    pack = bucket.manifests[0].way.packs[0]
    incoming = bucket.folder / "left" / bucket.run.run / "incoming"
    incoming.mkdir(parents=True)
    tiles = list(FullTiles(bucket.run, bucket.manifests[0].way, "it").in_pack(0))
    (incoming / pack.sha256).write_bytes(flip(bucket.objects()[pack.key], tiles[1].offset))
    local = bucket.reader(needs, "left").fetch(bucket.manifests[0])
    assert bucket.right(local.shards, 0, needs) and local.fetched_bytes == tiles[1].size


def test_what_reached_the_disk_is_hashed_once_more(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, start: int, data: bytes) -> None:
        write_at(path, start, flip(bytes(data), 0))

    monkeypatch.setattr(fetch, "write_at", write)
    reader = bucket.reader({"embed.weight": (0, 45)})
    with pytest.raises(Corrupt, match="the digests of its tiles make"):
        reader.fetch(bucket.manifests[0])
    assert reader.needed_versions == ()


# ---------------------------------------------------------------- digests that are wrong


def rewritten(bucket: Bucket, digests: bytes) -> Manifest:
    manifest = bucket.manifests[0]
    return msgspec.structs.replace(
        manifest, way=msgspec.structs.replace(manifest.way, tile_digests=digests)
    )


def test_digests_of_another_number_of_tiles_are_refused(bucket: Bucket) -> None:
    digests = bucket.manifests[0].way.tile_digests
    assert isinstance(digests, bytes)
    for wrong in (digests[:-8], digests + bytes(8), digests[:-1], b""):
        for needs in (None, {"embed.weight": (0, 45)}):
            with pytest.raises(Corrupt, match=r"versions/0000000000\.json .*bytes of digests for"):
                bucket.reader(needs).fetch(rewritten(bucket, wrong))


def test_digests_that_do_not_add_up_to_the_versions_are_refused(bucket: Bucket) -> None:
    """Where only a part is held too: the way, whole as it is, may be another version's."""
    other = bucket.full(bucket.random(9))
    mixed = msgspec.structs.replace(bucket.manifests[0], way=other.way)
    with pytest.raises(Corrupt, match="should have the digest"):
        bucket.reader({"embed.weight": (0, 45)}).fetch(mixed)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_delta_must_lead_to_the_versions_digest_also_where_a_part_is_held(
    bucket: Bucket, restarted: bool
) -> None:
    """The rest of the state is not here, but what tables and tiles say of it is."""
    needs = {"layer.bias": (0, 5)}
    reader = bucket.reader(needs, "held")
    reader.fetch(bucket.manifests[1])
    if restarted:
        reader.close()
        reader = bucket.reader(needs, "held")
        assert reader.fetch(bucket.manifests[1]).fetched_bytes == 0
    state = bucket.changed(0.2, 3)
    with pytest.raises(Corrupt, match="version 2 should have the digest 00000000deadbeef"):
        reader.fetch(bucket.delta(state, digest="00000000deadbeef"))
    reader.close()
    reader = bucket.reader(needs, "held")
    assert bucket.right(reader.fetch(bucket.manifests[1]).shards, 1, needs)


def test_a_version_that_was_replaced_is_noticed_by_who_holds_a_part_of_it(bucket: Bucket) -> None:
    needs = {"layer.bias": (0, 5)}
    reader = bucket.reader(needs, "held")
    reader.fetch(bucket.manifests[1])
    other = {name: bits.copy() for name, bits in bucket.states[1].items()}
    other["head.weight"].flat[3] ^= 1  # nothing that is held
    del bucket.objects()["versions/0000000001.json"]
    replaced = bucket.delta(other, base=0, version=1)
    assert reader.fetch(replaced).path.startswith("from nothing")
    reader.close()
    del bucket.objects()["versions/0000000001.json"]
    again = bucket.delta(bucket.changed(0.2, 8, bucket.states[0]), base=0, version=1)
    reader = bucket.reader(needs, "held")
    assert bucket.right(reader.fetch(again).shards, 1, needs)


@pytest.mark.parametrize("needs", [None, {"embed.weight": (0, 45)}], ids=["whole", "part"])
def test_a_pack_that_was_written_from_something_else_is_found_out(
    bucket: Bucket, needs: Needs | None
) -> None:
    """Its hash is that of its bytes; only they are not those of the state."""
    manifest = bucket.manifests[0]
    pack = manifest.way.packs[0]
    data = bucket.objects()[pack.key] = flip(bucket.objects()[pack.key], pack.size - 20)
    forged = msgspec.structs.replace(pack, sha256=hashlib.sha256(data).hexdigest())
    way = msgspec.structs.replace(manifest.way, packs=(forged, *manifest.way.packs[1:]))
    with pytest.raises(Corrupt, match="digest"):
        bucket.reader(needs).fetch(msgspec.structs.replace(manifest, way=way))


def test_a_pack_of_another_layout_than_its_manifest_says_is_refused(bucket: Bucket) -> None:
    manifest = bucket.manifests[0]
    places = {**manifest.way.weight_map, "layer.bias": 0}
    way = msgspec.structs.replace(manifest.way, weight_map=places)
    with pytest.raises(WeightsError, match="is not laid out as"):
        bucket.reader({"embed.weight": (0, 45)}).fetch(msgspec.structs.replace(manifest, way=way))
