"""How a change of 16-bit weights becomes bytes, and bytes become the change: lossless for every bit pattern.

The unit is a tile: up to TILE consecutive elements of one tensor. All arrays are uint16 [n], the weights' bits.

digest.py    the digest of a state, which a change can update
tiles.py     tile -> bytes -> tile; the choice of a mode; composition
steps.py     the modes that can be read without the base: gaps and steps, or a step for every element
small.py     the small mode: what changes is told by what the base is
model.py     how probable a change is, by the exponent of the base
blocks.py    rare changes: how many in a block, and which
hot.py       elements that change often: a step for each
numbers.py   sequences of numbers -> sections of bytes near their entropy
tables.py    frequencies of symbols: chosen, written, read
rans.py      numbers as symbols, symbols as states and words
elements.py  passes over the weights themselves
tensors.py   the same for torch tensors of any device, for whoever has torch
scratch.py   arrays that a thread uses again
jit.py       how kernels are compiled, and vectors
planes.py    tensors of other widths
"""

from async_rl.weights.codec.digest import digest_of
from async_rl.weights.codec.planes import apply_planes, encode_planes
from async_rl.weights.codec.tiles import (
    TILE,
    CodedTile,
    Found,
    Mode,
    add_steps,
    apply_tile,
    encode_found,
    encode_steps,
    encode_tile,
    tile_steps,
)

__all__ = [
    "TILE",
    "CodedTile",
    "Found",
    "Mode",
    "add_steps",
    "apply_planes",
    "apply_tile",
    "digest_of",
    "encode_found",
    "encode_planes",
    "encode_steps",
    "encode_tile",
    "tile_steps",
]
