"""Delta packs: coded tiles and a table of them, in one safetensors object.

    header | tiles U8 [bytes of all tiles, one after another] | table U8 [zstd of the columns below]

The columns stand byte plane by byte plane, tensors as differences: what is left of a tile's row is its hash, what it
adds to the digest, and its counts, about 20 bytes.

The table stands at the end, so that tiles can be written as they are coded; its place and hash stand in the
manifest, and it holds a hash of every tile: a ranged read of single tiles can be checked. Tensors are named by their
index in run.json.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zstandard

from async_rl.errors import Corrupt
from async_rl.weights.codec import CodedTile, Mode
from async_rl.weights.codec.digest import MASK
from async_rl.weights.lineage import Pack, TableRef
from async_rl.weights.packs import TensorSpec, framed

__all__ = ["DeltaPackWriter", "Tile", "check_tiles", "pack_tiles", "read_table", "table_of", "tile_hash"]

HASH_BYTES = 8

_COLUMNS = (
    ("tensor", "<u4"),
    ("start", "<u8"),
    ("count", "<u4"),
    ("mode", "|u1"),
    ("changed", "<u4"),
    ("moved", "<u8"),
    ("size", "<u4"),
    ("hash", "|V8"),
)
_TABLE_BYTES_MAX = 1 << 30


class Tile(NamedTuple):
    tensor: int  # index into the run's tensors
    start: int  # element of the tensor, in its flat Hugging Face layout
    elements: int
    mode: int  # codec.Mode
    changed: int  # elements that the tile changes
    moved: int  # what that adds to the state's digest
    offset: int  # bytes from the start of the object
    size: int  # bytes
    hash: bytes  # of the coded bytes, tile_hash


def tile_hash(data: bytes | memoryview) -> bytes:
    """SHA-256, its first 8 bytes: against accidents, under a table whose whole hash stands in the manifest."""
    return hashlib.sha256(data).digest()[:HASH_BYTES]


class DeltaPackWriter:
    """Gathers coded tiles; `finish` gives the object. Holds the coded bytes in memory: bounded by whoever adds."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int, int, bytes]] = []
        self._data: list[bytes] = []
        self.nbytes = 0  # of the coded tiles

    def add(self, tensor: int, start: int, count: int, coded: CodedTile) -> None:
        self._rows.append(
            (
                tensor,
                start,
                count,
                int(coded.mode),
                coded.changed,
                coded.moved,
                len(coded.data),
                tile_hash(coded.data),
            )
        )
        self._data.append(coded.data)
        self.nbytes += len(coded.data)

    @property
    def changed(self) -> int:
        return sum(row[4] for row in self._rows)

    @property
    def moved(self) -> int:
        return sum(row[5] for row in self._rows) & MASK

    def finish(self, key: str) -> tuple[list[bytes], Pack]:
        """The object's bytes, in pieces, and what a manifest says about it."""
        table = self._table()
        header = _header(self.nbytes, len(table))
        pieces = [header, *self._data, table]
        whole = hashlib.sha256()
        for piece in pieces:
            whole.update(piece)
        start = len(header) + self.nbytes
        ref = TableRef(start, len(table), hashlib.sha256(table).hexdigest())
        return pieces, Pack(key, start + len(table), whole.hexdigest(), ref)

    def _table(self) -> bytes:
        rows = len(self._rows)
        raw = [struct.pack("<I", rows)]
        for (name, dtype), cells in zip(_COLUMNS, zip(*self._rows, strict=True), strict=False):
            if name == "hash":
                column = np.frombuffer(b"".join(cells), np.uint8).reshape(rows, HASH_BYTES)
            else:
                values = np.array(cells, dtype)
                if name == "tensor":
                    values[1:] -= values[:-1].copy()
                column = values.view(np.uint8).reshape(rows, -1)
            raw.append(column.T.tobytes())
        return zstandard.ZstdCompressor(level=3).compress(b"".join(raw))


def table_of(pack: Pack, what: str) -> TableRef:
    """Where a delta pack's table stands: at its end. Raises Corrupt, naming `what`."""
    ref = pack.table
    if ref is None or ref.start + ref.size != pack.size:
        raise Corrupt(f"{what} should end with a table of tiles")
    return ref


def pack_tiles(pack: Pack, table: bytes, tensors: Sequence[TensorSpec], what: str) -> list[Tile]:
    """A delta pack's tiles, from the bytes of its table, which must have their hash; the tiles must fit the run's
    `tensors`, the pack and one another. Raises Corrupt, naming `what`."""
    ref = table_of(pack, what)
    if hashlib.sha256(table).hexdigest() != ref.sha256:
        raise Corrupt(f"{what}: its table differs from its hash")
    try:
        tiles = read_table(table, 0)
    except Corrupt as error:
        raise Corrupt(f"{what}: {error.message}") from error
    first = ref.start - sum(tile.size for tile in tiles)  # they end where the table begins
    if first < 0:
        raise Corrupt(f"{what} describes more bytes than it has")
    tiles = [tile._replace(offset=tile.offset + first) for tile in tiles]
    check_tiles(tiles, tensors, ref.start, what)
    return tiles


def read_table(data: bytes, first: int) -> list[Tile]:
    """A pack's table. `first`: where its tiles begin in the object. Raises Corrupt."""
    try:
        if zstandard.frame_content_size(data) > _TABLE_BYTES_MAX:  # before anything is allocated
            raise Corrupt(f"a table of tiles says that it is larger than {_TABLE_BYTES_MAX} bytes")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_TABLE_BYTES_MAX)
        (rows,) = struct.unpack_from("<I", raw)
    except (zstandard.ZstdError, struct.error) as error:
        raise Corrupt(f"a table of tiles can't be read: {error}") from error
    widths = [np.dtype(dtype).itemsize for _, dtype in _COLUMNS]
    if len(raw) != 4 + rows * sum(widths):
        raise Corrupt(f"a table of {rows} tiles has {len(raw)} bytes")
    columns: dict[str, np.ndarray] = {}
    at = 4
    for (name, dtype), width in zip(_COLUMNS, widths, strict=True):
        planes = np.frombuffer(raw, np.uint8, rows * width, at).reshape(width, rows)
        columns[name] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
        at += rows * width
    columns["tensor"] = np.cumsum(columns["tensor"], dtype=np.uint32)
    sizes = columns["size"].astype(np.int64)
    offsets = (first + np.cumsum(sizes) - sizes).tolist()
    hashes = columns.pop("hash").tobytes()
    return [
        Tile(tensor, start, count, mode, changed, moved, offset, size, hashes[n : n + HASH_BYTES])
        for n, (tensor, start, count, mode, changed, moved, size, offset) in zip(
            range(0, len(hashes), HASH_BYTES),
            zip(*(column.tolist() for column in columns.values()), offsets, strict=True),
            strict=True,
        )
    ]


def check_tiles(tiles: Sequence[Tile], table: Sequence[TensorSpec], end: int, what: str) -> None:
    """That the tiles lie inside the run's tensors and, coded, before byte `end` of the object, and that none
    overlaps another. Raises Corrupt naming `what`."""
    modes = {int(mode) for mode in Mode}
    reached: dict[int, int] = {}
    sizes = [math.prod(spec.shape) for spec in table]
    for tile in sorted(tiles, key=lambda tile: (tile.tensor, tile.start)):
        if tile.tensor >= len(table) or tile.mode not in modes:
            raise Corrupt(f"{what} has a tile of tensor {tile.tensor} in mode {tile.mode}")
        size = sizes[tile.tensor]
        if (
            tile.elements < 1
            or tile.start + tile.elements > size
            or tile.start < reached.get(tile.tensor, 0)
        ):
            raise Corrupt(
                f"{what} has a tile at {tile.start}+{tile.elements} of {table[tile.tensor].name} ({size} elements)"
            )
        reached[tile.tensor] = tile.start + tile.elements
    if tiles and tiles[-1].offset + tiles[-1].size != end:
        raise Corrupt(
            f"{what} has {end} bytes of tiles, its table describes {tiles[-1].offset + tiles[-1].size}"
        )


def _header(tiles: int, table: int) -> bytes:
    entries = {
        "__metadata__": {"format": "async-rl-delta"},
        "tiles": {"dtype": "U8", "shape": [tiles], "data_offsets": [0, tiles]},
        "table": {"dtype": "U8", "shape": [table], "data_offsets": [tiles, tiles + table]},
    }
    return framed(entries)
