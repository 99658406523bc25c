"""The reader's side: find the newest version, bring it here, let nothing through that was not verified.

    newest(after)     list versions/, then claims: the newest that is not a zombie's
    fetch(manifest)   follower.py: the shortest path in bytes from what is here, verified, applied to the shadow
    hf_folder(local)  the same folder, made complete for from_pretrained
    scrub()           hash the whole shadow: an update only sees what it touches

    cache_dir/<run id>/shadow/model-00001-of-00002.safetensors …    one version's state, changed in place
    cache_dir/<run id>/incoming/                                    what is on its way, and the lock

No torch here: only bytes, hashes and integers. The state's digest covers these files; what an engine made of them on
its device is beyond it. Whoever reads the files must be done before the next `fetch`: it changes them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from async_rl.errors import Corrupt, WeightsError
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import disk_errors, write_whole
from async_rl.weights.follower import Follower, Progress
from async_rl.weights.lineage import (
    Claim,
    Manifest,
    list_versions,
    newest_admissible,
    read_claims,
    read_manifest,
    wanted_version,
)
from async_rl.weights.run import RunInfo, fetch_model_files, open_run
from async_rl.weights.shadow import HELD, Shadow, read_held

__all__ = ["LocalVersion", "Progress", "Subscriber", "export", "pull"]

log = get_logger(__name__)

_INCOMING = ".incoming"
_INDEX = "model.safetensors.index.json"


class LocalVersion(Struct, frozen=True):
    """A verified version on this machine. The files are this version until the next fetch."""

    version: int
    step: int
    shards: list[Path]  # safetensors files, all in one folder
    weight_map: dict[str, int]  # tensor name -> index into shards
    fetched_bytes: int = 0  # downloaded since the fetch before, failed attempts included
    path: str = ""  # the way it came, in words


class Subscriber:
    def __init__(
        self,
        store: ObjectStore,
        run: RunInfo,
        cache_dir: Path,
        config: WeightsConfig,
        needs: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`needs`: first and last + 1 of the elements needed of each tensor (flat, in its Hugging Face layout); None:
        everything, as the engines of one host share a shadow. With it only the tiles around them are read, and the
        files are holes elsewhere. A delta's tile is checked by its hash and by what it must do to the digest, a full
        state's by its digest, and what all tiles together say by the manifest's; a scrub goes by the sum of what was
        verified. (Full versions of runs before format 5 say nothing of their tiles: packs that hold anything needed
        are read and verified whole, and the manifest's digest can't be compared.)
        """
        self.store, self.run, self.config = store, run, config
        folder = cache_dir / run.run
        self._follower = Follower(store, run, config, folder / "shadow", folder / "incoming", needs)
        self._claims: list[Claim] = []
        self._told_bytes = 0
        self._coming: int | None = None
        self.lacks = -1
        """The version to which the last fetch found no whole way; -1: it found one, or the store was away."""
        self._unscrubbed = 0

    @property
    def needed_versions(self) -> tuple[int, ...]:
        """What this reader holds and what it is on the way to: garbage collection keeps the paths between."""
        return tuple(
            sorted({version for version in (self._follower.held, self._coming) if version is not None})
        )

    def newest(self, after: int = -1) -> Manifest | None:
        """The newest version greater than `after` that counts; None if there is none. Raises Corrupt,
        StoreErrors."""
        numbers = list_versions(self.store, after)  # before the claims, see lineage.py
        if not numbers:
            return None
        with ThreadPoolExecutor(1, thread_name_prefix="newest") as pool:
            # Beside the claims: a round trip less.
            likely = pool.submit(read_manifest, self.store, numbers[-1])
            self._claims += read_claims(self.store, self._claims[-1].incarnation if self._claims else -1)
            for number in reversed(numbers):
                manifest = likely.result() if number == numbers[-1] else read_manifest(self.store, number)
                found = newest_admissible([manifest], self._claims)
                if found is not None:
                    return found
        return None

    def next_poll_s(self) -> float:
        """How long to wait before looking again: a fleet must not ask in step."""
        return self.config.poll_s * random.uniform(0.5, 1.5)

    def fetch(self, manifest: Manifest, progress: Progress | None = None) -> LocalVersion:
        """The shadow as `manifest`'s version, verified.

        Raises Corrupt (naming the objects; no other path is left), WeightsError (no room, the folder is in use),
        StoreErrors. Memory: see follower.py.
        """
        self._coming = manifest.version
        try:
            shadow, route = self._follower.reach(manifest, progress)
            self.lacks = -1
        except Corrupt:
            self.lacks = manifest.version
            raise
        finally:
            self._coming = None
        self._unscrubbed += 1
        fetched = self._follower.downloaded - self._told_bytes
        self._told_bytes += fetched
        return _local(shadow, manifest, fetched, route.describe())

    def scrub(self) -> bool:
        """Hash the whole shadow against its digest. False where it was damaged on this machine (logged as an error):
        it is dropped, and the next fetch begins from nothing."""
        self._unscrubbed = 0
        return self._follower.scrub()

    @property
    def scrub_due(self) -> bool:
        """Whether scrub_every versions were fetched since the last one."""
        return 0 < self.config.scrub_every <= self._unscrubbed

    def hf_folder(self, local: LocalVersion) -> Path:
        """The shadow's folder with config, tokenizer and index: AutoModelForCausalLM.from_pretrained loads it."""
        folder = local.shards[0].parent
        _complete(self.store, self.run, local, folder)
        return folder

    def close(self) -> None:
        """End a fetch of another thread, and let others use the cache folder. What is in it stays. Not to be used any
        more."""
        self._follower.close()


# ---------------------------------------------------------------- folders of one's own


def pull(
    store: ObjectStore,
    version: int | None,
    out_dir: Path,
    config: WeightsConfig | None = None,
    progress: Progress | None = None,
    describe: Callable[[str], None] | None = None,
) -> Path:
    """A working copy of one version (None: the newest) at `out_dir`: a complete Hugging Face folder, which a later
    pull of any other version changes in place by the shortest path.

    `out_dir` must be absent, empty, or such a copy of this run; files of one's own in it stay as they are. Its first
    pull, interrupted, leaves a folder without a model, and goes on from there. `describe` is told the path taken.
    Raises WeightsError, Corrupt, StoreErrors.
    """
    run = open_run(store)
    _check_ours(out_dir, run)
    _make_copy(store, run, version, out_dir, config, progress, describe)
    return out_dir


def _check_ours(folder: Path, run: RunInfo) -> None:
    """Raises WeightsError unless it is absent, empty, or a copy of this run, whole or begun."""
    held = read_held(folder)
    ours = held.run == run.run if held is not None else (folder / _INCOMING).is_dir()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        what = f"a copy of another run ({held.run})" if held is not None else "not an empty folder"
        raise WeightsError(f"{folder} is {what}: nothing was written", hint="choose another folder")


def export(
    store: ObjectStore,
    version: int | None,
    out_dir: Path,
    config: WeightsConfig | None = None,
    progress: Progress | None = None,
    describe: Callable[[str], None] | None = None,
) -> Path:
    """A plain Hugging Face folder of one version (None: the newest) at `out_dir`, which must be absent or empty.

    It appears when it is whole; an interrupted export leaves `<out_dir>.partial` and goes on from there.
    Raises WeightsError, Corrupt, StoreErrors.
    """
    out_dir = out_dir.resolve()  # a link stays one
    if out_dir == Path.cwd():
        raise WeightsError(
            f"{out_dir} would be replaced, and we stand in it: nothing was written",
            hint="name a folder in it, or one beside it",
        )
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise WeightsError(
            f"{out_dir} is not an empty folder: nothing was written", hint="choose another folder"
        )
    partial = out_dir.with_name(out_dir.name + ".partial")
    run = open_run(store)
    _check_ours(partial, run)
    _make_copy(store, run, version, partial, config, progress, describe)
    with disk_errors(out_dir, 0):
        if out_dir.exists():
            out_dir.rmdir()
        partial.rename(out_dir)
        (
            out_dir / HELD
        ).unlink()  # last: without it, what a killed export left could not be told from a user's folder
    return out_dir


def _make_copy(
    store: ObjectStore,
    run: RunInfo,
    version: int | None,
    folder: Path,
    config: WeightsConfig | None,
    progress: Progress | None,
    describe: Callable[[str], None] | None,
) -> None:
    manifest = wanted_version(store, version)
    follower = Follower(store, run, config or WeightsConfig(), folder, folder / _INCOMING)
    try:
        shadow, route = follower.reach(manifest, progress)
        if describe is not None:
            describe(route.describe())
        _complete(store, run, _local(shadow, manifest, 0, ""), folder)
        shutil.rmtree(folder / _INCOMING)
    finally:
        follower.close()


def _local(shadow: Shadow, manifest: Manifest, fetched: int, path: str) -> LocalVersion:
    mapped = shadow.mapped
    return LocalVersion(
        manifest.version, manifest.step, list(mapped.files), dict(mapped.weight_map), fetched, path
    )


def _complete(store: ObjectStore, run: RunInfo, local: LocalVersion, folder: Path) -> None:
    """Everything beside the weights."""
    fetch_model_files(store, run, folder)
    if len(local.shards) > 1:  # transformers finds the weights by this index
        total = sum(shard.stat().st_size for shard in local.shards)
        weight_map = {name: local.shards[index].name for name, index in sorted(local.weight_map.items())}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(folder / _INDEX, json.dumps(index, indent=2).encode())
    else:
        (folder / _INDEX).unlink(missing_ok=True)
