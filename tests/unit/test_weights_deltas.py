"""Delta packs: what is written is read; what nobody wrote is refused."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import load

from async_rl.errors import Corrupt
from async_rl.weights.codec import CodedTile, Mode
from async_rl.weights.deltas import DeltaPackWriter, Tile, check_tiles, pack_tiles, read_table, tile_hash
from async_rl.weights.packs import TensorSpec

quick = settings(max_examples=60, deadline=None)

coded_tiles = st.builds(
    CodedTile,
    st.sampled_from(list(Mode)),
    st.binary(min_size=1, max_size=50),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
)
rows = st.lists(
    st.tuples(st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 50), st.integers(1, 1 << 31), coded_tiles),
    max_size=30,
)

TENSORS = [TensorSpec("norm", (100,)), TensorSpec("wide", (30, 100))]


def pack_of(tiles):
    writer = DeltaPackWriter()
    for tile in tiles:
        writer.add(*tile)
    pieces, pack = writer.finish("packs/a")
    return writer, b"".join(pieces), pack


def tile(tensor=0, start=0, elements=10, mode=1, offset=0, size=5):
    return Tile(tensor, start, elements, mode, 1, 2, offset, size, b"12345678")


@quick
@given(rows)
def test_tiles_come_back_from_the_table_with_their_bytes(tiles):
    writer, data, pack = pack_of(tiles)
    header = 8 + int.from_bytes(data[:8], "little")
    found = read_table(data[pack.table.start : pack.table.start + pack.table.size], header)
    assert len(found) == len(tiles)
    for (tensor, start, count, coded), each in zip(tiles, found, strict=True):
        assert each[:6] == (tensor, start, count, coded.mode, coded.changed, coded.moved)
        assert data[each.offset : each.offset + each.size] == coded.data
        assert each.hash == tile_hash(coded.data)
    assert writer.changed == sum(coded.changed for *_, coded in tiles)
    assert writer.moved == sum(coded.moved for *_, coded in tiles) % (1 << 64)
    assert writer.nbytes == sum(len(coded.data) for *_, coded in tiles)


@quick
@given(rows)
def test_a_pack_is_a_safetensors_file_with_the_hashes_that_it_says(tiles):
    _, data, pack = pack_of(tiles)
    assert set(load(data)) == {"tiles", "table"}
    assert len(data) == pack.size and hashlib.sha256(data).hexdigest() == pack.sha256
    assert hashlib.sha256(data[pack.table.start :]).hexdigest() == pack.table.sha256


def test_the_row_of_a_small_tile_takes_about_twenty_bytes():
    rng = np.random.default_rng(0)
    tiles = [
        (
            3 * n,
            0,
            4096,
            CodedTile(Mode.STEPS, rng.bytes(20), int(rng.integers(1, 60)), int(rng.integers(1 << 63))),
        )
        for n in range(300)
    ]
    assert pack_of(tiles)[2].table.size < 20 * 300


@quick
@given(st.binary(max_size=200))
def test_a_table_that_nobody_wrote_is_refused(data):
    with pytest.raises(Corrupt, match="table of"):
        read_table(data, 0)


@quick
@given(st.binary(max_size=200))
def test_a_table_with_other_columns_is_refused(raw):
    if len(raw) != 4 + 41 * int.from_bytes(raw[:4], "little"):
        with pytest.raises(Corrupt, match="table of"):
            read_table(zstandard.compress(raw), 0)


@quick
@given(rows, st.data())
def test_a_damaged_table_is_refused_or_read_without_harm(tiles, draw):
    _, data, pack = pack_of(tiles)
    table = bytearray(data[pack.table.start :])
    at = draw.draw(st.integers(0, 8 * len(table) - 1))
    table[at >> 3] ^= 1 << (at & 7)
    try:
        found = read_table(bytes(table), 0)
        check_tiles(found, TENSORS, pack.table.start, "a pack")
    except Corrupt:
        pass


def test_a_table_that_claims_to_be_huge_is_refused_before_anything_is_allocated():
    magic = zstandard.compress(b"")[:4]
    single_segment_with_8_bytes_of_size = b"\xe0"
    frame = magic + single_segment_with_8_bytes_of_size + struct.pack("<Q", 1 << 45)
    with pytest.raises(Corrupt, match="larger"):
        read_table(frame, 0)


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        ([tile(tensor=2)], "tensor 2 in mode 1"),
        ([tile(mode=0)], "in mode 0"),
        ([tile(mode=9)], "in mode 9"),
        ([tile(elements=0)], r"at 0\+0 of norm"),
        ([tile(elements=101)], r"at 0\+101 of norm"),
        ([tile(start=95)], r"at 95\+10 of norm"),
        ([tile(start=1 << 60)], "of norm"),
        ([tile(), tile(offset=5)], r"at 0\+10 of norm"),
        ([tile(start=9), tile(offset=5)], r"at 9\+10 of norm"),
        ([tile(size=6)], "has 5 bytes of tiles, its table describes 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tiles_outside_the_run_or_over_each_other_are_refused(tiles, said):
    with pytest.raises(Corrupt, match=f"a pack has.*{said}|a pack {said}"):
        check_tiles(tiles, TENSORS, 5 * len(tiles), "a pack")


def test_tiles_side_by_side_in_any_order_are_accepted():
    tiles = [tile(1, 500), tile(0, 90, offset=5), tile(1, 490, offset=10), tile(0, 0, 90, offset=15)]
    check_tiles(tiles, TENSORS, 20, "a pack")
    check_tiles([], TENSORS, 0, "a pack")


def test_a_packs_tiles_are_refused_where_its_table_is_not_what_the_manifest_says():
    coded = CodedTile(Mode.STEPS, b"12345", 1, 2)
    _, data, pack = pack_of([(0, 0, 10, coded), (1, 0, 10, coded)])
    table = data[pack.table.start :]
    found = pack_tiles(pack, table, TENSORS, "a pack")
    assert [data[each.offset : each.offset + each.size] for each in found] == [b"12345", b"12345"]
    for wrong, why in (
        (replace(pack, table=None), "a pack should end with a table"),
        (replace(pack, size=pack.size + 1), "a pack should end with a table"),
        (
            replace(pack, table=replace(pack.table, sha256="0" * 64)),
            "a pack: its table differs from its hash",
        ),
        (
            replace(pack, size=9 + len(table), table=replace(pack.table, start=9)),
            "a pack describes more bytes than it has",
        ),
    ):
        with pytest.raises(Corrupt, match=why):
            pack_tiles(wrong, table, TENSORS, "a pack")
    with pytest.raises(Corrupt, match="a pack has a tile at 0"):
        pack_tiles(pack, table, [TensorSpec("norm", (100,)), TensorSpec("wide", (9,))], "a pack")
