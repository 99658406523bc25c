"""From publish to verified and ready in the reader's shadow, over a link of 200 Mbit/s and 40 ms.

A trainer's process, a real S3 server, a reader's process; a link of its own between each of the two and the
server. The model has 135 M weights (training.py). Version by version, one after the other on the same link, the
same change goes

    ours       Publisher.publish ─► manifest committed ─► hint ─► Subscriber.newest, fetch: verified, digest
               compared
    xor        XOR with the state before, zstd-1 (peers.py) ─► one put ─► hint ─► get, applied; nothing is
               verified
    full       a safetensors file through bare boto3 in parallel parts, there and back; nothing is verified

Times run from before the rounding of the masters to 16 bit until the reader has the state in its memory. A hint
takes half a round trip, as over the trainer's socket. Afterwards the reader's states must be the trainer's, bit
for bit.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from rich.console import Console

from async_rl.store.local_server import LocalServer
from tests.bench.claims import Claim
from tests.bench.link import RATE_BIT_S, ROUND_TRIP_S, Link
from tests.bench.processes import Remote, Setup

__all__ = ["run"]

VERSIONS = 20
SKIP = 2
"""Versions left out: both processes touch buffers and connections for the first time."""
FULL_REPEATS = 2


def run(scratch: Path, console: Console) -> list[Claim]:
    with (
        LocalServer(scratch / "store", grace_s=0) as server,
        Link(server.endpoint) as up,
        Link(server.endpoint) as down,
    ):
        setups = [
            Setup(f"{server.url}/sync", server.bucket, link.env(server.env), str(scratch / role))
            for role, link in (("publisher", up), ("reader", down))
        ]
        for setup in setups:
            Path(setup.folder).mkdir()
        with Remote("publisher", setups[0]) as publisher:
            publisher.answer()
            first = publisher.ask("publish", step=0)
            with Remote("reader", setups[1]) as reader:
                reader.answer()
                return measure(publisher, reader, first, console)


def measure(publisher: Remote, reader: Remote, first: dict[str, float], console: Console) -> list[Claim]:
    joined = reader.ask("fetch")
    reader.ask("start_of_peers", **publisher.ask("start_of_peers"))
    ours, xor, full = [], [], []
    parts: list[tuple[float, ...]] = []
    nbytes: list[tuple[int, int]] = []
    changed = []
    for step in range(1, VERSIONS + SKIP + 1):
        publisher.ask("step")
        sent = publisher.ask("publish", step=step)
        time.sleep(ROUND_TRIP_S / 2)
        got = reader.ask("fetch")
        assert got["version"] == sent["version"]
        peer_sent = publisher.ask("xor", key=f"xor/{step}")
        time.sleep(ROUND_TRIP_S / 2)
        peer_got = reader.ask("xor", key=peer_sent["key"], size=peer_sent["size"])
        ours.append(got["ended"] - sent["began"])
        xor.append(peer_got["ended"] - peer_sent["began"])
        nbytes.append((sent["bytes"], peer_sent["size"]))
        changed.append(sent["changed"])
        parts.append(
            (
                sent["snapshot"] - sent["began"],
                sent["ended"] - sent["snapshot"],
                got["found"] - got["began"],
                got["ended"] - got["found"],
            )
        )
    wanted = publisher.ask("digest")["digest"]
    assert reader.ask("digest")["digest"] == wanted, "ours differs from the trainer's state"
    assert reader.ask("peer_digest")["digest"] == wanted, "the peer's differs from the trainer's state"
    for repeat in range(FULL_REPEATS):
        sent = publisher.ask("full", key=f"full/{repeat}")
        time.sleep(ROUND_TRIP_S / 2)
        got = reader.ask("full", key=sent["key"], size=sent["size"])
        full.append(got["ended"] - sent["began"])
    median = statistics.median(ours[SKIP:])
    snapshot, commit, find, fetch = (statistics.median(column) for column in list(zip(*parts, strict=True)))
    sizes = [statistics.median(column) for column in zip(*nbytes[SKIP:], strict=True)]
    weights = sent["size"] // 2
    how = (
        f"{median:.2f} s over {VERSIONS} versions ({min(ours[SKIP:]):.2f} to {max(ours[SKIP:]):.2f}): "
        f"snapshot {snapshot:.2f}, "
        f"encode to commit {commit:.2f}, find {find:.2f}, fetch to ready {fetch:.2f}; {sizes[0] / 1e6:.2f} MB, "
        f"{100 * statistics.median(changed) / weights:.2f} % changed"
    )
    link = f"{RATE_BIT_S / 1e6:.0f} Mbit/s, {1e3 * ROUND_TRIP_S:.0f} ms"
    return [
        Claim(
            f"sync over {link}: full safetensors through boto3 / ours",
            statistics.median(full) / median,
            "x",
            at_least=1.0,
            how=f"full {statistics.median(full):.1f} s, not verified",
        ),
        Claim(
            f"sync over {link}: XOR + zstd-1 through boto3 / ours",
            statistics.median(xor[SKIP:]) / median,
            "x",
            at_least=1.0,
            how=f"XOR {statistics.median(xor[SKIP:]):.2f} s with {sizes[1] / 1e6:.2f} MB, not verified",
        ),
        Claim(f"sync over {link}: publish to ready", median, " s", how=how),
        Claim(
            f"sync over {link}: first full version, publish + fetch / boto3",
            (first["ended"] - first["began"] + joined["ended"] - joined["began"]) / statistics.median(full),
            "x",
            how="ours, verified, against put + get of the same bytes; cold connections",
        ),
    ]
