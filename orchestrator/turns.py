"""Who is next: what workers sent is taken by turns, so that one whose work takes long delays its own and no other's.
Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Turns"]

T = TypeVar("T")

MOST_WORKERS = 4096
"""Whose time is remembered; a fleet whose names change for months must not fill the memory."""


class Turns(Generic[T]):
    """A bounded queue for each worker; next is the worker that has taken the least time of those who wait. One that
    comes new begins with as much as the least of them (where nobody waits, as who had the last turn), so that nobody
    is favoured for having been away."""

    def __init__(self, most: int, most_bytes: int, size: Callable[[T], int]) -> None:
        self._most, self._most_bytes, self._size = most, most_bytes, size
        self._waiting: dict[str, deque[T]] = {}
        self._spent_s: dict[str, float] = {}
        self._last_s = 0.0  # what the worker that had the last turn had taken before it
        self._bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, worker: str, item: T) -> bool:
        """False where there is no room. The one who has the most there makes room for another that has less."""
        size = self._size(item)
        while len(self) >= self._most or self._bytes + size > self._most_bytes:
            longest = max(self._waiting, key=lambda each: len(self._waiting[each]), default=worker)
            mine = len(self._waiting.get(worker, ()))
            if longest == worker or len(self._waiting[longest]) <= mine + 1:
                return False
            self._drop(longest, self._waiting[longest].pop())
        if worker not in self._waiting:
            floor = min((self._spent_s[each] for each in self._waiting), default=self._last_s)
            self._spent_s[worker] = max(floor, self._spent_s.get(worker, floor))
            self._waiting[worker] = deque()
        self._waiting[worker].append(item)
        self._bytes += size
        return True

    def pop(self) -> T:
        worker = min(self._waiting, key=lambda each: self._spent_s[each])
        self._last_s = self._spent_s[worker]
        item = self._waiting[worker].popleft()
        self._drop(worker, item)
        return item

    def spent(self, worker: str, seconds: float) -> None:
        """What its turn took."""
        self._spent_s[worker] = self._spent_s.get(worker, 0.0) + seconds
        if len(self._spent_s) > MOST_WORKERS:
            self._spent_s = {each: spent for each, spent in self._spent_s.items() if each in self._waiting}

    def clear(self) -> None:
        self._waiting.clear()
        self._bytes = 0

    def _drop(self, worker: str, item: T) -> None:
        self._bytes -= self._size(item)
        if not self._waiting[worker]:
            del self._waiting[worker]
