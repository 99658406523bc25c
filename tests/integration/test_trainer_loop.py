"""The trainer's whole loop, against a real store and an orchestrator that follows a script."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from async_rl.algo.losses import DppoTv
from async_rl.errors import TrainingError, WaitTimeout
from async_rl.store import StoreConfig
from async_rl.store.file import FileStore
from async_rl.transport.base import frame_of, message_of
from async_rl.weights.config import WeightsConfig
from async_rl.weights.lineage import read_manifest
from async_rl.wire import (
    MAX_BATCH_BYTES,
    AnyMessage,
    Array,
    Attach,
    Attached,
    Batch,
    EvalScore,
    Finish,
    Finished,
    Group,
    Key,
    NextBatch,
    Published,
    Sample,
)
from tests.learner_support import VOCABULARY, as_ranks, save_tiny_model
from workers.settings import ModelConfig, TrainerConfig
from workers.trainer import run_rank

GROUPS = 4
Answer = Callable[["Script", NextBatch], Batch | None]


def good_batch(script: Script, asked: NextBatch, logprob: float = -3.5) -> Batch:
    """Random groups of the newest version that the trainer told of."""
    draw = np.random.default_rng(asked.step)

    def sample(reward: float) -> Sample:
        return Sample(
            tokens=Array.of(draw.integers(0, VOCABULARY, 6), "<i4"),
            logprobs=Array.of([logprob] * 6, "<f4"),
            mask=Array.of([1] * 6, "|u1"),
            spans=Array.of([script.version, 6], "<i4"),
            reward=reward,
            finish="stop",
        )

    groups = [
        Group(Key("train", asked.step * GROUPS + n), Array.of([1, 2], "<i4"), (sample(1.0), sample(0.0)))
        for n in range(GROUPS)
    ]
    score = EvalScore(version=script.version, step=asked.step, reward=0.5, prompts=8)
    return Batch(
        incarnation=asked.incarnation,
        step=asked.step,
        groups=tuple(groups),
        lags=(),
        frontier=(asked.step + 1) * GROUPS,
        dropped={"no_signal": asked.step},
        evals=(score,),
    )


class Script:
    """An orchestrator's socket; `answer` gives the batches, None is silence."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.version = -1
        self.attached: list[Attach] = []
        self.published: dict[int, int] = {}  # version -> step
        self.finished: list[Finish] = []
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(50):
                continue
            peer, *frames = self._socket.recv_multipart()
            reply = self._reply(message_of(frames, MAX_BATCH_BYTES))
            if reply is not None:
                self._socket.send_multipart([peer, frame_of(reply, MAX_BATCH_BYTES)])
        self._socket.close(0)

    def _reply(self, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Attach():
                self.attached.append(message)
                self.version = message.version
                return Attached(run=message.run, max_lag=1, batch_groups=GROUPS)
            case Published():
                self.published[message.version] = message.step
                self.version = max(self.version, message.version)
            case NextBatch():
                return self.answer(self, message)
            case Finish():
                self.finished.append(message)
                return Finished(
                    evals=(EvalScore(version=self.version, step=message.step, reward=0.9, prompts=8),)
                )
        return None

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


@contextmanager
def orchestrator(answer: Answer = good_batch) -> Iterator[Script]:
    script = Script(answer)
    try:
        yield script
    finally:
        script.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def train(folder: Path, model: Path, script: Script, **settings: Any) -> None:
    train_at(script.address, folder, model, settings)


def train_at(address: str, folder: Path, model: Path, settings: dict[str, Any]) -> None:
    defaults = {
        "threads": 1,
        "out": str(folder / "out"),
        "microbatch_tokens": 64,
        "collective_wait_s": 60.0,
    }
    run_rank(
        store_url=f"file://{folder / 'run'}",
        store=StoreConfig(),
        model=ModelConfig(path=str(model)),
        trainer=TrainerConfig(**defaults | settings),
        loss=DppoTv(),
        weights=WeightsConfig(merge_after_s=60.0),  # a version for every step, however slow the machine
        temperature=1.0,
        orchestrator_address=address,
        seed=0,
        resume="latest",
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_publishes_and_after_a_resume_goes_on_where_it_was(tmp_path: Path, model: Path):
    with orchestrator() as script:
        train(tmp_path, model, script, steps=3, checkpoint_every=2)
    assert script.attached[0].version == 0 and script.attached[0].step == 0
    assert script.published == {0: 0, 1: 1, 2: 2, 3: 3} | script.published
    assert [finish.step for finish in script.finished] == [3]
    steps = [line for line in metrics(tmp_path) if "reward/mean" in line]
    assert [(line["step"], line["version"]) for line in steps] == [(1, 1), (2, 2), (3, 3)]
    for line in steps:
        assert line["reward/mean"] == 0.5 and line["tokens"] == 48 and line["groups"] == GROUPS
        assert line["lag/max"] <= 1 and line["refused"] == 0
        assert line["mismatch/abs_logprob"] > 0 and line["mismatch/kl_k3"] > 0 and line["grad_norm"] > 0
        assert 0 < line["ess/token"] <= 1 and 0 < line["ess/sequence"] <= 1 and line["chi_square"] > 0
        assert line["lag/in_flight_max"] + line["lag/in_queue_max"] >= line["lag/max"]
        assert line["updates"] == 1 and line["tokens_per_s"] > 0 and line["mfu"] is None
        assert {"alerts/low_ess", "alerts/ratio_mean", "alerts/mismatch_kl"} <= line.keys()
        assert line["time/step_s"] >= line["time/forward_backward_s"] > 0
    assert steps[0]["mismatch_lag0/kl_k3"] == steps[0]["mismatch/kl_k3"]  # all of version 0
    assert steps[2]["dropped/no_signal"] == 2
    evals = [line for line in metrics(tmp_path) if "eval/reward" in line]
    assert [line["eval/reward"] for line in evals] == [0.5, 0.5, 0.5, 0.9]

    with orchestrator() as script:
        train(tmp_path, model, script, steps=5, checkpoint_every=2)
    attach = script.attached[0]
    assert (attach.step, attach.version, attach.version_step, attach.frontier) == (3, 4, 3, 12)
    assert attach.incarnation == 1
    store = FileStore(f"file://{tmp_path / 'run'}")
    before, after = read_manifest(store, 3), read_manifest(store, 4)
    assert (after.parent, after.step, after.digest) == (3, 3, before.digest)
    steps = [line for line in metrics(tmp_path) if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["version"] for line in steps][3:] == [5, 6]


def test_a_stop_is_heard_at_the_next_wait_and_leaves_a_checkpoint(tmp_path: Path, model: Path):
    def stop_at_step_two(script: Script, asked: NextBatch) -> Batch | None:
        if asked.step < 2:
            return good_batch(script, asked)
        os.kill(os.getpid(), signal.SIGTERM)
        return None

    with orchestrator(stop_at_step_two) as script:
        train(tmp_path, model, script, steps=10, checkpoint_every=100)
    assert script.finished == []  # the run is not over
    commits = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json"))
    assert commits == ["00000000-0000000002.json"]


def test_without_batches_the_error_says_what_was_awaited_and_where_to_look(tmp_path: Path, model: Path):
    with (
        orchestrator(lambda script, asked: None) as script,
        pytest.raises(WaitTimeout, match=r"no batch for step 0 within batch_wait_s = 0.5 s.*async-rl lag"),
    ):
        train(tmp_path, model, script, steps=1, batch_wait_s=0.5)


def test_refused_steps_go_on_and_too_many_in_a_row_end_the_run(tmp_path: Path, model: Path):
    def broken_but_once(script: Script, asked: NextBatch) -> Batch:
        return good_batch(script, asked, logprob=-3.5 if asked.step == 1 else float("nan"))

    with orchestrator(broken_but_once) as script, pytest.raises(TrainingError, match="2 steps in a row"):
        train(tmp_path, model, script, steps=10, max_refused_steps=2)
    steps = [line for line in metrics(tmp_path) if "refused" in line]
    assert [line["refused"] for line in steps] == [1, 0, 1, 1]
    assert [line["version"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["dropped/trainer_malformed"] == GROUPS and steps[0]["reward/mean"] is None
    store = FileStore(f"file://{tmp_path / 'run'}")
    digests = [read_manifest(store, version).digest for version in range(4)]
    assert digests[0] == digests[1] != digests[2] == digests[3]  # a refused step changed not one bit


def test_steps_refused_before_a_resume_count_with_those_after_it(tmp_path: Path, model: Path):
    def broken_and_stopped(script: Script, asked: NextBatch) -> Batch | None:
        if asked.step == 0:
            return good_batch(script, asked, logprob=float("nan"))
        os.kill(os.getpid(), signal.SIGTERM)
        return None

    with orchestrator(broken_and_stopped) as script:
        train(tmp_path, model, script, steps=10, checkpoint_every=100, max_refused_steps=2)
    with (
        orchestrator(lambda script, asked: good_batch(script, asked, logprob=float("nan"))) as script,
        pytest.raises(TrainingError, match="2 steps in a row were refused, the last one step 2"),
    ):
        train(tmp_path, model, script, steps=10, checkpoint_every=100, max_refused_steps=2)
    assert [line["refused/total"] for line in metrics(tmp_path) if "refused" in line] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_take_over_what_one_began_and_stop_together(tmp_path: Path, model: Path):
    def two_more_then_silence(script: Script, asked: NextBatch) -> Batch | None:
        return good_batch(script, asked) if asked.step < 3 else None

    with orchestrator() as script:
        train(tmp_path, model, script, steps=1, checkpoint_every=1)
    with (
        orchestrator(two_more_then_silence) as script,
        pytest.raises(Exception, match="no batch for step 3 within"),
    ):
        settings = {"steps": 4, "checkpoint_every": 1, "batch_wait_s": 8.0}
        as_ranks(train_at, 2, script.address, tmp_path, model, settings)
    steps = [line for line in metrics(tmp_path) if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["version"] for line in steps] == [1, 3, 4]  # 2: the restored weights
    commits = sorted((tmp_path / "run" / "checkpoints").glob("*.json"))
    assert [path.stem for path in commits] == ["00000001-0000000002", "00000001-0000000003"]
    assert len(list(commits[-1].with_suffix("").glob("*.safetensors"))) == 2
