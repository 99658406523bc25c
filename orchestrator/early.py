"""Leases that end before their time, found in a worker's heartbeat.

lost       the worker does not have it: its Lease was lost on the way, or what became of it was. The prompt goes
           back, and nobody is to blame; should a result come all the same, it counts
stale      its group would be too old for the next step already, and the next step only moves on: the worker is
           told to stop, and the prompt goes back as after a failure. One that takes longer than max_lag steps
           every time is given up after max_attempts
"""

from __future__ import annotations

from collections.abc import Iterable

from async_rl.wire import Heartbeat
from orchestrator.leases import Held
from orchestrator.pool import Failure
from orchestrator.session import Session

__all__ = ["UNREPORTED_BEATS", "end_early"]

UNREPORTED_BEATS = 3
"""Heartbeats in a row without a word about a lease. The first of them may have been sent before the lease arrived;
three lie further apart than any message takes."""


def end_early(
    session: Session, worker: str, beat: Heartbeat, now: float, heartbeat_s: float
) -> tuple[list[Failure], list[Held]]:
    """After the heartbeat's progress was noted: the leases that ended, and those of them to cancel."""
    ledger, evals = session.ledger, session.evals
    held = ledger.pool.of_worker(worker)
    _note_begun(held, beat)
    stale = [each for each in held if ledger.stale(each, now)]
    ended = [
        ledger.give_up_stale(each, f"{worker}: begun under version {each.begun}, and not done in time")
        for each in stale
    ]
    reported = {report.lease for report in beat.progress} | set(beat.finished)
    reason = f"{worker} does not have this lease: it was lost on the way"
    for each in _unreported(ledger.pool.of_worker(worker), reported, now, heartbeat_s / 2):
        ended.append(ledger.lose(each, reason))
    for each in _unreported(evals.pool.of_worker(worker), reported, now, heartbeat_s / 2):
        ended += evals.lose(each, reason)
    return ended, stale


def _note_begun(held: Iterable[Held], beat: Heartbeat) -> None:
    """What has a token by now has one of this version, or of an older one."""
    with_tokens = {report.lease for report in beat.progress if report.tokens}
    for each in held:
        if each.begun < 0 and each.lease in with_tokens:
            each.begun = beat.version


def _unreported(held: Iterable[Held], reported: set[int], now: float, apart_s: float) -> list[Held]:
    """Heartbeats out of turn are no further ones: they count when they are `apart_s` apart."""
    lost = []
    for each in held:
        if each.lease in reported:
            each.missing = 0
        elif now - each.missed >= apart_s:
            each.missing, each.missed = each.missing + 1, now
            if each.missing >= UNREPORTED_BEATS:
                lost.append(each)
    return lost
