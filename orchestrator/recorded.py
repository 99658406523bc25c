"""A recorded run, read from its spool: the batches of every step in the history that survives.

Only reads: no lock is taken, nothing is cut off, so the orchestrator that writes there may live. What it has not
committed yet is left out, and what a later resume can't need any more it has deleted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from async_rl.algo.staleness import Tree
from async_rl.errors import ConfigError
from async_rl.log import get_logger
from async_rl.wire import Batch
from orchestrator.config import OrchestratorConfig
from orchestrator.framing import committed_bodies
from orchestrator.ledger_state import LedgerState
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
from orchestrator.spool import MemoryJournal, Place

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
    reading = _Reading(segments)
    ledger = LedgerState(OrchestratorConfig(), MemoryJournal(), itertools.count())
    ledger.restore(reading.records(), 0.0)
    assigned = ledger.history()
    ordinals = {ordinal for each in assigned.values() for ordinal in each.ordinals}
    places = {ordinal: place for ordinal in ordinals if (place := ledger.place_of(ordinal)) is not None}
    groups = {ordinal: reading.arrived[place] for ordinal, place in places.items()}
    return Recorded(assigned, ledger.tree, reading.newest, groups)


class _Reading:
    """The records of a spool, and what the ledger does not keep of them."""

    def __init__(self, segments: list[Path]) -> None:
        self._segments = segments
        self.arrived: dict[Place, Arrived] = {}
        self.newest: dict[int, int] = {}

    def records(self) -> Iterator[tuple[Record, Place]]:
        """But for what only says that older groups may be forgotten: those that are still there can be replayed."""
        incarnation, resumable, told, begun = -1, 0, (-1, -1), False
        for record, place in self._all():
            match record:
                case Snapshot() if not begun:
                    incarnation, resumable = record.incarnation, record.resumable
                    if record.versions:
                        self.newest[incarnation] = record.versions[-1].version
                case Version(version):
                    told = (version, self.newest.get(incarnation, -1))
                    self.newest[incarnation] = max(told)
                case Took():
                    if incarnation != record.incarnation and told[0] >= 0:
                        # The version that a trainer attaches with stands before it: it is the first of its own.
                        self.newest[incarnation] = told[1]
                        self.newest[record.incarnation] = told[0]
                    incarnation = record.incarnation
                    if record.step < resumable:  # it found nothing to repeat, as the ledger that forgot it
                        record, resumable = msgspec.structs.replace(record, anew=True), 0
                case Resumable():
                    resumable = record.step
                case Arrived():
                    self.arrived[place] = record
            if not isinstance(record, Version):
                told = (-1, -1)
            begun = True
            if not isinstance(record, Resumable):
                yield record, place

    def _all(self) -> Iterator[tuple[Record, Place]]:
        for path in self._segments:
            for at, body in enumerate(committed_bodies(path.read_bytes())):
                yield decode_record(body), Place(int(path.stem), at, len(body))
