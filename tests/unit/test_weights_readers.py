"""Readers' beats: who is alive, by the store's clock alone."""

from __future__ import annotations

import pytest

from async_rl.errors import NotFound
from async_rl.store.file import FileStore
from async_rl.weights.readers import ReaderBeat, drop_beat, live_readers, store_now, write_beat
from tests.weights_support import MemoryStore, ScriptedStore, raises


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.now = 1000.0
    return store


def test_a_reader_lives_until_its_last_beat_expires_by_the_stores_clock(store: MemoryStore) -> None:
    write_beat(store, old := ReaderBeat("w1", (3, 7), 300.0))
    store.now = 1200.0
    write_beat(store, young := ReaderBeat("w2", (), 300.0))
    assert live_readers(store) == [old, young]
    store.now = 1299.0
    assert live_readers(store) == [old, young]
    store.now = 1300.0
    assert live_readers(store) == [young]
    write_beat(store, later := ReaderBeat("w1", (9,), 300.0))
    assert live_readers(store) == [later, young]


def test_a_reader_that_says_goodbye_is_gone_at_once(store: MemoryStore) -> None:
    write_beat(store, ReaderBeat("w1", (3,), 300.0))
    drop_beat(store, "w1")
    drop_beat(store, "w1")
    assert live_readers(store) == []


def test_a_workers_name_can_not_reach_other_objects(store: MemoryStore) -> None:
    write_beat(store, beat := ReaderBeat("../run.json#1", (3,), 300.0))
    assert list(store.objects) == ["workers/..%2Frun.json%231.json"]
    assert live_readers(store) == [beat]


def test_what_is_no_beat_is_left_out_and_nothing_of_the_clock_stays(store: MemoryStore) -> None:
    write_beat(store, beat := ReaderBeat("w1", (3,), 300.0))
    store.put("workers/w2.json", b"{")
    store.put("workers/notes.txt", b"")
    scripted = ScriptedStore(store)
    assert live_readers(scripted) == [beat]
    scripted.on("get", "workers/w1", raises(NotFound("it has just left")))
    assert live_readers(scripted) == []
    assert set(store.objects) == {"workers/w1.json", "workers/w2.json", "workers/notes.txt"}


def test_the_stores_clock_is_that_of_a_new_object(tmp_path, store: MemoryStore) -> None:  # type: ignore[no-untyped-def]
    assert store_now(store) == 1000.0
    files = FileStore(f"file://{tmp_path}")
    files.put("before", b"")
    assert store_now(files) >= files.head("before").modified
    assert [info.key for info in files.list_after("")] == ["before"]
