"""A run of the matrix: its processes, and the checker that knows what every version must be."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from async_rl.store import ObjectStore, open_store
from async_rl.weights import lineage
from async_rl.weights.lineage import Manifest
from tests.chaos import toy
from tests.chaos.forks import Child, Forks
from tests.chaos.settings import PUBLISHING, STORE
from tests.servers import S3Server

__all__ = ["Trainer", "World", "Wrong"]


class Wrong(AssertionError):
    """What must never happen: a wrong byte, a run that does not go on."""


class World:
    """One run. Its trainers live one after another, unless told otherwise; its readers are one process, each with a
    cache folder of its own below `folder`."""

    def __init__(
        self,
        server: S3Server,
        forks: Forks,
        folder: Path,
        model: str = "small",
        seed: int = 1,
        codec: str = "default",
        probe: bool = False,
        store: Mapping[str, Any] | None = None,
    ) -> None:
        """`probe`: trainers look what the store enforces, as real ones do. `store`: of their StoreConfig."""
        self.url = server.new_url()
        self.store: ObjectStore = open_store(self.url, STORE)
        self.prefix = self.url.removeprefix("s3://").partition("/")[2]
        self._forks, self._model, self._seed, self._codec = forks, model, seed, codec
        self._probe, self._settings = probe, dict(store or {})
        self.folder = folder / self.url.rpartition("/")[2]
        self.folder.mkdir()
        self.lives: dict[int, tuple[int, int]] = {}
        self._children: list[Child] = []
        self._reader: Child | None = None
        self._copies = self._crews = 0
        self._asking = threading.Lock()
        self._manifests: dict[int, Manifest] = {}

    # ------------------------------------------------------------ trainers

    def trainer(
        self,
        target: str = "",
        *,
        without: Iterable[str] = (),
        stop: bool = False,
        config: Mapping[str, Any] | None = None,
        store: Mapping[str, Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
        meeting: str = "",
    ) -> Trainer:
        child = self._forks.start(
            "publisher",
            url=self.url,
            model=self._model,
            seed=self._seed,
            lives=self.lives,
            target=target,
            stop=stop,
            without=list(without),
            config={"codec": self._codec, **(config or {})},
            store={**self._settings, **(store or {})},
            probe=self._probe,
            rank=rank,
            ranks=ranks,
            meeting=meeting,
        )
        self._children.append(child)
        return Trainer(self, child)

    def live(self, orders: Iterable[Mapping[str, Any]], target: str = "", **options: Any) -> Trainer:
        """A trainer's whole life, until it has obeyed all orders or dies."""
        trainer = self.trainer(target, **options)
        trainer.tell_all(orders)
        trainer.listen()
        return trainer

    def crew(
        self, targets: Sequence[str] = ("", ""), options: Sequence[Mapping[str, Any]] = ({}, {})
    ) -> list[Trainer]:
        """The ranks of one trainer, each with its own target and options."""
        self._crews += 1
        meeting = str(self.folder / f"meeting-{self._crews}")
        shared = {"ranks": len(targets), "meeting": meeting}
        return [
            self.trainer(target, rank=rank, **shared, **each)
            for rank, (target, each) in enumerate(zip(targets, options, strict=True))
        ]

    def live_together(
        self, orders: Sequence[Mapping[str, Any]], rank: int = 0, target: str = ""
    ) -> list[Trainer]:
        """The whole life of two ranks, one of which may die."""
        ranks = self.crew(["", target] if rank else [target, ""])
        for each in ranks:
            each.tell_all(orders)
        for each in ranks:
            each.listen()
        return ranks

    # ------------------------------------------------------------ readers

    def reader(
        self, target: str = "", *, watch: str = "", without: Iterable[str] = (), endpoint: str = ""
    ) -> Child:
        """`watch`: the cache folder whose changes are points; empty: there are none."""
        child = self._forks.start(
            "reader",
            url=self.url,
            endpoint=endpoint,
            folder=str(self.folder),
            target=target,
            watch=watch,
            without=list(without),
        )
        self._children.append(child)
        return child

    def use_reader(self, *, without: Iterable[str]) -> None:
        """The long-lived reader, started now and without these guards."""
        self._reader = self.reader(without=without)

    def copy_cache(self, template: str) -> str:
        """A cache folder like this one, whose reader has closed it."""
        with self._asking:
            self._copies += 1
            name = f"{template}-{self._copies}"
        shutil.copytree(self.folder / template, self.folder / name)
        return name

    def ask(self, do: str, cache: str, **order: Any) -> dict[str, Any]:
        """The long-lived reader."""
        with self._asking:
            if self._reader is None:
                self._reader = self.reader()
            return self._reader.ask(do=do, cache=cache, **order)

    # ------------------------------------------------------------ the checker

    def truth(self) -> dict[int, str]:
        """The hash of every version that counts, by the manifests in the store. What was read once is not read again:
        a manifest that is damaged later does not change the truth."""
        claims = lineage.read_claims(self.store)
        for number in lineage.list_versions(self.store):
            if number not in self._manifests:
                self._manifests[number] = lineage.read_manifest(self.store, number)
        return {
            number: self.expected(each.incarnation, each.step)
            for number, each in self._manifests.items()
            if lineage.admissible(each, claims)
        }

    def expected(self, incarnation: int, step: int) -> str:
        return toy.hash_at(self._model, self._seed, self.lives, toy.Place(incarnation, step))

    def check(self, answer: Mapping[str, Any], truth: Mapping[int, str], what: str) -> int:
        """The version served, which must be exactly right. Raises Wrong."""
        if "version" not in answer:
            raise Wrong(f"{what}: {answer}")
        version = answer["version"]
        if version not in truth:
            raise Wrong(f"{what}: version {version} was served, which does not count")
        if answer["step"] != self._manifests[version].step:
            raise Wrong(f"{what}: version {version} was served as of step {answer['step']}")
        if answer["hash"] != truth[version]:
            raise Wrong(f"{what}: WRONG BYTES were served as version {version}")
        return int(version)

    def check_newest(self, what: str, *, cache: str = "follower") -> int:
        """The follower catches up, and one that comes from nothing gets there too; the newest version, or -1."""
        truth = self.truth()
        newest = max(truth, default=-1)
        if newest < 0:
            return -1
        answer = self.ask("follow", cache)
        if answer != {"nothing": True}:
            served = self.check(answer, truth, f"{what}: the follower")
            if served != newest:
                raise Wrong(f"{what}: the follower got version {served}, the newest is {newest}")
        joined = self.check(self.ask("follow", "joiner"), truth, f"{what}: a joiner")
        self.ask("forget", "joiner")
        if joined != newest:
            raise Wrong(f"{what}: a joiner got version {joined}, the newest is {newest}")
        return newest

    def check_recent(self, what: str) -> None:
        """Every version that counts, each from nothing: those that garbage collection keeps must be right, older ones
        right or refused."""
        truth = self.truth()
        kept = sorted(truth)[-PUBLISHING.keep_versions :]
        for version in truth:
            answer = self.ask("read", "checker", version=version)
            if version in kept or "error" not in answer:
                self.check(answer, truth, what)
            self.ask("forget", "checker")

    def flip_in_cache(self, cache: str, tensor: str, element: int) -> None:
        """One bit of the copy that a reader holds."""
        for file in (self.folder / cache).glob("*/shadow/*.safetensors"):
            with file.open("r+b") as opened:
                length = int.from_bytes(opened.read(8), "little")
                entry = json.loads(opened.read(length)).get(tensor)
                if entry is not None:
                    opened.seek(8 + length + entry["data_offsets"][0] + 2 * element)
                    byte = opened.read(1)[0]
                    opened.seek(-1, 1)
                    opened.write(bytes([byte ^ 1]))
                    return
        raise AssertionError(f"{cache} holds no {tensor}")

    def state(self, version: int) -> toy.State:
        manifest = self._manifests[version]
        return toy.state_at(
            self._model, self._seed, self.lives, toy.Place(manifest.incarnation, manifest.step)
        )

    def close(self) -> None:
        for child in self._children:
            child.end()
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Trainer:
    """A trainer's process and what it has said."""

    def __init__(self, world: World, child: Child) -> None:
        self._world, self.child = world, child
        self.committed: list[int] = []
        self.seen: list[str] = []
        self.killed_at = ""
        self.error = ""
        self.incarnation = -1

    def tell_all(self, orders: Iterable[Mapping[str, Any]]) -> None:
        """These and then the end; it may be dead already."""
        for order in (*orders, {"do": "end"}):
            try:
                self.child.link.tell(order)
            except (BrokenPipeError, ConnectionResetError):
                break

    def resume(self) -> None:
        """After it was stopped."""
        self.child.signal(signal.SIGCONT)

    def hear(self) -> dict[str, Any] | None:
        """One more message, taken note of."""
        message = self.child.link.hear()
        if message is None:
            return None
        if "life" in message:
            self._world.lives[message["life"]] = tuple(message["from"])
            self.incarnation = message["life"]
        self.killed_at = message.get("killed", self.killed_at)
        self.seen = message.get("seen", self.seen)
        if "error" in message:
            self.error = f"{message['error']}: {message['message']}"
        if "committed" in message:
            self.committed.append(message["committed"])
        return message

    def listen(self) -> None:
        """Until its end."""
        while self.hear() is not None:
            pass

    def publish(self, count: int = 1) -> list[int]:
        """The versions it has committed in answer."""
        while not self.committed:  # the one it begins with
            self._hear_on()
        before = len(self.committed)
        self.child.link.tell({"do": "publish", "count": count})
        while len(self.committed) < before + count:
            self._hear_on()
        return self.committed[before:]

    def _hear_on(self) -> None:
        if self.hear() is None or self.error:
            raise Wrong(f"the trainer could not go on: {self.error or self.child.stderr()}")

    def was_killed(self) -> bool:
        return self.child.wait() == -signal.SIGKILL
