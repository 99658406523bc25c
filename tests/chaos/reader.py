"""A worker without an engine: fetches versions and says the hash of the files that an engine would load.

Orders over the link, each with the name of a cache folder (`"cache"`), which is one reader:

    follow    the newest version after the one it has served
    read      the version that is named
    scrub     whether what it holds is as it was
    close     end this reader
    forget    … and its folder

With `"needs": tensor` a reader keeps that one only. Answers: `{"version": …, "step": …, "hash": …}`,
`{"nothing": true}`, `{"whole": …, "held": …}`, or `{"error": …, "message": …}`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from async_rl.errors import AsyncRLError
from async_rl.store import open_store
from async_rl.weights import lineage
from async_rl.weights.run import RunInfo, open_run
from async_rl.weights.subscriber import LocalVersion, Subscriber
from tests.chaos import guards, toy
from tests.chaos.forks import Link
from tests.chaos.points import Points
from tests.chaos.settings import READING, STORE
from tests.weights_support import state_of


def main(link: Link, args: dict[str, Any]) -> None:
    points = Points(args["target"], link.tell)
    guards.remove(args["without"])
    reader = _Reader(args["url"], Path(args["folder"]), args["endpoint"])
    if args["watch"]:
        points.watch_requests(args["url"].removeprefix("s3://").partition("/")[2], ("GET", "HEAD"))
        points.watch_files(Path(args["folder"]) / args["watch"])
        guards.watch_apply(points)
    while (order := link.hear()) is not None and order["do"] != "end":
        try:
            answer = reader.obey(order)
        except AsyncRLError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        link.tell(answer)
    if args["watch"]:
        link.tell({"seen": points.seen})


class _Reader:
    def __init__(self, url: str, folder: Path, endpoint: str) -> None:
        self._store = open_store(url, msgspec.structs.replace(STORE, endpoint_url=endpoint))
        self._folder = folder
        self._open: dict[str, Subscriber] = {}
        self._run: RunInfo | None = None
        self._served: dict[str, int] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        cache = order["cache"]
        if order["do"] in ("forget", "close"):
            self._close(cache)
            if order["do"] == "forget":
                self._served.pop(cache, None)
                shutil.rmtree(self._folder / cache, ignore_errors=True)
            return {"nothing": True}
        if order["do"] == "scrub":
            held = self._open[cache].needed_versions
            return {"whole": self._open[cache].scrub(), "held": held[0] if held else -1}
        run = open_run(self._store)
        if cache not in self._open:
            sizes = {spec.name: spec.nbytes // 2 for spec in run.tensors}
            needs = {order["needs"]: (0, sizes[order["needs"]])} if "needs" in order else None
            self._open[cache] = Subscriber(self._store, run, self._folder / cache, READING, needs)
        subscriber = self._open[cache]
        if order["do"] == "read":
            manifest = lineage.read_manifest(self._store, order["version"])
        else:
            newest = subscriber.newest(self._served.get(cache, -1))
            if newest is None:
                return {"nothing": True}
            manifest = newest
        local = subscriber.fetch(manifest)
        self._served[cache] = local.version
        return {"version": local.version, "step": local.step, "hash": self._hash(run, local)}

    def _hash(self, run: RunInfo, local: LocalVersion) -> str:
        return toy.hash_of(state_of(run, local.shards))

    def _close(self, cache: str) -> None:
        subscriber = self._open.pop(cache, None)
        close = getattr(subscriber, "close", None)
        if close is not None:
            close()
