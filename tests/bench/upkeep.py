"""What upkeep costs the trainer: the same steps with skip deltas, anchors and garbage collection, and without.

One process, as a trainer's rank 0 is one: 21 M weights that move as under Adam (training.py), every step published by
the real Publisher into a folder store, with spans and anchors so close together that there is always something to
look after. Both sides take turns; a side's turn ends when its upkeep has caught up, outside the clock.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from async_rl.store import open_store
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest, claim
from async_rl.weights.run import ensure_run
from async_rl.weights.upkeep import Upkeep
from async_rl.weights.ways import list_edges
from tests.bench.claims import Claim
from tests.bench.training import SMALL, Training, write_model_dir

__all__ = ["run"]

TURNS = 3
TURN = 8
"""Steps of one side before the other's turn."""
WORK = 4
"""Passes over all weights that make a step: far less than a real step of such a model takes."""
RATE = 3e-6
LIMIT_S = 60.0
UPKEEP: dict[str, Any] = {
    "skip_spans": [4, 8],
    "anchor_every": 8,
    "keep_versions": 8,
    "gc_every": 8,
    "gc_grace_s": 0.0,
}
NONE: dict[str, Any] = {"skip_spans": [], "anchor_every": 1 << 20, "anchor_cost": 1e9, "gc_every": 0}


def run(scratch: Path, console: Console) -> list[Claim]:
    with ExitStack() as stack:
        kept, bare = _Side(stack, scratch / "kept", UPKEEP), _Side(stack, scratch / "bare", NONE)
        for side in (kept, bare):
            side.turn()  # a warm-up
            side.steps.clear()
            side.calls.clear()
        for _ in range(TURNS):
            for side in (kept, bare):
                side.turn()
        edges = list(list_edges(kept.store))
    console.print(
        f"{sum(edge.base >= 0 for edge in edges)} skips, {sum(edge.base < 0 for edge in edges)} anchors"
    )
    return [
        Claim(
            f"a step {what}: with upkeep / without",
            of(kept.steps) / of(bare.steps),
            "x",
            at_most=limit,
            how=f"{1e3 * of(kept.steps):.0f} ms against {1e3 * of(bare.steps):.0f}; the call of publish in it "
            f"{1e3 * of(kept.calls):.1f} against {1e3 * of(bare.calls):.1f}",
        )
        for what, of, limit in (("(median)", statistics.median, 1.1), ("(mean)", statistics.mean, None))
    ]


class _Side:
    """A trainer with a run of its own."""

    def __init__(self, stack: ExitStack, folder: Path, settings: dict[str, Any]) -> None:
        from async_rl.weights.publisher import Publisher

        config = msgspec.convert(settings, WeightsConfig)
        self.training = Training(RATE, SMALL)
        self.store = open_store(f"file://{folder}/store")
        parameters = self.training.parameters
        info = ensure_run(self.store, write_model_dir(folder / "model", SMALL), parameters)
        self.publisher = stack.enter_context(
            Publisher(self.store, info, claim(self.store), parameters, config, on_commit=self._committed)
        )
        self.upkeep: Upkeep | None = None
        if settings is UPKEEP:
            self.upkeep = stack.enter_context(Upkeep(self.store, info, config, on_done=self._looked_after))
        self.steps: list[float] = []
        self.calls: list[float] = []
        self._number = 0
        self._newest = self._done = -1
        self._changed = threading.Condition()

    def turn(self) -> None:
        for _ in range(TURN):
            began = time.monotonic()
            for _ in range(WORK):
                self.training.step()
            worked = time.monotonic()
            self.publisher.publish(self._number)
            self.calls.append(time.monotonic() - worked)
            self.steps.append(time.monotonic() - began)
            self._number += 1
        self.publisher.flush()
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.upkeep is None or self._done == self._newest, LIMIT_S
            )

    def _committed(self, manifest: Manifest) -> None:
        self._newest = manifest.version
        if self.upkeep is not None:
            self.upkeep.committed(manifest)

    def _looked_after(self, version: int) -> None:
        with self._changed:
            self._done = version
            self._changed.notify_all()
