"""`[weights]`: how versions travel. Read by the trainer's publisher and by every subscriber."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["WeightsConfig"]

Positive = Annotated[float, Meta(gt=0)]


class WeightsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    pack_bytes: Annotated[int, Meta(ge=1)] = 512 << 20
    """A pack is not filled beyond this (a single larger tensor has a pack of its own). With 16 MiB parts
    that is 32 parts: long enough to reach full speed, short enough that a pack which failed is soon sent
    again."""
    publish_limit_s: Positive = 600.0
    """A version that is not committed after this long (the store is away) is given up, and the trainer is
    told. Ten minutes outlast the restart of a store or of a gateway; beyond that somebody has to look. It
    must be longer than one upload of the model takes."""
    poll_s: Positive = 2.0
    """How often a subscriber looks for a new version when no hint arrives, jittered by half. A list request
    costs about half a thousandth of a cent: 0.2 $ per worker and day at S3's prices."""
    fetch_parallel: Annotated[int, Meta(ge=1, le=256)] = 8
    """Ranged gets in flight. One S3 connection gives 50 to 100 MB/s: eight fill a 5 Gbit/s link."""
    fetch_part_bytes: Annotated[int, Meta(ge=1)] = 16 << 20
    """Bytes per ranged get: AWS advises 8 to 16 MB. Extra memory of a fetch: this times fetch_parallel."""
    cache_versions: Annotated[int, Meta(ge=1)] = 2
    """Versions a subscriber keeps on disk: the one it serves and the one before, still mapped during a
    swap."""
