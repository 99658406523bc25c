"""The leases in a worker's hands: each from its prompt to its group, and the group until it is acknowledged.

Lease ─► token ids ─► n completions ─► rewards ─► GroupDone ─► Ack       many at once
  │                                                   └──────── sent again while there is none
  └─► Failed: it can't be done, or is given back
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from async_rl.envs import Environment
from async_rl.errors import AsyncRLError, EngineError, Malformed
from async_rl.log import get_logger
from async_rl.wire import AnyMessage, Failed, Group, GroupDone, Lease, LeaseProgress
from workers.engines import Completion, Engine
from workers.rollout_ending import Ending, cancel, together
from workers.rollout_groups import Texts, make_group
from workers.rollout_rewards import Rewards

__all__ = ["Leases"]

log = get_logger(__name__)

REASON_CHARS = 1000
"""Of why a lease failed: what an environment raises may hold the whole completion, and a message has limits."""

RESEND_S = 10.0
"""A group that is not acknowledged after this long is sent again. An acknowledgement takes milliseconds."""
MOST_DOUBLINGS = 6
"""Of the pause before the next time: ten minutes at the most, which is how long a full disk is waited for."""
LAST_ACKS_S = 5.0
"""At the end, how long to wait for the acknowledgements of what was just sent."""


class _Work:
    """A lease that is being fulfilled."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.task: asyncio.Task[None] | None = None
        self.running: set[str] = set()  # request ids inside the engine
        self.tokens = 0  # of the samples that are complete


class _Unacked(Struct):
    """A finished group, ours until it is acknowledged."""

    message: GroupDone
    finished: float
    sent: float
    times: int = 0  # that it was sent


class _GiveBack(Exception):
    """This lease can't be fulfilled here, and it is not its fault."""


class Leases:
    """`texts` and `environment` are set before the first lease comes. `send` drops what can't be sent; `reach` waits
    for the engine to serve a version, for a time, and says whether it does."""

    def __init__(
        self,
        worker: str,
        engine: Engine,
        ending: Ending,
        rewards: Rewards,
        *,
        send: Callable[[AnyMessage], Awaitable[None]],
        reach: Callable[[int, float], Awaitable[bool]],
    ) -> None:
        self.texts: Texts | None = None
        self.environment: Environment | None = None
        self._worker = worker
        self._engine = engine
        self._ending = ending
        self._rewards = rewards
        self._send = send
        self._reach = reach
        self._leaving = False
        self._work: dict[int, _Work] = {}  # by lease
        self._unacked: dict[int, _Unacked] = {}  # by lease
        self._all_acknowledged = asyncio.Event()
        self._all_acknowledged.set()
        self._began: dict[str, float] = {}  # of the sequences in the engine
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self.turnaround_s = 0.0
        """From a finished group to its acknowledgement, of late."""

    def __len__(self) -> int:
        """Those that are being fulfilled."""
        return len(self._work)

    @property
    def held(self) -> int:
        """As the orchestrator counts them: its acknowledgement and the next lease come together."""
        return len(self._work) + len(self._unacked)

    @property
    def finished(self) -> tuple[int, ...]:
        """Those whose groups wait for their Ack."""
        return tuple(self._unacked)

    def serve(self, now: float) -> None:
        """The engine could work from here on."""
        self._idle_since = None if self._began else now

    def idle_s(self, now: float) -> float:
        """In all, since `serve`: the engine had no sequence."""
        return self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)

    def oldest_s(self, now: float) -> float:
        """Since the oldest sequence in the engine began; 0 where there is none."""
        return now - min(self._began.values(), default=now)

    def progress(self) -> tuple[LeaseProgress, ...]:
        return tuple(
            LeaseProgress(lease, work.tokens + sum(map(self._engine.progress, work.running)))
            for lease, work in self._work.items()
        )

    # ---------------------------------------------------------------- what the orchestrator says

    def take(self, lease: Lease) -> None:
        if lease.lease in self._work or lease.lease in self._unacked:
            return
        work = self._work[lease.lease] = _Work(lease)
        work.task = self._ending.background(self._fulfil(work))

    def settle(self, lease: int) -> None:
        """The orchestrator has the group, or does not want it."""
        unacked = self._unacked.pop(lease, None)
        if unacked is not None:
            self.turnaround_s += (time.monotonic() - unacked.finished - self.turnaround_s) / 4
        if not self._unacked:
            self._all_acknowledged.set()

    def cancel(self, leases: tuple[int, ...], reason: str) -> None:
        for lease in leases:
            self.settle(lease)
            work = self._work.pop(lease, None)
            if work is not None and work.task is not None:
                work.task.cancel()
                log.debug("lease cancelled", key=work.lease.key, reason=reason)

    async def send_again(self, *, heard: bool = False) -> None:
        """The groups that were sent a while ago and are not acknowledged; the while doubles each time, for each copy
        waits in the socket's queue for as long as nobody reads. `heard`: somebody reads again, all are sent now."""
        for unacked in list(self._unacked.values()):
            if heard:
                unacked.times = 0
            pause_s = RESEND_S * 2.0 ** min(unacked.times - 1, MOST_DOUBLINGS)
            if heard or time.monotonic() - unacked.sent >= pause_s:
                await self._send_group(unacked)

    # ---------------------------------------------------------------- one lease

    async def _fulfil(self, work: _Work) -> None:
        """From its prompt to the sending of its group, or of the reason why there is none."""
        lease = work.lease
        failure: Failed | None = None
        try:
            if self._leaving:
                raise _GiveBack("the worker is leaving")
            limit_s = lease.deadline_s / 2
            if not await self._reach(lease.oldest_version, limit_s):
                has = self._engine.version
                raise _GiveBack(
                    f"it asks for version {lease.oldest_version}, and {has} is what this worker has after "
                    f"{limit_s:.0f} s"
                )
            group = await self._make_group(work)
            now = time.monotonic()
            unacked = self._unacked[lease.lease] = _Unacked(GroupDone(lease.lease, group), now, now)
            self._all_acknowledged.clear()
            await self._send_group(unacked)
        except _GiveBack as reason:
            failure = Failed(lease.lease, lease.key, str(reason), returned=True)
        except EngineError as error:
            if self._engine.failed:
                self._ending.fail(error)
                failure = Failed(lease.lease, lease.key, "its worker's engine failed", returned=True)
            else:
                failure = Failed(lease.lease, lease.key, str(error)[:REASON_CHARS])
        except AsyncRLError as error:
            why = str(error)[:REASON_CHARS]
            log.warning("lease failed", key=lease.key, error=why)
            failure = Failed(lease.lease, lease.key, why)
        finally:
            self._work.pop(lease.lease, None)
        if failure is not None:
            await self._send(failure)

    async def _make_group(self, work: _Work) -> Group:
        """Raises EnvironmentFailed, EngineError."""
        assert self.texts is not None and self.environment is not None
        lease, texts, environment = work.lease, self.texts, self.environment
        prompt_ids = texts.prompt_ids(lease.prompt)
        room = self._engine.max_model_len - lease.sampling.max_tokens
        if len(prompt_ids) > room:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and {lease.sampling.max_tokens} to generate are over the "
                f"engine's limit of {self._engine.max_model_len}",
                hint="raise rollout.max_model_len, lower sampling.max_tokens, or leave out such prompts",
            )
        began = time.monotonic()
        completions = await together(
            *(self._sample(work, prompt_ids, index, seed) for index, seed in enumerate(lease.seeds))
        )
        generated = time.monotonic()
        answers = [texts.completion(completion.tokens.tolist()) for completion in completions]
        rewards = await self._rewards.score_all(environment, lease.prompt, answers)
        return make_group(
            lease,
            self._worker,
            prompt_ids,
            completions,
            answers,
            rewards,
            generate_s=generated - began,
            reward_s=time.monotonic() - generated,
        )

    async def _sample(self, work: _Work, prompt_ids: list[int], index: int, seed: int) -> Completion:
        request_id = f"{work.lease.lease}-{index}"
        work.running.add(request_id)
        self._enter(request_id, time.monotonic())
        try:
            completion = await self._engine.generate(
                prompt_ids,
                seed=seed,
                temperature=work.lease.sampling.temperature,
                max_tokens=work.lease.sampling.max_tokens,
                request_id=request_id,
            )
        finally:
            work.running.discard(request_id)
            self._exit(request_id, time.monotonic())
        work.tokens += len(completion.tokens)
        return completion

    def _enter(self, request_id: str, now: float) -> None:
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        self._began[request_id] = now

    def _exit(self, request_id: str, now: float) -> None:
        del self._began[request_id]
        if not self._began:
            self._idle_since = now

    async def _send_group(self, unacked: _Unacked) -> None:
        """Raises Malformed for a group over the size limit; it is then not kept."""
        unacked.sent, unacked.times = time.monotonic(), unacked.times + 1
        try:
            await self._send(unacked.message)
        except Malformed:
            self.settle(unacked.message.lease)
            raise

    # ---------------------------------------------------------------- the end

    def leave(self) -> None:
        """From now on, what is leased is given back."""
        self._leaving = True

    async def finish(self, limit_s: float) -> None:
        """Waits for: what is being generated, for at most `limit_s`, or until there is a hurry."""
        working = [work.task for work in self._work.values() if work.task is not None]
        if not working or limit_s <= 0:
            return
        hurried = asyncio.create_task(self._ending.hurry.wait())
        finished = asyncio.create_task(_all_done(working))
        ends: list[asyncio.Task[Any]] = [hurried, finished]
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel(*ends)

    async def give_back(self, reason: str) -> None:
        """What is left of the work; then waits for: the acknowledgements of what was just sent."""
        left = list(self._work.values())
        await cancel(*(work.task for work in left if work.task is not None))
        for work in left:
            if unacked := self._unacked.get(work.lease.lease):  # it was interrupted while it was sent
                await self._send_group(unacked)
            else:
                await self._send(Failed(work.lease.lease, work.lease.key, reason, returned=True))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_acknowledged.wait(), LAST_ACKS_S)
        if self._unacked:
            log.warning("groups were not acknowledged and are lost", groups=len(self._unacked))


async def _all_done(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
