"""Checkpoints in the background: what the loop waits for, what it doesn't, and what is committed when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import AsyncRLError, CheckpointError, Fenced, StoreUnavailable, WaitTimeout
from async_rl.store.base import Upload
from async_rl.store.file import FileStore
from workers import checkpoints
from workers.batches import Lineage
from workers.checkpoints import Checkpoint, Progress
from workers.optimizers import OptimizerRows
from workers.saver import Saver
from workers.settings import TrainerConfig

LIMIT_S = 20.0


class Store(FileStore):
    """Uploads wait for `open`; `away` says which keys can't be written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}")
        self.open = threading.Event()
        self.open.set()
        self.away: Callable[[str], bool] = lambda key: False

    def _write(self, key: str) -> None:
        assert self.open.wait(LIMIT_S)
        if self.away(key):
            raise StoreUnavailable(f"scripted: {key}")

    def upload(self, key: str) -> Upload:
        self._write(key)
        return super().upload(key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key)
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> None:
        self._write(key)
        super().put_if_absent(key, data)


class Alone:
    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class ThreadGroup:
    """RankGroup's gather, between threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, len(board), barrier, board

    def gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(LIMIT_S)
        everyone = list(self._board)
        self._barrier.wait(LIMIT_S)
        return everyone


class Training:
    """A trainer of four weights: `step` trains, publishes and checkpoints. Every version is committed at once,
    unless `hold` is set; then `release` commits what was held."""

    def __init__(self, store: Store, group: Any = None, **settings: Any) -> None:
        self.store, self.group = store, group or Alone()
        self.steps = 0
        self.newest = -1
        self.hold = False
        self.held: list[tuple[int, int]] = []  # version, step
        self.ours: Callable[[], None] = lambda: None
        self.resumable: list[int] = []
        self.lineage = Lineage()
        first = 2 * self.group.rank
        self.row = OptimizerRows((4,), first, {name: torch.zeros(2) for name in ("param", "exp_avg")})
        self.publish()
        self.saver = Saver(
            store,
            self.group,
            TrainerConfig(**{"checkpoint_every": 1, "checkpoint_wait_s": LIMIT_S, "steps": 99} | settings),
            lambda: {"w": self.row},
            self,  # type: ignore[arg-type]
            self.lineage,
            fingerprint="model",
            resumed=None,
            check_ours=lambda: self.ours(),
            on_resumable=self.resumable.append,
        )

    def publish(self) -> None:
        self.newest += 1
        self.held.append((self.newest, self.steps))
        if not self.hold:
            self.release()

    def release(self) -> None:
        for version, step in self.held:
            self.lineage.committed(version, version - 1, step)
        self.held.clear()

    def flush(self, *, step: int) -> None:
        self.release()

    def step(self, publish: bool = True) -> None:
        self.steps += 1
        self.row.tensors["param"].fill_(float(self.steps))
        if publish:
            self.publish()
        self.saver.step(Progress(self.steps, self.newest, 1, 8 * self.steps, self.steps))

    def until(self, condition: Callable[[], object]) -> None:
        """Slices of the wait for a batch."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.saver.advance()
            time.sleep(0.001)

    def until_free(self) -> None:
        self.until(lambda: self.saver._job is None)

    @property
    def committed(self) -> list[int]:
        return [int(name.partition("-")[2]) for name in checkpoints.list_committed(self.store)]

    def latest(self) -> Checkpoint:
        found = checkpoints.choose(self.store, "latest", "model")
        assert found is not None
        return found

    def restored(self) -> list[float]:
        row = OptimizerRows((4,), 0, {name: torch.full((4,), float("nan")) for name in self.row.tensors})
        halves = OptimizerRows((4,), 0, {name: tensor[:2] for name, tensor in row.tensors.items()})
        whole = self.group.size > 1
        checkpoints.restore(self.store, self.latest(), 0, {"w": row if whole else halves})
        return (row if whole else halves).tensors["param"].tolist()


@pytest.fixture(autouse=True)
def keep_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@contextmanager
def training(store: Store, **settings: Any) -> Iterator[Training]:
    made = Training(store, **settings)
    try:
        yield made
    finally:
        store.open.set()
        made.saver.close()


def test_the_loop_goes_on_while_a_checkpoint_is_uploaded_and_later_steps_are_not_in_it(store: Store):
    with training(store, checkpoint_every=4) as run:
        store.open.clear()
        for _ in range(6):
            run.step()
        assert run.steps == 6 and run.committed == []
        store.open.set()
        run.until_free()
        assert run.committed == [4]
        assert run.restored() == [4.0, 4.0]
        assert run.latest().progress == Progress(4, 4, 1, 32, 4)


def test_the_commit_waits_for_the_version_that_it_names(store: Store):
    with training(store) as run:
        run.hold = True
        run.step()
        assert run.saver._job is not None and run.saver._job.upload.done(LIMIT_S)
        for _ in range(5):
            run.saver.advance()
        assert run.committed == [] and run.resumable == [0]
        run.release()
        run.until_free()
        assert run.committed == [1] and run.latest().progress.version == 1


def test_weights_that_were_merged_into_a_later_version_name_the_one_before_them(store: Store):
    with training(store, checkpoint_every=2) as run:
        store.open.clear()
        run.step()
        run.step(publish=False)  # merged into the version of step 3
        run.step()
        store.open.set()
        run.until_free()
        assert [run.lineage.nodes[v].step for v in (0, 1, 2)] == [0, 1, 3]
        assert run.latest().progress.step == 2 and run.latest().progress.version == 1


def test_one_that_is_due_too_early_is_late_and_never_are_two_on_their_way(store: Store):
    with training(store, checkpoint_every=2) as run:
        store.open.clear()
        for _ in range(5):
            run.step()
        assert run.saver.late == 1
        store.open.set()
        run.until_free()
        assert run.committed == [2, 5], "of the step that is done when the way is free"
        assert run.restored() == [5.0, 5.0] and run.latest().parent == "00000001-0000000002"


def test_a_store_that_is_away_costs_the_checkpoint_and_not_the_run(store: Store):
    with training(store) as run:
        run.step()
        run.until_free()
        store.away = lambda key: "0000000002" in key
        run.step()
        run.until_free()
        assert run.committed == [1] and run.saver.failed == 1
        run.step()
        run.until_free()
        assert run.committed == [1, 3]
        assert run.latest().parent == "00000001-0000000001"


@pytest.mark.parametrize("key", ["rank-00000.safetensors", "rank-00000.json", "0000000001.json"])
def test_the_last_one_is_waited_for_and_its_failure_is_the_runs(store: Store, key: str):
    with training(store, checkpoint_every=50) as run:
        run.step()
        store.away = lambda written: written.endswith(key)
        with pytest.raises(StoreUnavailable, match=f"scripted: .*{key}"):
            run.saver.finish()
        assert run.committed == []


def test_at_the_end_what_is_on_its_way_is_waited_for_and_the_last_step_follows(store: Store):
    with training(store, checkpoint_every=2) as run:
        run.hold = True
        store.open.clear()
        for _ in range(3):
            run.step()
        threading.Timer(0.05, store.open.set).start()
        run.release()
        run.saver.finish()
        assert run.committed == [2, 3]
        run.saver.finish()
        assert run.committed == [2, 3], "the last step has one"


def test_the_wait_at_the_end_has_a_limit_that_is_named(store: Store):
    with training(store, checkpoint_wait_s=0.1) as run:
        store.open.clear()
        run.step()
        with pytest.raises(WaitTimeout, match=r"step 1 .* checkpoint_wait_s = 0.1 s.*the upload of rank 0"):
            run.saver.finish()


def test_a_resume_may_go_back_only_to_what_is_left_after_the_commit(store: Store):
    with training(store, keep_checkpoints=2) as run:
        told: list[tuple[int, list[int]]] = []
        run.saver._on_resumable = lambda step: told.append((step, run.committed))
        for _ in range(4):
            run.step()
            assert run.saver._job is not None, "a resume can still go back to what was there before"
            run.until_free()
        assert told == [(1, [1]), (1, [1, 2]), (2, [2, 3]), (3, [3, 4])]


def test_a_trainer_that_has_lost_the_run_commits_none(store: Store):
    def lost() -> None:
        raise Fenced("a newer trainer has the run")

    with training(store) as run:
        run.ours = lost
        run.step()
        with pytest.raises(Fenced):
            run.until_free()
        assert run.committed == []


def test_a_bug_in_the_thread_ends_the_run_at_the_next_step(store: Store):
    with training(store) as run:
        store.away = lambda key: bool(1 // 0)
        run.step()
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):
            run.until_free()


def test_a_trainer_that_ends_with_an_error_breaks_off_what_is_on_its_way(store: Store):
    run = Training(store)
    store.away = lambda key: not run.saver._closing.wait(LIMIT_S)
    run.step()
    job = run.saver._job
    assert job is not None
    run.saver.close()
    assert job.upload.report.kind == "CheckpointError" and run.committed == []


def as_ranks(store: Store, work: Callable[[Training], None], **settings: Any) -> list[Training]:
    barrier, board = threading.Barrier(2), [b"", b""]
    ranks = [Training(store, ThreadGroup(rank, barrier, board), **settings) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, ranks))
    for rank in ranks:
        rank.saver.close()
    return ranks


def test_rank_0_commits_when_every_rank_has_uploaded(store: Store):
    uploaded = threading.Event()
    store.away = lambda key: "rank-00001" in key and not uploaded.wait(LIMIT_S)

    def work(run: Training) -> None:
        run.step()
        for _ in range(3):
            run.saver.advance()
        assert run.committed == []
        run.group.gather(b"")
        uploaded.set()
        run.until_free()

    ranks = as_ranks(store, work)
    assert ranks[0].committed == [1] and ranks[0].restored() == [1.0] * 4
    assert ranks[0].resumable == [0, 1] and ranks[1].resumable == []


@pytest.mark.parametrize("key", ["rank-00001.safetensors", "rank-00000.json", "0000000001.json"])
def test_what_fails_on_one_rank_is_given_up_on_all(store: Store, key: str):
    store.away = lambda written: written.endswith(key)

    def work(run: Training) -> None:
        run.step()
        run.until_free()
        assert run.saver.failed == 1 and run.committed == []
        run.step()
        run.until_free()

    ranks = as_ranks(store, work)
    assert ranks[0].committed == ([2] if key == "0000000001.json" else [])
    assert [rank.saver.failed for rank in ranks] == ([1, 1] if key == "0000000001.json" else [2, 2])


def test_all_ranks_hear_which_one_the_last_checkpoint_waited_for(store: Store):
    over = threading.Event()
    store.away = lambda key: "rank-00001" in key and not over.wait(LIMIT_S)
    errors: list[AsyncRLError] = []

    def work(run: Training) -> None:
        run.step()
        with pytest.raises(WaitTimeout, match="the upload of rank 1") as raised:
            run.saver.finish()
        errors.append(raised.value)
        run.group.gather(b"")
        over.set()

    as_ranks(store, work, checkpoint_wait_s=0.1)
    assert len(errors) == 2
