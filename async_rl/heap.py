"""Python's garbage collector, kept out of the loops."""

from __future__ import annotations

import atexit
import gc

__all__ = ["settle_heap"]


def settle_heap() -> None:
    """Once, between a process's start and its loop: what is there now stays, and is not looked through again.

    Imports and models leave a million objects. The collector goes through all of them some time after the start, in
    the middle of whatever happens to make objects: half a second on a quiet machine, two on a busy one, in which
    no answer is read and no step is made.
    """
    gc.collect()
    gc.freeze()
    # The interpreter's last collection takes modules apart, and libraries count on it: nanobind reports leaks.
    atexit.register(gc.unfreeze)
