"""Whether the steps that a resumed trainer repeats make the weights that they made before.

    version 41   step 41   digest a   the life before; its checkpoint: step 40
    version 58   step 41   digest a   this life, the same groups again: one policy, the branches are one again
                           digest b   something else computes here: the branches stay apart

The same groups give the same bits on the same hardware with the same software, settings and number of ranks. Where
they don't, nothing breaks, but lags are counted back to the checkpoint and forward again: worth a warning, once.
"""

from __future__ import annotations

import threading
from functools import partial

from async_rl.algo.staleness import Node, Tree
from async_rl.errors import Corrupt, NotFound, StoreError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.lineage import Manifest, list_versions, read_manifest
from async_rl.weights.parallel import side_by_side

__all__ = ["Repeats", "earlier_versions", "made_before"]

log = get_logger(__name__)

_LOOK_BACK = 256
"""Versions before our first one: more steps than lie between two checkpoints, unless those are very far apart."""

_READ_LIMIT_S = 10.0
"""A commit of a repeated step waits so long for the list of earlier versions (it is read from the start on, and there
by then, unless the store is slow). After that there is nothing to compare with."""


def made_before(tree: Tree, origin: int, step: int, first: int) -> int | None:
    """The newest version before `first` that a life before ours made of the state of `origin` (the checkpoint's
    version) in `step` steps; None where none is known."""
    ours = tree.first_like(origin)
    for version in sorted((v for v, node in tree.items() if v < first and node.step == step), reverse=True):
        at = version
        while at in tree and tree[at].step > tree[origin].step:
            at = tree[at].parent
        if at in tree and tree.first_like(at) == ours:
            return version
    return None


def earlier_versions(store: ObjectStore, first: int) -> Tree:
    """The newest ones before version `first`. Raises StoreErrors."""
    numbers = [version for version in list_versions(store) if version < first][-_LOOK_BACK:]
    found = side_by_side(partial(_read, store), numbers)
    return Tree({m.version: Node(m.parent, m.step, m.digest) for m in found if m is not None})


def _read(store: ObjectStore, version: int) -> Manifest | None:
    try:
        return read_manifest(store, version)
    except (NotFound, Corrupt):
        return None


class Repeats:
    """Rank 0's. `first`: our first version; `origin`: the version whose state we began with, -1 for a new run."""

    def __init__(self, store: ObjectStore, first: int, origin: int) -> None:
        self.different = 0
        """Versions of repeated steps that are not what they were."""
        self._store, self._first, self._origin = store, first, origin
        self._expected: set[int] = set()
        self._tree = Tree()
        self._reader: threading.Thread | None = None
        if 0 <= origin < first:
            self._reader = threading.Thread(target=self._look_back, name="earlier versions", daemon=True)
            self._reader.start()

    def expect(self, step: int) -> None:
        """The weights after `step` steps will be those of an earlier life: they are trained on the same groups."""
        self._expected.add(step)

    def committed(self, manifest: Manifest) -> None:
        """One of ours (the publisher's thread)."""
        if manifest.step not in self._expected or self._reader is None:
            return
        self._reader.join(_READ_LIMIT_S)
        if self._reader.is_alive() or self._origin not in self._tree:
            return
        before = made_before(self._tree, self._origin, manifest.step, self._first)
        if before is None or self._tree[before].digest == manifest.digest:
            return
        self.different += 1
        if self.different == 1:
            log.warning(
                "a repeated step made other weights than before, of the same groups: hardware, software, settings "
                "or the number of ranks have changed. Training is as good as it was, but groups sampled by the "
                "versions of the life before now count as further away (back to the checkpoint and forward "
                "again), so some may be dropped as too old",
                step=manifest.step,
                version=manifest.version,
                digest=manifest.digest,
                version_before=before,
                digest_before=self._tree[before].digest,
                checkpoint_step=self._tree[self._origin].step,
            )

    def _look_back(self) -> None:
        try:
            self._tree = earlier_versions(self._store, self._first)
        except StoreError as error:
            log.warning("can't look whether repeated steps make the same weights", reason=error.message)
