"""What 300 versions cost in the bucket, and what a late reader reads of it.

A model of 21 M weights that move as under Adam (training.py), published by the real Publisher, anchors included,
with the real compactor after every commit, into a folder store that counts. Then

    a reader with nothing             joins at the newest version
    a reader 256 versions behind      goes on from the one it holds

and the states of both must be the trainer's, bit for bit. A shorter history of real training (real_models.py) stands
beside it, where its model is installed: a sentence encoder, an optimizer step of a small batch per version.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from rich.console import Console

from async_rl.store import ObjectInfo, ObjectStore, Upload, open_store
from async_rl.store.base import Capabilities
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Manifest, Way, claim, list_versions, read_manifest
from async_rl.weights.plan import find_path
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.subscriber import LocalVersion, Subscriber
from async_rl.weights.ways import list_edges, read_way
from tests.bench.claims import Claim
from tests.bench.real_models import INSTALL, MODELS, WARM_UP_STEPS, RealTraining, missing_packages
from tests.bench.training import SMALL, Training, write_model_dir
from tests.weights_support import state_of

if TYPE_CHECKING:
    from async_rl.weights.publisher import Publisher

__all__ = ["run"]

RATES = (3e-6,)
"""1e-6 and 1e-5 are of interest too; each takes a minute or two."""
VERSIONS = 300
BEHIND = 256
CONFIG: dict[str, Any] = {}
"""Settings of [weights] other than the defaults."""
LOOK_EVERY = 5
"""Versions between two looks at what a join would cost."""

REAL_RATES = (1e-6, 1e-5)
REAL_VERSIONS = 66
REAL_BEHIND = 64
REAL_PAIRS = 2
"""Pairs of sentences in a batch: a step takes some tenths of a second."""


class Moving(Protocol):
    """Weights that a `step` moves. `parameters`: tensor name -> float32, in order."""

    parameters: dict[str, Any]

    def step(self) -> None: ...


class Length(NamedTuple):
    versions: int
    behind: int
    aimed: bool  # goals are for long histories: a short one is mostly its first full state


def run(scratch: Path, console: Console) -> list[Claim]:
    claims = []
    for rate in RATES:
        training = Training(rate, SMALL)
        model_dir = write_model_dir(scratch / f"model-{rate:g}", SMALL)
        length = Length(VERSIONS, BEHIND, aimed=True)
        claims += history(scratch / f"{rate:g}", training, model_dir, length, f"lr {rate:g}", console)
    return claims + real_history(scratch, console)


def real_history(scratch: Path, console: Console) -> list[Claim]:
    absent = missing_packages("minilm")
    if absent:
        console.print(f"no history of real training, without {', '.join(absent)}: {INSTALL}")
        return []
    from transformers.utils import logging

    logging.disable_progress_bar()
    net, losses, _ = MODELS["minilm"].load()
    begin = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    length = Length(REAL_VERSIONS, REAL_BEHIND, aimed=False)
    net.config.save_pretrained(scratch / "minilm")
    claims = []
    for rate in REAL_RATES:
        training = _Real(RealTraining(net, begin, rate, losses(REAL_PAIRS), fused=True))
        for _ in range(WARM_UP_STEPS):
            training.step()
        folder, what = scratch / f"minilm-{rate:g}", f"minilm, lr {rate:g}"
        claims += history(folder, training, scratch / "minilm", length, what, console)
    return claims


class _Real:
    def __init__(self, training: RealTraining) -> None:
        self.parameters, self.step = training.masters, training.step


class CountingStore:
    """Another store; counts the bytes of objects written and read."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.written = 0
        self.read = 0

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put(key, data)
        self.written += len(data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put_if_absent(key, data)
        self.written += len(data)

    def settled(self, key: str, data: bytes | memoryview) -> bool:
        return self.inner.settled(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self.inner.get(key, start, length)
        self.read += len(data)
        return data

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        for block in self.inner.stream(key, start, length):
            self.read += len(block)
            yield block

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list_after(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list_after(prefix, after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def upload(self, key: str) -> Upload:
        return _CountingUpload(self, self.inner.upload(key))

    def probe(self) -> Capabilities:
        return self.inner.probe()

    def close(self) -> None:
        self.inner.close()


class _CountingUpload:
    def __init__(self, store: CountingStore, inner: Upload) -> None:
        self._store, self._inner, self._bytes = store, inner, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._inner.write(data)
        self._bytes += memoryview(data).nbytes

    def commit(self) -> None:
        self._inner.commit()
        self._store.written += self._bytes

    def __enter__(self) -> Upload:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def history(
    folder: Path, training: Moving, model_dir: Path, length: Length, what: str, console: Console
) -> list[Claim]:
    import msgspec

    from async_rl.weights.compactor import Compactor
    from async_rl.weights.publisher import Publisher

    config = msgspec.convert(CONFIG, WeightsConfig)
    store = CountingStore(open_store(f"file://{folder}/store"))
    info = ensure_run(store, model_dir, training.parameters)
    behind = Subscriber(store, info, folder / "behind", config)
    committed: list[Manifest] = []
    joins: list[int] = []  # bytes that a reader with nothing would read
    took: Counter[str] = Counter()
    with Publisher(
        store, info, claim(store), training.parameters, config, on_commit=committed.append
    ) as publisher:
        compactor = Compactor(store, info, config, folder / "compactor")
        for number in range(length.versions):
            if number:
                _timed(took, "train", training.step)
            _timed(took, "publish", lambda: _publish(publisher, number))  # noqa: B023
            _timed(took, "compact", lambda: compactor.run(newest=committed[-1]))
            if number % LOOK_EVERY == LOOK_EVERY - 1:
                joins.append(find_path(store, committed[-1], None).nbytes)
            if number == length.versions - 1 - length.behind:
                behind.fetch(committed[-1])
    console.print(f"{what}: " + ", ".join(f"{part} {seconds:.0f} s" for part, seconds in took.items()))
    claims = [
        _written(store, what, length, console),
        _all_along(joins, committed[0], what),
        *_joins(
            store, info, behind, committed[-1], _bits(info, training), folder, config, what, length.behind
        ),
    ]
    return claims if length.aimed else [replace(each, at_most=None) for each in claims]


def _bits(info: RunInfo, training: Moving) -> np.ndarray:
    """The state as it is published: uint16 [weights], bfloat16's bits."""
    import torch

    tensors = (training.parameters[spec.name].detach() for spec in info.tensors)
    bits = torch.cat([tensor.bfloat16().view(torch.int16).reshape(-1) for tensor in tensors])
    return bits.numpy().view(np.uint16)


def _publish(publisher: Publisher, step: int) -> None:
    publisher.publish(step)
    publisher.flush()


def _timed(took: Counter[str], what: str, function: Callable[[], object]) -> None:
    began = time.monotonic()
    function()
    took[what] += time.monotonic() - began  # type: ignore[assignment]


def _written(store: CountingStore, what: str, length: Length, console: Console) -> Claim:
    ways: list[tuple[str, Way]] = []
    for version in list_versions(store):
        way = read_manifest(store, version).way
        ways.append(("delta" if way.base >= 0 else "full", way))
    for edge in list_edges(store):
        way = read_way(store, edge).way
        ways.append((f"skip {edge.version - edge.base}" if way.base >= 0 else "full", way))
    packs = {pack.key: (kind, pack.size) for kind, way in ways for pack in way.packs}
    by_kind: Counter[str] = Counter()
    for kind, size in packs.values():
        by_kind[kind] += size
    deltas = by_kind["delta"]
    by_kind["records and the rest"] = store.written - sum(by_kind.values())
    parts = ", ".join(f"{kind} {size / deltas:.2f}" for kind, size in sorted(by_kind.items()))
    changed = sum(way.changed for kind, way in ways if kind == "delta")
    console.print(
        f"{deltas / 1e6:.1f} MB of deltas, {deltas / changed:.3f} bytes per changed weight, "
        f"{changed / length.versions:.0f} changed per version"
    )
    return Claim(
        f"{what}: bytes written over {length.versions} versions / the deltas alone",
        store.written / deltas,
        "x",
        at_most=3.0,
        how=f"{deltas / 1e6:.3g} MB of deltas; {parts}",
    )


def _all_along(joins: list[int], first: Manifest, what: str) -> Claim:
    costs = [nbytes / first.way.total_bytes for nbytes in joins]
    return Claim(
        f"{what}: bytes read from nothing / an anchor's, median of all moments",
        statistics.median(costs),
        "x",
        at_most=1.2,
        how=f"at most {max(costs):.2f}",
    )


def _joins(
    store: CountingStore,
    info: RunInfo,
    behind: Subscriber,
    newest: Manifest,
    state: np.ndarray,
    folder: Path,
    config: WeightsConfig,
    what: str,
    versions: int,
) -> list[Claim]:
    fulls = {edge.version: edge.nbytes for edge in list_edges(store) if edge.base < 0}
    first = read_manifest(store, list_versions(store)[0])
    anchor = {first.version: first.way.total_bytes, **fulls}[max([first.version, *fulls])]
    claims = []
    joiner = Subscriber(store, info, folder / "joiner", config)
    for reader, who in ((joiner, "from nothing"), (behind, f"from {versions} behind")):
        before = store.read
        local = reader.fetch(newest)
        _check(info, local, state)
        claims.append(
            Claim(
                f"{what}: bytes read, {who} / the newest anchor's",
                (store.read - before) / anchor,
                "x",
                at_most=1.2,
                how=f"{local.path}, every object counted",
            )
        )
        reader.close()
    return claims


def _check(info: RunInfo, local: LocalVersion, state: np.ndarray) -> None:
    found = state_of(info, local.shards)
    read = np.concatenate([found[spec.name].reshape(-1) for spec in info.tensors])
    assert np.array_equal(read, state), f"version {local.version} differs from the trainer's state"
