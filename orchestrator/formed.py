"""What the ledger answers: a batch that was formed, what became of a group, and what a batch waits for."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from async_rl.wire import Group
from orchestrator.leases import Held
from orchestrator.records import Assigned, decode_group

__all__ = ["Delivery", "Formed", "Readiness"]


class Formed(msgspec.Struct, frozen=True):
    """A batch that may leave once the journal is committed. `bodies`: its groups, as they lie in the journal; they
    leave as they came, for the trainer to decode."""

    assigned: Assigned
    bodies: tuple[Raw, ...]
    lags: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]  # of all samples

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(map(decode_group, self.bodies))


class Delivery(msgspec.Struct, frozen=True):
    outcome: str  # stored, no_signal, lag
    obsolete: Held | None  # somebody else's lease for the same group


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str
