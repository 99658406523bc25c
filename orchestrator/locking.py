"""One orchestrator to a spool: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from async_rl.errors import ConfigError

__all__ = ["locked"]


def locked(path: Path, limit_s: float) -> int:
    """The open lock file. Raises ConfigError after the limit."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(file)
                raise ConfigError(
                    f"another orchestrator holds the spool {path.parent}",
                    hint="stop it, or give this run a folder of its own: orchestrator.spool",
                ) from None
            time.sleep(0.1)
