"""What lies between two versions: which weights moved, and by how many steps.

A step is one representable value (codec/tiles.py). From the deltas alone where they can be read without the weights:
that takes a few megabytes; else both states are put together on the disk and compared.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from async_rl.errors import WeightsError
from async_rl.store.base import ObjectStore
from async_rl.weights.codec import TILE, encode_tile, tile_steps
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import disk_errors, temporary_folder
from async_rl.weights.gc import dead_edges
from async_rl.weights.layers import aligned, net_steps, open_layers
from async_rl.weights.lineage import Manifest
from async_rl.weights.parallel import Report
from async_rl.weights.plan import Path, find_path
from async_rl.weights.replay import FlatState
from async_rl.weights.run import RunInfo

__all__ = ["Bucket", "Difference", "Mover", "TensorDifference", "difference"]

LARGEST = 10
"""Weights that are named: those that moved furthest."""

_BUCKETS = 17  # by powers of two: 1, 2, 3-4, 5-8, …, 16385-32768


class Bucket(Struct, frozen=True):
    """Weights that moved by `least` to `most` steps."""

    least: int
    most: int
    up: int
    down: int


class TensorDifference(Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    changed: int
    changed_part: float
    largest: int  # steps


class Mover(Struct, frozen=True):
    name: str
    index: tuple[int, ...]
    steps: int


class Difference(Struct, frozen=True):
    before: int  # version
    after: int
    how: str  # the path, or paths, that were read
    fetched_bytes: int
    weights: int
    changed: int
    buckets: tuple[Bucket, ...]
    tensors: tuple[TensorDifference, ...]  # that changed; the most changed first
    largest: tuple[Mover, ...]

    @property
    def changed_part(self) -> float:
        return self.changed / max(1, self.weights)


class Found(NamedTuple):
    """Steps of one tensor, in a part of it."""

    tensor: int
    positions: np.ndarray  # elements, int64 [k]
    steps: np.ndarray  # int32 [k]


def difference(
    store: ObjectStore,
    run: RunInfo,
    before: Manifest,
    after: Manifest,
    config: WeightsConfig | None = None,
    report: Report | None = None,
) -> Difference:
    """From `before` to `after`, whichever is older. Scratch space in the system's temporary folder.

    Raises Corrupt, WeightsError (no path leads there), StoreErrors.
    """
    older, newer = sorted((before, after), key=lambda manifest: manifest.version)
    sign = 1 if before is older else -1
    config = config or WeightsConfig()
    dead = dead_edges(store)
    with temporary_folder() as folder:
        path = _deltas(store, older, newer, dead)
        if path is not None:
            found = _from_deltas(store, run, path, folder, config, report)
            return _summed(run, before, after, path.describe(), path.nbytes, found, sign)
        states = [FlatState(store, run, folder / str(n), config) for n in range(2)]
        paths = [
            state.go_to(manifest, dead, _reporter(report, f"version {manifest.version}"))
            for state, manifest in zip(states, (older, newer), strict=True)
        ]
        how = "; ".join(
            f"version {manifest.version} {path.describe()}"
            for manifest, path in zip((older, newer), paths, strict=True)
        )
        found = _from_states(states[0], states[1], report)
        return _summed(run, before, after, how, sum(path.nbytes for path in paths), found, sign)


def _deltas(
    store: ObjectStore, older: Manifest, newer: Manifest, dead: frozenset[tuple[int, int]]
) -> Path | None:
    """A path of deltas that can be read without the weights."""
    try:
        path = find_path(store, newer, older.version, avoid=dead, context_free=True)
    except WeightsError:
        return None
    return path if path.start == older.version else None


def _from_deltas(
    store: ObjectStore,
    run: RunInfo,
    path: Path,
    folder: FilePath,
    config: WeightsConfig,
    report: Report | None,
) -> Iterator[Found]:
    def fetched(done: int) -> None:
        if report is not None:
            report("deltas", done, path.nbytes)

    with disk_errors(folder, path.nbytes):
        layers = open_layers(store, run, [hop.way for hop in path.hops], folder, config, fetched)
    for span in aligned(layers):
        positions, steps = net_steps(span)
        yield Found(span.tensor, positions.astype(np.int64) + span.start, steps.astype(np.int32))


def _from_states(older: FlatState, newer: FlatState, report: Report | None) -> Iterator[Found]:
    total = older.places[-1]
    for tensor, (begin, end) in enumerate(zip(older.places, older.places[1:], strict=False)):
        for start in range(begin, end, TILE):
            stop = min(start + TILE, end)
            coded = encode_tile(older.values[start:stop], newer.values[start:stop], start)
            if coded is not None:
                positions, steps = tile_steps(coded.mode, coded.data, stop - start)
                yield Found(tensor, positions.astype(np.int64) + (start - begin), steps.astype(np.int32))
            if report is not None:
                report("comparing", stop, total)


def _summed(
    run: RunInfo,
    before: Manifest,
    after: Manifest,
    how: str,
    fetched: int,
    parts: Iterator[Found],
    sign: int,
) -> Difference:
    up, down = np.zeros(_BUCKETS, np.int64), np.zeros(_BUCKETS, np.int64)
    changed: dict[int, int] = {}
    furthest: dict[int, int] = {}
    movers: list[tuple[int, int, int, int]] = []  # |steps|, tensor, element, steps
    for tensor, positions, steps in parts:
        if not len(steps):
            continue
        sizes = np.abs(steps)
        # frexp's exponent of n - 1/2 is the number of the bucket: 1 -> 0, 2 -> 1, 3..4 -> 2, 5..8 -> 3
        numbers = np.frexp(sizes - 0.5)[1]
        up += np.bincount(numbers[steps * sign > 0], minlength=_BUCKETS)
        down += np.bincount(numbers[steps * sign < 0], minlength=_BUCKETS)
        changed[tensor] = changed.get(tensor, 0) + len(steps)
        furthest[tensor] = max(furthest.get(tensor, 0), int(sizes.max()))
        best = np.argpartition(sizes, -min(LARGEST, len(sizes)))[-LARGEST:]
        movers += [(int(sizes[n]), tensor, int(positions[n]), sign * int(steps[n])) for n in best]
        movers = heapq.nlargest(LARGEST, movers, key=lambda mover: (mover[0], -mover[1], -mover[2]))
    tensors = [
        TensorDifference(
            run.tensors[tensor].name,
            run.tensors[tensor].shape,
            count,
            count / math.prod(run.tensors[tensor].shape),
            furthest[tensor],
        )
        for tensor, count in changed.items()
    ]
    return Difference(
        before=before.version,
        after=after.version,
        how=how,
        fetched_bytes=fetched,
        weights=sum(math.prod(spec.shape) for spec in run.tensors),
        changed=sum(changed.values()),
        buckets=tuple(
            Bucket((1 << number >> 1) + 1 if number else 1, 1 << number, int(up[number]), int(down[number]))
            for number in range(_BUCKETS)
            if up[number] or down[number]
        ),
        tensors=tuple(sorted(tensors, key=lambda each: (-each.changed_part, each.name))),
        largest=tuple(
            Mover(run.tensors[tensor].name, _index(element, run.tensors[tensor].shape), steps)
            for _, tensor, element, steps in movers
        ),
    )


def _index(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(element, shape)) if shape else ()


def _reporter(report: Report | None, what: str) -> Callable[[int, int], None] | None:
    if report is None:
        return None
    return lambda done, of: report(what, done, of)
