"""What the commands of `async-rl weights` share: how a version is named, progress on standard error, JSON on standard
output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from async_rl.store import ObjectStore
    from async_rl.weights.run import RunInfo

__all__ = [
    "VERSION",
    "Report",
    "json_option",
    "mb",
    "opened",
    "percent",
    "reporting",
    "version_name",
    "write_json",
]

Report = Callable[[str, int, int], None]
"""Called with what is done, how much of it is done, and of how much."""

json_option = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")

NEWEST = "newest"


class VersionNumber(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A number, or `newest` (None)."""

    name = "version"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text != NEWEST and not text.isdecimal():
            self.fail(f"{text!r} is neither a number nor {NEWEST}", param, ctx)
        return text if text == NEWEST else int(text)


VERSION = VersionNumber()


def version_name(version: int | str) -> int | None:
    return None if isinstance(version, str) else version


@contextmanager
def opened(store_url: str) -> Iterator[tuple[ObjectStore, RunInfo]]:
    """The store, in which there must be a run."""
    from async_rl.store import open_store
    from async_rl.weights.run import open_run

    store = open_store(store_url)
    try:
        yield store, open_run(store)
    finally:
        store.close()


@contextmanager
def reporting() -> Iterator[Report]:
    """A bar for everything that is reported, gone at the end. On a standard error that is no terminal: nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        tasks: dict[str, object] = {}

        def report(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=max(1, of))
            progress.update(tasks[what], completed=done, total=max(1, of))  # type: ignore[arg-type]

        yield report


def write_json(value: object) -> None:
    """One line."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def mb(nbytes: int) -> str:
    """In MB with three digits or so: a delta may be a few hundred bytes."""
    return f"{nbytes / 1e6:,.2f}" if nbytes >= 1e6 or not nbytes else f"{nbytes / 1e6:.3g}"


def percent(part: float) -> str:
    return f"{100 * part:.3g} %"
