"""The store goes away in the middle of training, and comes back: real processes, a real server.

Nothing ends, workers go on serving, the trainer goes on as far as admission lets it; the lag rises and falls, as
`async-rl lag --json` tells throughout; and in the end every worker has, bit for bit, the trainer's weights."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from async_rl.procs import Child
from async_rl.store import open_store
from async_rl.store.local_server import LocalServer, free_ports
from async_rl.weights.lineage import list_versions
from tests.chaos.s3_proxy import S3Proxy, Weather
from tests.runs import LocalRun
from tests.servers import S3Server
from workers import checkpoints

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 120.0
MAX_LAG = 4
RISEN = 3
"""Steps that the trainer is ahead; without an outage it is one, sometimes two."""
SETTINGS: dict[str, dict[str, Any]] = {
    "trainer": {"steps": 5000, "checkpoint_every": 4, "warmup_steps": 0},
    "orchestrator": {"max_lag": MAX_LAG},
}


class Outage:
    """A run with two workers, and whoever watches it."""

    def __init__(self, folder: Path, url: str, model: Path) -> None:
        self.url = url
        settings = {name: dict(table) for name, table in SETTINGS.items()}
        address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        settings["orchestrator"] |= {"bind": address, "batch_groups": 4}
        self.run = LocalRun(folder, url, model, **settings)
        self.run.address = self.run.dial = address
        self.folder = folder

    def start(self) -> None:
        self.orchestrator = self.run.start_orchestrator()
        self.trainer = self.run.start_trainer("--orchestrator", self.run.address)
        self.workers = [
            self.run.start_worker(name, "--set", "rollout.cache_dir=cache") for name in ("w1", "w2")
        ]
        self.all = (self.orchestrator, self.trainer, *self.workers)
        self.steps_more(3)
        argv = [
            sys.executable,
            "-m",
            "async_rl",
            "lag",
            "--watch",
            "--json",
            "--orchestrator",
            self.run.address,
        ]
        self.watcher = self.run.fleet.start("lag", argv, log_path=self.folder / "lag.log")
        self.wait("both workers to serve", lambda: self.serving() == 2)
        self.wait("the first sample", lambda: bool(self.samples()))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        self.run.wait(what, condition, START_S, *self.all)

    def steps_more(self, count: int) -> None:
        goal = self.run.steps() + count
        self.wait(f"{count} more steps", lambda: self.run.steps() >= goal)

    def serving(self) -> int:
        status = self.run.status()
        return sum(each.state in ("serving", "updating") for each in status.workers) if status else 0

    def samples(self) -> list[dict[str, Any]]:
        """What `async-rl lag --json` has said, of a run with a version."""
        lines = self.run.log("lag").splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [each for each in said if (each["newest_version_step"] or 0) >= 0]

    def end(self) -> None:
        """The trainer stops as asked; the workers have its last version, bit for bit, before they end."""
        self.trainer.process.send_signal(signal.SIGTERM)
        assert self.run.finish(self.trainer, START_S) in (0, 128 + signal.SIGTERM, -signal.SIGTERM), (
            self.run.logs()
        )
        store = open_store(self.url)
        newest = list_versions(store)[-1]
        rest = (self.orchestrator, *self.workers)

        def both_there() -> bool:
            status = self.run.status()
            return status is not None and [each.version for each in status.workers] == [newest, newest]

        self.run.wait(f"both workers to serve version {newest}", both_there, START_S, *rest)
        for worker in self.workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in self.workers:
            self.run.finish(worker, START_S)
        truth = masters(store, newest)
        for name in ("w1", "w2"):
            files = list((self.folder / name / "cache").glob("*/shadow/*.safetensors"))
            held = {key: bits for file in files for key, bits in load_bits(file.read_bytes()).items()}
            assert held.keys() == truth.keys()
            for key, bits in truth.items():
                assert np.array_equal(held[key], bits), f"{name} holds other weights in {key}"
        store.close()


def load_bits(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of 16-bit floats as their bits."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = np.frombuffer(data, "<u2", (end - begin) // 2, 8 + length + begin)
            result[name] = raw.reshape(entry["shape"])
    return result


def masters(store: Any, version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The trainer's float32 weights in its last checkpoint, rounded to bfloat16 (to nearest, ties to even)."""
    name = checkpoints.list_committed(store)[-1]
    commit = json.loads(store.get(f"checkpoints/{name}.json"))
    assert commit["progress"]["version"] == version, "the last checkpoint is of the last version"
    part = load(store.get(f"checkpoints/{name}/rank-00000.safetensors"))
    result = {}
    for key, values in part.items():
        if key.endswith("/param"):
            bits = values.view(np.uint32).astype(np.uint64)
            result[key.removesuffix("/param")] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(
                np.uint16
            )
    return result


def lag_of(sample: dict[str, Any]) -> int:
    """Optimizer steps that the trainer is ahead of what the worst worker serves."""
    ahead = sample["step"] - sample["newest_version_step"]
    behind = [each["lag"] for each in sample["workers"] if each["lag"] is not None]
    return max([ahead, *behind])


class Server:
    """An S3 server that can be killed, stopped, and started again on the same port and folder."""

    def __init__(self, folder: Path) -> None:
        self._options: dict[str, Any] = {
            "bucket": "tests",
            "kind": "seaweedfs",
            "limit_s": START_S,
            "grace_s": 0,
        }
        self._folder = folder
        self._server = LocalServer(folder, **self._options)
        self._server.start()
        self.port = int(self._server.endpoint.rpartition(":")[2])
        env = self._server.env
        self.s3 = S3Server(
            self._server.endpoint, env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], "tests"
        )

    @property
    def _child(self) -> Child:
        return self._server._fleet.children[0]

    def kill(self) -> None:
        self._child.signal_group(signal.SIGKILL)
        self._child.process.wait(START_S)

    def start_again(self) -> None:
        self._server.stop()
        self._server = LocalServer(self._folder, port=self.port, **self._options)
        self._server.start()

    def freeze(self) -> None:
        self._child.signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self._child.signal_group(signal.SIGCONT)

    def close(self) -> None:
        self.thaw()
        self._server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "s3")
    yield server
    server.close()


@pytest.mark.parametrize(
    ("how", "outage_s"),
    [
        ("killed", 5.0),
        pytest.param("stopped", 5.0, marks=pytest.mark.long),
        pytest.param("killed", 60.0, marks=pytest.mark.long),
        pytest.param("stopped", 60.0, marks=pytest.mark.long),
    ],
)
def test_a_store_that_goes_away_in_training_costs_lag_and_nothing_else(
    how: str,
    outage_s: float,
    server: Server,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.s3.activate(monkeypatch)
    outage = Outage(tmp_path, server.s3.new_url(), tiny_model)
    with outage.run:
        outage.start()
        away_from = len(outage.samples())
        (server.kill if how == "killed" else server.freeze)()
        threading.Event().wait(outage_s)  # this is the outage, no wait for anything
        assert all(child.running() for child in outage.all), outage.run.logs()
        outage.wait("the lag to rise", lambda: lag_of(outage.samples()[-1]) >= RISEN)
        served = outage.serving()
        (server.start_again if how == "killed" else server.thaw)()
        back = len(outage.samples())
        version = outage.samples()[-1]["newest_version"]
        outage.wait(
            "versions after the outage", lambda: outage.samples()[-1]["newest_version"] >= version + 3
        )
        outage.steps_more(2 * MAX_LAG)
        outage.wait("the lag to fall", lambda: lag_of(outage.samples()[-1]) <= 1)
        assert outage.watcher.running(), outage.run.log("lag")[-2000:]
        outage.end()
    assert served == 2, "workers serve what they have while the store is away"
    samples = outage.samples()
    before, during, after = samples[:away_from], samples[away_from:back], samples[back:]
    assert before and during and after
    oldest = max(each["newest_version_age_s"] for each in during)
    assert oldest >= 0.5 * outage_s, "the age of the newest version shows the outage"
    assert max(map(lag_of, during)) >= RISEN
    ahead = [each["step"] - each["newest_version_step"] for each in samples]
    assert max(ahead) <= MAX_LAG + 1, "as far as admission lets the trainer go"
    assert min(each["newest_version_age_s"] for each in after) < oldest
    assert min(map(lag_of, after)) <= 1, "it falls again"
    assert all(row["lag/max"] <= MAX_LAG for row in outage.run.metrics() if "lag/max" in row)


STORM = Weather(fail=0.1, drop=0.05, lose=0.05, cut=0.05, delay=0.2, delay_s=0.3, stale=0.05, stale_s=1.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_faults_costs_time_and_nothing_else(
    seed: int, seaweed: S3Server, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed.activate(monkeypatch)
    url = seaweed.new_url()
    with S3Proxy(seaweed.endpoint, seed=seed, root=url.removeprefix("s3:/")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        outage = Outage(tmp_path, url, tiny_model)
        with outage.run:
            outage.start()
            proxy.weather = STORM
            outage.steps_more(30)
            counts = proxy.counts()
            proxy.weather = Weather()
            outage.end()
    assert all(counts.get(name, 0) > 0 for name in ("fail", "drop", "lose", "delay")), counts
    assert all(row["lag/max"] <= MAX_LAG for row in outage.run.metrics() if "lag/max" in row)
