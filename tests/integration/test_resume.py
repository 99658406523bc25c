"""A run that is killed and resumes, given the same groups again, is the run that never stopped: bit for bit on the
same number of ranks, to rounding on another."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from async_rl.store.file import FileStore
from async_rl.weights.lineage import list_versions, read_manifest
from async_rl.wire import Array, Batch, NextBatch
from tests.integration.test_trainer_loop import (
    Script,
    good_batch,
    metrics,
    model,
    orchestrator,
    train_at,
)
from tests.learner_support import as_ranks, start_ranks
from workers import checkpoints
from workers.checkpoints import Checkpoint, Table

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 7
SETTINGS = {"steps": STEPS, "checkpoint_every": 3, "learning_rate": 1e-2, "warmup_steps": 6}
KILLED_AT = 5  # steps done; the checkpoint is of step 3


class Groups:
    """Of every step the same ones, whoever asks: sampled by the policy of the step before. A life that asks for
    a step that another life had gets them as they were, as the orchestrator does it."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(f"file://{folder / 'run'}")
        self.had: dict[int, Batch] = {}
        self.replayed: list[int] = []

    def __call__(self, script: Script, asked: NextBatch) -> Batch:
        before = self.had.get(asked.step)
        if before is not None:
            again = before.incarnation != asked.incarnation
            if again and asked.step not in self.replayed:
                self.replayed.append(asked.step)
            return msgspec.structs.replace(before, incarnation=asked.incarnation, replayed=again)
        made = good_batch(script, asked)
        version = self.version_at(max(0, asked.step - 1))
        spans = Array.of([version, 6], "<i4")
        groups = tuple(
            msgspec.structs.replace(
                group, samples=tuple(msgspec.structs.replace(s, spans=spans) for s in group.samples)
            )
            for group in made.groups
        )
        self.had[asked.step] = msgspec.structs.replace(made, groups=groups, evals=(), open=(asked.step,))
        return self.had[asked.step]

    def version_at(self, step: int) -> int:
        versions = reversed(list_versions(self.store))
        return next(v for v in versions if read_manifest(self.store, v).step == step)


def live(folder: Path, model: Path, groups: Groups, ranks: int, **settings: Any) -> None:
    """A life of the trainer to the last step. One rank runs in this process."""
    with orchestrator(groups) as script:
        arguments = (script.address, folder, model, SETTINGS | settings)
        if ranks == 1:
            train_at(*arguments)
        else:
            as_ranks(train_at, ranks, *arguments)


def live_until_killed(folder: Path, model: Path, ranks: int) -> Groups:
    """A life that ends by SIGKILL on all ranks, two steps after a checkpoint."""
    groups = Groups(folder)
    pids: list[int] = []

    def answer(script: Script, asked: NextBatch) -> Batch | None:
        if asked.step == KILLED_AT - 1 and not checkpoints.list_committed(groups.store):
            return None  # it is committed in the wait for this batch
        if asked.step == KILLED_AT:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return None
        return groups(script, asked)

    with orchestrator(answer) as script:
        context = start_ranks(train_at, ranks, script.address, folder, model, SETTINGS)
        pids += context.pids()
        with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
            while not context.join(grace_period=10):
                pass
    newest = checkpoints.list_committed(groups.store)
    assert [name.partition("-")[2] for name in newest] == ["0000000003"]
    return groups


def committed(folder: Path) -> Checkpoint:
    store = FileStore(f"file://{folder / 'run'}")
    return checkpoints._decode(store, f"checkpoints/{checkpoints.list_committed(store)[-1]}.json")


def hashes(folder: Path) -> list[dict[str, str]]:
    """Of weights and moments after the last step, by rank and parameter; and the random state."""
    found = []
    for ref in committed(folder).tables:
        table = msgspec.json.decode((folder / "run" / ref.key).read_bytes(), type=Table)
        found.append({name: piece.sha256 for name, piece in table.pieces.items()} | {"rng": table.rng})
    return found


def told(folder: Path) -> dict[int, dict[str, Any]]:
    """What metrics.jsonl says about each step, in the history that survives; left out: times, versions, and alerts,
    which look back over steps of one life."""
    steps = {line["step"]: line for line in metrics(folder) if "reward/mean" in line}
    left_out = ("time", "version", "incarnation", "checkpoint", "tokens_per_s", "waiting", "mfu", "alerts")
    return {
        step: {name: value for name, value in line.items() if not name.startswith(left_out)}
        for step, line in steps.items()
    }


def digests(folder: Path) -> dict[int, set[str]]:
    store = FileStore(f"file://{folder / 'run'}")
    found: dict[int, set[str]] = {}
    for version in list_versions(store):
        manifest = read_manifest(store, version)
        found.setdefault(manifest.step, set()).add(manifest.digest)
    return found


def assert_the_same_run(left: Path, right: Path) -> None:
    one, other = committed(left).progress, committed(right).progress
    assert (one.step, one.frontier, one.updates, one.open) == (
        other.step,
        other.frontier,
        other.updates,
        other.open,
    )
    assert hashes(left) == hashes(right), "weights, moments, random state"
    assert told(left) == told(right), "losses and everything else that is computed"
    assert sorted(told(left)) == list(range(1, STEPS + 1))
    assert digests(left) == digests(right)
    assert all(len(each) == 1 for each in digests(right).values()), "repeated steps made what they had made"


WARNING = "a repeated step made other weights than before"


def test_killed_and_resumed_it_is_bit_for_bit_the_run_that_never_stopped(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
):
    whole, killed, changed = (tmp_path / name for name in ("whole", "killed", "changed"))
    live(whole, model, Groups(whole), 1)
    groups = live_until_killed(killed, model, 1)
    shutil.copytree(killed, changed)
    copied = Groups(changed)
    copied.had = dict(groups.had)
    with caplog.at_level(logging.WARNING):
        live(killed, model, groups, 1)
        assert groups.replayed == [3, 4]
        assert_the_same_run(whole, killed)
        assert WARNING not in caplog.text
        live(changed, model, copied, 1, learning_rate=3e-2)
        assert caplog.text.count(WARNING) == 1


@pytest.mark.long
def test_two_ranks_too_and_one_that_takes_over_from_two_to_rounding(tmp_path: Path, model: Path):
    whole, killed, alone = (tmp_path / name for name in ("whole", "killed", "alone"))
    live(whole, model, Groups(whole), 2)
    groups = live_until_killed(killed, model, 2)
    shutil.copytree(killed, alone)
    copied = Groups(alone)
    copied.had = dict(groups.had)
    live(killed, model, groups, 2)
    assert_the_same_run(whole, killed)

    live(alone, model, copied, 1)
    for step, line in told(whole).items():
        for name in ("loss", "grad_norm", "entropy", "mismatch/kl_k3"):
            assert told(alone)[step][name] == pytest.approx(line[name], rel=2e-3, abs=1e-5), (step, name)
        assert told(alone)[step]["lag/mean"] == line["lag/mean"]
    moved = _distance(whole, alone)
    assert moved < 2e-3, moved


def _distance(left: Path, right: Path) -> float:
    """Mean difference of the weights, in updates of the largest size."""
    sums, counts = 0.0, 0
    whole = [_weights(folder) for folder in (left, right)]
    for name, weight in whole[0].items():
        sums += float((weight - whole[1][name]).abs().sum())
        counts += weight.numel()
    learning_rate = SETTINGS["learning_rate"]
    assert isinstance(learning_rate, float)
    return sums / counts / learning_rate


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    name = committed(folder).tables[0].key.rpartition("/")[0]
    parts = [load_file(path) for path in sorted((folder / "run" / name).glob("*.safetensors"))]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if key.endswith("/param")}
