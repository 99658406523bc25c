"""A disk of a few megabytes, that can be full: `disk.fill()`, `disk.free()`. A plain folder where nothing can be
mounted (`disk.real` says so): mounting takes root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["SmallDisk"]

MEGABYTES = 64
LIMIT_S = 20.0


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.real = os.geteuid() == 0 and _call(
            "mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", folder
        )

    def fill(self) -> None:
        """Until not another byte fits."""
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """The files go with a mounted disk."""
        if self.real:
            _call("umount", "-l", self.folder)


def _call(*words: str | Path) -> bool:
    try:
        return (
            subprocess.run([str(word) for word in words], capture_output=True, timeout=LIMIT_S).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
