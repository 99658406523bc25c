"""Arrays that a thread uses again for every tile: new pages for each would take as long as looking for changes."""

from __future__ import annotations

import threading

import numpy as np

__all__ = ["scratch"]

_local = threading.local()


def scratch(name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
    """[count], with anything in it; the same memory as the thread's last array of this name."""
    held: np.ndarray | None = getattr(_local, name, None)
    if held is None or len(held) < count:
        held = np.empty(count + count // 4, dtype)
        setattr(_local, name, held)
    return held[:count]
