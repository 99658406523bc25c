"""Full states against the same bytes through bare boto3, and the memory that both sides of weight sync take.

On the loopback, with a real S3 server, a publisher's and a reader's process (135 M weights, 269 MB; training.py):

    publish   a run's first version, hashed and committed, against put_object of its packs, eight side by side
    fetch     into an empty cache folder, hashed, digest compared, against ranged gets of its packs into files
    half      the first half of the tensors only, against all of them
    memory    the most that a process held of its own above what it held before, as a multiple of the 16-bit
              model. Mapped files (the reader's shadow is one) are not counted: one model more, on disk or in
              shared memory

Ours and theirs take turns; medians.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console

from async_rl.store.base import BLOCK_BYTES
from async_rl.store.local_server import LocalServer
from async_rl.weights.config import WeightsConfig
from tests.bench.claims import Claim
from tests.bench.processes import Remote, Setup

__all__ = ["run"]

REPEATS = 5
DELTAS = 4


def run(scratch: Path, console: Console) -> list[Claim]:
    with LocalServer(scratch / "store", grace_s=0) as server:
        setups = [
            Setup(
                f"{server.url}/full",
                server.bucket,
                server.env,
                str(scratch / role),
                weights={"anchor_every": 1, "skip_spans": [DELTAS + 2]},
            )
            for role in ("publisher", "reader")
        ]
        for setup in setups:
            Path(setup.folder).mkdir()
        with Remote("publisher", setups[0]) as publisher:
            publisher.answer()
            first = publisher.ask("publish", step=0)
            memory = [publisher.ask("memory_most")]
            with Remote("reader", setups[1]) as reader:
                reader.answer()
                reader.ask("fetch")
                reading = [reader.ask("memory_most")]
                for step in range(1, DELTAS + 1):
                    publisher.ask("step")
                    publisher.ask("publish", step=step)
                    reader.ask("fetch")
                memory.append(publisher.ask("memory_most"))
                reading.append(reader.ask("memory_most"))
                for step in (
                    DELTAS + 1,
                    DELTAS + 2,
                ):  # the last one's anchor is due: a multiple of the span
                    publisher.ask("step")
                    publisher.ask("publish", step=step)
                publisher.ask("wait_for_anchor")
                memory.append(publisher.ask("memory_most"))
                console.print("memory is measured; now the speed of full states")
                claims = speed(publisher, reader, server.url)
    model = memory[0]["model"]
    packs = 2 * first["largest"] / model
    blocks = WeightsConfig().fetch_parallel * BLOCK_BYTES
    publishing, deltas, anchor = (most["most"] / model for most in memory)
    joining, following = (most["most"] / model for most in reading)
    return [
        *claims,
        Claim(
            "full publish: extra memory beyond its snapshot, in packs",
            (memory[0]["most"] - model) / first["largest"],
            at_most=2.0,
            how=f"the largest pack has {first['largest'] / 1e6:.0f} MB",
        ),
        Claim("publisher, full version: extra memory / model", publishing, "x", at_most=1 + packs + 0.1),
        Claim("publisher, deltas: extra memory / model", deltas, "x", at_most=2 + packs + 0.1),
        Claim(
            "publisher, deltas and an anchor: extra memory / model", anchor, "x", at_most=3 + packs + 0.1
        ),
        Claim(
            "reader, joins: extra memory / model",
            joining,
            "x",
            at_most=blocks / model + 0.1,
            how=f"{blocks / 1e6:.0f} MB of blocks on their way; its shadow, one model, is a mapped file",
        ),
        Claim("reader, deltas: extra memory / model", following, "x", at_most=blocks / model + 0.1),
    ]


def speed(publisher: Remote, reader: Remote, url: str) -> list[Claim]:
    times: dict[str, list[float]] = {"publish": [], "put": [], "fetch": [], "get": [], "half": []}
    cpu: dict[str, list[float]] = {what: [] for what in times}
    sizes: list[int] = []
    for repeat in range(REPEATS + 1):  # the first one is a warm-up
        run = f"{url}/again-{repeat}"
        answers = {"publish": publisher.ask("publish_again", url=run)}
        sizes = sizes or publisher.ask("packs", url=run)["sizes"]
        answers["put"] = publisher.ask("bare_packs", prefix=f"bare/{repeat}")
        answers["fetch"] = reader.ask("fetch_again", url=run, name=f"again-{repeat}")
        answers["get"] = reader.ask("bare_packs", prefix=f"bare/{repeat}", sizes=sizes)
        answers["half"] = reader.ask("fetch_again", url=run, name=f"half-{repeat}", half=True)
        for what, answer in answers.items():
            times[what].append(answer["ended"] - answer["began"])
            cpu[what].append(answer["cpu_s"])
    median = {what: statistics.median(each[1:]) for what, each in times.items()}
    cpu_s = {what: statistics.median(each[1:]) for what, each in cpu.items()}
    rate = {what: sum(sizes) / 1e9 / seconds for what, seconds in median.items()}
    half = answers["half"]
    rate["half"] = half["bytes"] / 1e9 / median["half"]
    parts = [
        Claim(
            "half of a full version: bytes read / needed", half["bytes"] / half["needed"], "x", at_most=1.0
        ),
        Claim(
            "half of a full version: speed / the whole's",
            rate["half"] / rate["fetch"],
            "x",
            at_least=0.8,
            how=f"{rate['half']:.2f} GB/s against {rate['fetch']:.2f}, {half['bytes'] / 1e6:.0f} MB",
        ),
    ]
    whole = [
        Claim(
            f"full {ours}: speed / bare boto3's",
            median[theirs] / median[ours],
            "x",
            at_least=0.9,
            how=f"{rate[ours]:.2f} GB/s against {rate[theirs]:.2f}; {len(sizes)} packs; processor time "
            f"{cpu_s[ours]:.2f} s against {cpu_s[theirs]:.2f}, the server's not counted",
        )
        for ours, theirs in (("publish", "put"), ("fetch", "get"))
    ]
    return [*whole, *parts]
