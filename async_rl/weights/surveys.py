"""States that lie on a device: compared and hashed there, and only what changed comes to the host.

Tiles of one tensor that follow one another are surveyed together, so that the host waits for the device once for
all of them; the encoding threads then take tile by tile. Whichever thread needs a window first surveys it, while the
others code the tiles of the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from async_rl.weights.codec import TILE, Found
from async_rl.weights.codec.tensors import digest, survey
from async_rl.weights.run import RunInfo
from async_rl.weights.shards import State, no_room

if TYPE_CHECKING:
    from async_rl.weights.changes import Cut

__all__ = ["Surveys", "digests_there", "windows"]

WINDOW = 4 * TILE
"""Elements surveyed together: a survey takes up to 200 MB of the device's memory for a moment, and waits for the
device some ten times at the most, which is little beside the milliseconds that the host codes what it found."""


class Surveys:
    """What each of `cuts` changes, on the host. Made for one pass over them, each once, in about their order."""

    def __init__(self, run: RunInfo, cuts: Sequence[Cut], base: State, new: State, *, small: bool) -> None:
        self._run, self._cuts, self._base, self._new, self._small = run, cuts, base, new, small
        self._window_of = [window for window in windows(cuts) for _ in window]
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # of surveys: they share a stream
        self._surveyed: dict[range, Future[list[Found | None]]] = {}
        self._unread: dict[range, int] = {}

    def found(self, at: int) -> Found | None:
        """Of cut number `at`; None if it changes nothing. From any thread. Waits for: the device, or the thread that
        waits for it. Raises WeightsError where the device has no memory left."""
        window = self._window_of[at]
        with self._lock:
            first = window not in self._surveyed
            tiles = self._surveyed.setdefault(window, Future())
        if first:
            try:
                tiles.set_result(self._survey(window))
            except BaseException as error:
                tiles.set_exception(error)
                raise
        found = tiles.result()[at - window.start]
        with self._lock:
            self._unread[window] = self._unread.get(window, len(window)) - 1
            if not self._unread[window]:
                del self._surveyed[window], self._unread[window]
        return found

    def _survey(self, window: range) -> list[Found | None]:
        first, last = self._cuts[window.start], self._cuts[window.stop - 1]
        name = self._run.tensors[first.tensor].name
        rows = slice(first.start - first.row_start, last.stop - first.row_start)
        sizes = [cut.stop - cut.start for cut in self._cuts[window.start : window.stop]]
        with self._one_at_a_time, self._new.beside(name):
            base, new = self._base.values(name), self._new.values(name)
            try:
                return survey(base[rows], new[rows], first.place, sizes, small=self._small)
            except torch.OutOfMemoryError as error:
                raise no_room("comparing two versions of the weights", new.device) from error


def windows(cuts: Sequence[Cut]) -> Iterator[range]:
    """Numbers of cuts that follow one another in one tensor, up to WINDOW elements or a single cut."""
    first = 0
    for at in range(1, len(cuts) + 1):
        if (
            at == len(cuts)
            or cuts[at].tensor != cuts[first].tensor
            or cuts[at].stop - cuts[first].start > WINDOW
        ):
            yield range(first, at)
            first = at


def digests_there(run: RunInfo, cuts: Sequence[Cut], state: State) -> np.ndarray:
    """uint64 [cuts]: what the elements of each add to the state's digest. The weights stay where they are; the host
    waits for the device once per tensor."""
    found = [np.zeros(0, np.uint64)]
    for tensor, group in groupby(cuts, key=lambda cut: cut.tensor):
        name = run.tensors[tensor].name
        # What comes to the host has waited for the work of this stream, not of another.
        with state.beside(name):
            values = state.values(name)
            sums = [
                digest(values[cut.start - cut.row_start : cut.stop - cut.row_start], cut.place)
                for cut in group
            ]
            found.append(torch.stack(sums).cpu().numpy().view(np.uint64))
    return np.concatenate(found)
