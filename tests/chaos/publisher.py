"""A trainer without a model: claims the run, goes on from its newest version, and does as it is told. It is one
process, or one rank of several, which then hold the tensors' rows between them.

Orders over the link: `{"do": "publish", "count": n}`, `{"do": "compact"}`, `{"do": "gc"}`, `{"do": "end"}`; and
`{"do": "lose", "refused": …}`: a version that is given up, because the store refuses the requests whose names begin
so (`{"lost": …}`). It says
`{"life": …}` (rank 0) before its first version, `{"committed": version}` after each, `{"seen": [...]}` at its end.
Rank 0 compacts and collects garbage; all ranks are given the same orders.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from async_rl.errors import AsyncRLError, StoreUnavailable
from async_rl.store import ObjectStore, StoreConfig, open_store
from async_rl.weights import gc, lineage
from async_rl.weights.compactor import Compactor
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import Claim, Manifest
from async_rl.weights.publisher import Publisher
from async_rl.weights.ranks import from_rank0
from async_rl.weights.run import RunInfo, ensure_run
from tests.chaos import guards, toy
from tests.chaos.forks import Link
from tests.chaos.points import Points
from tests.chaos.ranked import assign, rank_group, watch_ranks, zeros
from tests.chaos.settings import PUBLISHING, STORE
from tests.weights_support import write_model_dir

LIMIT_S = 30.0


def main(link: Link, args: dict[str, Any]) -> None:
    points = Points(args["target"], link.tell, stop=args["stop"])
    guards.remove(args["without"])
    points.watch_requests(args["url"].removeprefix("s3://").partition("/")[2], ("PUT", "POST", "DELETE"))
    if args["ranks"] > 1:
        watch_ranks(points)
    store = open_store(
        args["url"], msgspec.convert({**msgspec.to_builtins(STORE), **args["store"]}, StoreConfig)
    )
    if args["probe"]:
        store.probe()
    config = msgspec.convert({**msgspec.to_builtins(PUBLISHING), **args["config"]}, WeightsConfig)
    try:
        with rank_group(args["meeting"], args["rank"], args["ranks"]):
            _Trainer(link, args, store, points, config).live()
    except AsyncRLError as error:
        link.tell({"error": type(error).__name__, "message": str(error)})
    link.tell({"seen": points.seen})


class _Start(Struct, frozen=True):
    """What rank 0 found and took, for all ranks."""

    run: RunInfo
    claim: Claim
    parent: int
    place: tuple[int, int]  # incarnation and step that the parent's weights are of


class _Trainer:
    def __init__(
        self, link: Link, args: dict[str, Any], store: ObjectStore, points: Points, config: WeightsConfig
    ) -> None:
        self._link, self._store, self._points, self._config = link, store, points, config
        self._rank, self._ranks = args["rank"], args["ranks"]
        self._model, self._seed = args["model"], args["seed"]
        self._lives: dict[int, tuple[int, int]] = {
            int(number): (start[0], start[1]) for number, start in args["lives"].items()
        }
        self._parameters = zeros(toy.MODELS[self._model], self._rank, self._ranks)

    def live(self) -> None:
        start = from_rank0(self._take_run, _Start)
        self._run, self._claim = start.run, start.claim
        self._points.numbered_from(self._claim.first_version, self._claim.incarnation)
        self._lives[self._claim.incarnation] = start.place
        if self._rank == 0:
            self._link.tell({"life": self._claim.incarnation, "from": start.place})
        step = start.place[1]
        with Publisher(
            self._store, self._run, self._claim, self._parameters, self._config, parent=start.parent
        ) as publisher:
            self._publish(publisher, step)
            while (order := self._link.hear()) is not None and order["do"] != "end":
                for _ in range(order.get("count", 1)):
                    step += order["do"] in ("publish", "lose")
                    if order["do"] == "publish":
                        self._publish(publisher, step)
                    else:
                        self._keep_up(publisher, order, step)

    def _take_run(self) -> _Start:
        with tempfile.TemporaryDirectory() as folder:
            run = ensure_run(self._store, write_model_dir(Path(folder) / "model"), self._parameters)
        claim = lineage.claim(self._store)
        parent = self._newest()
        if parent is None:
            return _Start(run, claim, -1, (-1, 0))
        return _Start(run, claim, parent.version, (parent.incarnation, parent.step))

    def _load(self, step: int) -> None:
        """The parameters as after this step."""
        place = toy.Place(self._claim.incarnation, step)
        for name, bits in toy.state_at(self._model, self._seed, self._lives, place).items():
            assign(self._parameters[name], bits, self._rank, self._ranks)

    def _publish(self, publisher: Publisher, step: int) -> None:
        self._load(step)
        publisher.publish(step)
        publisher.flush(LIMIT_S)
        anchor = publisher._anchor_writer._thread
        if anchor is not None:  # so that every life passes the same points in the same order
            anchor.join(LIMIT_S)
        self._link.tell({"committed": publisher.committed, "step": step})

    def _lose(self, publisher: Publisher, step: int, refused: str) -> None:
        self._load(step)
        self._points.refused = refused
        try:
            publisher.publish(step)
            publisher.flush(LIMIT_S)
        except StoreUnavailable as error:
            self._link.tell({"lost": step, "message": str(error)})
        self._points.refused = ""

    def _keep_up(self, publisher: Publisher, order: dict[str, Any], step: int) -> None:
        task = order["do"]
        if task == "lose":
            self._lose(publisher, step, order["refused"])
        elif self._rank:
            return
        elif task == "gc":
            gc.collect(self._store, self._config)
        elif task == "compact":
            with tempfile.TemporaryDirectory() as scratch:
                Compactor(self._store, self._run, self._config, Path(scratch)).run()
        else:
            raise ValueError(f"no such order: {task}")

    def _newest(self) -> Manifest | None:
        """What a trainer restores: the newest version that counts and can be read."""
        numbers = lineage.list_versions(self._store)
        claims = lineage.read_claims(self._store)
        for number in reversed(numbers):
            manifest = lineage.read_manifest(self._store, number)
            if lineage.admissible(manifest, claims):
                return manifest
        return None
