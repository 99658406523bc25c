"""What is known about each worker, and what follows from it. Pure.

    behaviour logprobs (verification.py) ─┐
    rewards that were scored again        │
    texts that can't be (unscored.py)     ├─►  unjudged ─► good ─► suspect ─► to be quarantined, with a reason
    groups refused for what they say      ┘

Nothing of it is written down: after a restart of the orchestrator it is gathered anew. Who is in quarantine is the
ledger's to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from async_rl.wire import Key, Measured
from orchestrator.config import VerifyConfig
from orchestrator.unscored import Unscored
from orchestrator.verification import Verifier

__all__ = ["Conduct", "Verdict"]

RESCORED_WINDOW = 64
MOST_WORKERS = 4096
"""Remembered; a fleet whose names change for months must not fill the memory. The longest unheard is forgotten."""


class Verdict(NamedTuple):
    state: str  # unjudged, good, suspect, guilty
    reason: str
    groups: int


class _Record(msgspec.Struct):
    refused: deque[str]  # of the last groups: why each was refused, "" for one that was not
    rescored: deque[str]  # of the last groups that were scored again: what was wrong, ""
    suspect: bool = False  # and that was said


class Conduct:
    def __init__(self, config: VerifyConfig) -> None:
        self._config = config
        self._verifier = Verifier(config)
        self._unscored = Unscored()
        self._records: dict[str, _Record] = {}

    def checked(self, step: int, rows: Iterable[Measured], worker_of: Callable[[Key], str]) -> list[str]:
        """The trainer has measured the groups of a step; the workers it is about."""
        workers = sorted(self._verifier.add(step, rows, worker_of))
        for worker in workers:
            self._record(worker)
        return workers

    def examined(self, worker: str, fault: str) -> None:
        """A group of the worker was accepted (`fault` empty), or refused for what it says."""
        self._record(worker).refused.append(fault)

    def rescored(self, worker: str, wrong: str, failed: str = "") -> None:
        """Rewards of a group were scored again: as the worker had said (`wrong` empty), or not; or its texts can't be
        (`failed`)."""
        record = self._record(worker)
        self._unscored.add(worker, failed)
        if not failed:
            record.rescored.append(wrong)

    def forget(self, worker: str) -> None:
        """Begin anew with it."""
        self._records.pop(worker, None)
        self._verifier.forget(worker)
        self._unscored.forget(worker)

    def newly_suspect(self, worker: str, verdict: Verdict) -> bool:
        """Whether it is suspect now and was not when this was asked last: so that it is said once."""
        record = self._records.get(worker)
        if record is None:
            return False
        before, record.suspect = record.suspect, verdict.state == "suspect"
        return record.suspect and not before

    def verdict(self, worker: str) -> Verdict:
        config, record = self._config, self._records.get(worker)
        if record is None:
            return Verdict("unjudged", "", 0)
        found = self._verifier.finding(worker)
        wrong = [each for each in record.rescored if each]
        faults = [each for each in record.refused if each]
        verdicts = [Verdict(found.state, found.reason, found.groups)]
        if wrong:
            many = len(wrong) >= config.rescore_wrong
            reason = (
                f"{len(wrong)} of {len(record.rescored)} groups scored again had wrong rewards: {wrong[-1]}"
            )
            verdicts.append(Verdict("guilty" if many else "suspect", reason, found.groups))
        state, reason = self._unscored.finding(worker, config.rescore_wrong)
        if state != "good":
            verdicts.append(Verdict(state, reason, found.groups))
        if faults:
            many = 0 < config.max_faults <= len(faults)
            reason = f"{len(faults)} of its last {len(record.refused)} groups were refused: {faults[-1]}"
            verdicts.append(Verdict("guilty" if many else "suspect", reason, found.groups))
        worst = max(verdicts, key=lambda each: _WORSE.index(each.state))
        if worst.state == "guilty" and not config.quarantine:
            return worst._replace(state="suspect")
        return worst

    def _record(self, worker: str) -> _Record:
        record = self._records.pop(worker, None)
        if record is None:
            record = _Record(deque(maxlen=self._config.fault_window), deque(maxlen=RESCORED_WINDOW))
        self._records[worker] = record
        while len(self._records) > MOST_WORKERS:
            self.forget(next(iter(self._records)))
        return record


_WORSE = ("unjudged", "good", "suspect", "guilty")
