"""What goes out in one turn of the orchestrator: messages by peer, in the order in which they are to be sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from async_rl.log import get_logger
from async_rl.transport.base import printable
from async_rl.wire import AnyMessage, Cancel, Refused
from orchestrator.handshake import Refusal
from orchestrator.leases import Held
from orchestrator.roster import Roster
from orchestrator.tally import Tally

__all__ = ["Outbox", "Outgoing"]

log = get_logger(__name__)

Outgoing: TypeAlias = list[tuple[bytes, AnyMessage]]


class Outbox:
    def __init__(self, roster: Roster, tally: Tally) -> None:
        self._roster = roster
        self._tally = tally
        self._messages: Outgoing = []

    def take(self) -> Outgoing:
        """All of it; what follows is of the next turn."""
        taken, self._messages = self._messages, []
        return taken

    def send(self, peer: bytes, message: AnyMessage) -> None:
        self._messages.append((peer, message))

    def to_all(self, message: AnyMessage) -> None:
        """To every worker that is here."""
        for worker in self._roster.here:
            self.send(worker.peer, message)

    def cancel(self, held: Iterable[Held], reason: str) -> None:
        """One message for each worker, if it is here."""
        by_worker: dict[str, list[int]] = defaultdict(list)
        for each in held:
            by_worker[each.worker].append(each.lease)
        for name, leases in by_worker.items():
            worker = self._roster.get(name)
            if worker is not None and worker.gone_since is None:
                self.send(worker.peer, Cancel(tuple(leases), reason))

    def refuse(self, peer: bytes, refusal: Refusal) -> None:
        """It is counted."""
        self._tally.refused[refusal.code] += 1
        log.debug("refused", peer=printable(peer), code=refusal.code, reason=refusal.reason)
        self.send(peer, Refused(refusal.reason, refusal.hint, refusal.retry))
