"""One function over many items, in threads: for requests to the store, and for kernels that release the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["REQUESTS", "Report", "side_by_side"]

REQUESTS = 16
"""Small requests in flight: the round trip of one is many times the work that it makes here."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (items, bytes or weights)."""


def side_by_side(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int = REQUESTS,
    *,
    what: str = "",
    report: Report | None = None,
    to_the_end: bool = False,
) -> list[Result]:
    """Every item's result, in their order. Raises the first error in that order; what has not begun then is left.

    Ctrl-C does not wait for what has begun (a get may hang for a minute), but with `to_the_end`.
    """
    items = list(items)
    if len(items) < 2 and report is None:
        return [function(item) for item in items]
    results: list[Result] = []
    pool = ThreadPoolExecutor(max(1, min(threads, len(items))), thread_name_prefix="side-by-side")
    try:
        for result in pool.map(function, items):
            results.append(result)
            if report is not None:
                report(what, len(results), len(items))
    except BaseException as error:
        pool.shutdown(wait=to_the_end or isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()
    return results
