"""The processes of the sync benches: a publisher and a reader that do what they are told, one line at a time.

    python -m tests.bench.processes publisher|reader ARGUMENTS   (JSON, a `Setup`)

A command is a line of JSON on stdin, its answer a line of JSON on stdout, with times of the monotonic clock, which is
the same in every process of a machine. The bench starts them with `Remote`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from async_rl.store import open_store
from async_rl.weights.config import WeightsConfig
from async_rl.weights.peers import PEERS
from async_rl.weights.run import ensure_run, open_run

__all__ = ["Remote", "Setup"]

ANSWER_LIMIT_S = 150.0
XOR = "xor, zstd-1"


class Setup(Struct, frozen=True):
    url: str
    bucket: str
    env: dict[str, str]  # of the server, through this process's link
    folder: str  # scratch
    rate: float = 3e-6
    weights: dict[str, Any] = {}  # settings of [weights]


class Remote:
    """A process, from the bench's side: `ask` one thing at a time."""

    def __init__(self, role: str, setup: Setup) -> None:
        argv = [sys.executable, "-m", "tests.bench.processes", role, msgspec.json.encode(setup).decode()]
        self._role = role
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **setup.env}
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A process that hangs must not hang the bench.
        alarm = threading.Timer(ANSWER_LIMIT_S, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise RuntimeError(f"the {self._role} ended with {self._process.wait(ANSWER_LIMIT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(ANSWER_LIMIT_S)


class _Memory:
    """What this process holds of its own, in bytes, seen every few milliseconds. Mapped files are not counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most = 0
        threading.Thread(target=self._watch, name="memory", daemon=True).start()

    def reset(self) -> int:
        """Forget the most; what is held now."""
        with self._lock:
            self._most = _private_bytes()
            return self._most

    def most(self) -> int:
        """Since `reset`."""
        with self._lock:
            return max(self._most, _private_bytes())

    def _watch(self) -> None:
        while True:
            with self._lock:
                self._most = max(self._most, _private_bytes())
            time.sleep(_LOOK_S)


_LOOK_S = 0.004


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise KeyError("RssAnon")


class _Publisher:
    def __init__(self, setup: Setup) -> None:
        from async_rl.weights.lineage import claim
        from async_rl.weights.publisher import Publisher
        from tests.bench.bare import Bare
        from tests.bench.training import Training, write_model_dir

        self.folder = Path(setup.folder)
        self.training = Training(setup.rate)
        self.bare = Bare(setup.env, setup.bucket)
        store = open_store(setup.url)
        model = write_model_dir(self.folder / "model")
        config = msgspec.convert(setup.weights, WeightsConfig)
        run = ensure_run(store, model, self.training.parameters)
        warm_up()
        self.store, self.config, self.model = store, config, model
        self.memory = _Memory()
        self.before = self.memory.reset()
        self.manifest: Any = None
        self.publisher = Publisher(
            store, run, claim(store), self.training.parameters, config, on_commit=self._committed
        )
        self.bits: Any = None
        self.contents: list[bytes] = []
        self.sizes = [tensor.numel() for tensor in self.training.parameters.values()]

    def _committed(self, manifest: Any) -> None:
        self.manifest = manifest

    def step(self) -> dict[str, Any]:
        self.training.step()
        return {}

    def publish(self, step: int) -> dict[str, Any]:
        return self._published(self.publisher, step)

    def _published(self, publisher: Any, step: int) -> dict[str, Any]:
        with _Clock() as clock:
            publisher.publish(step)
            snapshot = time.monotonic()
            publisher.flush()
        way = self.manifest.way
        return {
            **clock.answer,
            "snapshot": snapshot,
            "version": self.manifest.version,
            "kind": way.kind,
            "bytes": way.total_bytes,
            "changed": way.changed,
            "packs": len(way.packs),
            "largest": max((pack.size for pack in way.packs), default=0),
        }

    def start_of_peers(self) -> dict[str, Any]:
        """The state that the next XOR is against."""
        self.bits = self.training.bits()
        return {"place": self._save()}

    def _save(self) -> str:
        path = self.folder / "peer-base.npy"
        np.save(path, self.bits.numpy().view(np.uint16))
        return str(path)

    def xor(self, key: str) -> dict[str, Any]:
        import torch

        began = time.monotonic()
        new = self.training.bits()
        pairs = [
            (a.numpy().view(np.uint16), b.numpy().view(np.uint16))
            for a, b in zip(torch.split(self.bits, self.sizes), torch.split(new, self.sizes), strict=True)
        ]
        data = peer(XOR).encode(pairs)
        encoded = time.monotonic()
        self.bare.put(key, data)
        ended = time.monotonic()
        self.bits = new
        return {"began": began, "encoded": encoded, "ended": ended, "key": key, "size": len(data)}

    def full(self, key: str) -> dict[str, Any]:
        from safetensors.torch import save

        began = time.monotonic()
        data = save({name: each.bfloat16() for name, each in self.training.parameters.items()})
        encoded = time.monotonic()
        self.bare.put(key, data)
        ended = time.monotonic()
        return {"began": began, "encoded": encoded, "ended": ended, "key": key, "size": len(data)}

    def digest(self) -> dict[str, Any]:
        """Of the state as it is now: whole, by the names of the tensors."""
        import torch

        parts = zip(self.training.parameters, torch.split(self.training.bits(), self.sizes), strict=True)
        return {"digest": _hash({name: bits.numpy().tobytes() for name, bits in parts})}

    def publish_again(self, url: str) -> dict[str, Any]:
        """The whole state as the first version of a run of its own."""
        from async_rl.weights.lineage import claim
        from async_rl.weights.publisher import Publisher

        store = open_store(url)
        run = ensure_run(store, self.model, self.training.parameters)
        with Publisher(
            store, run, claim(store), self.training.parameters, self.config, on_commit=self._committed
        ) as publisher:
            return self._published(publisher, 0)

    def packs(self, url: str) -> dict[str, Any]:
        """Read the last version's packs, for `bare_packs`."""
        packs = self.manifest.way.packs
        store = open_store(url)
        self.contents = [store.get(pack.key) for pack in packs]
        return {"sizes": [pack.size for pack in packs]}

    def bare_packs(self, prefix: str) -> dict[str, Any]:
        with _Clock() as clock:
            self.bare.put_all([(f"{prefix}/{number}", data) for number, data in enumerate(self.contents)])
        return clock.answer

    def drop_packs(self) -> dict[str, Any]:
        self.contents = []
        return {}

    def wait_for_anchor(self) -> dict[str, Any]:
        """Of a version after the first. Waits for: the record of the anchor in ways/."""
        from async_rl.weights.ways import list_edges

        deadline = time.monotonic() + ANSWER_LIMIT_S / 2
        while not any(edge.base < 0 for edge in list_edges(self.store, 0)):
            assert time.monotonic() < deadline, "no anchor was written"
            time.sleep(0.05)
        return {}

    def memory_most(self) -> dict[str, Any]:
        """Above what was held before the publisher was made; forgotten then."""
        most = self.memory.most() - self.before
        self.memory.reset()
        return {"most": most, "model": self.training.nbytes}

    def close(self) -> dict[str, Any]:
        self.publisher.close()
        return {}


class _Reader:
    def __init__(self, setup: Setup) -> None:
        from async_rl.weights.subscriber import Subscriber
        from tests.bench.bare import Bare

        self.bare = Bare(setup.env, setup.bucket)
        self.store = open_store(setup.url)
        self.run = open_run(self.store)
        self.folder = Path(setup.folder)
        warm_up()
        self.config = msgspec.convert(setup.weights, WeightsConfig)
        self.memory = _Memory()
        self.before = self.memory.reset()
        self.subscriber = Subscriber(self.store, self.run, self.folder / "cache", self.config)
        self.local: Any = None
        self.values: list[np.ndarray] = []

    def fetch(self) -> dict[str, Any]:
        began = time.monotonic()
        manifest = self.subscriber.newest(self.local.version if self.local else -1)
        assert manifest is not None
        found = time.monotonic()
        self.local = self.subscriber.fetch(manifest)
        return {
            "began": began,
            "found": found,
            "ended": time.monotonic(),
            "version": self.local.version,
            "bytes": self.local.fetched_bytes,
            "path": getattr(self.local, "path", ""),
        }

    def start_of_peers(self, place: str) -> dict[str, Any]:
        from async_rl.weights.packs import ITEM_BYTES

        flat = np.load(place)
        ends = np.cumsum([spec.nbytes // ITEM_BYTES for spec in self.run.tensors])[:-1]
        self.values = np.split(flat, ends)
        return {}

    def xor(self, key: str, size: int) -> dict[str, Any]:
        began = time.monotonic()
        data = self.bare.get(key, size)
        got = time.monotonic()
        peer(XOR).apply(data, self.values)
        return {"began": began, "got": got, "ended": time.monotonic()}

    def full(self, key: str, size: int) -> dict[str, Any]:
        began = time.monotonic()
        self.bare.get_file(key, size, self.folder / "full.safetensors")
        return {"began": began, "ended": time.monotonic()}

    def digest(self) -> dict[str, Any]:
        from tests.weights_support import state_of

        state = state_of(self.run, self.local.shards)
        return {"digest": _hash({spec.name: state[spec.name].tobytes() for spec in self.run.tensors})}

    def peer_digest(self) -> dict[str, Any]:
        parts = zip(self.run.tensors, self.values, strict=True)
        return {"digest": _hash({spec.name: values.tobytes() for spec, values in parts})}

    def fetch_again(self, url: str, name: str, half: bool = False) -> dict[str, Any]:
        """The newest version of a run, or `half` of its tensors (the first ones), into a folder of its own."""
        from async_rl.weights.subscriber import Subscriber

        store = open_store(url)
        run = open_run(store)
        first = run.tensors[: len(run.tensors) // 2] if half else ()
        needs = {spec.name: (0, spec.nbytes // 2) for spec in first} if half else None
        subscriber = Subscriber(store, run, self.folder / name, self.config, needs)
        with _Clock() as clock:
            manifest = subscriber.newest()
            assert manifest is not None
            local = subscriber.fetch(manifest)
        subscriber.close()
        shutil.rmtree(self.folder / name)
        return {
            **clock.answer,
            "bytes": local.fetched_bytes,
            "needed": sum(spec.nbytes for spec in first),
        }

    def bare_packs(self, prefix: str, sizes: list[int]) -> dict[str, Any]:
        folder = self.folder / "bare"
        folder.mkdir()
        with _Clock() as clock:
            self.bare.get_files([(f"{prefix}/{n}", size, folder / str(n)) for n, size in enumerate(sizes)])
        shutil.rmtree(folder)
        return clock.answer

    def memory_most(self) -> dict[str, Any]:
        most = self.memory.most() - self.before
        self.memory.reset()
        return {"most": most}

    def close(self) -> dict[str, Any]:
        return {}


class _Clock:
    """When the block began and ended, and the processor time that this process took for it, in seconds."""

    def __enter__(self) -> _Clock:
        self._began, self._cpu = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        cpu_s = time.process_time() - self._cpu
        self.answer: dict[str, Any] = {"began": self._began, "ended": time.monotonic(), "cpu_s": cpu_s}


def warm_up() -> None:
    """Compile the codec's kernels, in every mode that a run may meet, before anything is measured."""
    from async_rl.weights.codec import apply_tile, digest_of, encode_tile

    source = np.random.default_rng(1)
    base = source.integers(0, 1 << 16, 1 << 16, np.uint16)
    for part in (0.01, 0.6):
        new = base.copy()
        new[source.random(len(base)) < part] += 1
        for small in (False, True):
            coded = encode_tile(base, new, 0, small=small)
            assert coded is not None
            values = base.copy()
            apply_tile(int(coded.mode), coded.data, values, 0)
            assert np.array_equal(values, new)
    digest_of(base, 0)


def peer(name: str) -> Any:
    return next(each for each in PEERS if each.name == name)


def _hash(parts: dict[str, bytes]) -> str:
    import hashlib

    result = hashlib.sha256()
    for name, data in parts.items():
        result.update(name.encode() + b"\0" + data)
    return result.hexdigest()


def main() -> None:
    role = {"publisher": _Publisher, "reader": _Reader}[sys.argv[1]](
        msgspec.json.decode(sys.argv[2], type=Setup)
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps(getattr(role, command)(**arguments)) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
