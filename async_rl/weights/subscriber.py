"""The reader's side: find the newest version, fetch it to disk, let nothing through that was not verified.

    newest(after)     list versions/, then claims: the newest that is not a zombie's
    fetch(manifest)   parallel ranged gets ─► files ─► SHA-256 ─► safetensors headers, against run.json
    hf_folder(local)  the same folder, made complete for from_pretrained
    prune(keep)       forget the oldest

    cache_dir/<run id>/model/…                         config, tokenizer, …: once
    cache_dir/<run id>/0000000042/model-00001-of-00002.safetensors

A file under its final name had its hash verified when it was renamed, and is verified again before it is
reused. No torch here: only bytes, hashes and headers. One process per cache folder: `prune` knows of no
other readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from async_rl.errors import (
    AccessDenied,
    BucketMissing,
    Corrupt,
    NotFound,
    StoreError,
    StoreUnavailable,
    WeightsError,
)
from async_rl.log import get_logger
from async_rl.store.base import ObjectStore
from async_rl.weights.config import WeightsConfig
from async_rl.weights.files import disk_errors, part_file, write_whole
from async_rl.weights.lineage import (
    Claim,
    Manifest,
    Pack,
    admissible,
    list_versions,
    newest_admissible,
    read_claims,
    read_manifest,
)
from async_rl.weights.packs import read_header
from async_rl.weights.run import RunInfo, fetch_model_files, open_run

__all__ = ["LocalVersion", "Progress", "Subscriber", "pull"]

log = get_logger(__name__)

Progress = Callable[[float], None]
"""Called with the fraction of the bytes that are on disk, 0 to 1, by the thread that called fetch."""

_HASH_BLOCK_BYTES = 4 << 20


class LocalVersion(Struct, frozen=True):
    """A verified version on this machine's disk."""

    version: int
    step: int
    shards: list[Path]  # safetensors files, all in one folder
    weight_map: dict[str, int]  # tensor name -> index into shards
    fetched_bytes: int = 0  # downloaded for it now; packs that were on the disk already are not counted


class Subscriber:
    def __init__(self, store: ObjectStore, run: RunInfo, cache_dir: Path, config: WeightsConfig) -> None:
        self._store, self._run, self._config = store, run, config
        self._folder = cache_dir / run.run
        self._claims: list[Claim] = []

    def newest(self, after: int = -1) -> Manifest | None:
        """The newest version greater than `after` that counts; None if there is none. Raises Corrupt,
        StoreErrors."""
        numbers = list_versions(self._store, after)  # before the claims, see lineage.py
        if not numbers:
            return None
        self._claims += read_claims(self._store, self._claims[-1].incarnation if self._claims else -1)
        for number in reversed(numbers):
            found = newest_admissible([read_manifest(self._store, number)], self._claims)
            if found is not None:
                return found
        return None

    def next_poll_s(self) -> float:
        """How long to wait before looking again: a fleet must not ask in step."""
        return self._config.poll_s * random.uniform(0.5, 1.5)

    def fetch(self, manifest: Manifest, progress: Progress | None = None) -> LocalVersion:
        """All packs of a version on disk, verified. What is there and right is kept.

        Raises Corrupt (naming the object; after a second try), WeightsError (a pack is gone, no room on the
        disk), StoreErrors. Memory: fetch_parallel parts.
        """
        return _fetch_version(
            self._store, self._run, manifest, self._version_folder(manifest.version), self._config, progress
        )

    def hf_folder(self, local: LocalVersion) -> Path:
        """The version's folder with config, tokenizer and index: AutoModelForCausalLM.from_pretrained loads
        it."""
        cached = self._folder / "model"
        fetch_model_files(self._store, self._run, cached)
        folder = local.shards[0].parent
        for file in self._run.model_files:
            if not (folder / file.name).exists():
                write_whole(folder / file.name, (cached / file.name).read_bytes())
        _write_index(local, folder)
        return folder

    def prune(self, keep: int | None = None) -> None:
        """Delete all but the newest `keep` versions (default: cache_versions) from the disk."""
        numbers = sorted(int(path.name) for path in self._folder.glob("[0-9]*") if path.name.isdecimal())
        for number in numbers[
            : max(0, len(numbers) - (self._config.cache_versions if keep is None else keep))
        ]:
            shutil.rmtree(self._version_folder(number), ignore_errors=True)

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"{version:010}"


def pull(
    store: ObjectStore,
    version: int | None,
    out_dir: Path,
    config: WeightsConfig | None = None,
    progress: Progress | None = None,
) -> Path:
    """A complete Hugging Face folder of one version (None: the newest) at `out_dir`, which must be absent
    or empty.

    It appears when it is whole; an interrupted pull leaves `<out_dir>.partial` and goes on from there.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise WeightsError(
            f"{out_dir} is not an empty folder: nothing was written", hint="choose another folder"
        )
    run = open_run(store)
    manifest = _wanted_version(store, run, version)
    partial = out_dir.with_name(out_dir.name + ".partial")
    local = _fetch_version(store, run, manifest, partial, config or WeightsConfig(), progress)
    fetch_model_files(store, run, partial)
    _write_index(local, partial)
    _drop_others(partial, {path.name for path in local.shards})
    if out_dir.exists():
        out_dir.rmdir()
    partial.rename(out_dir)
    return out_dir


def _wanted_version(store: ObjectStore, run: RunInfo, version: int | None) -> Manifest:
    if version is None:
        newest = Subscriber(store, run, Path(), WeightsConfig()).newest()
        if newest is None:
            raise WeightsError(
                f"the run {store.url} has no version yet", hint="wait for its trainer's first"
            )
        return newest
    try:
        manifest = read_manifest(store, version)
    except NotFound as error:
        numbers = list_versions(store)
        there = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has none yet"
        raise WeightsError(f"the run {store.url} has no version {version}", hint=there) from error
    if not admissible(manifest, read_claims(store)):
        raise WeightsError(
            f"version {version} does not count: trainer incarnation {manifest.incarnation} wrote it "
            "when a newer one already owned the run",
            hint="choose another version",
        )
    return manifest


def _drop_others(folder: Path, shards: set[str]) -> None:
    """Weights in a `.partial` folder that an earlier pull left behind: of another version, or half of one."""
    for path in folder.glob("*.safetensors"):
        if path.name not in shards:
            path.unlink()
    for path in folder.glob(".*.part"):
        path.unlink()
    if len(shards) == 1:
        (folder / _INDEX).unlink(missing_ok=True)


# ---------------------------------------------------------------- packs to files


def _fetch_version(
    store: ObjectStore,
    run: RunInfo,
    manifest: Manifest,
    folder: Path,
    config: WeightsConfig,
    progress: Progress | None,
) -> LocalVersion:
    count = len(manifest.way.packs)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    shards = [folder / name for name in (names if count > 1 else ["model.safetensors"])]
    missing = [
        (pack, path)
        for pack, path in zip(manifest.way.packs, shards, strict=True)
        if not _holds(path, pack)
    ]
    wanted = sum(pack.size for pack, _ in missing)
    have = manifest.way.total_bytes - wanted

    def report(done: int) -> None:
        if progress is not None:
            progress((have + done) / max(1, manifest.way.total_bytes))

    report(0)
    with disk_errors(folder, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        _download(store, missing, config, report)
    _check_contents(store, run, manifest, shards)
    log.debug(
        "version fetched", version=manifest.version, bytes=manifest.way.total_bytes, reused_bytes=have
    )
    return LocalVersion(manifest.version, manifest.step, shards, dict(manifest.way.weight_map), wanted)


def _download(
    store: ObjectStore,
    missing: Sequence[tuple[Pack, Path]],
    config: WeightsConfig,
    report: Callable[[int], None],
) -> None:
    """Parts of all packs in parallel, each straight into its place; a pack is hashed as soon as it is
    whole, while others still arrive."""
    with ExitStack() as stack:
        parts = {pack.key: stack.enter_context(part_file(path)) for pack, path in missing}
        pool = ThreadPoolExecutor(config.fetch_parallel, thread_name_prefix="fetch")
        stack.callback(
            pool.shutdown, wait=True, cancel_futures=True
        )  # before the part files are renamed or removed
        futures: dict[Future[int], Pack] = {}
        left: dict[str, int] = {}
        for pack, _ in missing:
            with parts[pack.key].open("wb") as file:
                file.truncate(pack.size)
            starts = range(0, pack.size, config.fetch_part_bytes)
            left[pack.key] = len(starts)
            for start in starts:
                length = min(config.fetch_part_bytes, pack.size - start)
                futures[pool.submit(_fetch_part, store, pack, parts[pack.key], start, length)] = pack
        done = 0
        for future in as_completed(futures):
            pack = futures[future]
            done += future.result()
            left[pack.key] -= 1
            if left[pack.key] == 0:
                _verify_or_refetch(store, pack, parts[pack.key], config)
            report(done)


def _fetch_part(store: ObjectStore, pack: Pack, path: Path, start: int, length: int) -> int:
    try:
        data = store.get(pack.key, start, length)
    except (StoreUnavailable, AccessDenied, BucketMissing):
        raise
    except StoreError:  # not there, or shorter than what was asked for
        _explain(store, pack)
        raise
    if len(data) != length:
        raise Corrupt(
            f"{pack.key} in {store.url} gave {len(data)} bytes at {start} where {length} were asked for"
        )
    file = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(file, view, start)
            view, start = view[written:], start + written
    finally:
        os.close(file)
    return length


def _explain(store: ObjectStore, pack: Pack) -> None:
    """A part could not be read: raise what is wrong with the pack, if it is the pack."""
    try:
        size = store.head(pack.key).size
    except NotFound as error:
        raise WeightsError(
            f"{pack.key} is not in {store.url}, though a manifest names it",
            hint="the version was removed, or the bucket lost an object: take a newer version",
        ) from error
    if size != pack.size:
        raise Corrupt(f"{pack.key} in {store.url} has {size} bytes, its manifest says {pack.size}")


def _verify_or_refetch(store: ObjectStore, pack: Pack, path: Path, config: WeightsConfig) -> None:
    """One more fetch tells a torn read from a damaged object. Raises Corrupt."""
    if _sha256(path) == pack.sha256:
        return
    log.warning("a pack's bytes differ from their hash, fetching it again", key=pack.key)
    for start in range(0, pack.size, config.fetch_part_bytes):
        _fetch_part(store, pack, path, start, min(config.fetch_part_bytes, pack.size - start))
    if _sha256(path) != pack.sha256:
        raise Corrupt(
            f"{pack.key} in {store.url} differs from the hash in its manifest, twice",
            hint="the object is damaged: this version can't be used, the next one is not affected",
        )


def _holds(path: Path, pack: Pack) -> bool:
    return path.is_file() and path.stat().st_size == pack.size and _sha256(path) == pack.sha256


def _sha256(path: Path) -> str:
    result = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            result.update(block)
    return result.hexdigest()


def _check_contents(store: ObjectStore, run: RunInfo, manifest: Manifest, shards: Sequence[Path]) -> None:
    """The files hold exactly the run's tensors, each where the manifest says. Raises Corrupt."""
    place = f"version {manifest.version} of {store.url}"
    if manifest.dtype != run.dtype:
        raise Corrupt(f"{place} is {manifest.dtype}, the run is {run.dtype}")
    wanted = {spec.name: spec for spec in run.tensors}
    found: set[str] = set()
    for index, shard in enumerate(shards):
        for name, spec in read_header(shard, run.dtype).items():
            if name not in wanted or name in found:
                raise Corrupt(f"{place}: {manifest.way.packs[index].key} holds an unexpected tensor {name}")
            if spec.shape != wanted[name].shape:
                raise Corrupt(f"{place}: {name} has shape {spec.shape}, the run's is {wanted[name].shape}")
            if manifest.way.weight_map.get(name) != index:
                raise Corrupt(f"{place}: {name} is not in the pack that the manifest says")
            found.add(name)
    if len(found) < len(wanted):
        raise Corrupt(
            f"{place} lacks {len(wanted) - len(found)} tensors, e.g. {min(wanted.keys() - found)}"
        )


# ---------------------------------------------------------------- Hugging Face folder

_INDEX = "model.safetensors.index.json"


def _write_index(local: LocalVersion, folder: Path) -> None:
    """Where several files hold the weights, transformers finds them by this index."""
    if len(local.shards) > 1:
        total = sum(shard.stat().st_size for shard in local.shards)
        weight_map = {name: local.shards[index].name for name, index in sorted(local.weight_map.items())}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(folder / _INDEX, json.dumps(index, indent=2).encode())
