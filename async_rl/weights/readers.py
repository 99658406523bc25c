"""Who reads a run: every worker writes now and then which versions it still needs.

    workers/<worker>.json     ReaderBeat, replaced with every beat

The only mutable objects of a run. Nothing waits for them and nothing breaks without them: garbage collection keeps
the paths from the versions named here, and a reader whose beat was lost finds another path. Ages are measured by
the store's clock alone.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import Struct

from async_rl.errors import NotFound
from async_rl.log import get_logger
from async_rl.store.base import ObjectInfo, ObjectStore

__all__ = [
    "Beats",
    "ReaderBeat",
    "SeenBeat",
    "drop_beat",
    "live_readers",
    "newest_lack",
    "store_now",
    "write_beat",
]

log = get_logger(__name__)

WORKERS = "workers/"
MOST_BYTES = 1 << 20
"""Of a beat: it is a few hundred bytes. Whoever may write there must not fill the memory of all who look."""
_CLOCK = "clock/"


class ReaderBeat(Struct, frozen=True):
    worker: str
    versions: tuple[int, ...]  # that it holds, and that it is on the way to
    expires_s: float  # after the store's time of this object it counts as gone
    lacks: int = -1  # a version to which it found no whole way: it needs a new full state. -1: none
    # For those who watch from the bucket alone; None: it does not say (before it knows, and in older beats).
    cluster: str | None = None
    state: str | None = None  # as in Heartbeat
    version: int | None = None  # served; -1: none yet
    fetching: int | None = None  # -1: none
    fetched_fraction: float | None = None
    tokens_per_s: float | None = None
    sync_bytes: int | None = None


class SeenBeat(NamedTuple):
    """A beat as it lies in the store."""

    beat: ReaderBeat
    modified: float  # seconds since the epoch, by the store's clock


def write_beat(store: ObjectStore, beat: ReaderBeat) -> None:
    store.put(_key(beat.worker), msgspec.json.encode(beat))


def drop_beat(store: ObjectStore, worker: str) -> None:
    """It needs nothing any more."""
    store.delete(_key(worker))


def live_readers(store: ObjectStore) -> list[ReaderBeat]:
    """Everyone's whose beat has not expired. What is no beat is left out, with a warning."""
    beats = Beats(store).look()
    if not beats:
        return []
    now = store_now(store)  # after the listing: a beat is never younger than it seems
    return [beat for beat, modified in beats if now - modified < beat.expires_s]


class Beats:
    """All beats, expired ones too; looked at again, only those that are new are read."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._seen: dict[str, tuple[ObjectInfo, SeenBeat]] = {}

    def look(self) -> list[SeenBeat]:
        """By key. What is no beat is left out, with a warning."""
        found: dict[str, tuple[ObjectInfo, SeenBeat]] = {}
        infos = [info for info in self._store.list_after(WORKERS) if info.key.endswith(".json")]
        newest = max((info.modified for info in infos), default=0.0)
        for info in infos:
            before = self._seen.get(info.key)
            # Store clocks tick in seconds: what is that young may be replaced within the same one.
            if before is not None and before[0] == info and info.modified < newest - 1.0:
                found[info.key] = before
            elif info.size > MOST_BYTES:
                log.warning("not a reader's beat", key=info.key, bytes=info.size, limit=MOST_BYTES)
            elif (beat := self._read(info.key)) is not None:
                found[info.key] = info, SeenBeat(beat, info.modified)
        self._seen = found
        return [seen for _, seen in found.values()]

    def _read(self, key: str) -> ReaderBeat | None:
        try:
            return msgspec.json.decode(self._store.get(key), type=ReaderBeat)
        except NotFound:
            return None  # said goodbye meanwhile
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("not a reader's beat", key=key, error=str(error))
            return None


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
