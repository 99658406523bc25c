"""What a process holds beyond weights, gradients and optimizer, as the kernel counts it.

The kernel keeps the highest resident size of a process (VmHWM) and forgets it when told to. Between two steps, with
the optimizer's state made and the gradients freed, what is resident is the base; the peak of the following steps
above it, less the bytes of the gradients, is what forward and backward passes need.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

__all__ = ["base_bytes", "field_bytes", "forget_peak"]


def base_bytes() -> int:
    """Resident now, after everything that can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak()
    return field_bytes("VmRSS")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def field_bytes(name: str) -> int:
    """Of /proc/self/status: VmRSS is resident now, VmHWM was at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
