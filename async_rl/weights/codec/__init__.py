"""How a change of 16-bit weights becomes bytes, and bytes become the change: lossless for every bit pattern.

The unit is a tile: up to TILE consecutive elements of one tensor. All arrays are uint16 [n], the weights' bits.

digest.py   the digest of a state, which a change can update
tiles.py    tile -> bytes -> tile; the modes
"""

from async_rl.weights.codec.digest import digest_of
from async_rl.weights.codec.tiles import (
    TILE,
    CodedTile,
    Mode,
    add_steps,
    apply_tile,
    encode_steps,
    encode_tile,
    tile_steps,
)

__all__ = [
    "TILE",
    "CodedTile",
    "Mode",
    "add_steps",
    "apply_tile",
    "digest_of",
    "encode_steps",
    "encode_tile",
    "tile_steps",
]
