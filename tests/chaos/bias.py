"""Whether ends of workers and trainers make the prompts that are trained shorter than those that were asked.

    python -m tests.chaos.bias [--seed N]

The world of delivery.py, with prompts of prompts.py: one in three takes a worker many times as long as the others, so
whenever a worker dies it is mostly the long ones that it had in hand. It dies often, and so does the trainer. In the
end every prompt that was reached in order is looked for, by length: trained, still in hand, or dropped for its lag.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from async_rl import wire
from orchestrator import ledger as ledger_module
from tests.chaos import delivery
from tests.chaos.delivery import Killed, World
from tests.chaos.prompts import is_long
from tests.orchestration import group

__all__ = ["GUARDS", "Lengths", "Table", "play", "without"]

STEPS = 80
LONG_S, SHORT_S = 6.0, 0.5
"""That a worker takes for one group; it works on six at once."""
WORKER_DIES_S, TRAINER_DIES = 9.0, 0.02
"""Mean time between two deaths of the worker; the trainer's chance at each of four points of a step."""


class Table(NamedTuple):
    """Prompts of one length, in order up to the last one trained."""

    reached: int
    trained: int
    in_hand: int
    dropped_for_lag: int

    @property
    def lost(self) -> int:
        return self.reached - self.trained - self.in_hand - self.dropped_for_lag


class Lengths(World):
    steps = STEPS
    idle_limit = 40_000
    config = msgspec.structs.replace(delivery.CONFIG, lease_s=10.0, straggler_hold_s=8.0)

    def __init__(self, folder: Path, seed: int, *, deaths: bool = True) -> None:
        self.chance = random.Random(seed)
        self.deaths = deaths
        self.due: dict[int, float] = {}
        self.dies_at = 0.0
        self.counts: Counter[str] = Counter()
        self.settled: dict[int, str] = {}
        super().__init__(folder, None)

    def reach(self, who: str) -> None:
        if who == "trainer" and self.deaths and self.chance.random() < TRAINER_DIES:
            self.counts["ends of the trainer"] += 1
            raise Killed(who)

    def to_worker(self, message: wire.AnyMessage) -> None:
        super().to_worker(message)
        if isinstance(message, wire.Lease):
            took = LONG_S if is_long(message.key.ordinal) else SHORT_S
            self.due[message.lease] = self.now + took

    def idle(self) -> None:
        if self.deaths and self.now >= self.dies_at:
            self.counts["ends of the worker"] += bool(self.work)
            self.counts["long leases lost"] += sum(is_long(each.key.ordinal) for each in self.work.values())
            self.counts["short leases lost"] += sum(
                not is_long(each.key.ordinal) for each in self.work.values()
            )
            self.work.clear()
            self.unacknowledged.clear()
            self.introduce()
            self.dies_at = self.now + self.chance.expovariate(1 / WORKER_DIES_S)
        super().idle()

    def deliver(self) -> bool:
        """Whatever is done by now."""
        for lease, wanted in self.work.items():
            if self.due[lease] <= self.now:
                del self.work[lease]
                done = wire.GroupDone(lease, group(wanted.key, self.served, n=2, generate_s=float(lease)))
                self.unacknowledged[lease] = done
                self.queue.append((delivery.WORKER, done))
                return True
        return False

    def table(self, long: bool) -> Table:
        trained = {ordinal for had in self.history.values() for ordinal in had}
        ledger = self.left._ledger
        in_hand = {key.ordinal for key in (*ledger._buffer, *ledger.pool)}
        reached = {ordinal for ordinal in range(max(trained) + 1) if is_long(ordinal) == long}
        return Table(
            len(reached),
            len(reached & trained),
            len((reached & in_hand) - trained),
            len((reached & self.too_old) - trained - in_hand),
        )

    @property
    def too_old(self) -> set[int]:
        return {ordinal for ordinal, reason in self.settled.items() if reason == "lag"}


def play(seed: int, folder: Path, *, deaths: bool = True) -> Lengths:
    world = Lengths(folder, seed, deaths=deaths)
    append = delivery.Disk.append

    def noted(disk: Any, record: Any) -> Any:
        if type(record).__name__ == "Settled":
            world.settled[record.ordinal] = record.reason
        return append(disk, record)

    delivery.Disk.append = noted  # type: ignore[method-assign]
    try:
        world.live()
    finally:
        delivery.Disk.append = append  # type: ignore[method-assign]
    return world


# ---------------------------------------------------------------- guards


def _leases_come_back() -> Iterator[None]:
    """A lease whose worker died is given up, not given back."""
    inner = ledger_module.GroupLedger._return

    def give_up(self: Any, held: Any, reason: str, **how: Any) -> Any:
        failure = inner(self, held, reason, **how)
        if not failure.given_up:
            self._write(ledger_module.Settled(held.key.ordinal, "failed", reason))
        return failure

    ledger_module.GroupLedger._return = give_up  # type: ignore[method-assign]
    yield
    ledger_module.GroupLedger._return = inner  # type: ignore[method-assign]


def _resumes_take_back() -> Iterator[None]:
    """A resume goes on at its frontier, and forgets what was on its way below it."""
    inner = ledger_module.GroupLedger._apply_took

    def forget(self: Any, took: Any) -> None:
        open_before = set(self._pool)
        inner(self, took)
        for key in open_before & set(self._pool):
            self._pool.discard(key)

    ledger_module.GroupLedger._apply_took = forget  # type: ignore[method-assign]
    yield
    ledger_module.GroupLedger._apply_took = inner  # type: ignore[method-assign]


GUARDS: dict[str, Callable[[], Iterator[None]]] = {
    "leases come back": _leases_come_back,
    "a resume takes back what was on its way": _resumes_take_back,
}


@contextmanager
def without(guard: str) -> Iterator[None]:
    yield from GUARDS[guard]()


@click.command()
@click.option("--seed", default=1, show_default=True)
def main(seed: int) -> None:
    logging.disable(logging.WARNING)
    for deaths in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            world = play(seed, Path(folder) / "spool", deaths=deaths)
        click.echo(f"seed {seed}, {'with' if deaths else 'without'} deaths: {dict(world.counts)}")
        tables = {name: world.table(name == "long") for name in ("long", "short")}
        for name, table in tables.items():
            click.echo(f"    {name}: {table._asdict()}, lost {table.lost}")
        for what in ("reached", "trained"):
            share = getattr(tables["long"], what) / sum(getattr(each, what) for each in tables.values())
            click.echo(f"    long ones of those {what}: {share:.3f}")


if __name__ == "__main__":
    main()
