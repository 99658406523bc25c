"""The cases of the crash matrix, and the command that plays and counts them.

    python -m tests.chaos.matrix [--seeds N] [--only WORD] [--codec small]

A case is a life that ends at a named point, or an object that is damaged, and what must follow: no wrong byte, the
next version, a run that goes on. Cases of one kind share a run where they can: each death is the next one's past.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from async_rl.store.local_server import LocalServer
from async_rl.weights import lineage
from async_rl.weights.ways import FurtherWay, list_edges
from tests.chaos.damage import DAMAGES, region_of
from tests.chaos.forks import Forks
from tests.chaos.world import Trainer, World, Wrong
from tests.faulty import FaultyS3, list_without, stale
from tests.servers import S3Server

__all__ = ["Bench", "Case", "bench"]

LIFE = ({"do": "publish", "count": 3}, {"do": "compact"}, {"do": "gc"}, {"do": "publish"}, {"do": "gc"})
"""What a trainer does that is killed somewhere in it: the parent's state once more, deltas, an anchor, a skip delta,
two rounds of garbage collection."""

COMMITS = ("versions/", "ways/", "incarnations/", "run.json", "gc")
"""Objects that make something true: for these also a death between the request and its answer."""

OFTEN = 3
"""How many skips and deletions there are differs from life to life: the first three of each are cases. And of what
ranks say to each other."""

OFTEN_AGAIN = ("DELETE", "gather", "send", "receive")

LIVES_TO_TRY = 4
"""Skips and anchors come at certain versions: a life that does not come to its point is followed by another."""

FLIPS = 40
"""Bits per small object."""

VERSIONS_TO_RECOVER = 8
"""After damage the reader must be right again within so many further versions: an anchor comes every fourth."""


IN_PARTS = re.compile(" (begin|part|finish|abort)")
"""Requests of an upload in several parts."""

SIDE_BY_SIDE = 2
"""Runs that are played at once."""


class Case(NamedTuple):
    kind: str
    name: str
    failure: str  # empty: it went as it must
    seconds: float


class Bench:
    """A server, a warm process, and the cases played on them."""

    def __init__(
        self,
        server: S3Server,
        forks: Forks,
        folder: Path,
        seed: int = 1,
        part: int = 0,
        parts: int = 1,
        codec: str = "default",
    ) -> None:
        """Where there are `parts`, only every so many of the cases are played, from number `part` on."""
        self._part = slice(part, None, parts)
        self.server, self.forks, self.folder = server, forks, folder
        self.seed, self.codec = seed, codec
        self.cases: list[Case] = []
        self._lock = threading.Lock()

    def world(self, model: str = "small") -> World:
        return World(self.server, self.forks, self.folder, model, self.seed, self.codec)

    @contextmanager
    def case(self, kind: str, name: str) -> Iterator[None]:
        """Plays it; a failure is noted, not raised."""
        began = time.monotonic()
        failure = ""
        try:
            yield
        except (AssertionError, OSError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            self.cases.append(Case(kind, name, failure, time.monotonic() - began))

    @property
    def failures(self) -> list[Case]:
        return [case for case in self.cases if case.failure]

    # ------------------------------------------------------------ the trainer is killed

    def first_life_killed(self, model: str = "small") -> None:
        """While there is no run yet, or no version: each in a run of its own."""
        kind = f"trainer killed, first life, {model} model"
        with self.world(model) as world:
            points = _moments(world.live([]).seen)
        if model == "large":  # what the small one has is not repeated
            points = [point for point in points if IN_PARTS.search(point)]

        def play(point: str) -> None:
            with self.case(kind, point), self.world(model) as world:
                _die(world, (), point)
                world.check_newest(point)
                world.live([{"do": "publish"}])
                if world.check_newest(point, cache="late") < 1:
                    raise Wrong("the run did not go on")

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(play, points[self._part]))

    def later_life_killed(self, model: str = "small") -> None:
        """At every request of a trainer that goes on from another's version."""
        with self.world(model) as world:
            world.live(LIFE)
            points = _moments(world.live(LIFE).seen)
        if model == "large":
            points = [point for point in points if IN_PARTS.search(point)]
        points = points[self._part]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            shares = [points[number::SIDE_BY_SIDE] for number in range(SIDE_BY_SIDE)]
            list(pool.map(lambda share: self._die_again_and_again(model, share), shares))

    def _die_again_and_again(self, model: str, points: Sequence[str]) -> None:
        """In one run: every trainer goes on from what the one killed before it has left."""
        kind = f"trainer killed, {model} model"
        with self.world(model) as world:
            world.live(LIFE)
            for point in points:
                with self.case(kind, point):
                    before = max(world.truth())
                    _die(world, LIFE, point)
                    after = world.check_newest(point)
                    if after < before:
                        raise Wrong(f"version {after} is the newest, it was {before}")
            with self.case(kind, "in the end the run goes on"):
                trainer = world.live(LIFE)
                if len(trainer.committed) < 5 or trainer.error:
                    raise Wrong(f"{trainer.committed} committed: {trainer.error} {trainer.child.stderr()}")
                world.check_newest("in the end")
                world.check_recent("in the end")

    # ------------------------------------------------------------ one rank of two is killed

    def first_life_of_two_ranks(self) -> None:
        """While there is no run yet, or no version: each in a run of its own."""
        with self.world() as world:
            points = _points_of_ranks(world.live_together([]))

        def play(where: tuple[int, str]) -> None:
            rank, point = where
            with self.case("rank killed, first life", f"rank {rank}: {point}"), self.world() as world:
                _die_together(world, (), rank, point)
                world.check_newest(point)
                world.live_together([{"do": "publish"}])
                if world.check_newest(point, cache="late") < 1:
                    raise Wrong("the run did not go on")

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(play, points[self._part]))

    def later_life_of_two_ranks(self) -> None:
        """At every request of either rank, and at what they say to each other: the next two go on."""
        with self.world() as world:
            world.live_together(LIFE)
            points = _points_of_ranks(world.live_together(LIFE))[self._part]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            shares = [points[number::SIDE_BY_SIDE] for number in range(SIDE_BY_SIDE)]
            list(pool.map(self._ranks_die_again_and_again, shares))

    def _ranks_die_again_and_again(self, points: Sequence[tuple[int, str]]) -> None:
        with self.world() as world:
            world.live_together(LIFE)
            for rank, point in points:
                with self.case("rank killed", f"rank {rank}: {point}"):
                    before = max(world.truth())
                    _die_together(world, LIFE, rank, point)
                    after = world.check_newest(point)
                    if after < before:
                        raise Wrong(f"version {after} is the newest, it was {before}")
            with self.case("rank killed", "in the end the run goes on, with one rank"):
                trainer = world.live(LIFE)
                if len(trainer.committed) < 5 or trainer.error:
                    raise Wrong(f"{trainer.committed} committed: {trainer.error} {trainer.child.stderr()}")
                world.check_newest("in the end")
                world.check_recent("in the end")

    # ------------------------------------------------------------ the reader is killed

    def reader_killed(self, start: str) -> None:
        """At every request, every change of a file, and before, in and after every tile it applies. `start`: what its
        cache holds: nothing, an older version, or a torn one."""
        kind = f"reader killed, holding {start}"
        with self.world() as world:
            trainer = world.trainer()
            trainer.publish(2)
            template = f"template-{start}".replace(" ", "-")
            if start == "nothing":
                (world.folder / template).mkdir()
            else:
                world.check(world.ask("follow", template), world.truth(), "template")
                world.ask("close", template)
            trainer.publish(1 if start == "nothing" else 2)
            trainer.tell_all([])  # its next order would come minutes later
            newest = max(world.truth())
            points = self._read_until_killed(world, template, "").seen
            for point in points[self._part]:
                with self.case(kind, point):
                    cache = self._read_until_killed(world, template, point).cache
                    answer = world.ask("follow", cache)
                    if world.check(answer, world.truth(), point) != newest:
                        raise Wrong(
                            f"version {answer['version']} was served after the restart, not {newest}"
                        )
                    world.ask("forget", cache)
            with self.case(kind, "in the end the run goes on"):
                world.live([{"do": "publish"}])
                if world.check_newest("in the end", cache=template) <= newest:
                    raise Wrong("the run did not go on")

    def _read_until_killed(self, world: World, template: str, point: str) -> _Reading:
        """Tiles are applied by several threads, and a skip delta may have come meanwhile: what one reader passes by,
        the next may not."""
        for _ in range(LIVES_TO_TRY):
            reading, came = self._read_once(world, template, point)
            if came:
                return reading
            world.ask("forget", reading.cache)
        raise Wrong("no reader came to this point")

    def _read_once(self, world: World, template: str, point: str) -> tuple[_Reading, bool]:
        """`point`: empty to come to the end, and hear of all points."""
        cache = world.copy_cache(template)
        reader = world.reader(point, watch=cache)
        reader.link.tell({"do": "follow", "cache": cache})
        reader.link.tell({"do": "end"})
        seen: list[str] = []
        killed = False
        for message in reader.story():
            seen = message.get("seen", seen)
            killed |= message.get("killed", "") == point
        came = not point or (killed and reader.wait() == -9)
        if not came and reader.wait() != 0:
            raise Wrong(f"the reader came to another end than this point: {reader.stderr()}")
        reader.end()
        return _Reading(cache, seen), came

    # ------------------------------------------------------------ damaged objects

    def damaged(self) -> None:
        """Every kind of object in a run of its own: what is damaged stays so, and makes a long run slow to search."""
        cases: dict[str, list[tuple[str, str]]] = {}
        for kind, region in OBJECTS:
            for damage in DAMAGES if region in ("", "tiles") else ["one bit flipped"]:
                cases.setdefault(kind, []).append((region, damage))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(lambda kind: self._damaged(kind, cases[kind][self._part]), cases))

    def _damaged(self, kind: str, cases: Sequence[tuple[str, str]]) -> None:
        with self.world() as world:
            trainer = world.trainer()
            trainer.publish(6)
            world.check_newest("before")
            for region, damage in cases:
                name = f"{kind} {damage}" + (f" in its {region}" if region else "")
                with self.case("object damaged", name):
                    self._damage(world, trainer, kind, region, damage)

    def _damage(self, world: World, trainer: Trainer, kind: str, region: str, damage: str) -> None:
        target = _pick(world, trainer, kind)
        store = world.store
        data = store.get(target.key)
        at = region_of(data, region) if region else len(data) // 2
        truth = world.truth()
        DAMAGES[damage](store, target.key, target.other, at)
        restore = kind in ("claim", "run.json")
        try:
            for cache in ("follower", "damage-joiner"):
                answer = world.ask("follow", cache)
                if "version" in answer:
                    world.check(answer, truth, cache)
                elif "error" in answer and not answer["message"]:
                    raise Wrong(f"{cache}: an error without a word: {answer}")
        finally:
            if restore:
                store.put(target.key, data)
        self._recover(world, trainer)

    def _recover(self, world: World, trainer: Trainer) -> None:
        """The trainer goes on; within a few versions both readers are right and at the newest one."""
        trouble: object = None
        for _ in range(VERSIONS_TO_RECOVER):
            trainer.publish(1)
            trouble = None
            truth = world.truth()
            for cache in ("follower", "damage-joiner"):
                answer = world.ask("follow", cache)
                if "version" not in answer:
                    trouble = (cache, answer)
                elif world.check(answer, truth, cache) != max(truth):
                    raise Wrong(f"{cache} got version {answer['version']}, the newest is {max(truth)}")
            world.ask("forget", "damage-joiner")
            if trouble is None:
                return
        raise Wrong(f"no reader was right again within {VERSIONS_TO_RECOVER} versions: {trouble}")

    def bits_flipped(self) -> None:
        """In the small objects, which carry no hash of their own, at places drawn by chance: right, or refused."""
        source = random.Random(self.seed)
        with self.world() as world:
            trainer = world.trainer()
            trainer.publish(6)
            newest = max(world.truth())
            edge = next(edge for edge in list_edges(world.store) if edge.base < 0)
            manifest = lineage.version_key(newest)
            for key in (manifest, edge.key, lineage.claim_key(0), "run.json"):
                data = world.store.get(key)
                bits = sorted(source.sample(range(8 * len(data)), FLIPS))
                if key == manifest:
                    at = data.index(b'"step":') + len(b'"step":')
                    bits += [8 * at + bit for bit in range(3)]
                for bit in bits[self._part]:
                    with self.case("bit flipped in a small object", f"{key.partition('/')[0]}, bit {bit}"):
                        self._flip(world, key, data, bit)
            with self.case("bit flipped in a small object", "in the end the run goes on"):
                trainer.publish(2)
                world.check_newest("in the end")

    def _flip(self, world: World, key: str, data: bytes, bit: int) -> None:
        truth = world.truth()
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        world.store.put(key, bytes(changed))
        try:
            answer = world.ask("follow", f"bit-{bit}")
        finally:
            world.store.put(key, data)
        if "version" in answer:
            text = bytes(changed[max(0, bit // 8 - 30) : bit // 8 + 10])
            world.check(answer, truth, f"after {text!r} was read")
        world.ask("forget", f"bit-{bit}")

    # ------------------------------------------------------------ stale answers

    def stale_once(self) -> None:
        """A store that once answers as it was before; a reader behind a proxy sees it."""
        proxy = FaultyS3(self.server)
        try:
            with self.world() as world:
                trainer = world.trainer()
                trainer.publish(6)
                reader = world.reader(endpoint=proxy.endpoint)
                for kind in ("manifest", "delta pack", "full pack", "way", "claim", "run.json"):
                    for how in ("not there yet", "another's bytes"):
                        with self.case("stale once", f"{kind}: {how}"):
                            target = _pick(world, trainer, kind)
                            before = None if how == "not there yet" else world.store.get(target.other)
                            proxy.once("GET", target.key, stale(before))
                            self._hear_stale(
                                world, trainer, reader, proxy, f"{kind}-{how}".replace(" ", "-")
                            )
                for kind in ("manifest", "way", "claim"):
                    with self.case("stale once", f"listing of every {kind}"):
                        target = _pick(world, trainer, kind)
                        folder = target.key.partition("/")[0]
                        proxy.once("GET", f"prefix={world.prefix}/{folder}/", list_without(target.key))
                        self._hear_stale(world, trainer, reader, proxy, f"list-{kind}")
        finally:
            proxy.close()

    def _hear_stale(self, world: World, trainer: Trainer, reader: Any, proxy: FaultyS3, cache: str) -> None:
        truth = world.truth()
        first = reader.ask(do="follow", cache=cache)
        if "version" in first:
            world.check(first, truth, cache)
        trainer.publish(1)
        truth = world.truth()
        second = reader.ask(do="follow", cache=cache)
        if world.check(second, truth, cache) != max(truth):
            raise Wrong(f"version {second['version']} after the stale answer, the newest is {max(truth)}")
        if proxy.cues:
            left = [cue[:2] for cue in proxy.cues]
            proxy.cues.clear()
            raise Wrong(f"the reader never asked for it: {left}")
        reader.ask(do="forget", cache=cache)

    # ------------------------------------------------------------ two trainers

    def two_trainers(self) -> None:
        """The first is stopped at a request of its next version, a second one takes the run, the first goes on."""
        with self.world() as world:
            points = [
                point
                for point in world.live([{"do": "publish", "count": 2}]).seen
                if "+2" in point and point.endswith((": before", ": after")) and "PUT" in point
            ]
        for point in points[self._part]:
            with self.case("two trainers", f"the first one stopped at {point}"), self.world() as world:
                play_two_trainers(world, point)
        name = "a zombie commits before the second one's first version"
        with self.case("two trainers", name), self.world() as world:
            play_zombie(world)


def play_two_trainers(
    world: World, point: str, without: Sequence[str] = (), reader_without: Sequence[str] = ()
) -> None:
    world.use_reader(without=reader_without)
    old = world.trainer(point, stop=True, without=without)
    old.child.link.tell({"do": "publish", "count": 3})
    old.child.link.tell({"do": "end"})
    _until_stopped(old)
    world.check_newest("while the first one stands still")
    new = world.trainer()
    while new.hear() is not None and not new.committed:  # it has taken the run
        pass
    new.publish(1)
    before = world.truth()
    world.check_newest("when the second one has the run")
    old.resume()
    old.listen()
    if "Fenced" not in old.error:
        raise Wrong(f"the first trainer should have stopped with Fenced: {old.error or 'it went on'}")
    after = world.truth()
    if any(after.get(version) != digest for version, digest in before.items()):
        raise Wrong("a version of the second trainer was replaced")
    new.publish(2)
    world.check_newest("in the end")
    world.check_recent("in the end")


def play_zombie(world: World, without: Sequence[str] = (), reader_without: Sequence[str] = ()) -> None:
    """The first trainer commits after the second one's claim and before its first version: nobody may follow."""
    world.use_reader(without=reader_without)
    old = world.trainer("PUT versions/+2.json: before", stop=True, without=without)
    old.child.link.tell({"do": "publish", "count": 3})
    old.child.link.tell({"do": "end"})
    _until_stopped(old)
    new = world.trainer("PUT versions/+0.json: before", stop=True)
    _until_stopped(new)
    before = world.check_newest("while both stand still")
    old.resume()
    old.listen()
    if "Fenced" not in old.error:
        raise Wrong(f"the first trainer should have stopped with Fenced: {old.error or 'it went on'}")
    if world.check_newest("a zombie's version is there") != before:
        raise Wrong("a version was added to the truth by a zombie")
    new.resume()
    new.publish(2)
    world.check_newest("in the end")


def _until_stopped(trainer: Trainer) -> None:
    while (message := trainer.hear()) is not None and "stopped" not in message:
        pass
    if message is None:
        raise Wrong(f"the trainer did not come to its point: {trainer.child.stderr()}")


class _Reading(NamedTuple):
    cache: str
    seen: list[str]


class _Target(NamedTuple):
    key: str
    other: str  # another version's object of its kind


OBJECTS = (
    ("manifest", ""),
    ("delta pack", "length"),
    ("delta pack", "header"),
    ("delta pack", "tiles"),
    ("delta pack", "table"),
    ("full pack", "header"),
    ("full pack", "tiles"),
    ("way", ""),
    ("claim", ""),
    ("run.json", ""),
)


def _pick(world: World, trainer: Trainer, kind: str) -> _Target:
    """An object that the readers will want next, fresh from the trainer."""
    store = world.store
    if kind == "run.json":
        return _Target("run.json", lineage.claim_key(0))
    if kind == "claim":
        return _Target(lineage.claim_key(trainer.incarnation), "run.json")
    if kind in ("full pack", "way"):
        _wait_for_anchor(world, trainer)
        newest, older = [edge for edge in list_edges(store) if edge.base < 0][:-3:-1]
        if kind == "way":
            return _Target(newest.key, older.key)
        packs = [_first_pack(world, edge.key) for edge in (newest, older)]
        return _Target(packs[0], packs[1])
    before, version = trainer.publish(2)
    if kind == "manifest":
        return _Target(lineage.version_key(version), lineage.version_key(before))
    own = [lineage.read_manifest(store, number).way.packs for number in (version, before)]
    return _Target(own[0][0].key, own[1][0].key)


def _first_pack(world: World, key: str) -> str:
    return msgspec.json.decode(world.store.get(key), type=FurtherWay).way.packs[0].key


def _wait_for_anchor(world: World, trainer: Trainer) -> None:
    """Publish until a new full state is there: it is written in the background."""
    known = {edge.key for edge in list_edges(world.store) if edge.base < 0}
    for _ in range(3 * VERSIONS_TO_RECOVER):
        trainer.publish(1)
        if {edge.key for edge in list_edges(world.store) if edge.base < 0} - known:
            return
    raise Wrong("no anchor was written")


def _moments(seen: Sequence[str]) -> list[str]:
    """The points of a life worth a case."""
    chosen = []
    for point in seen:
        request, _, moment = point.rpartition(": ")
        key = request.partition(" ")[2]
        number = int(request.partition(" #")[2] or 1)
        again = request.startswith(OFTEN_AGAIN) or key.startswith(("packs/skip", "ways/skip"))
        if number > OFTEN and again:
            continue
        if moment == "sent" and not key.startswith(COMMITS):
            continue
        if moment == "in" and (request.startswith("DELETE") or key.endswith((" begin", " abort"))):
            continue  # no body to be in the middle of
        chosen.append(point)
    return chosen


def _die(world: World, orders: Sequence[dict[str, Any]], point: str) -> None:
    for _ in range(LIVES_TO_TRY):
        trainer = world.live(orders, point)
        if trainer.killed_at == point and trainer.was_killed():
            return
        if trainer.error or trainer.child.wait() != 0:
            break
    raise Wrong(f"no trainer came to this point: {trainer.error} {trainer.child.stderr()}")


def _points_of_ranks(ranks: Sequence[Trainer]) -> list[tuple[int, str]]:
    """Both ranks' in turn, so that whoever plays some of them plays both."""
    for each in ranks:
        if each.error or not each.seen:
            raise Wrong(f"two ranks could not live: {each.error} {each.child.stderr()}")
    first, second = ([(rank, point) for point in _moments(each.seen)] for rank, each in enumerate(ranks))
    pairs = itertools.zip_longest(first, second)
    return [point for pair in pairs for point in pair if point is not None]


def _die_together(world: World, orders: Sequence[dict[str, Any]], rank: int, point: str) -> None:
    """One rank is killed; the other must end by itself, with a word about it where it still needed the first."""
    for _ in range(LIVES_TO_TRY):
        ranks = world.live_together(orders, rank, point)
        victim, survivor = ranks[rank], ranks[1 - rank]
        status = survivor.child.wait()
        if status != 0:
            raise Wrong(f"the surviving rank ended with {status}: {survivor.child.stderr()}")
        if victim.killed_at == point and victim.was_killed():
            if survivor.error and "RankLost" not in survivor.error:
                raise Wrong(f"the surviving rank says: {survivor.error}")
            return
        if victim.error or victim.child.wait() != 0:
            break
    raise Wrong(f"no rank came to this point: {victim.error} {victim.child.stderr()}")


# ---------------------------------------------------------------- the command


@contextmanager
def bench(seed: int = 1, part: int = 0, parts: int = 1, codec: str = "default") -> Iterator[Bench]:
    """With a server of its own."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        with LocalServer(
            folder / "server", bucket="tests", kind="seaweedfs", limit_s=60, grace_s=0
        ) as started:
            env = started.env
            server = S3Server(
                started.endpoint, env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], started.bucket
            )
            os.environ.update(server.env)
            (folder / "caches").mkdir()
            with Forks(server.env) as forks:
                yield Bench(server, forks, folder / "caches", seed, part, parts, codec)


SUITES: dict[str, Callable[[Bench], None]] = {
    "first life": Bench.first_life_killed,
    "first life, large": lambda each: each.first_life_killed("large"),
    "later life": Bench.later_life_killed,
    "later life, large": lambda each: each.later_life_killed("large"),
    "first life, two ranks": Bench.first_life_of_two_ranks,
    "later life, two ranks": Bench.later_life_of_two_ranks,
    "reader from nothing": lambda each: each.reader_killed("nothing"),
    "reader from an older version": lambda each: each.reader_killed("an older version"),
    "damaged": Bench.damaged,
    "bits": Bench.bits_flipped,
    "stale": Bench.stale_once,
    "two trainers": Bench.two_trainers,
}


@click.command()
@click.option("--seeds", default=1, help="Play everything with so many seeds of the weights.")
@click.option("--only", default="", help="Only suites whose name holds this.")
@click.option("--parts", default=1, help="Play only every so many of the kills.")
@click.option("--codec", default="default", type=click.Choice(["default", "small"]))
def main(seeds: int, only: str, parts: int, codec: str) -> None:
    """Play the whole matrix and count."""
    failed = 0
    for seed in range(1, seeds + 1):
        with bench(seed, parts=parts, codec=codec) as each:
            for name, suite in SUITES.items():
                if only in name:
                    began, done = time.monotonic(), len(each.cases)
                    suite(each)
                    took = time.monotonic() - began
                    click.echo(f"{name}: {len(each.cases) - done} cases in {took:.0f} s")
            counts = Counter(case.kind for case in each.cases)
            for kind, count in sorted(counts.items()):
                bad = sum(case.kind == kind for case in each.failures)
                click.echo(f"{count:5} {kind}" + (f"   {bad} FAILED" if bad else ""))
            for case in each.failures:
                click.echo(f"FAILED {case.kind}: {case.name}\n    {case.failure}")
            click.echo(
                f"{len(each.cases):5} cases, {len(each.failures)} failed, seed {seed}, codec {codec}"
            )
            failed += len(each.failures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
