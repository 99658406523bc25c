"""Rewards computed once more, by an environment of the orchestrator's own: beside its loop, one group at a time.

An environment is the user's code. It may be slow, block, or raise; acknowledgements and leases wait for none of it
(judge.py keeps it in a process of its own), and a worker whose groups take long waits longer for its next turn.

A group that can't be scored is evidence only where it is the texts that make it so:

    it fails ─► score again what was scored well before ─► and it once more     each in a renewed environment
                 fails: it is the environment               fails: it is this text
                 nothing was yet: nobody knows

and one that takes too long only where its worker said that it did not (unscored.py compares workers).

What is verified: that each reward is what the environment gives for the completion's text; and, where the run's
tokenizer can be read here, that the text is what the tokens say. Without it the text is the worker's word.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable, Sequence

import msgspec

from async_rl.envs.base import Environment
from async_rl.envs.draws import hash_fraction
from async_rl.log import get_logger
from async_rl.wire import Group, Key, Prompt, Sample
from orchestrator.leases import name_of
from orchestrator.turns import Turns

__all__ = ["Outcome", "Rescorer", "Rescoring", "chosen", "difference"]

log = get_logger(__name__)

MOST_WAITING = 32
MOST_WAITING_BYTES = 64 << 20
"""While so many groups wait, or so much, further ones are passed over: the sample gets smaller, nothing else."""
HUNG_S = 5.0
"""Beyond the limit, before a thread counts as lost: asyncio's own limit ends all but what blocks."""
MOST_LOST = 3
"""Threads that an environment may block for ever; then nothing is scored again."""
CONTROLS = 2
"""Groups that were scored as they should be, of different workers, kept to hold failures against."""
REASON_CHARS = 500
"""Of what an environment says when it fails: it may be all of the text."""
TOO_LONG = "it takes longer than the limit"
REWARD_TOLERANCE = 1e-6
"""Of the width of the reward range: what sums in another order may differ by."""


class Rescoring(msgspec.Struct, frozen=True):
    """A group of a worker, and the prompt that it answers."""

    worker: str
    prompt: Prompt
    group: Group


class Outcome(msgspec.Struct, frozen=True):
    """`wrong`: what differs; empty: nothing. `failed`: why these texts can't be scored; empty: they were."""

    worker: str
    key: Key
    wrong: str
    failed: str = ""


def chosen(key: Key, salt: str, share: float) -> bool:
    """Whether a group belongs to the sample. The salt is not known to workers."""
    return share > 0 and hash_fraction(f"{salt}/{name_of(key)}") < share


def difference(
    group: Group,
    rewards: Sequence[float],
    reward_range: tuple[float, float],
    fits: Callable[[Sample], bool] | None = None,
) -> str:
    """What differs from what the worker said, in words. `fits`: whether a text is what the tokens say; None: there is
    no tokenizer to ask."""
    low, high = reward_range
    tolerance = REWARD_TOLERANCE * max(1.0, high - low)
    for index, (sample, reward) in enumerate(zip(group.samples, rewards, strict=True)):
        if fits is not None and not fits(sample):
            return f"{name_of(group.key)} sample {index}: its text is not what its tokens say"
        if not abs(sample.reward - reward) <= tolerance:
            return f"{name_of(group.key)} sample {index}: reward {sample.reward:g}, and {reward:g} when scored again"
    return ""


def _size(group: Group) -> int:
    arrays = (each.data for s in group.samples for each in (s.tokens, s.logprobs, s.mask, s.spans))
    return len(group.prompt.data) + sum(map(len, arrays)) + sum(len(s.text) for s in group.samples)


class _Run(msgspec.Struct):
    """The group that is being scored. `attempts`: begun so far, its own and those of the group it is held against."""

    rescoring: Rescoring
    began: float
    future: concurrent.futures.Future[Outcome | None] | None = None
    attempts: int = 0


class Rescorer:
    """`environment`: used by this alone, in a thread. `fits`: see `difference`. `renew`: gives up the state that
    texts may have spoiled; called in that thread. Not thread-safe: called by the orchestrator's loop."""

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float,
        fits: Callable[[Sample], bool] | None = None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._fits = fits
        self._renew = renew
        self._waiting: Turns[Rescoring] = Turns(
            MOST_WAITING, MOST_WAITING_BYTES, lambda each: _size(each.group)
        )
        self._running: _Run | None = None
        self._good: dict[str, Rescoring] = {}  # by worker, the newest last: what was scored as it should be
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = 0

    @property
    def idle(self) -> bool:
        return self._running is None and not self._waiting

    def add(self, rescoring: Rescoring) -> None:
        if self._lost < MOST_LOST:
            self._waiting.add(rescoring.worker, rescoring)

    def turn(self, now: float) -> list[Outcome]:
        """What is done since the last call; begins what comes next. Never waits."""
        outcomes = []
        if (run := self._running) is not None and run.future is not None:
            if run.future.done():
                outcomes += self._outcome(run)
                self._over(run, now)
            elif now - run.began > max(1, run.attempts) * self._timeout_s + HUNG_S:
                self._over(run, now)
                self._loop = None
                self._lost += 1
                log.warning(
                    "the environment blocks: a group is not scored again",
                    key=name_of(run.rescoring.group.key),
                    limit_s=self._timeout_s,
                    hint="" if self._lost < MOST_LOST else "no more groups are scored again in this life",
                )
                if self._lost >= MOST_LOST:
                    self._waiting.clear()
        if self._running is None and self._waiting:
            run = self._running = _Run(self._waiting.pop(), now)
            run.future = asyncio.run_coroutine_threadsafe(
                self._score(run, self._control(run.rescoring.worker)), self._thread()
            )
        return outcomes

    def close(self) -> None:
        """What is running is left behind, in a thread that does not keep the process from ending."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_end, self._loop)
            self._loop = None

    # ---------------------------------------------------------------- inside

    def _over(self, run: _Run, now: float) -> None:
        self._running = None
        self._waiting.spent(run.rescoring.worker, now - run.began)

    def _outcome(self, run: _Run) -> list[Outcome]:
        assert run.future is not None
        try:
            outcome = run.future.result()
        except Exception as error:  # noqa: BLE001  (whatever the environment did to the thread: we go on)
            log.warning(
                "a group could not be scored again",
                key=name_of(run.rescoring.group.key),
                reason=f"{type(error).__name__}: {error}"[:REASON_CHARS],
            )
            return []
        if outcome is None:
            return []
        if not (outcome.wrong or outcome.failed):
            self._good.pop(outcome.worker, None)
            self._good[outcome.worker] = run.rescoring
            while len(self._good) > CONTROLS:
                del self._good[next(iter(self._good))]
        return [outcome]

    def _control(self, worker: str) -> Rescoring | None:
        """What to hold a failure of this worker's against: rather what another one sent."""
        others = [each for name, each in self._good.items() if name != worker]
        return others[-1] if others else self._good.get(worker)

    def _thread(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rescoring", daemon=True).start()
        return self._loop

    # ---------------------------------------------------------------- in the thread

    async def _score(self, run: _Run, control: Rescoring | None) -> Outcome | None:
        """None: nothing is known of this group."""
        rescoring, key = run.rescoring, run.rescoring.group.key
        wrong, failed = await self._attempt(run, rescoring)
        if failed:
            self._renew()
            found = (
                await self._attempt(run, control) if control is not None else ("", "nothing was scored yet")
            )
            self._renew()  # what was scored well may have been made to spoil what comes after it
            if any(found):
                log.info(
                    "a group could not be scored again", key=name_of(key), reason=failed, others=found[1]
                )
                return None
            wrong, failed = await self._attempt(run, rescoring)
        if failed:
            self._renew()
            if failed == TOO_LONG and not self._said_quick(rescoring.group):
                log.info(
                    "a group took too long to be scored again", key=name_of(key), limit_s=self._timeout_s
                )
                return None
            failed = f"{name_of(key)}: {failed}"
        return Outcome(rescoring.worker, key, wrong, failed)

    async def _attempt(self, run: _Run, rescoring: Rescoring) -> tuple[str, str]:
        """What is wrong with a group's rewards, and why they can't be computed."""
        run.attempts += 1
        group = rescoring.group
        try:
            rewards = asyncio.gather(
                *(self._environment.reward(rescoring.prompt, sample.text) for sample in group.samples)
            )
            values = [float(value) for value in await asyncio.wait_for(rewards, self._timeout_s)]
            if not all(map(math.isfinite, values)):
                return "", f"rewards {values} are not all finite"[:REASON_CHARS]
            return difference(group, values, self._environment.reward_range, self._fits), ""
        except TimeoutError:
            return "", TOO_LONG
        except Exception as error:  # noqa: BLE001  (the edge to the user's environment, and to a tokenizer)
            return "", f"{type(error).__name__}: {error}"[:REASON_CHARS]

    def _said_quick(self, group: Group) -> bool:
        """Whether its worker says that all of its rewards, one after another, took far less than our limit: who needs
        longer is honest about a hard text, or lies about it and is not found by this."""
        return group.reward_s * len(group.samples) < self._timeout_s / 2


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """In the loop's thread. What was only just begun hears of it in the next turn, before the loop stops."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)
