"""`[weights]`: how versions travel. Read by the trainer's publisher and by every subscriber."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["WeightsConfig"]

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


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
    """Bytes per ranged get: AWS advises 8 to 16 MB. They never are in memory all at once."""

    codec: Literal["default", "small"] = "default"
    """default: deltas near the entropy of the change, readable without the weights, so that they can be composed.
    small: a sixth smaller still, with contexts from the base weights; encoding takes twice as long, decoding half
    as long again, and composing them needs a copy of the weights."""
    delta_pack_bytes: Annotated[int, Meta(ge=1)] = 32 << 20
    """Coded tiles are gathered into packs of about this size; a rank holds two of them in memory, one that is
    uploaded and one that fills."""
    baseline: Literal["host", "device"] = "host"
    """Where a trainer's rank keeps the two 16-bit copies of its rows that it compares. host: every version brings all
    rows to the host, while the optimizer waits. device: they stay with the parameters, are compared there, and only
    what changed comes to the host (with codec = "small" a byte more for each weight of a changed tile): for GPUs, on
    a CPU it is the slower way. It costs 4 bytes of device memory for each weight of the rank, 6 while an anchor is
    sent, beside the 16 or so that float32 training takes. So it is asked for, not guessed: how much memory the
    largest step will leave free, nobody knows before it."""
    merge_after_s: NotNegative = 0.2
    """A version that is still on its way after this wait is not waited for: the next one will carry both changes."""
    anchor_every: AtLeastOne = 1024
    """Versions between two anchors at the most, whatever the deltas between them cost."""
    anchor_cost: Positive = 0.2
    """A new anchor is due when the shortest path from the newest one costs more than this part of its bytes, and
    deltas have cost enough to pay for one (anchors.py): a worker that joins reads about 1.2 anchors."""
    skip_spans: tuple[Annotated[int, Meta(ge=2)], ...] = (16, 64, 256)
    """Skip deltas over this many versions, at their multiples: a worker that was away reads O(log n) of them.
    These cost 0.6 times what the deltas do. A span of 4 would cost 0.65 more, and save a reader little."""
    keep_versions: AtLeastOne = 64
    """Garbage collection keeps a path to this many of the newest versions (and to what live workers hold)."""
    gc_every: Count = 64
    """The trainer collects garbage after this many versions. 0: never; there is `async-rl weights gc`."""
    gc_grace_s: NotNegative = 900.0
    """Between the notice that objects are garbage and their deletion, by the store's clock: longer than the longest
    fetch of a version."""
    scrub_every: Count = 256
    """A subscriber hashes its whole copy of the weights after this many versions: an update only sees what it
    touches. 0: never."""
    beat_s: Positive = 60.0
    """How often a worker writes into the bucket which versions it still needs. It counts as gone after five times as
    long."""
