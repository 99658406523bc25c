"""What a storm does to a run, and the supervisor that starts again what was killed.

A fault is a function of the site; what it draws, it draws from the site's chance. It gives a name to be counted by
(where it could not be, why not), and leaves fair weather. FAULTS has them all.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from async_rl.procs import Child
from tests.chaos.evidence import read_log
from tests.chaos.lives import HOOKS, ROOT
from tests.chaos.s3_proxy import S3Proxy, Weather
from tests.chaos.small_disk import SmallDisk
from tests.chaos.socket_proxy import SocketProxy
from tests.runs import LocalRun

__all__ = ["FAULTS", "Site", "Still"]

PAUSE_S = 0.1
REPLACED_S = 40.0
"""A trainer looks for newer ones at every publish, and every few seconds where it waits."""
START_LIMIT_S = 180.0
"""Of a process that imports torch, on a busy machine."""
LEASE_S = 6.0
SILENT_S = 2.5  # five heartbeats
POINTS = {
    "orchestrator": (
        "write:before", "write:half", "write:after", "commit:before", "commit:after",
        "send-Ack:before", "send-Ack:after", "send-Batch:before", "send-Batch:after",
        "send-Lease:before", "send-Lease:after", "send-Attached:after",
    ),
    "trainer": (
        "batch:before", "batch:after", "optimizer:before", "optimizer:after", "versions:before",
        "versions:after", "checkpoints:before", "checkpoints:after", "incarnations:after",
    ),
    "rollout": ("send-GroupDone:before", "send-GroupDone:after", "Ack:after"),
}  # fmt: skip
RARE = ("checkpoints", "incarnations", "send-Attached")
REPLACED = ("may publish no more", "newer trainer", "has the run")
"""How a trainer that a newer one has replaced says so."""


class Still(Exception):
    """The run does not get on, or a process ended by itself."""


class Site:
    """The processes of one run. Its environment is this process's while it lasts."""

    def __init__(
        self,
        run: LocalRun,
        chance: random.Random,
        log: Path,
        environment: Mapping[str, str],
        without: str,
    ) -> None:
        """`without`: a guard that the processes are started without; empty: none."""
        self.run, self.chance, self.log = run, chance, log
        self.children: dict[str, Child] = {}
        self.old: dict[str, Child] = {}
        """Trainers that a newer one replaces, and that have not ended yet."""
        self.workers: list[str] = []
        self.sockets: SocketProxy
        self.s3: S3Proxy
        self.disk: SmallDisk
        self._kills = self._rivals = 0
        self._clock = run.folder / "clock"
        set_clock(self._clock, 0.0)
        self._environment = {
            **environment,
            "ASYNC_RL_TEST_LOG": str(log),
            "ASYNC_RL_TEST_LENGTHS": "1",
            "ASYNC_RL_TEST_CLOCK": str(self._clock),
            "ASYNC_RL_TEST_KILLS": "",
            "ASYNC_RL_TEST_WITHOUT": without,
            "PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]),
        }

    def __enter__(self) -> Site:
        self._before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in (*self.children.values(), *self.old.values()):
            for pid in family(child.pid):
                send(pid, signal.SIGCONT)  # or it hears no SIGTERM
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    # ---------------------------------------------------------------- processes

    def begin(self, workers: list[str], limit_s: float) -> None:
        self.workers = workers
        for name in ("orchestrator", "trainer", *workers):
            self.start(name)
        self.get_on(2, limit_s)

    def start(self, name: str, kill: str = "") -> None:
        """`kill`: the named point where this life of it ends."""
        os.environ["ASYNC_RL_TEST_KILLS"] = kill
        if name == "orchestrator":
            self.children[name] = self.run.start_orchestrator()
        elif name == "trainer":
            self._rivals += 1
            self.children[name] = self.run.start_trainer(
                "--orchestrator", self.run.dial, name=f"trainer-{self._rivals}"
            )
        else:
            self.children[name] = self.run.start_worker(name)
        os.environ["ASYNC_RL_TEST_KILLS"] = ""

    def supervise(self) -> None:
        """Start again what was killed. Raises Still for what ended otherwise."""
        for name, child in list(self.children.items()):
            if not child.running():
                if not was_killed(child):
                    raise self.still(f"{name} ended by itself, with status {child.process.returncode}")
                self.start(name)
        for name, child in list(self.old.items()):
            if not child.running():
                if not was_killed(child) and not any(each in child.log_tail(30) for each in REPLACED):
                    raise self.still(f"{name}, that was replaced, ended without saying so")
                del self.old[name]

    def watch(self, seconds: float, limit_s: float) -> None:
        """Supervise for so long; a run that has stood still for `limit_s` is Still."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.supervise()
            time.sleep(PAUSE_S)
            self._look(limit_s)

    def get_on(self, steps: int, limit_s: float) -> None:
        """Until so many more steps were trained."""
        seen = self.log.read_bytes().count(b'"ordinals"') if self.log.exists() else 0
        self._moved = time.monotonic()
        while self._look(limit_s) < seen + steps or self.old:
            self.supervise()
            time.sleep(PAUSE_S)

    def _look(self, limit_s: float) -> int:
        """Steps in the log. Raises Still where there was none for so long."""
        steps = self.log.read_bytes().count(b'"ordinals"') if self.log.exists() else 0
        if steps != getattr(self, "_steps", -1):
            self._steps, self._moved = steps, time.monotonic()
        elif time.monotonic() - self._moved > limit_s:
            raise self.still(f"no step for {limit_s:g} s")
        return steps

    def still(self, what: str) -> Still:
        children = (*self.children.values(), *self.old.values())
        logs = "\n".join(f"---- {child.name}\n{child.log_tail(15)}" for child in children)
        return Still(f"{what}\n{logs}\n---- status\n{self.run.status()}")

    def clear(self) -> None:
        self.sockets.flow()
        self.s3.weather = Weather()
        self.disk.free()

    def stop(self, limit_s: float) -> None:
        """As an operator: workers and trainer finish what they do, then the orchestrator ends."""
        for name in (*self.workers, "trainer", "orchestrator"):
            child = self.children[name]
            child.signal_group(signal.SIGTERM)
            if not child.wait_group(time.monotonic() + limit_s):
                raise self.still(f"{name} did not stop within {limit_s:g} s")
            if name == "orchestrator" and child.process.returncode:
                raise self.still(f"the orchestrator stopped with status {child.process.returncode}")

    # ---------------------------------------------------------------- for the faults

    def someone(self) -> str:
        return self.chance.choice(["orchestrator", "trainer", self.chance.choice(self.workers)])

    def pid(self, name: str) -> int:
        """Of the process that works: a trainer's rank, not its parent."""
        return family(self.children[name].pid)[-1]

    def next_kill(self, name: str) -> str:
        """Some named point for the next life of it."""
        role = "rollout" if name in self.workers else name
        point = self.chance.choice(POINTS[role])
        count = 1 if point.startswith(RARE) else self.chance.randrange(1, 30)
        self._kills += 1
        return f"{role} {point} {count} {self._kills}"

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
        """Supervising meanwhile."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise self.still(f"waited {limit_s:g} s for {what}")
            self.supervise()
            time.sleep(PAUSE_S)

    def lives(self) -> set[int]:
        """Process numbers of trainers that took the run."""
        lines = read_log(self.log) if self.log.exists() else []
        return {line["pid"] for line in lines if "life" in line}


def family(pid: int) -> list[int]:
    """A process and its descendants, the youngest last."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(each for child in children for each in family(int(child)))]


def send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def was_killed(child: Child) -> bool:
    return child.process.returncode == -signal.SIGKILL or "signal SIGKILL" in child.log_tail(8)


# ---------------------------------------------------------------- faults


def calm(site: Site) -> str:
    """Nothing, for once. `--only calm` is what to compare with."""
    site.watch(site.chance.uniform(2.0, 5.0), 1e9)
    return "calm"


def kill(site: Site) -> str:
    name = site.someone()
    send(site.pid(name), signal.SIGKILL)
    return f"kill {kind(name)}"


def kill_at_a_point(site: Site) -> str:
    """The one that is killed now is killed again in its next life, at a point of it."""
    name = site.someone()
    child = site.children[name]
    send(site.pid(name), signal.SIGKILL)
    if not child.wait_group(time.monotonic() + 10.0):
        raise site.still(f"{name} was not gone 10 s after SIGKILL")
    site.start(name, site.next_kill(name))
    return f"kill {kind(name)}, and at a point"


def kill_two(site: Site) -> str:
    names = site.chance.sample(["orchestrator", "trainer", *site.workers], 2)
    for name in names:
        send(site.pid(name), signal.SIGKILL)
    return "kill two"


def stop(site: Site) -> str:
    """SIGSTOP for longer than a lease, or than the heartbeats' limit."""
    name = site.someone()
    pid = site.pid(name)
    send(pid, signal.SIGSTOP)
    site.watch(site.chance.choice([SILENT_S + 1, LEASE_S + 1]), 1e9)
    send(pid, signal.SIGCONT)
    return f"stop {kind(name)}"


def leave(site: Site) -> str:
    """A worker is asked to leave, and comes back."""
    name = site.chance.choice(site.workers)
    child = site.children.pop(name)
    child.signal_group(signal.SIGTERM)
    site.wait(lambda: not child.running(), f"{name} to leave")
    site.start(name)
    return "a worker leaves"


def cut(site: Site) -> str:
    for _ in range(site.chance.randrange(1, 5)):
        site.sockets.cut()
        site.watch(site.chance.uniform(0.1, 1.0), 1e9)
    return "sockets cut"


def delay(site: Site) -> str:
    site.sockets.delay_s = site.chance.uniform(0.05, 0.5)
    site.watch(site.chance.uniform(2.0, 8.0), 1e9)
    site.sockets.flow()
    return "sockets slow"


def stall(site: Site) -> str:
    site.sockets.stall()
    site.watch(site.chance.choice([SILENT_S + 1, LEASE_S + 1]), 1e9)
    site.sockets.flow()
    return "sockets stalled"


def refuse(site: Site) -> str:
    site.sockets.refuse()
    site.watch(site.chance.uniform(1.0, LEASE_S + 2), 1e9)
    site.sockets.flow()
    return "sockets refused"


def bad_store(site: Site) -> str:
    share = site.chance.uniform(0.02, 0.12)
    site.s3.weather = Weather(fail=share, drop=share, lose=share, cut=share, delay=3 * share, delay_s=1.0)
    site.watch(site.chance.uniform(3.0, 10.0), 1e9)
    site.s3.weather = Weather()
    return "store 5xx, cut, lost, slow"


def stale_store(site: Site) -> str:
    """Old lists of versions: S3 has none, but a cache before one may."""
    site.s3.weather = Weather(stale=site.chance.uniform(0.2, 0.9), methods=("GET",), part="versions/")
    site.watch(site.chance.uniform(3.0, 8.0), 1e9)
    site.s3.weather = Weather()
    return "store lists stale"


def no_store(site: Site) -> str:
    site.s3.weather = Weather(down=True, hang=site.chance.choice([0.0, 1.0]))
    site.watch(site.chance.uniform(2.0, 8.0), 1e9)
    site.s3.weather = Weather()
    return "store away"


def full_disk(site: Site) -> str:
    if not site.disk.real:
        return "full disk: left out, nothing can be mounted"
    site.disk.fill()
    site.watch(site.chance.uniform(2.0, 6.0), 1e9)
    site.disk.free()
    return "full disk"


def set_clock(file: Path, off_s: float) -> None:
    """In place: every process has the file mapped, and one that is cut short under a mapping ends them (SIGBUS)."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(opened, struct.pack("<d", off_s), 0)
    finally:
        os.close(opened)


def clock(site: Site) -> str:
    """Everybody's wall clock jumps, forwards or back, for a while."""
    jump = site.chance.choice([-86400.0, -60.0, 60.0, 86400.0])
    set_clock(site._clock, jump)
    site.watch(site.chance.uniform(2.0, 5.0), 1e9)
    set_clock(site._clock, 0.0)
    return "clock jump"


def two_trainers(site: Site) -> str:
    """A second one is started beside the first, that may be stopped meanwhile. The first ends and says why."""
    site.wait(lambda: site.pid("trainer") in site.lives(), "the first trainer to take the run")
    first = site.children["trainer"]
    pid = site.pid("trainer")
    stopped = site.chance.random() < 0.5
    if stopped:
        send(pid, signal.SIGSTOP)
    site.old[f"trainer {pid}"] = first
    site.start("trainer")
    site.wait(lambda: site.pid("trainer") in site.lives(), "a second trainer to take the run")
    if stopped:
        site.watch(1.0, 1e9)
        send(pid, signal.SIGCONT)
    site.wait(lambda: not site.old, "the first trainer to stop", REPLACED_S)
    return "two trainers, the first one stopped" if stopped else "two trainers"


def kind(name: str) -> str:
    return name if name in ("orchestrator", "trainer") else "worker"


FAULTS: dict[str, Callable[[Site], str]] = {
    each.__name__: each
    for each in (
        calm,
        kill, kill_at_a_point, kill_two, stop, leave, cut, delay, stall, refuse, bad_store, stale_store, no_store,
        full_disk, clock, two_trainers,
    )
}  # fmt: skip
