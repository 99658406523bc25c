"""Which groups each step had, on every branch that a resume may still follow.

    incarnation 1   steps 0 … 56        its checkpoint: step 50
    incarnation 2   resumes at 50       repeats 50 … 56 with the same groups, then goes on: 57 … 70
    incarnation 3   resumes at 50 too   repeats 50 … 70: what the newest trainer with the same past had

A step belongs to a branch whether its trainer took it itself or would have repeated it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from orchestrator.records import Assigned

__all__ = ["Branches"]


class Branches:
    """`sources`: of each incarnation, the one whose steps it repeats and the step where it began; -1: none."""

    def __init__(
        self, sources: Mapping[int, tuple[int, int]] | None = None, assigned: Iterable[Assigned] = ()
    ) -> None:
        self.sources: dict[int, tuple[int, int]] = dict(sources or {})
        self._assigned: dict[tuple[int, int], Assigned] = {
            (each.incarnation, each.step): each for each in assigned
        }
        self._uses = self._counted()

    def take(self, incarnation: int, origin: int, step: int) -> dict[int, Assigned]:
        """A trainer begins at `step`, from a checkpoint that incarnation `origin` wrote (-1: from nothing). The steps
        that it will repeat."""
        if incarnation not in self.sources:
            alike = [each for each in self.sources if self._has_been_at(each, origin, step)]
            self.sources[incarnation] = (max(alike, default=-1), step)
        again = {}
        at = step
        while (assigned := self.lookup(incarnation, at)) is not None:
            again[at] = assigned
            at += 1
        return again

    def assign(self, assigned: Assigned) -> None:
        before = self._assigned.get((assigned.incarnation, assigned.step))
        if before is not None:
            self._uses.subtract(before.ordinals)
        self._uses.update(assigned.ordinals)
        self._assigned[assigned.incarnation, assigned.step] = assigned

    def own(self, incarnation: int, step: int) -> Assigned | None:
        return self._assigned.get((incarnation, step))

    def lookup(self, incarnation: int, step: int) -> Assigned | None:
        """What step `step` had, or will have, on the branch of `incarnation`."""
        while incarnation >= 0:
            found = self._assigned.get((incarnation, step))
            if found is not None:
                return found
            incarnation, _ = self.sources.get(incarnation, (-1, 0))
        return None

    def before(self, incarnation: int, step: int) -> set[int]:
        """Ordinals of all groups in steps before `step`, on the branch of `incarnation`."""
        steps = {at for _, at in self._assigned if at < step}
        found = (self.lookup(incarnation, at) for at in steps)
        return {ordinal for assigned in found if assigned is not None for ordinal in assigned.ordinals}

    def has(self, ordinal: int) -> bool:
        """Whether a step of any branch has this group."""
        return self._uses[ordinal] > 0

    def ordinals(self) -> set[int]:
        return {ordinal for assigned in self._assigned.values() for ordinal in assigned.ordinals}

    def all(self) -> Iterator[Assigned]:
        return iter(self._assigned.values())

    def forget_before(self, step: int) -> None:
        self._assigned = {key: each for key, each in self._assigned.items() if each.step >= step}
        self._uses = self._counted()

    def _counted(self) -> Counter[int]:
        return Counter(ordinal for each in self._assigned.values() for ordinal in each.ordinals)

    def _has_been_at(self, incarnation: int, origin: int, step: int) -> bool:
        """Whether `incarnation` has the state in its past that `origin` had after `step` steps."""
        while incarnation != origin and incarnation >= 0:
            incarnation, began = self.sources.get(incarnation, (-1, 0))
            if began < step:
                return False
        return incarnation == origin
