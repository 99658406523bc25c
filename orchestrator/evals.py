"""Held-out evaluation: for some versions, one sample of each of the first m held-out prompts, by the same
workers.

Their leases come before those of training and take no slot. A version is measured by workers that serve it
or a newer one; a worker is never asked to go back. Two evaluations may be open at a time: a third one,
begun by a trainer that is faster than its workers, gives up the oldest. Pure: the time is passed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from async_rl.wire import EvalScore, Group, Key, LeaseProgress
from orchestrator.config import EvalConfig
from orchestrator.leases import Held, LeaseTable, name_of
from orchestrator.pool import Failure, PromptPool
from orchestrator.versions import Versions

__all__ = ["Evaluations"]

MAX_OPEN = 2
"""The newest and the one before it; more would starve training with measurements of the past."""


class _Open(msgspec.Struct):
    version: int
    step: int
    rewards: dict[int, float] = {}  # prompt ordinal -> reward
    failed: int = 0  # prompts given up


class Evaluations:
    """`dropped` and `dead_letters` are those of the ledger: held-out prompts that were given up, one by one
    or with their evaluation, count as `evaluation`."""

    def __init__(
        self,
        config: EvalConfig,
        ids: Iterator[int],
        *,
        lease_s: float,
        max_attempts: int,
        dropped: Counter[str],
        dead_letters: deque[tuple[str, str]],
    ) -> None:
        self._dropped = dropped
        self._dead_letters = dead_letters
        self._config = config
        self._pool = PromptPool(LeaseTable(ids, lease_s), max_attempts)
        self._open: dict[int, _Open] = {}
        self._started: set[int] = set()
        self._fresh: list[EvalScore] = []

    @property
    def pool(self) -> PromptPool:
        return self._pool

    @property
    def open(self) -> int:
        """Evaluations that are not finished."""
        return len(self._open)

    def may_lease(self, version: int, versions: Versions) -> bool:
        """Whether a worker that serves `version` would get a lease now."""
        if versions.step_of(version) is None:
            return False
        return any(key.group <= version for key in self._pool.waiting)

    def due(self, version: int) -> bool:
        return self._config.every > 0 and version % self._config.every == 0

    def start(self, version: int, step: int) -> list[Held]:
        """Begin to measure a version, once. Returns the leases of an older evaluation that is given up for
        it."""
        if not self._config.every or version in self._started:
            return []
        self._started.add(version)
        self._open[version] = _Open(version, step)
        for ordinal in range(self._config.prompts):
            self._pool.add(Key("eval", ordinal, version))
        return self._give_up(min(self._open)) if len(self._open) > MAX_OPEN else []

    def settled(self, key: Key) -> bool:
        """Whether the group of this key was delivered before, or is not wanted any more."""
        return key.split == "eval" and key.group in self._started and key not in self._pool

    def lease(self, worker: str, version: int, versions: Versions, now: float) -> Held | None:
        if not self.may_lease(version, versions):
            return None
        key = next(key for key in self._pool.waiting if key.group <= version)
        return self._pool.grant(key, worker, version, now)

    def progress(self, report: LeaseProgress, worker: str, now: float) -> None:
        self._pool.progress(report, worker, now)

    def deliver(self, lease: int, worker: str, group: Group) -> Held | None:
        """Take an examined group; returns somebody else's lease for the same one."""
        obsolete = self._pool.deliver(lease, group.key, worker)
        open_ = self._open[group.key.group]
        open_.rewards[group.key.ordinal] = group.samples[0].reward
        self._maybe_finish(open_)
        return obsolete

    def fail(self, lease: int, worker: str, reason: str, *, counted: bool = True) -> list[Failure]:
        failure = self._pool.fail(lease, worker, reason, counted=counted)
        return self._note([failure] if failure is not None else [])

    def expire(self, now: float) -> list[Failure]:
        return self._note(self._pool.expire(now))

    def lose(self, held: Held, reason: str) -> list[Failure]:
        return self._note([self._pool.lose(held, reason)])

    def worker_left(self, worker: str, reason: str, *, counted: bool) -> list[Failure]:
        return self._note(self._pool.worker_left(worker, reason, counted=counted))

    def give_up_all(self) -> list[Held]:
        return [held for version in list(self._open) for held in self._give_up(version)]

    @property
    def untold(self) -> tuple[EvalScore, ...]:
        """The scores that the trainer has not got yet."""
        return tuple(self._fresh)

    def take_finished(self) -> tuple[EvalScore, ...]:
        """The scores since the last call."""
        scores, self._fresh = tuple(self._fresh), []
        return scores

    # ---------------------------------------------------------------- inside

    def _note(self, failures: list[Failure]) -> list[Failure]:
        for failure in failures:
            if failure.given_up:
                open_ = self._open[failure.key.group]
                open_.failed += 1
                self._dropped["evaluation"] += 1
                self._dead_letters.append((name_of(failure.key), failure.reason))
                self._maybe_finish(open_)
        return failures

    def _maybe_finish(self, open_: _Open) -> None:
        if len(open_.rewards) + open_.failed < self._config.prompts:
            return
        del self._open[open_.version]
        if open_.rewards:
            rewards = open_.rewards.values()
            self._fresh.append(
                EvalScore(open_.version, open_.step, sum(rewards) / len(rewards), len(rewards))
            )

    def _give_up(self, version: int) -> list[Held]:
        del self._open[version]
        keys = [Key("eval", ordinal, version) for ordinal in range(self._config.prompts)]
        waiting = [key for key in keys if key in self._pool]
        self._dropped["evaluation"] += len(waiting)
        return [held for key in waiting if (held := self._pool.drop(key)) is not None]
