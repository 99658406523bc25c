"""How packs come in: which thread brings what, and that they are hashed in order however they come."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from async_rl.errors import WeightsError
from async_rl.weights.config import WeightsConfig
from async_rl.weights.fetch import BadPack, Fetcher
from async_rl.weights.lineage import Pack
from async_rl.weights.whole import Turns, WholePack
from tests.weights_support import MemoryStore

PART = 10
DATA = bytes(range(37))


def a_pack(data: bytes = DATA, key: str = "packs/a") -> Pack:
    return Pack(key, len(data), hashlib.sha256(data).hexdigest())


def begun(folder: Path, data: bytes = DATA) -> WholePack:
    each = WholePack(a_pack(data), folder / "pack", PART)
    each.part.write_bytes(bytes(len(data)))
    return each


def blocks(start: int, data: bytes = DATA) -> list[tuple[int, bytes]]:
    """A part, three bytes at a time."""
    end = min(start + PART, len(data))
    return [(at, data[at : min(at + 3, end)]) for at in range(start, end, 3)]


def test_a_pack_is_hashed_in_order_whatever_the_order_of_its_parts(tmp_path: Path) -> None:
    for order in itertools.permutations(range(0, len(DATA), PART)):
        each = begun(tmp_path)
        ends = [each.bring(start, blocks(start)) for start in order]
        assert ends == [False] * 3 + [True], order
        assert each.right, order
        assert each.part.read_bytes() == DATA


def test_a_part_that_comes_while_the_one_before_arrives_is_hashed_by_who_brought_that(
    tmp_path: Path,
) -> None:
    each = begun(tmp_path)

    def first_part() -> Iterator[tuple[int, bytes]]:
        yield blocks(0)[0]
        for start in (30, 10, 20):
            assert not each.bring(start, blocks(start))
        yield from blocks(0)[1:]

    assert each.bring(0, first_part())
    assert each.right


def test_a_wrong_byte_in_any_part_shows(tmp_path: Path) -> None:
    for start in range(0, len(DATA), PART):
        each = begun(tmp_path)
        for other in range(0, len(DATA), PART):
            harmed = [(at, bytes(len(block))) for at, block in blocks(other)]
            each.bring(other, harmed if other == start else blocks(other))
        assert not each.right


def test_threads_keep_to_a_pack_then_begin_one_then_help_with_the_longest(tmp_path: Path) -> None:
    packs = [
        WholePack(Pack(name, size, ""), tmp_path / name, PART) for name, size in (("a", 15), ("b", 70))
    ]
    turns = Turns(packs)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def next_of(thread: ThreadPoolExecutor) -> tuple[str, int]:
            each, start = thread.submit(turns.next).result()
            return each.pack.key, start

        assert [next_of(one), next_of(other)] == [("a", 0), ("b", 0)]
        assert [next_of(one), next_of(other)] == [("a", 10), ("b", 10)]
        assert [next_of(one), next_of(other), next_of(one)] == [("b", 20), ("b", 30), ("b", 40)]


def test_an_empty_pack_is_a_file_without_bytes(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put("packs/a", b"")
    Fetcher(store, WeightsConfig()).whole([(a_pack(b""), tmp_path / "pack")], lambda done: None)
    assert (tmp_path / "pack").read_bytes() == b""


def test_a_pack_that_is_wrong_once_is_fetched_again_and_wrong_twice_refused(tmp_path: Path) -> None:
    class Torn(MemoryStore):
        left = 1

        def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
            self.left -= 1
            yield bytes(length) if self.left >= 0 else self.get(key, start, length)

    store = Torn()
    store.put("packs/a", DATA)
    fetcher = Fetcher(store, WeightsConfig(fetch_part_bytes=PART))
    fetcher.whole([(a_pack(), tmp_path / "pack")], lambda done: None)
    assert (tmp_path / "pack").read_bytes() == DATA
    store.left = 99
    with pytest.raises(BadPack, match="differs from the hash in its manifest, twice"):
        fetcher.whole([(a_pack(), tmp_path / "other")], lambda done: None)
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


@pytest.mark.parametrize(
    ("suspects", "again"), [([(10, 3)], [(10, 3)]), ([], [(0, 37)])], ids=["some of it", "nobody knows"]
)
def test_of_a_pack_that_is_wrong_only_the_suspects_are_fetched_again(
    tmp_path: Path, suspects: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    class Torn(MemoryStore):
        asked: ClassVar[list[tuple[int, int]]] = []

        def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
            self.asked.append((start, length))
            data = self.get(key, start, length)
            yield data.replace(b"\x0b", b"!") if len(self.asked) == 1 else data

    store = Torn()
    store.asked.clear()
    store.put("packs/a", DATA)
    Fetcher(store, WeightsConfig()).whole(
        [(a_pack(), tmp_path / "pack")], lambda done: None, lambda pack, path: suspects
    )
    assert store.asked[1:] == again
    assert (tmp_path / "pack").read_bytes() == DATA


def test_a_fetch_is_stopped_between_two_blocks(tmp_path: Path) -> None:
    class Slow(MemoryStore):
        def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
            for at in range(start, start + length):
                if at == 5:
                    fetcher.stop()
                yield self.get(key, at, 1)

    store = Slow()
    store.put("packs/a", DATA)
    fetcher = Fetcher(store, WeightsConfig())
    with pytest.raises(WeightsError, match="was stopped"):
        fetcher.whole([(a_pack(), tmp_path / "pack")], lambda done: None)
    assert fetcher.downloaded == 5
    assert not list(tmp_path.iterdir())
