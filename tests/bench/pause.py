"""How long the engine stands still for a new version: apply only, against a full checkpoint inside the pause.

A model of 135 M weights in an engine (vLLM, or the reference engine where there is none), a real S3 server, and
a link of 200 Mbit/s and 40 ms between the two, or none. For every new version

    ours    Subscriber.fetch brings the delta into the shadow while the engine generates; then Engine.update, which
            where it can (vLLM on a CPU) loads the shadow beside the weights that serve, and flips: the pause
    theirs  the engine stands still while a full checkpoint is fetched (bare boto3, parallel ranged gets) and
            then loaded in place (`rollout.stage = "off"`): what a trainer gets that writes checkpoints and tells
            its engines to load them

Printed beside it: what generation loses while a version is staged, and the pause of an engine at work, which
includes the rest of the step in progress.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from async_rl.store import open_store
from async_rl.store.base import ObjectStore, StoreConfig
from async_rl.store.local_server import LocalServer
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import claim
from async_rl.weights.run import RunInfo, ensure_run
from async_rl.weights.subscriber import LocalVersion, Subscriber
from tests.bench.bare import Bare
from tests.bench.claims import Claim
from tests.bench.link import RATE_BIT_S, ROUND_TRIP_S, Link
from workers.engines.base import Engine

__all__ = ["run"]

ENGINES = ("reference", "vllm")
VERSIONS = 5
"""Updates of ours; the median counts."""
BUSY = 4
"""Sequences at once while generation's speed is measured."""
BUSY_S = 4.0
TURNS = 4
FULL_OVER_LINK = 2
FULL_OVER_LOOPBACK = 3
AIM = 10.0


def run(scratch: Path, console: Console) -> list[Claim]:
    claims = []
    with LocalServer(scratch / "store", grace_s=0) as server, Link(server.endpoint) as link:
        os.environ.update(server.env)
        with _published(scratch, server.url) as trainer:
            for name in ENGINES:
                if name == "vllm" and importlib.util.find_spec("vllm") is None:
                    console.print("vLLM is not installed: only the reference engine is measured")
                    continue
                times = asyncio.run(_measure(name, trainer, scratch / name, server, link, console))
                claims += _claims(name, times)
    return claims


class _Trainer:
    """Publishes over the loopback, in this process; `newest` is then the version to follow."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        from async_rl.weights.publisher import Publisher
        from tests.bench.training import Training, write_model_dir

        self.training = Training(3e-6)
        self.store = store
        self.info: RunInfo = ensure_run(store, write_model_dir(folder / "model"), self.training.parameters)
        self.publisher = Publisher(
            store, self.info, claim(store), self.training.parameters, WeightsConfig()
        )
        self.steps = 0
        self.publish()

    def publish(self) -> None:
        self.publisher.publish(self.steps)
        self.publisher.flush()
        self.steps += 1

    def next_version(self) -> None:
        self.training.step()
        self.publish()


@contextmanager
def _published(scratch: Path, url: str) -> Iterator[_Trainer]:
    trainer = _Trainer(scratch, open_store(f"{url}/pause"))
    try:
        yield trainer
    finally:
        trainer.publisher.close()


async def _measure(
    name: str, trainer: _Trainer, folder: Path, server: LocalServer, link: Link, console: Console
) -> dict[str, list[float]]:
    from workers.engines import make_engine
    from workers.engines.vllm_engine import VLLMEngine
    from workers.rollout_settings import RolloutConfig

    times: dict[str, list[float]] = {
        "ours": [],
        "ready": [],
        "staged": [],
        "full, link": [],
        "full, loopback": [],
    }
    store = open_store(trainer.store.url, StoreConfig(endpoint_url=link.endpoint))
    near = Subscriber(trainer.store, trainer.info, folder / "cache", WeightsConfig())
    local = await asyncio.to_thread(_fetch, near)
    engine = make_engine(RolloutConfig(engine=name, max_sequences=8, max_model_len=256, kv_cache_gib=0.1))  # type: ignore[arg-type]
    with ExitStack() as stack:
        try:
            await engine.start(near.hf_folder(local), local.version)
            near.close()
            far = Subscriber(store, trainer.info, folder / "cache", WeightsConfig())
            stack.callback(far.close)
            for _ in range(VERSIONS):
                await asyncio.to_thread(trainer.next_version)
                began = time.monotonic()
                local = await asyncio.to_thread(_fetch, far, local.version)
                times["ready"].append(time.monotonic() - began)
                update = await engine.update(local.version, local.shards)
                times["ours"].append(update.pause_s)
                times["staged"].append(update.staged_s)
            sizes = [path.stat().st_size for path in local.shards]
            bare = Bare(server.env, server.bucket)
            await asyncio.to_thread(
                bare.put_all,
                [(f"checkpoint/{n}", path.read_bytes()) for n, path in enumerate(local.shards)],
            )
            version = local.version
            if update.staged_s:
                await _measure_under_load(engine, local.shards, console)
                version = engine.version
            if isinstance(engine, VLLMEngine):
                engine.staging = False
            for where, repeats, env in (
                ("full, loopback", FULL_OVER_LOOPBACK, server.env),
                ("full, link", FULL_OVER_LINK, link.env(server.env)),
            ):
                bare = Bare(env, server.bucket)
                (folder / "checkpoint").mkdir(exist_ok=True)
                files = [folder / "checkpoint" / path.name for path in local.shards]
                wanted = [
                    (f"checkpoint/{n}", size, file)
                    for n, (size, file) in enumerate(zip(sizes, files, strict=True))
                ]
                for _ in range(repeats):
                    began = time.monotonic()
                    await asyncio.to_thread(bare.get_files, wanted)
                    fetched = time.monotonic() - began
                    version += 1_000_000  # no published version: the engine only wants it to grow
                    times[where].append(fetched + (await engine.update(version, files)).pause_s)
        finally:
            await engine.close()
    return times


async def _measure_under_load(engine: Engine, shards: list[Path], console: Console) -> None:
    """Tokens per second with BUSY sequences at once, alone and while versions are staged, in turns, all together."""
    stop = asyncio.Event()
    running = [asyncio.create_task(_generate(engine, number, stop)) for number in range(BUSY)]
    alone: list[tuple[int, float]] = []  # tokens, seconds
    staging: list[tuple[int, float]] = []
    pauses: list[float] = []
    try:
        while not engine.load().tokens:  # noqa: ASYNC110  (an engine's progress is no event)
            await asyncio.sleep(0.1)
        for _ in range(TURNS):
            began, tokens = time.monotonic(), engine.load().tokens
            await asyncio.sleep(BUSY_S)
            alone.append((engine.load().tokens - tokens, time.monotonic() - began))
            tokens = engine.load().tokens
            update = await engine.update(engine.version + 1_000_000, shards)
            staging.append((engine.load().tokens - tokens, update.staged_s))
            pauses.append(update.pause_s)
    finally:
        stop.set()
        await asyncio.gather(*running)
    console.print(
        f"at work: {_rate(staging):.1f} tokens/s while a version is staged ({update.staged_s:.1f} s), "
        f"{_rate(alone):.1f} alone; pause {statistics.median(pauses):.3f} s"
    )


def _rate(counted: list[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)


async def _generate(engine: Engine, number: int, stop: asyncio.Event) -> None:
    for turn in itertools.count():
        if stop.is_set():
            return
        await engine.generate(
            [10 + number, 20, 30],
            seed=turn,
            temperature=1.0,
            max_tokens=100,
            request_id=f"busy{number}-{turn}",
        )


def _fetch(subscriber: Subscriber, after: int = -1) -> LocalVersion:
    manifest = subscriber.newest(after)
    assert manifest is not None
    return subscriber.fetch(manifest)


def _claims(name: str, times: dict[str, list[float]]) -> list[Claim]:
    ours, ready, staged, over_link, over_loopback = (statistics.median(each) for each in times.values())
    link = f"{RATE_BIT_S / 1e6:.0f} Mbit/s, {1e3 * ROUND_TRIP_S:.0f} ms"
    how = f"pause {ours:.3f} s; fetched and verified in {ready:.2f} s before it, while the engine generates"
    if staged:
        how += f", and staged in {staged:.2f} s"
    return [
        Claim(
            f"pause, {name}, {link}: full checkpoint inside it / ours",
            over_link / ours,
            "x",
            at_least=AIM,
            how=f"{how}; full {over_link:.1f} s",
        ),
        Claim(
            f"pause, {name}, loopback: full checkpoint inside it / ours",
            over_loopback / ours,
            "x",
            how=f"full {over_loopback:.2f} s, not verified",
        ),
    ]
