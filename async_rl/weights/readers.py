"""Who reads a run: every worker writes now and then which versions it still needs.

    workers/<worker>.json     ReaderBeat, replaced with every beat

The only mutable objects of a run. Nothing waits for them and nothing breaks without them: garbage collection keeps
the paths from the versions named here, and a reader whose beat was lost finds another path. Ages are measured by
the store's clock alone.
"""

from __future__ import annotations

import uuid
from urllib.parse import quote

import msgspec
from msgspec import Struct

from async_rl.errors import NotFound
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore

__all__ = ["ReaderBeat", "drop_beat", "live_readers", "newest_lack", "store_now", "write_beat"]

log = get_logger(__name__)

WORKERS = "workers/"
_CLOCK = "clock/"


class ReaderBeat(Struct, frozen=True):
    worker: str
    versions: tuple[int, ...]  # that it holds, and that it is on the way to
    expires_s: float  # after the store's time of this object it counts as gone
    lacks: int = -1  # a version to which it found no whole way: it needs a new full state. -1: none


def write_beat(store: ObjectStore, beat: ReaderBeat) -> None:
    store.put(_key(beat.worker), msgspec.json.encode(beat))


def drop_beat(store: ObjectStore, worker: str) -> None:
    """It needs nothing any more."""
    store.delete(_key(worker))


def live_readers(store: ObjectStore) -> list[ReaderBeat]:
    """Everyone's whose beat has not expired. What is no beat is left out, with a warning."""
    found = [info for info in store.list_after(WORKERS) if info.key.endswith(".json")]
    if not found:
        return []
    now = store_now(store)  # after the listing: a beat is never younger than it seems
    live = []
    for info in found:
        try:
            beat = msgspec.json.decode(store.get(info.key), type=ReaderBeat)
        except NotFound:
            continue  # said goodbye meanwhile
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("not a reader's beat", key=info.key, error=str(error))
            continue
        if now - info.modified < beat.expires_s:
            live.append(beat)
    return live


def newest_lack(store: ObjectStore) -> int:
    """The newest version to which a live reader found no whole way; -1: none is stuck."""
    return max((beat.lacks for beat in live_readers(store)), default=-1)


def store_now(store: ObjectStore) -> float:
    """Seconds since the epoch by the store's clock (in whole seconds on most): the time it gives to a new object."""
    key = f"{_CLOCK}{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        return store.head(key).modified
    finally:
        store.delete(key)


def _key(worker: str) -> str:
    return f"{WORKERS}{quote(worker, safe='')}.json"
