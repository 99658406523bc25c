"""Further ways to the versions: skip deltas over many versions, and anchors (full states).

    ways/<to>-<base>-<bytes>-<incarnation>.json     FurtherWay; base is `full` for an anchor

A version's own way stands in its manifest; these are added later, in the background, and may be deleted again. The
key says all that planning needs, so one listing shows every edge: a reader that is hundreds of versions behind reads
a handful of objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from async_rl.errors import Corrupt
from async_rl.store.base import ObjectStore
from async_rl.weights.lineage import Way, check_way

__all__ = ["Edge", "FurtherWay", "list_edges", "read_way", "way_key", "write_way"]

WAYS = "ways/"
_FULL = "full"

Count = Annotated[int, Meta(ge=0)]


class FurtherWay(Struct, frozen=True):
    """What one of these objects holds."""

    version: Count  # it leads to
    incarnation: Count  # of the trainer whose versions it connects
    way: Way
    created: float  # seconds since the epoch, by the writer's clock: for people


class Edge(Struct, frozen=True):
    """A way as its key tells it."""

    version: int
    base: int  # -1: full
    nbytes: int
    incarnation: int
    key: str


def way_key(further: FurtherWay) -> str:
    way = further.way
    base = _FULL if way.base < 0 else f"{way.base:010}"
    return f"{WAYS}{further.version:010}-{base}-{way.total_bytes}-{further.incarnation:08}.json"


def write_way(store: ObjectStore, further: FurtherWay) -> str:
    """After its packs are whole. The key; writing the same way again changes nothing."""
    key = way_key(further)
    store.put(key, msgspec.json.encode(further))
    return key


def list_edges(store: ObjectStore, after: int = -1) -> Iterator[Edge]:
    """Edges to versions later than `after`, by version. Anything else under the prefix is ignored."""
    start = f"{WAYS}{after + 1:010}" if after >= 0 else ""
    for info in store.list_after(WAYS, start):
        parts = info.key.removeprefix(WAYS).removesuffix(".json").split("-")
        if len(parts) != 4 or not info.key.endswith(".json"):
            continue
        version, base, nbytes, incarnation = parts
        if not (version + nbytes + incarnation).isdecimal() or not (base == _FULL or base.isdecimal()):
            continue
        yield Edge(
            int(version), -1 if base == _FULL else int(base), int(nbytes), int(incarnation), info.key
        )


def read_way(store: ObjectStore, edge: Edge) -> FurtherWay:
    """Raises NotFound (it was removed meanwhile), Corrupt."""
    try:
        further = msgspec.json.decode(store.get(edge.key), type=FurtherWay)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{edge.key} in {store.url} is not valid: {error}") from error
    check_way(further.way, further.version, f"{edge.key} in {store.url}")
    if way_key(further) != edge.key:
        raise Corrupt(f"{edge.key} in {store.url} holds another way, {way_key(further)}")
    return further
