"""The shadow under faults: whatever happens to an object or a reader, it is exactly a version or known not to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.errors import NotFound, WeightsError
from async_rl.weights.codec import apply_tile
from async_rl.weights.lineage import version_key
from async_rl.weights.shadow import read_held
from async_rl.weights.ways import FurtherWay
from tests.shadow_support import Branches
from tests.weights_support import raises, same_state, state_of


@pytest.fixture
def bucket(tmp_path: Path) -> Branches:
    return Branches(tmp_path)


# ---------------------------------------------------------------- every fault at every object

KINDS = ["truncated", "bit flipped", "swapped", "missing", "stale once", "missing once"]
OBJECTS = ["manifest", "older manifest", "pack", "table", "way", "pack of the anchor", "way of the anchor"]


def harm(bucket: Branches, kind: str, thing: str) -> str:
    """Does `kind` to the object and gives its key."""
    skip = msgspec.json.decode(bucket.objects[bucket.skip_key], type=FurtherWay).way.packs
    key, other, place = {
        "manifest": (version_key(4), version_key(3), 40),
        "older manifest": (version_key(3), version_key(2), 40),
        "pack": (skip[0].key, bucket.manifests[2].way.packs[0].key, -150),
        "table": (skip[-1].key, bucket.manifests[1].way.packs[-1].key, -10),
        "way": (bucket.skip_key, bucket.anchor_key, 60),
        "pack of the anchor": (bucket.keys("-anchor-")[1], bucket.manifests[0].way.packs[1].key, -1),
        "way of the anchor": (bucket.anchor_key, bucket.skip_key, 60),
    }[thing]
    content = bucket.objects[key]
    if kind == "truncated":
        bucket.objects[key] = content[: len(content) // 2]
    elif kind == "bit flipped":
        flipped = bytearray(content)
        flipped[place] ^= 4
        bucket.objects[key] = bytes(flipped)
    elif kind == "swapped":
        bucket.objects[key] = bucket.objects[other]
    elif kind == "missing":
        del bucket.objects[key]
    elif kind == "stale once":
        bucket.store.on("get", key, lambda: bucket.objects[other])
    else:
        bucket.store.on("get", key, raises(NotFound(f"{key} does not exist")))
    return key


@pytest.mark.parametrize("start", [None, 0, 3], ids=["from nothing", "from 0", "from 3"])
@pytest.mark.parametrize("thing", OBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_never_becomes_a_wrong_byte_and_the_next_version_is_reached(
    bucket: Branches, kind: str, thing: str, start: int | None
) -> None:
    reader = bucket.reader() if start is None else bucket.at(start)
    harm(bucket, kind, thing)
    reached = False
    with suppress(WeightsError, NotFound):
        manifest = reader.newest(start if start is not None else -1)
        if manifest is not None:
            bucket.exact(reader.fetch(manifest))
            reached = manifest.version == 4
    # Nothing but the manifest of the version itself is without another way here.
    assert reached or thing == "manifest"
    bucket.full(bucket.changed(0.3, seed=77, state=bucket.states[4]))
    bucket.exact(reader.fetch(bucket.manifests[5]))


# ---------------------------------------------------------------- killed anywhere


class Killed(BaseException):
    """What SIGKILL is in these tests: nothing of ours catches it."""


class Points:
    """Every write of the reader, in order; at one of them it is killed, before or after (or in the middle)."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.seen, self.at, self.when, self.folder = 0, -1, "before", folder
        for name in ("replace", "unlink", "write_bytes"):
            patch.setattr(Path, name, self._wrapped(getattr(Path, name)))
        patch.setattr("async_rl.weights.fetch.write_at", self._wrapped(bare_write_at))
        patch.setattr("async_rl.weights.shadow.apply_tile", self._wrapped(apply_tile))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            if isinstance(args[0], Path) and not args[0].is_relative_to(self.folder):
                return function(*args, **options)
            number, self.seen = self.seen, self.seen + 1
            if number != self.at:
                return function(*args, **options)
            if function is apply_tile and self.when == "in":
                values = args[2]
                copy = values.copy()
                function(args[0], args[1], copy, args[3])
                values[: len(values) // 2] = copy[: len(values) // 2]
            elif self.when == "after":
                function(*args, **options)
            raise Killed

        return wrapper


def bare_write_at(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


@pytest.mark.parametrize("when", ["before", "in", "after"])
@pytest.mark.parametrize(("start", "end"), [(None, 3), (3, 4), (0, 4), (1, 3), (4, 0)])
def test_killed_at_any_write_the_shadow_is_a_version_or_known_to_be_none(
    bucket: Branches, monkeypatch: pytest.MonkeyPatch, start: int | None, end: int, when: str
) -> None:
    (bucket.reader() if start is None else bucket.at(start)).close()
    saved = bucket.cache.with_name("saved")
    if start is not None:
        shutil.copytree(bucket.cache, saved)
    else:
        saved.mkdir()
    folder = bucket.cache / bucket.run.run / "shadow"
    points = Points(monkeypatch, bucket.cache)
    count = 1 << 30
    at = -1
    torn = 0
    while at < count:
        shutil.rmtree(bucket.cache, ignore_errors=True)
        shutil.copytree(saved, bucket.cache)
        points.seen, points.at, points.when = 0, at, when
        reader = bucket.reader()
        if at == -1:  # nobody is killed: how many writes are there?
            bucket.exact(reader.fetch(bucket.manifests[end]))
            count = points.seen
        else:
            with suppress(Killed):
                reader.fetch(bucket.manifests[end])
        points.at = -1
        held = read_held(folder)
        torn += held is None
        if held is not None:
            files = [folder / name for name in held.files]
            assert same_state(state_of(bucket.run, files), bucket.states[held.version])
        # The next life: whatever is there is used or thrown away.
        reader.close()
        again = bucket.reader()
        bucket.exact(again.fetch(bucket.manifests[end]))
        again.close()
        at += 1
    assert count >= 10 and torn > 0
