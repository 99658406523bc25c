"""How long the engine stands still for a new version: apply only, against a full checkpoint inside the pause.

A model of 135 M weights in an engine (vLLM, or the reference engine where there is none), a real S3 server, and
a link of 200 Mbit/s and 40 ms between the two, or none. For every new version

    ours    Subscriber.fetch brings the delta into the shadow while the engine generates; then Engine.update:
            the pause
    theirs  the engine stands still while a full checkpoint is fetched (bare boto3, parallel ranged gets) and
            then loaded by the same Engine.update: what a trainer gets that writes checkpoints and tells its
            engines to load them

Both load with the same code, so over the loopback the difference is the fetch from this machine's own server.
"""

from __future__ import annotations

import asyncio
import importlib.util
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

__all__ = ["run"]

ENGINES = ("reference", "vllm")
VERSIONS = 5
"""Updates of ours; the median counts."""
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
                times = asyncio.run(_measure(name, trainer, scratch / name, server, link))
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
    name: str, trainer: _Trainer, folder: Path, server: LocalServer, link: Link
) -> dict[str, list[float]]:
    from workers.engines import make_engine
    from workers.rollout_settings import RolloutConfig

    times: dict[str, list[float]] = {"ours": [], "ready": [], "full, link": [], "full, loopback": []}
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
                times["ours"].append((await engine.update(local.version, local.shards)).pause_s)
            sizes = [path.stat().st_size for path in local.shards]
            bare = Bare(server.env, server.bucket)
            await asyncio.to_thread(
                bare.put_all,
                [(f"checkpoint/{n}", path.read_bytes()) for n, path in enumerate(local.shards)],
            )
            version = local.version
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


def _fetch(subscriber: Subscriber, after: int = -1) -> LocalVersion:
    manifest = subscriber.newest(after)
    assert manifest is not None
    return subscriber.fetch(manifest)


def _claims(name: str, times: dict[str, list[float]]) -> list[Claim]:
    ours, ready, over_link, over_loopback = (statistics.median(each) for each in times.values())
    link = f"{RATE_BIT_S / 1e6:.0f} Mbit/s, {1e3 * ROUND_TRIP_S:.0f} ms"
    how = f"pause {ours:.3f} s; fetched and verified {ready:.2f} s before it, while the engine generates"
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
