"""How many leases a worker holds: found from its engine's load, against the constant max_sequences // group_size.

One vLLM engine on this machine's CPU and a random model of 61 tokens, whose samples end by chance: a few are long.
Both kinds take turns on it, next to the orchestrator and over a link of one second there and back. The time in the
queue is what waits, on average, by what is finished in a second (Little).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tests.bench.claims import Claim
from tests.rollout_support import VOCAB, write_model
from workers.engines import Engine, make_engine
from workers.rollout_load import LOOK_S, LoadControl, Look
from workers.rollout_settings import RolloutConfig

GROUP, MAX_TOKENS, SEATS = 8, 160, 64
WARM_S, MEASURE_S = 6.0, 8.0
"""Of each turn. The level is found within three or four spans of a second, a group takes one or two."""
LINK_S = 1.0


class Turn(NamedTuple):
    tokens_per_s: float
    queue_s: float
    level: int


def run(scratch: Path, console: Console) -> list[Claim]:
    turns = asyncio.run(_all(write_model(scratch / "model", 1)))
    for name, turn in turns.items():
        console.print(
            f"  {name}: {turn.tokens_per_s:.0f} tokens/s, {turn.queue_s * 1000:.0f} ms in the queue, "
            f"{turn.level} leases"
        )
    near = turns["near, found"].tokens_per_s / turns["near, constant"].tokens_per_s
    far = turns["far, found"].tokens_per_s / turns["far, constant"].tokens_per_s
    how = f"vLLM on this CPU, groups of {GROUP}, {SEATS} sequences"
    return [
        Claim("leases found from the load: tokens/s over a constant, near", near, at_least=1.0, how=how),
        Claim("the same over a link of 1 s", far, at_least=1.2, how=how),
        Claim("time in the engine's queue, near", turns["near, found"].queue_s, " s", how=how),
        Claim("the same over a link of 1 s", turns["far, found"].queue_s, " s", how=how),
    ]


async def _all(model: Path) -> dict[str, Turn]:
    engine = make_engine(RolloutConfig(max_sequences=SEATS, max_model_len=256, kv_cache_gib=0.1))
    turns = {}
    try:
        await engine.start(model, 0)
        for place, link_s in (("near", 0.0), ("far", LINK_S)):
            for kind in ("constant", "found"):
                turns[f"{place}, {kind}"] = await _Worker(engine, link_s, kind == "found").measure()
    finally:
        await engine.close()
    return turns


class _Worker:
    """What a worker and its orchestrator do with leases, without the two."""

    numbers = itertools.count()

    def __init__(self, engine: Engine, link_s: float, found: bool) -> None:
        load = engine.load()
        self.engine, self.link_s, self.found = engine, link_s, found
        self.control = LoadControl(
            group_size=GROUP,
            sequences=load.seats,
            cache_tokens=load.cache_tokens,
            tokens=2 * MAX_TOKENS,
        )
        self.level = SEATS // GROUP
        self.granted = self.returned = self.in_hand = self.unacked = self.sequences = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def measure(self) -> Turn:
        queued, looks, began, tokens, sequences = 0, 0, 0.0, 0, 0
        until = time.monotonic() + WARM_S
        while (now := time.monotonic()) < until + MEASURE_S:
            load = self.engine.load()
            if now >= until:
                if not looks:
                    began, tokens, sequences = now, load.tokens, self.sequences
                queued, looks = queued + load.queued, looks + 1
            level = self.control.look(
                Look(
                    held=self.in_hand + self.unacked,
                    running=load.running,
                    queued=load.queued,
                    cache_used=load.cache_used,
                    preempted=load.preempted,
                    turnaround_s=self.link_s,
                ),
                now,
            )
            self.level = level if self.found else self.level
            self._grant()
            await asyncio.sleep(LOOK_S)
        took = time.monotonic() - began
        made, finished = self.engine.load().tokens - tokens, self.sequences - sequences
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return Turn(made / took, queued / looks / (finished / took), self.level)

    def _grant(self) -> None:
        while self.granted - self.returned < self.level:
            self.granted += 1
            task = asyncio.create_task(self._lease())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _lease(self) -> None:
        await asyncio.sleep(self.link_s / 2)
        self.in_hand += 1
        await asyncio.gather(*(self._sample() for _ in range(GROUP)))
        self.in_hand -= 1
        self.unacked += 1
        await asyncio.sleep(self.link_s / 2)
        self.returned += 1
        self._grant()
        await asyncio.sleep(self.link_s / 2)
        self.unacked -= 1

    async def _sample(self) -> None:
        number = next(self.numbers)
        prompt = [2 + (number // GROUP * 7 + i * 5) % (VOCAB - 2) for i in range(12)]
        await self.engine.generate(
            prompt, seed=number, temperature=1.5, max_tokens=MAX_TOKENS, request_id=f"bench{number}"
        )
        self.sequences += 1
