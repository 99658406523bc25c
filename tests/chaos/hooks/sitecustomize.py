"""On PYTHONPATH, this runs first in every process of a run under test. It changes nothing but:

    ASYNC_RL_TEST_LOG=FILE    what was trained and what was acknowledged is noted there, one JSON line each: a log
                              that is not the orchestrator's own
    ASYNC_RL_TEST_KILLS=…     "ROLE POINT N; …": the N-th time that the process of this role comes to this point, it
                              is killed with SIGKILL. Once: what was done stands in the log. A fourth word tells equal
                              ones apart
    ASYNC_RL_TEST_LENGTHS=1   each lease of tests/chaos/prompts.py samples as many tokens as its ordinal asks for
    ASYNC_RL_TEST_CLOCK=FILE  time.time() is off by the float64 in it; time.monotonic() is not
    ASYNC_RL_TEST_WITHOUT=…   guards that are taken out (without.py), separated by ";"

What the lines mean stands in tests/chaos/evidence.py. Modules are changed when they are imported, and only those that
a role imports anyway.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections import Counter
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

LOG = os.environ.get("ASYNC_RL_TEST_LOG", "")


def role() -> str:
    words = sys.orig_argv
    for name in ("orchestrator", "rollout"):
        if name in words:
            return name
    return "trainer" if "trainer" in words and "RANK" in os.environ else ""


ROLE = role()


def note(**line: Any) -> None:
    data = (json.dumps({"who": ROLE, "pid": os.getpid(), **line}) + "\n").encode()
    file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, data)
    os.close(file)


def armed() -> dict[str, list[tuple[int, str]]]:
    done = set()
    if Path(LOG).exists():
        lines = Path(LOG).read_text().splitlines()
        done = {json.loads(line)["killed"] for line in lines if '"killed"' in line}
    result: dict[str, list[tuple[int, str]]] = {}
    for each in filter(None, map(str.strip, os.environ.get("ASYNC_RL_TEST_KILLS", "").split(";"))):
        who, point, count = each.split(" ")[:3]
        if who == ROLE and each not in done:
            result.setdefault(point, []).append((int(count), each))
    return result


KILLS = armed() if LOG and ROLE else {}
passed: Counter[str] = Counter()


def point(name: str) -> None:
    passed[name] += 1
    for count, each in KILLS.get(name, ()):
        if passed[name] == count:
            note(killed=each)
            os.kill(os.getpid(), signal.SIGKILL)


def turn_clock() -> None:
    """The storm writes the file while we run."""
    with Path(os.environ["ASYNC_RL_TEST_CLOCK"]).open("rb") as file:
        offset = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real = time.time
    time.time = lambda: real() + struct.unpack("<d", offset[:8])[0]


def group_hash(group: Any) -> str:
    """Of what is trained of it."""
    digest = hashlib.blake2b(bytes(group.prompt.data), digest_size=8)
    for sample in group.samples:
        for array in (sample.tokens, sample.logprobs, sample.mask, sample.spans):
            digest.update(bytes(array.data))
        digest.update(struct.pack("<d", sample.reward))
    return digest.hexdigest()


def versions_of(sample: Any) -> list[int]:
    return [int(version) for version in sample.spans.numpy()[::2]]


def around(holder: Any, name: str, label: Any) -> None:
    """`label(args)`: the name of the point, or empty."""
    inner = getattr(holder, name)

    def outer(*args: Any, **options: Any) -> Any:
        said = label(*args, **options) if callable(label) else label
        if said:
            point(f"{said}:before")
        result = inner(*args, **options)
        if said:
            point(f"{said}:after")
        return result

    setattr(holder, name, outer)


def around_async(holder: Any, name: str, label: Any, done: Any = None) -> None:
    inner = getattr(holder, name)

    async def outer(*args: Any, **options: Any) -> Any:
        said = label(*args) if label else ""
        if said:
            point(f"{said}:before")
        result = await inner(*args, **options)
        if said:
            point(f"{said}:after")
        if done:
            done(result)
        return result

    setattr(holder, name, outer)


# ---------------------------------------------------------------- what each module gets


def spool(module: Any) -> None:
    write = module.os.pwritev

    def in_halves(file: int, parts: Any, offset: int) -> int:
        if any(passed["write:half"] + 1 == n for n, _ in KILLS.get("write:half", ())):
            data = b"".join(parts)
            write(file, [data[: len(data) // 2]], offset)
        point("write:half")
        return write(file, parts, offset)

    around(module.Spool, "_write_sealed", lambda self: "write" if self._sealed else "")
    around(module.Spool, "write", lambda self: "commit" if self._sealed_dirty else "")
    around(module.Spool, "begin", "segment")
    append = module.Spool.append

    def noted(self: Any, record: Any) -> Any:
        if type(record).__name__ == "Settled":
            note(settled=record.ordinal, reason=record.reason)
        return append(self, record)

    module.Spool.append = noted

    class Os:
        pwritev = staticmethod(in_halves)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    module.os = Os()


def listener(module: Any) -> None:
    around_async(module.ZmqListener, "send", lambda self, peer, message: f"send-{type(message).__name__}")


def dialer(module: Any) -> None:
    def acknowledged(message: Any) -> None:
        if type(message).__name__ == "Ack" and message.key.split == "train":
            note(acknowledged=message.key.ordinal, lease=message.lease)
            point("Ack:after")

    def sends(self: Any, message: Any) -> str:
        if type(message).__name__ == "GroupDone" and message.group.key.split == "train":
            group = message.group
            note(
                made=group.key.ordinal,
                lease=message.lease,
                hash=group_hash(group),
                rewards=[sample.reward for sample in group.samples],
                tokens=[len(sample.mask.data) for sample in group.samples],
            )
        return f"send-{type(message).__name__}"

    around_async(module.ZmqDialer, "recv", None, acknowledged)
    around_async(module.ZmqDialer, "send", sends)
    if os.environ.get("ASYNC_RL_TEST_LENGTHS"):
        cut_to_length(module)


def cut_to_length(module: Any) -> None:
    import msgspec

    from tests.chaos.prompts import tokens_of

    inner = module.ZmqDialer.recv

    async def recv(self: Any) -> Any:
        message = await inner(self)
        if type(message).__name__ != "Lease":
            return message
        sampling = msgspec.structs.replace(message.sampling, max_tokens=tokens_of(message.key.ordinal))
        return msgspec.structs.replace(message, sampling=sampling)

    module.ZmqDialer.recv = recv


def subscriber(module: Any) -> None:
    inner = module.Subscriber.fetch

    def fetch(self: Any, *args: Any, **options: Any) -> Any:
        from safetensors import safe_open

        local = inner(self, *args, **options)
        tensors = {}
        for path in local.shards:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    tensors[name] = file.get_tensor(name).clone()
        note(served=local.version, hash=state_hash(tensors))
        return local

    module.Subscriber.fetch = fetch


def state_hash(tensors: dict[str, Any]) -> str:
    """Of the weights as bfloat16, whoever holds them."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        rows = tensors[name].detach().to(torch.bfloat16).contiguous()
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def publisher(module: Any) -> None:
    begin, inner = module.Publisher.__init__, module.Publisher.publish

    def init(
        self: Any, store: Any, run: Any, claim: Any, parameters: Any, *args: Any, **options: Any
    ) -> None:
        self.test_parameters, self.test_incarnation = parameters, claim.incarnation
        begin(self, store, run, claim, parameters, *args, **options)

    def publish(self: Any, step: int) -> Any:
        tensors = {name: each.to_local() for name, each in self.test_parameters.items()}
        note(state=state_hash(tensors), after=step, incarnation=self.test_incarnation)
        return inner(self, step)

    module.Publisher.__init__, module.Publisher.publish = init, publish


def link(module: Any) -> None:
    inner = module.TrainerLink.attach

    def attach(self: Any, attach: Any) -> Any:
        attached = inner(self, attach)
        note(life=attach.incarnation, resumed=attach.step, version=attach.version)
        return attached

    module.TrainerLink.attach = attach


def batches(module: Any) -> None:
    prepare = module.prepare

    def noted(batch: Any, lineage: Any, **options: Any) -> Any:
        point("batch:before")
        result = prepare(batch, lineage, **options)
        note(
            step=batch.step,
            incarnation=batch.incarnation,
            now=lineage.now,
            ordinals=[group.key.ordinal for group in batch.groups],
            hashes=[group_hash(group) for group in batch.groups],
            versions=[[versions_of(sample) for sample in group.samples] for group in batch.groups],
            lags=result.lags,
            left_out=result.dropped,
            replayed=batch.replayed,
        )
        point("batch:after")
        return result

    module.prepare = noted


def learner(module: Any) -> None:
    around(module.Learner, "optimizer_step", "optimizer")


def store(module: Any) -> None:
    def label(self: Any, key: str, *args: Any, **options: Any) -> str:
        kind = key.partition("/")[0]
        return kind if kind in ("versions", "checkpoints", "incarnations") else ""

    around(module.S3Store, "put_if_absent", label)
    inner = module.S3Store.put_if_absent

    def put_if_absent(self: Any, key: str, *args: Any, **options: Any) -> Any:
        result = inner(self, key, *args, **options)
        if key.startswith("checkpoints/"):
            note(checkpoint=int(key.removesuffix(".json").rpartition("-")[2]))
        return result

    module.S3Store.put_if_absent = put_if_absent


def without(module: Any) -> None:
    import without

    without.take_out(os.environ["ASYNC_RL_TEST_WITHOUT"].split(";"), ROLE)


PATCHES = {
    "orchestrator": {"orchestrator.spool": spool, "async_rl.transport.zmq": listener},
    "rollout": {"async_rl.transport.zmq": dialer, "async_rl.weights.subscriber": subscriber},
    "trainer": {
        "workers.batches": batches,
        "workers.learner": learner,
        "async_rl.store.s3": store,
        "async_rl.weights.publisher": publisher,
        "async_rl.transport.link": link,
    },
}
if os.environ.get("ASYNC_RL_TEST_WITHOUT"):
    PATCHES["orchestrator"]["orchestrator.server"] = without
    PATCHES["trainer"]["workers.trainer"] = without


class Finder(MetaPathFinder):
    def __init__(self, patches: dict[str, Any]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run: Any = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if LOG and ROLE in PATCHES and os.environ.get("ASYNC_RL_TEST_CLOCK"):
    turn_clock()
if LOG and ROLE in PATCHES:
    sys.meta_path.insert(0, Finder(dict(PATCHES[ROLE])))
