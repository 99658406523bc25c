"""On PYTHONPATH, this runs first in every process of a run under test. It changes nothing but:

    ASYNC_RL_TEST_LOG=FILE    what was trained and what was acknowledged is noted there, one JSON line each: a log
                              that is not the orchestrator's own
    ASYNC_RL_TEST_KILLS=…     "ROLE POINT N; …": the N-th time that the process of this role comes to this point, it
                              is killed with SIGKILL. Once: what was done stands in the log

Modules are changed when they are imported, and only those that a role imports anyway.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
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
    data = (json.dumps({"who": ROLE, **line}) + "\n").encode()
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
        who, point, count = each.split(" ")
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
    write = module.os.pwrite

    def in_halves(file: int, data: Any, offset: int) -> int:
        if len(data) > 1 and any(passed["write:half"] + 1 == n for n, _ in KILLS.get("write:half", ())):
            write(file, data[: len(data) // 2], offset)
        point("write:half")
        return write(file, data, offset)

    around(module.Spool, "_write_pending", lambda self: "write" if self._pending else "")
    around(module.Spool, "commit", lambda self: "commit" if self._dirty else "")
    around(module.Spool, "begin", "segment")

    class Os:
        pwrite = staticmethod(in_halves)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    module.os = Os()


def listener(module: Any) -> None:
    around_async(module.ZmqListener, "send", lambda self, peer, message: f"send-{type(message).__name__}")


def dialer(module: Any) -> None:
    def acknowledged(message: Any) -> None:
        if type(message).__name__ == "Ack" and message.key.split == "train":
            note(acknowledged=message.key.ordinal)
            point("Ack:after")

    around_async(module.ZmqDialer, "recv", None, acknowledged)
    around_async(module.ZmqDialer, "send", lambda self, message: f"send-{type(message).__name__}")


def batches(module: Any) -> None:
    prepare = module.prepare

    def noted(batch: Any, lineage: Any, **options: Any) -> Any:
        point("batch:before")
        result = prepare(batch, lineage, **options)
        note(
            step=batch.step,
            incarnation=batch.incarnation,
            ordinals=[group.key.ordinal for group in batch.groups],
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


PATCHES = {
    "orchestrator": {"orchestrator.spool": spool, "async_rl.transport.zmq": listener},
    "rollout": {"async_rl.transport.zmq": dialer},
    "trainer": {"workers.batches": batches, "workers.learner": learner, "async_rl.store.s3": store},
}


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


if LOG and ROLE in PATCHES:
    sys.meta_path.insert(0, Finder(dict(PATCHES[ROLE])))
