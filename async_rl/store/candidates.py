"""Creating once on a store that does not enforce it: everybody writes a key of their own, and the first one counts.

    versions/0000000042.json              where the store enforces `If-None-Match`: the object itself
    versions/0000000042.json~6f0c…        where it does not: a candidate, its key ends in a nonce of its writer

Of an object's candidates the one that the store stamped first counts (of equal stamps, the one whose key comes
first); an object under the plain key counts before all of them. Nobody can replace what somebody else has written,
and one that comes late, from a process that slept between its look and its put, changes nothing for anybody.

What is left is the time in which two may each see only their own. So whoever creates what decides about others (the
claim of an incarnation, run.json, a tombstone) waits out `[store] settle_s` and looks again: `ObjectStore.settled`.
That is safe while three things hold, which the log of the trainer and docs/stores.md say: within settle_s, a put
that was sent has arrived or never will; what has arrived is in the listings; and the clocks of the store's servers
agree.

Candidates are for records: small JSON objects, whose keys end in RECORD. Readers need not know what the store
enforces: listings show each object once, under its plain key, and a get that finds nothing there looks for
candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from async_rl.store.base import ObjectInfo

__all__ = ["RECORD", "candidate_key", "first_of", "merged", "plain_key"]

RECORD = ".json"
MARK = ".json~"
"""'~' comes after all characters of our keys: candidates stand directly behind their plain key in a listing."""


def candidate_key(key: str, nonce: str) -> str:
    return f"{key}~{nonce}"


def plain_key(key: str) -> str:
    """What a candidate stands for; any other key is its own."""
    plain, mark, nonce = key.rpartition(MARK)
    return plain + RECORD if mark and nonce and "/" not in nonce else key


def first_of(key: str, infos: Iterable[ObjectInfo]) -> ObjectInfo | None:
    """The object that counts as `key`, among these; None where there is none."""
    there = [info for info in infos if plain_key(info.key) == key]
    return min(there, key=lambda info: (info.key != key, info.modified, info.key), default=None)


def merged(infos: Iterable[ObjectInfo], after: str = "") -> Iterator[ObjectInfo]:
    """`infos`, in byte order, with each object once and under its plain key, where that is greater than `after`."""
    same: list[ObjectInfo] = []
    for info in infos:
        if same and plain_key(info.key) != plain_key(same[0].key):
            yield from _one(same, after)
            same = []
        same.append(info)
    if same:
        yield from _one(same, after)


def _one(same: list[ObjectInfo], after: str) -> Iterator[ObjectInfo]:
    key = plain_key(same[0].key)
    first = first_of(key, same)
    if first is not None and key.encode("utf-8", "surrogatepass") > after.encode("utf-8", "surrogatepass"):
        yield first if first.key == key else ObjectInfo(key, first.size, first.modified)
