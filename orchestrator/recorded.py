"""A recorded run, read from its spool: the batches of every step in the history that survives.

Only reads: no lock is taken, nothing is cut off, so the orchestrator that writes there may live. What it has not
committed yet is left out, and what a later resume can't need any more it has deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from async_rl.algo.staleness import Node, Tree
from async_rl.errors import ConfigError
from async_rl.log import get_logger
from async_rl.wire import Batch
from orchestrator.branches import Branches
from orchestrator.records import (
    Arrived,
    Assigned,
    Record,
    Resumable,
    Snapshot,
    Took,
    Version,
    decode_record,
    group_of,
)
from orchestrator.spool import committed_bodies

__all__ = ["Recorded", "read_recorded"]

log = get_logger(__name__)


class Recorded(Struct, frozen=True):
    """`assigned`: by step. `tree`: every version that was told. `newest`: of each incarnation, its last version."""

    assigned: dict[int, Assigned]
    tree: Tree
    newest: dict[int, int]
    _groups: dict[int, Arrived]

    def batches(self, first: int) -> Iterator[Batch]:
        """From step `first` on, as long as they are whole. `replayed` as the trainer was told."""
        step = first
        while (assigned := self.assigned.get(step)) is not None:
            arrived = [self._groups.get(ordinal) for ordinal in assigned.ordinals]
            groups = tuple(group_of(each) for each in arrived if each is not None)
            if len(groups) < len(arrived):
                log.warning("the spool does not hold all groups of a step: stopping", step=step)
                return
            yield Batch(
                incarnation=assigned.incarnation,
                step=step,
                groups=groups,
                lags=(),
                frontier=assigned.frontier,
                open=assigned.open,
                replayed=assigned.replayed,
            )
            step += 1


def read_recorded(folder: Path) -> Recorded:
    """Raises ConfigError for a folder that is no spool."""
    segments = sorted(path for path in folder.glob("*.log") if path.stem.isdigit())
    if not segments:
        raise ConfigError(
            f"{folder} is no spool: it has no *.log",
            hint="name the folder that the orchestrator logged as `spool opened` with --spool",
        )
    branches, tree, newest = Branches(), Tree(), dict[int, int]()
    groups: dict[int, Arrived] = {}
    incarnation, resumable, begun = -1, 0, False
    for record in _records(segments):
        match record:
            case Snapshot() if not begun:
                branches = Branches(record.sources, record.assigned)
                incarnation, resumable = record.incarnation, record.resumable
                for told in record.versions:
                    tree.add(told.version, Node(told.parent, told.step, told.digest))
                    newest[incarnation] = told.version
            case Took():
                if record.anew or record.step < resumable:
                    branches, resumable = Branches(), 0
                    groups.clear()
                incarnation = record.incarnation
                branches.take(incarnation, record.origin, record.step)
            case Version(version, parent, step, digest):
                tree.add(version, Node(parent, step, digest))
                newest[incarnation] = max(version, newest.get(incarnation, -1))
            case Arrived():
                groups[record.ordinal] = record
            case Assigned():
                branches.assign(record)
            case Resumable(step):
                resumable = step
        begun = True
    steps = {each.step for each in branches.all()}
    found = {step: branches.lookup(incarnation, step) for step in steps}
    return Recorded(
        {step: assigned for step, assigned in found.items() if assigned is not None}, tree, newest, groups
    )


def _records(segments: list[Path]) -> Iterator[Record]:
    for path in segments:
        for body in committed_bodies(path.read_bytes()):
            yield decode_record(body)
