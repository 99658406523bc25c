"""Which policy versions this incarnation of the trainer has published, and the optimizer step each one
holds.

Lag is counted in steps along one branch of the lineage. Versions of earlier incarnations lie on other
branches: they are unknown here, so no lease is given for them and no group of theirs is accepted.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Versions"]


class Versions:
    def __init__(self, version: int, step: int, now: float) -> None:
        self._step: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._order: list[
            int
        ] = []  # ascending: versions and their steps both only grow within an incarnation
        self.add(version, step, now)

    @property
    def newest(self) -> int:
        return self._order[-1]

    @property
    def newest_step(self) -> int:
        return self._step[self.newest]

    def add(self, version: int, step: int, now: float) -> bool:
        """True where the version was new."""
        if version in self._step:
            return False
        self._step[version] = step
        self._since[version] = now
        insort(self._order, version)
        return True

    def step_of(self, version: int) -> int | None:
        """None: not a version of this incarnation, or not yet published."""
        return self._step.get(version)

    def oldest_at(self, step: int) -> int:
        """The oldest version that holds at least `step` optimizer steps, else the newest."""
        at = bisect_left(self._order, step, key=self._step.__getitem__)
        return self._order[min(at, len(self._order) - 1)]

    def age_s(self, version: int, now: float) -> float | None:
        """Seconds since we heard that the version was committed."""
        since = self._since.get(version)
        return None if since is None else now - since
