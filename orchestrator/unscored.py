"""Texts that can't be scored again: the environment raises, ends, or does not end. Is that the environment, or one
worker's texts? Pure.

A worker that sent a reward says that the environment scored the text for it; a deterministic environment then scores
it for us, too. That it fails here may still be our own trouble (a package that is missing here, a disk that is full)
or that of a hard text that any honest worker samples now and then. So a failure counts only where a text that was
scored before is scored again between two failures (rescoring.py), and what is judged is how often:

    of a worker's last n texts f failed, of all others' last ones F of N:
    chance = P(f or more of n), if all n + N texts were shuffled       hypergeometric tail (Fisher's exact test)

which honest workers of one policy meet, however often texts fail. Where a worker is alone there is nobody to compare
with, and it becomes suspect at most.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Unscored", "tail"]

WINDOW = 64
GUILTY = 1e-6
"""Of the chance. It is looked at once for each text scored again, one of fifty groups: over a million groups one
false alarm in fifty runs, and then only where somebody has the other `least` failures, too."""
SUSPECT = 1e-3


class Unscored:
    """The last texts of each worker that were to be scored again: what went wrong, "" where nothing did."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[str]] = {}
        self._texts = self._failures = 0  # of all workers

    def add(self, worker: str, failed: str) -> None:
        seen = self._seen.setdefault(worker, deque())
        seen.append(failed)
        self._count(failed, 1)
        if len(seen) > WINDOW:
            self._count(seen.popleft(), -1)

    def forget(self, worker: str) -> None:
        for failed in self._seen.pop(worker, ()):
            self._count(failed, -1)

    def finding(self, worker: str, least: int) -> tuple[str, str]:
        """State (good, suspect, guilty) and reason. `least`: failures before it may be guilty."""
        seen = self._seen.get(worker, ())
        failures = [each for each in seen if each]
        if not failures:
            return "good", ""
        texts, others = len(seen), self._texts - len(seen)
        failed_there = self._failures - len(failures)
        reason = f"{len(failures)} of its {texts} groups could not be scored again"
        if not others:
            state = "suspect" if len(failures) >= least else "good"
            return state, f"{reason}, with no other worker to compare with: {failures[-1]}"
        chance = tail(len(failures), texts, self._failures, texts + others)
        reason += f", of others {failed_there} of {others}: {failures[-1]}"
        if chance < GUILTY and len(failures) >= least:
            return "guilty", reason
        return "suspect" if chance < SUSPECT else "good", reason

    def _count(self, failed: str, by: int) -> None:
        self._texts += by
        self._failures += by * bool(failed)


def tail(found: int, drawn: int, marked: int, whole: int) -> float:
    """The probability of `found` or more marked ones among `drawn` of `whole`, of which `marked` are."""

    def log_ways(of: int, some: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)

    all_ways = log_ways(whole, drawn)
    most = min(drawn, marked)
    least = max(found, drawn + marked - whole)
    logs = (
        log_ways(marked, each) + log_ways(whole - marked, drawn - each) - all_ways
        for each in range(least, most + 1)
    )
    return min(1.0, sum(map(math.exp, logs)))
