"""The control plane in one process, ended at every single point: the real loop (`serve`), the real rules, a real
spool; a trainer and a worker of a few lines, and a disk that loses what was not synced.

    python -m tests.chaos.delivery        # every point of every kind, counted

An end of the orchestrator is a power cut: what it had written since the last fsync is lost, or torn in the middle.
An end of the trainer loses everything since its last checkpoint; and it is no end at all: it goes on asking,
publishing and attaching, as one does that was only stopped. What must hold in the end is checked from what the
trainer and the worker saw themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from async_rl import wire
from async_rl.envs.base import EnvironmentConfig
from async_rl.wire import AnyMessage
from orchestrator import ledger as ledger_module
from orchestrator import server
from orchestrator.commits import Commits
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.control import Control
from orchestrator.pool import PromptPool
from orchestrator.spool import Spool
from tests.orchestration import VOCAB, Counting, group, hello

__all__ = ["GUARDS", "Case", "World", "points_of", "without"]

STEPS = 9
CHECKPOINT_EVERY = 3
CONFIG = OrchestratorConfig(
    batch_groups=2, max_lag=2, lease_s=20.0, max_attempts=50, straggler_hold_s=0.0, drop_no_signal=False
)
SEGMENT_BYTES = 6000
IDLE_LIMIT = 2000
MESSAGE_LIMIT = 20_000
ENOUGH_FAULTS = 5
"""The run need not go on."""
WORKER = b"w1:1"


class Killed(Exception):
    pass


class Case(NamedTuple):
    """Who ends, at the how manyth of its points, and what the disk keeps of what was not synced (0 to 1)."""

    who: str
    point: int
    kept: float = 0.0


class Disk(Spool):
    """A spool whose last write can be torn."""

    def __init__(self, folder: Path, reach: Callable[[str], None]) -> None:
        super().__init__(folder, segment_bytes=SEGMENT_BYTES, lock_limit_s=0.0)
        self.synced: dict[int, int] = {}
        self._reach = reach

    def write(self) -> None:
        self._reach("commit: before")
        super().write()
        self.synced[self._segment] = self._written
        self._reach("commit: after")

    def begin(self, snapshot: Any) -> None:
        self._reach("segment: before")
        super().begin(snapshot)
        self.synced[self._segment] = self._written
        self._reach("segment: after")

    def _write_file(self, path: Path, data: bytes) -> None:
        try:
            self._reach("segment: half a file")
        except Killed:
            path.write_bytes(data[: len(data) // 2])
            raise
        super()._write_file(path, data)

    def cut_power(self, kept: float) -> None:
        if self._file >= 0:
            self.seal()
            self._write_sealed()
            size, synced = self._written, self.synced.get(self._segment, 0)
            os.ftruncate(self._file, synced + int(kept * (size - synced)))
            os.close(self._file)
        os.close(self._lock)


@dataclass
class Checkpoint:
    incarnation: int
    step: int
    frontier: int
    open: tuple[int, ...]
    version: int


@dataclass
class Trainer:
    """`asked`: the step whose batch it waits for. `again`: it must attach first."""

    incarnation: int
    step: int
    parent: int
    origin: int
    frontier: int = 0
    open: tuple[int, ...] = ()
    version: int = -1
    version_step: int = 0
    again: bool = True


class World:
    """One run. `reach` is called at every point and ends somebody where the case says so."""

    steps = STEPS
    idle_limit = IDLE_LIMIT
    config = CONFIG

    def __init__(self, folder: Path, case: Case | None) -> None:
        self.folder, self.case = folder, case
        self.now = 1000.0
        self.points: Counter[str] = Counter()
        self.queue: deque[tuple[bytes, AnyMessage]] = deque()
        self.versions = itertools.count()
        self.history: dict[int, tuple[int, ...]] = {}  # of the branch that survives
        self.states: dict[int, str] = {}  # by step: what a state digest would tell
        self.repeats: dict[int, tuple[int, ...]] = {}
        self.faults: list[str] = []
        self.dead = False  # the orchestrator's power is cut: not even a write that was under way goes on
        self.checkpoints: list[Checkpoint] = []
        self.ends = 0
        self.zombies: list[Trainer] = []
        self.attached = -1  # the newest incarnation that was told so
        # the worker
        self.work: dict[int, wire.Lease] = {}
        self.unacknowledged: dict[int, AnyMessage] = {}
        self.acknowledged: dict[int, int] = {}  # of each ordinal, the lease whose group was, first
        self.trained: dict[int, float] = {}  # of each ordinal, the lease whose group was, last
        self.served = 0
        self.finished = False
        self.trainer = self.new_trainer()

    # ---------------------------------------------------------------- ends

    def reach(self, who: str) -> None:
        self.points[who] += 1
        here = self.case is not None and (who, self.points[who]) == (self.case.who, self.case.point)
        if here:
            self.dead = who == "orchestrator"
        if here or (self.dead and who == "orchestrator"):
            raise Killed(who)

    def reach_orchestrator(self, what: str) -> None:
        self.reach("orchestrator")

    # ---------------------------------------------------------------- the trainer

    def new_trainer(self) -> Trainer:
        last = self.checkpoints[-1] if self.checkpoints else Checkpoint(-1, 0, 0, (), -1)
        incarnation = self.trainer.incarnation + 1 if hasattr(self, "trainer") else 1
        self.repeats = {step: had for step, had in self.history.items() if step >= last.step}
        self.history = {step: had for step, had in self.history.items() if step < last.step}
        made = Trainer(incarnation, last.step, last.version, last.incarnation, last.frontier, last.open)
        made.version, made.version_step = next(self.versions), last.step
        return made

    @property
    def peer(self) -> bytes:
        return _peer_of(self.trainer)

    def digest(self) -> str:
        return str(hash(tuple(sorted(self.history.items()))))

    def ask(self) -> None:
        t = self.trainer
        if t.again:
            self.queue.append((self.peer, self.attach_of(t, self.digest())))
        resumable = self.checkpoints[-2].step if len(self.checkpoints) > 1 else 0
        self.queue.append((self.peer, wire.NextBatch(t.incarnation, t.step, resumable)))

    def attach_of(self, t: Trainer, digest: str) -> wire.Attach:
        attach = wire.Attach(
            wire.PROTOCOL,
            "run",
            "model",
            t.incarnation,
            t.step,
            t.version,
            t.version_step,
            VOCAB,
            t.frontier,
        )
        return _with(attach, open=t.open, parent=t.parent, digest=digest, origin=t.origin)

    def haunt(self) -> None:
        """What trainers say that have been replaced."""
        for t in self.zombies:
            if t.incarnation < self.attached:
                version = 10_000 + t.incarnation
                self.queue += [
                    (_peer_of(t), self.attach_of(t, "a zombie's")),
                    (_peer_of(t), wire.NextBatch(t.incarnation, t.step)),
                    (_peer_of(t), wire.Published(t.incarnation, version, 1000, t.version, "a zombie's")),
                    (_peer_of(t), wire.Finish(t.incarnation, self.steps, False)),
                ]

    def to_zombie(self, peer: bytes, message: AnyMessage) -> None:
        late = int(peer.partition(b":")[2]) < self.attached
        if late and isinstance(message, wire.Attached | wire.Batch | wire.Finished):
            self.faults.append(f"{peer.decode()} was replaced, and got {type(message).__name__}")

    def to_trainer(self, message: AnyMessage) -> None:
        if self.finished:
            return  # what was on its way when it ended
        t = self.trainer
        match message:
            case wire.Attached():
                t.again = False
                self.attached = max(self.attached, t.incarnation)
            case wire.Refused():
                if not message.retry:
                    self.faults.append(message.reason)
                t.again = True
            case wire.Batch(incarnation=t.incarnation, step=t.step):
                try:
                    self.train(message)
                except Killed:
                    self.ends += 1
                    self.zombies.append(t)
                    self.trainer = self.new_trainer()
                if not self.finished:
                    self.ask()

    def train(self, batch: wire.Batch) -> None:
        t = self.trainer
        self.reach("trainer")
        ordinals = tuple(made.key.ordinal for made in batch.groups)
        if t.step in self.repeats and ordinals != self.repeats.pop(t.step):
            self.faults.append(f"step {t.step} was repeated with {ordinals}")
        if any(lag > self.config.max_lag for lags in batch.lags for lag in lags):
            self.faults.append(f"step {t.step}: lags {batch.lags}")
        self.history[t.step] = ordinals
        self.trained |= {made.key.ordinal: made.generate_s for made in batch.groups}
        self.reach("trainer")
        t.step, t.frontier, t.open = t.step + 1, batch.frontier, batch.open
        if t.step == self.steps:
            self.finished = True
            return
        parent, t.version, t.version_step = t.version, next(self.versions), t.step
        t.parent = parent
        self.queue.append(
            (self.peer, wire.Published(t.incarnation, t.version, t.step, parent, self.digest()))
        )
        self.reach("trainer")
        if t.step % CHECKPOINT_EVERY == 0:
            self.checkpoints.append(Checkpoint(t.incarnation, t.step, t.frontier, t.open, t.version))
        self.reach("trainer")

    # ---------------------------------------------------------------- the worker

    def introduce(self) -> None:
        self.queue.append((WORKER, hello("w1", self.served)))

    def to_worker(self, message: AnyMessage) -> None:
        match message:
            case wire.Welcome(
                newest_version=newest
            ):  # an Announce may have been lost; the store tells the same
                self.served = max(self.served, newest)
                self.queue.append((WORKER, wire.Credit(6, self.served)))
                self.queue += [(WORKER, message) for message in self.unacknowledged.values()]
            case wire.Refused():
                self.introduce()
            case wire.Announce(version=version):
                self.served = max(self.served, version)
                self.queue.append((WORKER, wire.Credit(6, self.served)))
            case wire.Lease(lease=lease):
                self.work[lease] = message
            case wire.Ack(lease=lease, key=key):
                self.acknowledged.setdefault(key.ordinal, lease)
                self.unacknowledged.pop(lease, None)
            case wire.Nack(lease=lease):
                self.unacknowledged.pop(lease, None)
            case wire.Cancel(leases=leases):
                for lease in leases:
                    self.work.pop(lease, None)

    def deliver(self) -> bool:
        """The oldest lease becomes a group; every third one waits for a while, so that they come out of order."""
        for lease, wanted in self.work.items():
            if lease % 3 or self.now % 8 < 1:
                del self.work[lease]
                done = wire.GroupDone(lease, group(wanted.key, self.served, n=2, generate_s=float(lease)))
                self.unacknowledged[lease] = done
                self.queue.append((WORKER, done))
                return True
        return False

    # ---------------------------------------------------------------- the orchestrator

    def live(self) -> None:
        """One life of it after another, until the run is trained."""
        while not self.finished:
            self.dead = False
            disk = Disk(self.folder, self.reach_orchestrator)
            control = Control(
                environment=Counting(),
                environment_config=EnvironmentConfig(name="counting"),
                sampling=SamplingConfig(group_size=2, max_tokens=8),
                config=self.config,
                evaluation=EvalConfig(every=0),
                seed=1,
                lease_ids=itertools.count(1000 * (1 + self.ends)),
                now=self.now,
                journal=disk,
            )
            try:
                control.restore(disk.replay(), self.now)
                self.queue.clear()  # what was on its way is lost
                self.trainer.again = True
                self.introduce()
                self.ask()
                asyncio.run(self.serve(control, disk))
                disk.close()
            except Killed:
                self.ends += 1
                disk.cut_power(self.case.kept if self.case else 0.0)
        self.left = control

    async def serve(self, control: Control, disk: Disk) -> None:
        listener, stop = _Listener(self), asyncio.Event()
        serving = asyncio.ensure_future(
            server.serve(
                listener, control, disk, clock=lambda: self.now, in_thread=self.slow_disk, stop=stop
            )
        )
        listener.idle = lambda: stop.set() if self.finished else self.idle()
        await serving

    async def slow_disk(self, write: Callable[[], None]) -> None:
        """Every write takes another time, in turns of the loop, which goes on meanwhile."""
        self.points["write"] += 1
        for _ in range(self.points["write"] * 5 % 17):
            await asyncio.sleep(0)
        write()

    def idle(self) -> None:
        """Nobody has anything to say: time passes, somebody works, requests are repeated."""
        self.now += 0.5
        self.points["idle"] += 1
        if self.points["idle"] > self.idle_limit or len(self.faults) > ENOUGH_FAULTS:
            raise AssertionError(f"the run stands still at step {self.trainer.step}: {self.faults}")
        if not self.deliver():
            self.now += 1.5
            self.ask()
            self.queue += [(WORKER, message) for message in self.unacknowledged.values()]
        if self.points["idle"] % 5 == 0:
            self.haunt()
        beat = wire.Heartbeat(
            self.served, "serving", tuple(wire.LeaseProgress(lease, 1) for lease in self.work)
        )
        self.queue.append((WORKER, beat))

    # ---------------------------------------------------------------- what must be true

    def failures(self) -> list[str]:
        found = list(self.faults)
        if sorted(self.history) != list(range(self.steps)):
            found.append(f"steps {sorted(self.history)}")
        trained = [ordinal for step in sorted(self.history) for ordinal in self.history[step]]
        twice = [ordinal for ordinal, count in Counter(trained).items() if count > 1]
        if twice:
            found.append(f"trained twice: {twice}")
        ledger = self.left._ledger
        waiting = {key.ordinal for key in ledger._buffer}
        prompts = {key.ordinal for key in ledger.pool}
        missing = set(self.acknowledged) - set(trained) - waiting
        if len(missing) > ledger.dropped["lag"]:
            found.append(f"acknowledged and lost: {sorted(missing)}; dropped {dict(ledger.dropped)}")
        made_again = [
            ordinal
            for ordinal in trained
            if self.trained[ordinal] != self.acknowledged.get(ordinal, self.trained[ordinal])
        ]
        if made_again:
            found.append(f"acknowledged, lost, and made again: {made_again}")
        unseen = set(range(max(trained) + 1)) - set(trained) - waiting - prompts
        if len(unseen) > ledger.dropped["lag"]:
            found.append(f"prompts lost: {sorted(unseen)}; dropped {dict(ledger.dropped)}")
        return found


class _Listener:
    """Hands over what is queued; what is sent is answered at once."""

    address = "memory://world"

    def __init__(self, world: World) -> None:
        self._world = world
        self.idle: Callable[[], None] = world.idle

    async def recv(self) -> tuple[bytes, AnyMessage]:
        while not self._world.queue:
            self.idle()
            if not self._world.queue:
                await asyncio.sleep(3600)  # the run is trained: the stop ends this
        return self._next()

    def recv_now(self) -> tuple[bytes, AnyMessage] | None:
        return self._next() if self._world.queue else None

    def _next(self) -> tuple[bytes, AnyMessage]:
        self._world.points["message"] += 1
        if self._world.points["message"] > MESSAGE_LIMIT:
            raise AssertionError("they talk without end")  # without some guards
        peer, message = self._world.queue.popleft()
        return peer, wire.decode(wire.encode(message), wire.MAX_BATCH_BYTES)

    async def send(self, peer: bytes, message: AnyMessage) -> None:
        self._world.reach_orchestrator(f"send {type(message).__name__}: before")
        message = wire.decode(wire.encode(message), wire.MAX_BATCH_BYTES)
        if peer == WORKER:
            self._world.to_worker(message)
        elif peer == self._world.peer:
            self._world.to_trainer(message)
        elif peer in map(_peer_of, self._world.zombies):
            self._world.to_zombie(peer, message)
        self._world.reach_orchestrator(f"send {type(message).__name__}: after")

    async def close(self) -> None:
        pass


def _peer_of(trainer: Trainer) -> bytes:
    return f"trainer:{trainer.incarnation}".encode()


def _with(message: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(message, **changes)


# ---------------------------------------------------------------- cases and guards


def play(case: Case | None, folder: Path) -> World:
    world = World(folder, case)
    world.live()
    return world


def points_of(who: str) -> int:
    """How many there are in a run in which nobody ends."""
    with tempfile.TemporaryDirectory() as folder:
        return play(None, Path(folder) / "spool").points[who]


def _acknowledge_first() -> Iterator[None]:
    """Of eight turns seven are answered at once."""
    inner = Commits.begin
    turns = itertools.count(1)

    def begin(self: Any) -> Any:
        if next(turns) % 8 == 0:
            return inner(self)
        answers, self._waiting = self._waiting, []
        return answers

    Commits.begin = begin  # type: ignore[method-assign]
    yield
    Commits.begin = inner  # type: ignore[method-assign]


def _as_the_write_begins() -> Iterator[None]:
    """An answer does not wait for the end of its commit."""
    inner = Commits.begin

    def begin(self: Any) -> Any:
        at_once = inner(self)
        answers, self._sealed = self._sealed, []
        return at_once + answers

    Commits.begin = begin  # type: ignore[method-assign]
    yield
    Commits.begin = inner  # type: ignore[method-assign]


def _no_journal() -> Iterator[None]:
    from orchestrator.branches import Branches

    inner = Branches.take
    Branches.take = lambda self, *args: inner(self, *args) and {}  # type: ignore[method-assign]
    yield
    Branches.take = inner  # type: ignore[method-assign]


def _no_dedup() -> Iterator[None]:
    """A group that was delivered before is taken again."""
    inner, expects = ledger_module.GroupLedger.settled, PromptPool.expects
    ledger_module.GroupLedger.settled = lambda self, key: False  # type: ignore[method-assign]
    PromptPool.expects = lambda self, lease, key, worker: (  # type: ignore[method-assign]
        expects(self, lease, key, worker) or key not in self
    )
    held_for = PromptPool.held_for
    PromptPool.held_for = lambda self, key: held_for(self, key) if key in self else None  # type: ignore[method-assign]
    yield
    ledger_module.GroupLedger.settled = inner  # type: ignore[method-assign]
    PromptPool.expects = expects  # type: ignore[method-assign]
    PromptPool.held_for = held_for  # type: ignore[method-assign]


def _no_consumed_keys() -> Iterator[None]:
    """What the branch has used before the resume is not looked at."""
    from orchestrator.branches import Branches

    inner = Branches.before
    Branches.before = lambda self, *args: set()  # type: ignore[method-assign]
    apply = ledger_module.GroupLedger._apply_took

    def forgetful(self: Any, took: Any) -> None:
        apply(self, _with(took, frontier=0))

    ledger_module.GroupLedger._apply_took = forgetful  # type: ignore[method-assign]
    yield
    Branches.before = inner  # type: ignore[method-assign]
    ledger_module.GroupLedger._apply_took = apply  # type: ignore[method-assign]


def _no_fence() -> Iterator[None]:
    """Older incarnations are heard like the newest one."""
    from orchestrator import trainer_desk as desk

    attach, trainer = desk.refuse_attach, desk.refuse_trainer

    def anybody(refuse: Any) -> Any:
        def look(*args: Any, **options: Any) -> Any:
            refusal = refuse(*args, **options)
            return None if refusal is not None and refusal.code == "incarnation" else refusal

        return look

    desk.refuse_attach, desk.refuse_trainer = anybody(attach), anybody(trainer)
    yield
    desk.refuse_attach, desk.refuse_trainer = attach, trainer


GUARDS: dict[str, Callable[[], Iterator[None]]] = {
    "fsync before the ack": _acknowledge_first,
    "the end of the fsync before the ack": _as_the_write_begins,
    "the journal of assignments": _no_journal,
    "one group per key": _no_dedup,
    "the consumed keys": _no_consumed_keys,
    "the fence": _no_fence,
}


@contextmanager
def without(guard: str) -> Iterator[None]:
    yield from GUARDS[guard]()


def main() -> None:
    total = failed = 0
    for who in ("orchestrator", "trainer"):
        for point in range(1, points_of(who) + 1):
            for kept in (0.0, 0.5, 1.0) if who == "orchestrator" else (0.0,):
                case = Case(who, point, kept)
                with tempfile.TemporaryDirectory() as folder:
                    failures = play(case, Path(folder) / "spool").failures()
                total += 1
                failed += bool(failures)
                if failures:
                    click.echo("\n    ".join([str(case), *failures]))
        click.echo(f"{who}: {total} cases so far, {failed} failed")


if __name__ == "__main__":
    main()
