"""The worker's small parts: how it ends, how it pauses, how it asks for rewards."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading

import pytest

from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.errors import EnvironmentFailed, NotFound, StoreUnavailable, WaitTimeout
from async_rl.threads import in_daemon_thread
from async_rl.weights.run import ensure_run
from async_rl.wire import GroupDone, Prompt
from tests.orchestration import group, train_key
from tests.weights_support import MemoryStore, ScriptedStore, shapes, write_model_dir
from workers import rollout_leases
from workers.rollout_ending import Ending, Over, cancel, delays, to_the_end, together
from workers.rollout_leases import Leases, _Unacked
from workers.rollout_process import _find_run
from workers.rollout_rewards import Rewards


async def test_a_stop_interrupts_a_wait_and_cancels_what_was_awaited():
    ending, cancelled = Ending(), asyncio.Event()

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.create_task(ending.unless_over(endless()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ending.stop("SIGTERM")
    with pytest.raises(Over, match="SIGTERM"):
        await waiting
    assert cancelled.is_set()
    assert not ending.hurry.is_set()
    ending.stop("SIGTERM")
    assert ending.hurry.is_set(), "the second one means: at once"
    with pytest.raises(Over):
        await ending.unless_over(asyncio.Event().wait())


async def test_a_loop_that_fails_ends_the_worker_with_its_error():
    ending = Ending()

    async def failing():
        raise StoreUnavailable("gone")

    ending.background(failing())
    with pytest.raises(StoreUnavailable):
        await ending.unless_over(asyncio.Event().wait())
    ending.stop("later")
    with pytest.raises(StoreUnavailable):
        await ending.wait()
    await ending.close()


async def test_results_pass_through_while_nothing_ends():
    async def answer():
        return 42

    ending = Ending()
    assert await ending.unless_over(answer()) == 42
    await ending.close()


async def test_the_first_failure_of_several_cancels_the_others():
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def failing():
        await started.wait()
        raise ValueError("no")

    with pytest.raises(ValueError):
        await together(endless(), failing())
    assert ended.is_set()

    async def same(x):
        return x

    assert await together(*(same(i) for i in range(3))) == [0, 1, 2]


async def test_what_must_not_be_left_half_done_is_finished_before_a_cancellation_is_raised():
    async def swap(free: asyncio.Event, done: list[bool], error: Exception | None = None) -> int:
        await free.wait()
        done.append(True)
        if error:
            raise error
        return 42

    free, done = asyncio.Event(), []
    for error in (None, StoreUnavailable("gone")):
        free.clear()
        task = asyncio.create_task(to_the_end(swap(free, done, error)))
        for _ in range(3):  # `cancel` does it again and again
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == [True, True]
    assert await to_the_end(swap(free, done)) == 42
    with pytest.raises(StoreUnavailable):
        await to_the_end(swap(free, done, StoreUnavailable("gone")))


async def test_a_worker_that_comes_first_waits_for_the_run(tmp_path):
    store, made = MemoryStore(), []
    store_of_a_run = ScriptedStore(store)

    def not_yet(*_):
        made.append(ensure_run(store, write_model_dir(tmp_path / "model"), shapes()))
        raise NotFound("run.json")

    store_of_a_run.on("get", "run.json", not_yet, times=1)
    assert await _find_run(store_of_a_run, 30.0) == made[0]
    with pytest.raises(WaitTimeout, match="no run appeared"):
        await _find_run(MemoryStore(), 0.0)


async def test_a_thread_hands_over_its_result_and_its_error():
    assert await in_daemon_thread(lambda a: a + 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 / 0)


async def test_a_thread_that_hangs_does_not_keep_the_process():
    hang, started, daemons = threading.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def work():
        daemons.append(threading.current_thread().daemon)
        loop.call_soon_threadsafe(started.set)
        hang.wait()

    task = asyncio.create_task(in_daemon_thread(work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    hang.set()
    assert daemons == [True]


def test_pauses_double_up_to_a_limit_with_jitter():
    for drawn, full in zip(
        itertools.islice(delays(1.0, 10.0), 8), (1, 2, 4, 8, 10, 10, 10, 10), strict=True
    ):
        assert full / 2 <= drawn <= full


class Task:
    name, reward_range = "task", (0.0, 1.0)

    def __init__(self, reward):
        self._reward = reward

    async def reward(self, prompt, completion):
        return self._reward(prompt, completion)


@pytest.fixture
def rewards():
    made = Rewards(timeout_s=30.0, parallel=64)
    yield made
    made.close()


async def test_a_reward_is_a_number_made_beside_the_loop(rewards):
    threads = []

    def reward(prompt, completion):
        threads.append(threading.current_thread())
        return len(completion)

    assert await rewards.score(Task(reward), Prompt(text="x"), "abc") == 3.0
    assert threads[0] is not threading.current_thread()


async def test_a_reward_that_blocks_its_thread_does_not_block_the_worker(rewards):
    free = threading.Event()
    scoring = asyncio.create_task(rewards.score(Task(lambda p, c: float(free.wait(20))), Prompt(), ""))
    turns = 0
    for _ in range(100):  # the worker's loop turns meanwhile
        await asyncio.sleep(0)
        turns += 1
    assert turns == 100 and not scoring.done()
    free.set()
    assert await scoring == 1.0


@pytest.mark.parametrize("value", ["high", None, float("nan"), float("inf"), True])
async def test_what_is_no_finite_number_fails(rewards, value):
    with pytest.raises(EnvironmentFailed, match="not a finite number"):
        await rewards.score(Task(lambda p, c: value), Prompt(), "")


async def test_what_the_environment_raises_is_named(rewards):
    def reward(prompt, completion):
        raise KeyError("answer")

    with pytest.raises(EnvironmentFailed, match="KeyError: 'answer'"):
        await rewards.score(Task(reward), Prompt(), "")


async def test_a_reward_over_its_limit_fails_and_a_timeout_of_its_own_is_told_apart():
    limited = Rewards(timeout_s=0.01, parallel=64)
    hang = threading.Event()
    with pytest.raises(EnvironmentFailed, match="longer than 0.01 s"):
        await limited.score(Task(lambda p, c: float(hang.wait(20))), Prompt(), "")
    hang.set()
    limited.close()
    free = Rewards(timeout_s=30.0, parallel=64)

    def reward(prompt, completion):
        raise TimeoutError("judge")

    with pytest.raises(EnvironmentFailed, match="TimeoutError: judge"):
        await free.score(Task(reward), Prompt(), "")
    free.close()


def hangs(prompt, completion):
    """A plain reward function of a user's, named in an environment's arguments."""
    if completion == "hang":
        threading.Event().wait()
    return 1.0


HANGS = EnvironmentConfig("jsonl", {"path": "none", "reward": f"{__name__}:hangs"})


async def test_rewards_that_hang_fail_one_by_one_and_starve_no_later_one():
    rewards, environment = Rewards(timeout_s=0.02, parallel=2), make_environment(HANGS)
    hanging = [rewards.score(environment, Prompt(), "hang") for _ in range(40)]
    for failure in await asyncio.gather(*hanging, return_exceptions=True):
        assert isinstance(failure, EnvironmentFailed) and "longer than 0.02 s" in str(failure)
    rewards.close()
    rewards = Rewards(timeout_s=30.0, parallel=2)
    assert (
        await asyncio.gather(*(rewards.score(environment, Prompt(), "") for _ in range(20))) == [1.0] * 20
    )
    rewards.close()


async def test_the_wait_for_a_turn_is_not_counted_and_no_more_run_at_once_than_may():
    rewards, now, most = Rewards(timeout_s=0.5, parallel=2), 0, 0

    class Judge:
        async def reward(self, prompt, completion):
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.1)  # ten turns of it are longer than the limit
            now -= 1
            return 1.0

    scoring = asyncio.gather(*(rewards.score(Judge(), Prompt(), "") for _ in range(20)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rewards.waiting == 18
    assert await scoring == [1.0] * 20
    assert most == 2 and rewards.waiting == 0
    rewards.close()


def test_a_reward_that_hangs_does_not_keep_the_process_from_ending():
    program = f"""
import asyncio
from async_rl.envs import make_environment
from async_rl.errors import EnvironmentFailed
from async_rl.wire import Prompt
from {__name__} import HANGS
from workers.rollout_rewards import Rewards

async def main():
    rewards = Rewards(timeout_s=0.01, parallel=2)
    try:
        await rewards.score(make_environment(HANGS), Prompt(), "hang")
    except EnvironmentFailed:
        rewards.close()
        return 7

raise SystemExit(asyncio.run(main()))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 7


async def test_a_loop_that_swallows_a_cancellation_is_cancelled_again():
    """As asyncio.wait_for does before Python 3.12 when what it awaits is done in the same moment."""
    rounds = 0

    async def loop() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if rounds > 1:
                    raise

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel(task), 10.0)
    assert task.cancelled() and rounds == 2


async def test_a_group_that_nobody_acknowledges_is_sent_again_later_and_later_until_somebody_is_there(
    monkeypatch,
):
    now, sent = [1000.0], []
    monkeypatch.setattr(rollout_leases.time, "monotonic", lambda: now[0])

    async def send(message):
        sent.append(now[0])

    leases = Leases("w", None, Ending(), None, send=send, reach=None)
    unacked = _Unacked(GroupDone(1, group(train_key(1))), now[0], now[0])
    leases._unacked[1] = unacked
    await leases._send_group(unacked)
    for _ in range(600):  # twenty minutes of heartbeats
        now[0] += 2.0
        await leases.send_again()
    pauses = [after - before for before, after in itertools.pairwise(sent)]
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0], "each copy waits in the socket's queue"
    await leases.send_again(heard=True)
    assert sent[-1] == now[0]
    now[0] += 10.0
    await leases.send_again()
    assert sent[-1] == now[0], "and soon again"
