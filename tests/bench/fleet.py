"""A thousand workers at one orchestrator, against a bare ROUTER that echoes the same payloads.

Real processes on the loopback: the orchestrator with its spool and fsync on; a trainer that takes every batch as
soon as it is ready, and publishes; a process with a DEALER socket per worker, each of which answers a lease with a
finished group at once, and sends its heartbeats. The peer is the same process of DEALERs against a ROUTER that sends
a short answer for each group: no decoding, no checks, no disk. Memory is that of the orchestrator at the end.

    encoding    the same groups through wire.encode and decode, against json (arrays as lists) and pickle
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from rich.console import Console

from async_rl import wire
from async_rl.errors import WaitTimeout
from async_rl.transport.link import TrainerLink, ask_status
from async_rl.wire import Array, Group, Key, Lease, Sample
from tests.bench.claims import Claim

__all__ = ["run"]

WORKERS = 1000
SAMPLES = 8
TOKENS = 128
BATCH = 1024
MAX_LAG = 3
WARM_S, MEASURE_S = 5.0, 15.0
HEARTBEAT_S = 2.0
LIMIT_S = 120.0
VOCAB = 50


def run(scratch: Path, console: Console) -> list[Claim]:
    console.print(
        f"{WORKERS} workers, groups of {SAMPLES} samples of {TOKENS} tokens, {len(payload(0))} bytes"
    )
    echo = against_echo(scratch)
    ours = against_orchestrator(scratch)
    console.print(
        f"ours {ours['rate']:.0f} groups/s, ack p50 {1e3 * ours['p50']:.1f} ms, p99 {1e3 * ours['p99']:.1f} ms; "
        f"echo {echo['rate']:.0f}/s, p50 {1e3 * echo['p50']:.1f}, p99 {1e3 * echo['p99']:.1f}; orchestrator "
        f"{ours['memory_mb']:.0f} MB, {ours['trained']} groups trained, spool {ours['spool_mb']:.0f} MB"
    )
    return [
        Claim(
            "groups/s, decoded, checked, on disk / bare ROUTER echo",
            ours["rate"] / echo["rate"],
            "x",
            at_least=0.3,
            how=f"{ours['rate']:.0f} against {echo['rate']:.0f} groups/s, {WORKERS} workers, fsync on",
        ),
        Claim(
            "time to the ack, median / echo's",
            ours["p50"] / echo["p50"],
            "x",
            how=f"p99 {1e3 * ours['p99']:.0f} ms against {1e3 * echo['p99']:.0f} ms",
        ),
        *encoding(),
    ]


# ---------------------------------------------------------------- what is sent


def a_group(ordinal: int) -> Group:
    ids = np.arange(TOKENS) % VOCAB
    samples = tuple(
        Sample(
            tokens=Array.of(ids, "<i4"),
            logprobs=Array.of(np.linspace(-3, -0.01, TOKENS), "<f4"),
            mask=Array.of(np.ones(TOKENS), "|u1"),
            spans=Array.of([0, TOKENS], "<i4"),
            reward=float(index % 2),
            finish="stop",
            text="x" * (3 * TOKENS),
        )
        for index in range(SAMPLES)
    )
    return Group(Key("train", ordinal), Array.of(range(1, 33), "<i4"), samples, "w")


def payload(ordinal: int) -> bytes:
    return wire.encode(wire.GroupDone(ordinal, a_group(ordinal)))


# ---------------------------------------------------------------- the two runs


def against_orchestrator(scratch: Path) -> dict[str, Any]:
    address_file = scratch / "address"
    server = subprocess.Popen([sys.executable, "-m", "tests.bench.fleet", "orchestrator", str(scratch)])
    try:
        address = _wait_for(address_file, server)
        stop = threading.Event()
        trainer = threading.Thread(target=_train, args=(address, stop), daemon=True)
        trainer.start()
        result = _clients(address, "orchestrator")
        status = ask_status(address, 10.0)
        memory = Path(f"/proc/{server.pid}/status").read_text()
        result["memory_mb"] = int(memory.split("VmRSS:")[1].split()[0]) / 1024
        result["trained"] = sum(status.lag_counts.values()) // SAMPLES
        result["spool_mb"] = sum(path.stat().st_size for path in (scratch / "spool").glob("*.log")) / 1e6
        stop.set()
        trainer.join(LIMIT_S)
        if set(status.refused) - {"no_trainer", "unattached", "unknown"}:
            raise AssertionError(f"refused: {status.refused}")
        return result
    finally:
        server.kill()
        server.wait()


def against_echo(scratch: Path) -> dict[str, Any]:
    address_file = scratch / "echo"
    server = subprocess.Popen([sys.executable, "-m", "tests.bench.fleet", "echo", str(address_file)])
    try:
        return _clients(_wait_for(address_file, server), "echo")
    finally:
        server.kill()
        server.wait()


def _clients(address: str, kind: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.fleet", "clients", address, kind],
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no address in {file}")
        time.sleep(0.05)
    return file.read_text().strip()


def _train(address: str, stop: threading.Event) -> None:
    """Takes batches and publishes; keeps as much as a run with a checkpoint every hundred steps would."""
    with TrainerLink(address) as link:
        link.attach(wire.Attach(wire.PROTOCOL, "run", "model", 1, 0, 0, 0, VOCAB))
        step = 0
        while not stop.is_set():
            try:
                link.next_batch(1, step, 1.0, resumable=step // 100 * 100, explain=False)
            except WaitTimeout:
                continue
            step += 1
            link.published(1, step, step)


# ---------------------------------------------------------------- processes


def _orchestrator(scratch: Path) -> None:
    from async_rl.envs.base import EnvironmentConfig
    from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
    from orchestrator.server import run_orchestrator
    from tests.orchestration import Counting

    run_orchestrator(
        environment=Counting(),
        environment_config=EnvironmentConfig(),
        sampling=SamplingConfig(group_size=SAMPLES, max_tokens=TOKENS),
        config=OrchestratorConfig(
            bind="tcp://127.0.0.1:0", batch_groups=BATCH, max_lag=MAX_LAG, straggler_hold_s=0.0
        ),
        evaluation=EvalConfig(every=0),
        seed=0,
        spool=scratch / "spool",
        address_file=scratch / "address",
    )


def _echo(address_file: Path) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    partial = address_file.with_suffix(".part")
    partial.write_text(f"tcp://127.0.0.1:{port}")
    partial.replace(address_file)
    while True:
        peer, _ = socket.recv_multipart()
        socket.send_multipart([peer, b"acknowledged: 32 bytes or about"])


def _dealers(address: str, kind: str) -> None:
    """A DEALER per worker, one loop. A worker of the echo sends its next group at the answer, one of the orchestrator
    at the next lease. `version`: newest announced, which every group claims as its own."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, WORKERS + 64)
    poller = zmq.Poller()
    sockets: dict[Any, int] = {}
    for number in range(WORKERS):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"w{number}:1".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        sockets[socket] = number
        poller.register(socket, zmq.POLLIN)
    done = wire.GroupDone(0, a_group(0))
    sent: dict[tuple[int, int], float] = {}
    waits: list[float] = []
    began = measured = time.monotonic()
    finished, version = 0, 0

    def deliver(socket: Any, number: int, lease: int, key: Key) -> None:
        spans = Array.of([version, TOKENS], "<i4")
        samples = tuple(msgspec.structs.replace(each, spans=spans) for each in done.group.samples)
        group = msgspec.structs.replace(done.group, key=key, samples=samples)
        frame = wire.encode(wire.GroupDone(lease, group))
        sent[number, lease] = time.monotonic()
        socket.send(frame)

    for socket, number in sockets.items():
        if kind == "echo":
            deliver(socket, number, 0, Key("train", number))
        else:
            socket.send(
                wire.encode(wire.Hello(wire.PROTOCOL, f"w{number}", "bench", "run", "model", 0, "bench"))
            )
    beats = 0  # how many were sent: each worker one every HEARTBEAT_S, evenly
    everybody = list(sockets)
    while (now := time.monotonic()) < began + WARM_S + MEASURE_S:
        while kind != "echo" and beats < (now - began) * WORKERS / HEARTBEAT_S:
            everybody[beats % WORKERS].send(wire.encode(wire.Heartbeat(version, "serving")))
            beats += 1
        if now > began + WARM_S and measured == began:
            measured, finished = now, 0
            waits.clear()
        for socket, _ in poller.poll(1000):
            number = sockets[socket]
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if kind == "echo":
                    waits.append(time.monotonic() - sent.pop((number, 0)))
                    finished += 1
                    deliver(socket, number, 0, Key("train", finished))
                    continue
                match wire.decode(frame):
                    case wire.Welcome():
                        socket.send(wire.encode(wire.Credit(2, version)))
                    case wire.Refused():
                        time.sleep(0.01)  # no trainer yet
                        hello = wire.Hello(wire.PROTOCOL, f"w{number}", "bench", "run", "model", 0, "bench")
                        socket.send(wire.encode(hello))
                    case Lease(lease=lease, key=key):
                        deliver(socket, number, lease, key)
                    case wire.Announce(version=newest):
                        if newest > version:
                            version = newest
                        socket.send(wire.encode(wire.Credit(2, version)))
                    case wire.Ack(lease=lease):
                        waits.append(time.monotonic() - sent.pop((number, lease)))
                        finished += 1
                    case wire.Nack(reason=reason):
                        raise SystemExit(f"refused: {reason}")
    seconds = time.monotonic() - measured
    p99 = statistics.quantiles(waits, n=100)[98]
    result = {"rate": finished / seconds, "p50": statistics.median(waits), "p99": p99}
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # closing a thousand sockets one by one takes longer than the bench


# ---------------------------------------------------------------- encoding


def encoding() -> list[Claim]:
    done = wire.GroupDone(1, a_group(1))

    def lists() -> bytes:
        samples = [
            {
                "tokens": s.tokens.numpy().tolist(),
                "logprobs": s.logprobs.numpy().tolist(),
                "mask": s.mask.numpy().tolist(),
                "spans": s.spans.numpy().tolist(),
                "reward": s.reward,
                "finish": s.finish,
                "text": s.text,
            }
            for s in done.group.samples
        ]
        return json.dumps({"prompt": done.group.prompt.numpy().tolist(), "samples": samples}).encode()

    def arrays() -> list[Any]:
        return [
            (
                s.tokens.numpy(),
                s.logprobs.numpy(),
                s.mask.numpy(),
                s.spans.numpy(),
                s.reward,
                s.finish,
                s.text,
            )
            for s in done.group.samples
        ]

    def unlisted(data: bytes) -> Any:
        return [np.asarray(s["tokens"], np.int32) for s in json.loads(data)["samples"]]

    ours = _time(lambda: wire.decode(wire.encode(done)))
    text = _time(lambda: unlisted(lists()))
    pickled = _time(lambda: pickle.loads(pickle.dumps(arrays())))
    size = len(wire.encode(done))
    return [
        Claim("encode + decode of a group: json's time / ours", text / ours, "x", how=f"{size} bytes"),
        Claim("encode + decode of a group: pickle's time / ours", pickled / ours, "x"),
        Claim("bytes of a group: json's / ours", len(lists()) / size, "x"),
    ]


def _time(work: Any) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(200):
            work()
        best = min(best, time.thread_time() - began)
    return best


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["orchestrator", folder]:
            _orchestrator(Path(folder))
        case ["echo", file]:
            _echo(Path(file))
        case ["clients", at, what]:
            _dealers(at, what)
