"""Who may take part: the rules for a trainer's Attach and a worker's Hello, as pure decisions.

A refusal names both sides of what differs, because the person who reads it sees only one of them.
"""

from __future__ import annotations

import msgspec

from async_rl.wire import PROTOCOL, Attach, Hello
from orchestrator.records import Opened
from orchestrator.roster import Worker

__all__ = ["Refusal", "in_quarantine", "refuse_attach", "refuse_hello", "refuse_trainer"]


class Refusal(msgspec.Struct, frozen=True):
    code: str  # to count by
    reason: str
    hint: str = ""
    retry: bool = False


_SAME_VERSION = "run the same version of async-rl on both sides"
_NEWER_TRAINER = "a newer trainer took over; stop this one"
UNATTACHED = Refusal("unattached", "this orchestrator does not know you: attach first", retry=True)
UNKNOWN_WORKER = Refusal("unknown", "this orchestrator does not know you: say Hello again", retry=True)


def in_quarantine(worker: str, reason: str, left_s: float) -> Refusal:
    """It may come again, and is told until then: a worker that ended would only be started anew by whatever runs it.
    The reason stays the same from one Hello to the next, so that a worker's log has it once."""
    return Refusal(
        "quarantined",
        f"worker {worker} is in quarantine: {reason}",
        f"it may try again in {left_s:.0f} s; compare its release, weights, engine and environment with the other "
        "workers'; the limits are in [orchestrator.verify]",
        retry=True,
    )


def refuse_attach(
    attach: Attach, current: Attach | None, opened: Opened | None, newest: int, *, spool: str, ended: bool
) -> Refusal | None:
    """`current`: of the trainer that has the run, over another connection or in an older life. `opened`,
    `newest`: the run of the spool, and the last incarnation that took it; `spool`: where that is."""
    if attach.protocol != PROTOCOL:
        reason = f"the trainer speaks protocol {attach.protocol}, the orchestrator {PROTOCOL}"
        return Refusal("protocol", reason, _SAME_VERSION)
    for version, parent in ((attach.version, attach.parent), *(known[:2] for known in attach.known)):
        if parent >= version:
            reason = f"version {version} can't have followed version {parent}: versions only grow"
            return Refusal("malformed", reason, _SAME_VERSION)
    if opened is not None and (attach.run, attach.fingerprint) != (opened.run, opened.fingerprint):
        reason = (
            f"this orchestrator serves run {opened.run!r} (model {opened.fingerprint}), as its spool {spool} says; "
            f"the trainer has run {attach.run!r} (model {attach.fingerprint})"
        )
        hint = "start an orchestrator for each run; if that run is gone, remove its spool and start this one again"
        return Refusal("run", reason, hint)
    if current is None:
        if attach.incarnation < newest:
            reason = f"incarnation {newest} has taken the run, this is incarnation {attach.incarnation}"
            return Refusal("incarnation", reason, _NEWER_TRAINER)
        return None
    if attach.incarnation <= current.incarnation:
        reason = (
            f"incarnation {current.incarnation} has the run over another connection, "
            f"this is incarnation {attach.incarnation}"
        )
        return Refusal("incarnation", reason, _NEWER_TRAINER)
    if ended:
        return Refusal("finished", "this orchestrator is finished and about to end", retry=True)
    return None


def refuse_trainer(peer: bytes, incarnation: int, current: Attach | None, at: bytes) -> Refusal | None:
    """For every later request of a trainer; `at`: the peer that has the run."""
    if current is None or incarnation > current.incarnation:
        return UNATTACHED
    if incarnation < current.incarnation:
        reason = f"incarnation {current.incarnation} has the run, this is incarnation {incarnation}"
        return Refusal("incarnation", reason, _NEWER_TRAINER)
    if peer != at:
        reason = f"incarnation {incarnation} is attached over another connection"
        return Refusal("incarnation", reason, "use one TrainerLink per incarnation")
    return None


def refuse_hello(hello: Hello, current: Attach | None, holder: Worker | None, now: float) -> Refusal | None:
    """`holder`: another process that is here under the worker's name."""
    if hello.protocol != PROTOCOL:
        reason = f"worker {hello.worker} speaks protocol {hello.protocol}, the orchestrator {PROTOCOL}"
        return Refusal("protocol", reason, _SAME_VERSION)
    if current is None:
        return Refusal("no_trainer", "no trainer attached yet", retry=True)
    if (hello.run, hello.fingerprint) != (current.run, current.fingerprint):
        reason = (
            f"worker {hello.worker} has run {hello.run!r} (model {hello.fingerprint}), "
            f"this orchestrator serves run {current.run!r} (model {current.fingerprint})"
        )
        return Refusal("run", reason, "give the worker the store URL of the trainer's run")
    if holder is not None:
        heard_s = now - holder.last_seen
        return Refusal(
            "name_taken",
            f"another process is here as worker {hello.worker}, last heard {heard_s:.1f} s ago",
            "give each worker a name of its own; after a crash, the name is free again in a few seconds",
            retry=True,
        )
    return None
