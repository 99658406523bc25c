"""Memory of all processes of a run, several times a second, as the kernel accounts for it.

Each process counts with its PSS, the proportional share: its own pages, and of pages that several processes map its
part, so that the sum over all of them counts each page once; pages of files that are mapped (a model, a shadow)
included. Files in shared memory (/dev/shm) count in full beside it, mapped or not: what is mapped of them counts
twice, so a sum is rather too large than too small. The kernel's cache of files that nobody maps is not counted: it
gives that back as soon as somebody wants memory.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

__all__ = ["MemoryWatch", "Reading", "descendants", "highest", "pss_bytes", "shared_bytes"]

EVERY_S = 0.2
JOIN_S = 10.0
SHARED = "shared memory"
PROC, SHM = Path("/proc"), Path("/dev/shm")


class Reading(NamedTuple):
    time: float  # seconds since the epoch
    parts: Mapping[str, int]  # bytes by kind of process, and of SHARED

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def highest(readings: Iterable[Reading], begin: float, end: float) -> Reading | None:
    """The one with the greatest total in [begin, end)."""
    return max((r for r in readings if begin <= r.time < end), key=lambda r: r.total, default=None)


class MemoryWatch:
    """Reads in a thread from `with` to its end. `roots`: process ids, and what each is called; `name` tells how a
    process is called whose parent's name and command line are given."""

    def __init__(
        self,
        roots: Callable[[], Mapping[int, str]],
        name: Callable[[str, str], str],
        every_s: float = EVERY_S,
    ) -> None:
        self.readings: list[Reading] = []
        self._roots, self._name, self._every_s = roots, name, every_s
        self._known = _entries(SHM)  # what lay there before is not the run's
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)
        if self._failure is not None and error is None:
            raise RuntimeError("the memory of the run could not be read to its end") from self._failure

    def read(self) -> Reading:
        parts: Counter[str] = Counter()
        for pid, name in descendants(self._roots(), self._name).items():
            parts[name] += pss_bytes(pid)
        parts[SHARED] = shared_bytes(_entries(SHM) - self._known)
        return Reading(time.time(), dict(parts))

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._every_s):
                self.readings.append(self.read())
        except Exception as error:  # noqa: BLE001  (told at the end: a peak that nobody saw is no figure)
            self._failure = error


def descendants(
    roots: Mapping[int, str], name: Callable[[str, str], str], proc: Path = PROC
) -> dict[int, str]:
    """The roots that live, and all processes that descend from them, with their names."""
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The program's own name, in brackets, may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                alive.add(int(folder.name))
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, str] = {}
    waiting: list[tuple[int, str]] = [(pid, each) for pid, each in roots.items() if pid in alive]
    while waiting:
        pid, called = waiting.pop()
        found[pid] = called
        waiting += [
            (child, name(called, _command(proc, child)))
            for child in children.get(pid, ())
            if child not in found
        ]
    return found


def pss_bytes(pid: int, proc: Path = PROC) -> int:
    """0 of a process that has ended."""
    with suppress(OSError):
        for line in (proc / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def shared_bytes(entries: Iterable[Path]) -> int:
    """What these files and folders take, those in folders included."""
    total = 0
    for entry in entries:
        for file in (entry, *_below(entry)):
            with suppress(OSError):
                total += file.lstat().st_blocks * 512
    return total


def _below(entry: Path) -> Sequence[Path]:
    try:
        return list(entry.rglob("*")) if entry.is_dir() else []
    except OSError:  # removed meanwhile
        return []


def _entries(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.is_dir() else set()


def _command(proc: Path, pid: int) -> str:
    with suppress(OSError):
        return (
            (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    return ""
