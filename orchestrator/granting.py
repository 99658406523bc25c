"""Leases are given out: one at a time, to the worker whose turn it is (fair.py), as far as admission allows
(ledger.py). Pure, time passed in."""

from __future__ import annotations

from async_rl.envs.base import Environment
from async_rl.wire import Lease, RunSettings
from orchestrator.config import OrchestratorConfig
from orchestrator.fair import Emptiest
from orchestrator.leases import Held
from orchestrator.outbox import Outbox
from orchestrator.prompts import prompt_of
from orchestrator.roster import Roster
from orchestrator.seeds import seeds_of
from orchestrator.session import Session

__all__ = ["Granting"]


class Granting:
    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Environment,
        settings: RunSettings,
        seed: int,
        roster: Roster,
        emptiest: Emptiest,
        outbox: Outbox,
    ) -> None:
        """`settings`: how groups are sampled. `seed`: the run's."""
        self._config = config
        self._environment = environment
        self._settings = settings
        self._seed = seed
        self._roster = roster
        self._emptiest = emptiest
        self._outbox = outbox

    def grant(self, session: Session, now: float) -> None:
        """All leases that there are now: evaluation first, then training as admission allows."""

        def wanted(version: int) -> bool:
            training = session.finish_by is None and session.ledger.may_lease(version, now)
            return training or session.evals.may_lease(version, session.versions)

        self._emptiest.turn(session.most_leases)
        oldest = session.versions.oldest_at(session.ledger.next_step - self._config.max_lag)
        while (worker := self._emptiest.pop(wanted)) is not None:
            held = session.evals.lease(worker.name, worker.version, session.versions, now)
            if held is None:
                held = session.ledger.lease(worker.name, worker.version, now)
            assert held is not None, "it was wanted"
            self._roster.granted(worker)
            self._emptiest.touch(worker)
            self._outbox.send(worker.peer, self._lease(held, oldest))

    def _lease(self, held: Held, oldest: int) -> Lease:
        """`oldest`: version that is not too old for the next step."""
        key = held.key
        evaluation = key.split == "eval"
        return Lease(
            lease=held.lease,
            key=key,
            prompt=prompt_of(self._environment, key.split, key.ordinal),
            seeds=seeds_of(self._seed, key, 1 if evaluation else self._settings.group_size),
            sampling=self._settings.sampling,
            deadline_s=self._config.lease_s,
            oldest_version=key.group if evaluation else oldest,
        )
