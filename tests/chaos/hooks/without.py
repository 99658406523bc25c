"""Guards of the control plane that a real process can be started without (ASYNC_RL_TEST_WITHOUT)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def take_out(names: Iterable[str], role: str) -> None:
    """For the rest of this process."""
    for name in names:
        if role == "orchestrator" and name == "fsync before the ack":
            _never_commit()
        elif role == "orchestrator":
            from tests.chaos.delivery import GUARDS

            next(GUARDS[name]())
        elif name == "the fence":
            _no_fence()


def _never_commit() -> None:
    """SIGKILL leaves what was written: without a write, it is as lost as in a power cut."""
    from orchestrator.commits import Commits

    def answer_at_once(self: Any) -> Any:
        answers, self._waiting = self._waiting, []
        self._messages = 0
        return answers

    Commits.begin = answer_at_once


def _no_fence() -> None:
    """The trainer's half: that it looks for newer claims, and stops where it finds one."""
    from async_rl.weights import lineage
    from workers import trainer

    lineage.check_not_fenced = trainer.check_not_fenced = lambda store, ours: None
