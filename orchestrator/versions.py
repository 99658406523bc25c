"""The policy versions as one life of the trainer sees them: the ones that it has published, and how far away every
other one is.

Lag is counted in optimizer steps along the lineage. A version of an earlier incarnation lies on another branch, or on
what both have in common; from here it looks like one of this branch with the step that gives the same lag.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from async_rl.algo.staleness import Tree, version_lag

__all__ = ["Versions"]


class Versions:
    """`tree` knows `version`, the first of this life, and every one that is added."""

    def __init__(self, tree: Tree, version: int, now: float) -> None:
        self._tree = tree
        self._steps: dict[int, int | None] = {}  # what `step_of` found, until something is added
        # Likewise, `oldest_steps`.
        self._oldest: dict[tuple[tuple[int, ...], ...], tuple[int, ...] | None] = {}
        self._since: dict[int, float] = {}
        # Ascending: versions and their steps both only grow within an incarnation.
        self._order: list[int] = []
        self.add(version, now)

    @property
    def newest(self) -> int:
        return self._order[-1]

    @property
    def newest_step(self) -> int:
        return self._tree[self.newest].step

    def add(self, version: int, now: float) -> bool:
        """True where the version was new."""
        self._oldest.clear()
        self._steps.clear()  # it may be the same policy as one of another branch: then that one is nearer now
        if version in self._since:
            return False
        self._since[version] = now
        insort(self._order, version)
        return True

    def step_of(self, version: int) -> int | None:
        """The step that counts for lag. None: not a version of this run, or not yet published."""
        if version not in self._steps:
            self._steps[version] = self._count(version)
        return self._steps[version]

    def oldest_steps(self, samples: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
        """Of each sample, given the versions that sampled it, the step of its oldest policy. None where a version is
        not of this run."""
        found = self._oldest.get(samples, ())
        if found == ():
            steps = [[self.step_of(version) for version in sample] for sample in samples]
            known = [[step for step in sample if step is not None] for sample in steps]
            strange = any(len(a) != len(b) for a, b in zip(steps, known, strict=True))
            found = self._oldest[samples] = None if strange else tuple(map(min, known))
        return found

    def oldest_at(self, step: int) -> int:
        """The oldest version of this life that holds at least `step` optimizer steps, else the newest."""
        at = bisect_left(self._order, step, key=lambda version: self._tree[version].step)
        return self._order[min(at, len(self._order) - 1)]

    def age_s(self, version: int, now: float) -> float | None:
        """Seconds since we heard that the version was committed."""
        since = self._since.get(version)
        return None if since is None else now - since

    def behind(self, version: int, now: float) -> tuple[int, float] | None:
        """How many versions were committed after `version`, and for how long the first of them has been there, in
        seconds, as far as we heard. None: not a version of this run, or not yet published."""
        if self.step_of(version) is None:
            return None
        at = bisect_right(self._order, version)
        if at == len(self._order):
            return 0, 0.0
        earlier, child = 0, self._order[0]  # of the lives before, on our branch
        while at == 0 and version < (parent := self._tree[child].parent) < child and parent in self._tree:
            earlier, child = earlier + 1, parent
        return len(self._order) - at + earlier, now - self._since[self._order[at]]

    def _count(self, version: int) -> int | None:
        if version > self.newest:
            return None
        try:
            return -version_lag(self._tree, version, self.newest, 0)
        except KeyError:
            return None
