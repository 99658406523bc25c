"""The guards of the product, each of which a process of the matrix can be started without: a guard that nothing
misses is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.chaos.points import Points

__all__ = ["GUARDS", "remove", "watch_apply"]

GUARDS: dict[str, Callable[[], None]] = {}


def remove(names: Iterable[str]) -> None:
    for name in names:
        GUARDS[name]()


def watch_apply(points: Points) -> None:
    """Points before, in and after every tile that is applied to a reader's shadow."""
