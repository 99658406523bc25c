"""Packs on their way as wholes: which thread brings what, and how they are hashed while they arrive (fetch.py)."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from async_rl.store.base import BLOCK_BYTES
from async_rl.weights.files import write_at
from async_rl.weights.lineage import Pack

__all__ = ["Suspects", "Turns", "WholePack"]

Suspects = Callable[[Pack, Path], list[tuple[int, int]]]
"""Of a pack whose bytes, which are in the file, differ from its hash: (start, length) of those to fetch again;
none: all."""


class WholePack:
    """A pack on its way. It is hashed in order while it arrives, by the threads that bring its parts: from memory
    where a part comes in its turn, from the file where it came early."""

    def __init__(self, pack: Pack, path: Path, part_bytes: int, suspects: Suspects | None = None) -> None:
        self.pack, self.path = pack, path
        self.suspects = suspects or (lambda pack, path: [])
        self.part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        self.starts = deque(range(0, pack.size, part_bytes) or [0])
        """Where the parts that nobody has begun to bring begin."""
        self.begun = False
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._early: set[int] = set()  # parts (where they start) that are in the file, not yet hashed
        self._hashing = False

    def length(self, start: int) -> int:
        """Of the part there."""
        return min(self._part_bytes, self.pack.size - start)

    def bring(self, start: int, blocks: Iterable[tuple[int, bytes]]) -> bool:
        """Put a part, in blocks and with their places, into the file. Whether the whole pack is there now, and hashed
        (said to one thread only)."""
        with self._lock:
            in_turn = start == self._hashed and not self._hashing
            self._hashing |= in_turn
        for at, block in blocks:
            write_at(self.part, at, block)
            if in_turn:
                self._sha256.update(block)
        with self._lock:
            if in_turn:
                self._hashed += self.length(start)
            else:
                self._early.add(start)
                if self._hashing:
                    return False  # the other one sees to it
                self._hashing = True
        return self._hash_early()

    def _hash_early(self) -> bool:
        """Hash the parts that follow and are in the file; whether that was the last one. By one thread at a time."""
        while True:
            with self._lock:
                at = self._hashed
                if at not in self._early:
                    self._hashing = False
                    return at == self.pack.size
                self._early.remove(at)
            end = at + self.length(at)
            with self.part.open("rb", buffering=0) as file:
                file.seek(at)
                while at < end and (block := file.read(min(BLOCK_BYTES, end - at))):
                    self._sha256.update(block)
                    at += len(block)
            self._hashed = end

    @property
    def right(self) -> bool:
        return self._sha256.hexdigest() == self.pack.sha256


class Turns:
    """Which part a thread brings next: the next one of the pack it brought one of last; else the first of a pack that
    nobody has begun; else it helps with the pack of which most is left. Thread-safe."""

    def __init__(self, packs: Sequence[WholePack]) -> None:
        self._packs = packs
        self._lock = threading.Lock()
        self._mine: dict[int, WholePack] = {}  # by thread

    def next(self) -> tuple[WholePack, int]:
        """To be asked as often as there are parts."""
        with self._lock:
            mine = self._mine.get(threading.get_ident())
            if mine is None or not mine.starts:
                fresh = (each for each in self._packs if not each.begun)
                mine = next(fresh, None) or max(self._packs, key=lambda each: len(each.starts))
                self._mine[threading.get_ident()] = mine
            mine.begun = True
            return mine, mine.starts.popleft()
