"""What `async-rl demo` shows: a live picture on a terminal, a line now and then elsewhere, a summary at the
end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.cli.lag import render
from async_rl.cli.plot import Metrics
from async_rl.log import plain
from async_rl.weights.report import Row
from async_rl.wire import Status

__all__ = ["Progress", "Results", "WeightSync", "line", "summary"]

LINE_EVERY_S = 5.0


class Progress:
    """Shows each Status. `with` restores the terminal, whatever happens."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._answered = False
        self._started = time.monotonic()
        self._last_line = self._started - LINE_EVERY_S
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def waiting(self) -> None:
        """No answer: not up yet, or already gone, and then the last picture stays."""
        if not self._answered:
            words = "trainer and worker are starting"
            self._put(Text(f"{words} … {self._elapsed():.0f} s", style="dim"), words)

    def show(self, status: Status) -> None:
        self._answered = True
        bar = ProgressBar(total=self._steps, completed=status.step, width=40)
        head = Table.grid(padding=(0, 2))
        head.add_row(bar, f"step {status.step} of {self._steps}", f"{self._elapsed():.0f} s")
        self._put(Group(head, render(status)), line(status, self._steps))

    def _put(self, picture: RenderableType, words: str) -> None:
        if self._live is not None:
            self._live.update(picture, refresh=True)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(f"[{self._elapsed():4.0f} s] {words}", markup=False, soft_wrap=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def line(status: Status, steps: int) -> str:
    """A Status in one line."""
    parts = [f"step {status.step}/{steps}", f"version {status.newest_version}"]
    parts.append("reward -" if status.reward != status.reward else f"reward {status.reward:.3f}")
    if status.evals:
        parts.append(f"held out {status.evals[-1].reward:.3f} (v{status.evals[-1].version})")
    lag = f"p50 {status.lag_p50:.0f} max {status.lag_max}" if status.lag_counts else "-"
    parts.append(f"lag {lag} of {status.max_lag}")
    for worker in status.workers:
        parts.append(
            f"{plain(worker.worker)} {worker.state} v{worker.version} {worker.tokens_per_s:.0f} tokens/s"
        )
    if not status.workers:
        parts.append("the trainer is starting" if status.trainer == "absent" else "no worker yet")
    return "  ".join(parts)


class WeightSync(Struct, frozen=True):
    """What the deltas of a run cost, against full versions. Empty ones, of a restart, are not counted."""

    deltas: int
    delta_bytes: int
    full_bytes: int  # of one full version
    changed_part: float  # of all weights, on average

    @classmethod
    def of(cls, rows: Sequence[Row], full_bytes: int) -> WeightSync:
        deltas = [row for row in rows if row.kind == "delta" and row.changed]
        changed = [row.changed_part or 0.0 for row in deltas]
        return cls(
            len(deltas),
            sum(row.nbytes for row in deltas),
            full_bytes,
            sum(changed) / len(changed) if changed else 0.0,
        )

    def describe(self) -> str:
        if not self.deltas:
            return "no deltas"
        each = self.delta_bytes / self.deltas
        return (
            f"{self.deltas} deltas of {each / 1e6:.3f} MB on average, {self.full_bytes / each:.1f}x less than full "
            f"versions ({self.full_bytes / 1e6:.2f} MB); {100 * self.changed_part:.0f} % of the weights change in one"
        )


class Results(Struct, frozen=True):
    """What a finished run left."""

    folder: Path
    store_url: str
    plot: Path
    metrics: Metrics
    status: Status | None  # the last one seen
    wall_s: float
    objects: int  # in the bucket
    object_bytes: int
    sync: WeightSync

    @property
    def reward_start(self) -> float | None:
        """Held out, of version 0."""
        return next((row["eval/reward"] for row in self.metrics.evals if row["eval/version"] == 0), None)

    @property
    def reward_end(self) -> float | None:
        """Held out, of the run's last version; None where that was not measured. (The last step may have been
        merged into a version that got its number after the step's line was written.)"""
        final = self.metrics.steps[-1]["version"] if self.metrics.steps else None
        last = max(self.metrics.evals, key=lambda row: row["eval/version"], default=None)
        if final is None or last is None or last["eval/version"] < final:
            return None
        return float(last["eval/reward"])


def summary(results: Results, goal: float) -> RenderableType:
    """The numbers, the places, and how to look further."""
    return Group("", _numbers(results, goal), "", _places(results), "", _commands(results))


def _numbers(results: Results, goal: float) -> RenderableType:
    steps, status = results.metrics.steps, results.status
    reached = results.reward_end is not None and results.reward_end >= goal
    table = _grid()
    table.add_row(
        "held-out reward",
        Text.assemble(
            f"{_number(results.reward_start)} at version 0, ",
            (f"{_number(results.reward_end)} at the end", "bold green" if reached else "bold red"),
            f"  (goal {goal:.2f})",
        ),
    )
    table.add_row("wall time", f"{int(results.wall_s // 60)} min {results.wall_s % 60:.0f} s in all")
    if status is not None:
        table.add_row(
            "lag of samples",
            f"p50 {status.lag_p50:.0f}  p95 {status.lag_p95:.0f}  max {status.lag_max} optimizer steps "
            f"(limit {status.max_lag})",
        )
    if steps:
        tokens = sum(row["tokens"] for row in steps)
        table.add_row(
            "steps", f"{steps[-1]['step']}, on {tokens:,.0f} tokens sampled by the worker's engine"
        )
        table.add_row("policy versions", f"{steps[-1]['version'] + 1} (0 to {steps[-1]['version']})")
    table.add_row("weight sync", results.sync.describe())
    table.add_row("in the bucket", f"{results.objects} objects, {results.object_bytes / 1e6:.1f} MB")
    return table


def _places(results: Results) -> RenderableType:
    table = _grid()
    table.add_row("metrics", _text(results.folder / "trainer" / "metrics.jsonl"))
    table.add_row("plot", _text(results.plot))
    table.add_row("logs", _text(results.folder / "trainer.log", results.folder / "rollout.log"))
    table.add_row("run file", _text(results.folder / "run.toml"))
    table.add_row("store's data", _text(results.folder / "store", f"(the run is {results.store_url})"))
    return table


def _commands(results: Results) -> RenderableType:
    store = shlex.quote(str(results.folder / "store"))
    return Group(
        Text("To look further, start the store and export in another shell what it prints:"),
        _text(f"  async-rl store up --dir {store}"),
        _text(f"  async-rl weights ls --store {results.store_url}"),
        _text(f"  async-rl weights pull newest --store {results.store_url} --out policy"),
    )


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _text(*parts: object) -> Text:
    """Plain: paths may hold what rich takes for markup."""
    return Text(" ".join(map(str, parts)), overflow="fold")


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
