"""`async-rl replay`: a run with a resume in it, from its spool: identical losses, or the first step that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from async_rl.cli.main import cli
from async_rl.errors import ConfigError, TrainingError
from async_rl.weights.lineage import list_versions, read_manifest
from async_rl.wire import Attach
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger, hash_of
from orchestrator.records import Arrived, Assigned, Record, Took, Version, encode_group, group_of
from orchestrator.spool import Spool
from tests.integration.test_resume import Groups
from tests.integration.test_trainer_loop import GROUPS, model, orchestrator, train

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 6, "checkpoint_every": 2}


def record(folder: Path, model: Path) -> list[Record]:
    """Two lives, steps 1 to 3, and 3 again to 5; what an orchestrator writes down about them."""
    groups = Groups(folder)
    records: list[Record] = []
    for incarnation, steps in enumerate((3, 5)):
        with orchestrator(groups) as script:
            train(folder, model, script, steps=steps, **SETTINGS)
        (attach,) = script.attached
        records += _life(groups, attach, incarnation, steps)
        last = folder / "run" / "checkpoints" / "00000000-0000000003.json"
        last.unlink(missing_ok=True)  # the second life goes back to step 2
    assert groups.replayed == [2]
    return records


def _life(groups: Groups, attach: Attach, incarnation: int, steps: int) -> list[Record]:
    yours: list[Record] = [
        Took(incarnation, attach.step, attach.origin, attach.frontier, attach.open, attach.anew)
    ]
    manifests = [read_manifest(groups.store, version) for version in list_versions(groups.store)]
    yours += [
        Version(m.version, m.parent, m.step, m.digest) for m in manifests if m.incarnation == incarnation
    ]
    for step in range(attach.step, steps):
        batch = groups.had[step]
        again = batch.incarnation != incarnation
        for each in batch.groups if not again else ():
            body = encode_group(each)
            yours.append(Arrived(0, each.key.ordinal, ((0,),) * 2, hash_of(body), msgspec.Raw(body)))
        ordinals = tuple(each.key.ordinal for each in batch.groups)
        yours.append(Assigned(incarnation, step, ordinals, batch.frontier, batch.open, again))
    return yours


def spooled(folder: Path, records: list[Record]) -> Path:
    spool = Spool(folder)
    list(spool.replay())
    spool.begin(GroupLedger(OrchestratorConfig(), None, iter(())).snapshot())  # type: ignore[arg-type]
    for each in records:
        spool.append(each)
    spool.commit()
    spool.close()
    return folder


def run_file(folder: Path, model: Path) -> Path:
    path = folder / "run.toml"
    settings = "\n".join(f"{name} = {value}" for name, value in SETTINGS.items())
    path.write_text(
        f'[run]\nstore = "file://{folder / "run"}"\n[model]\npath = "{model}"\n'
        f"[trainer]\nsteps = 5\nthreads = 1\nmicrobatch_tokens = 64\n{settings}\n"
    )
    return path


def replay(*arguments: object) -> list[dict[str, Any]]:
    """The lines that were written. Raises what the command raised."""
    done = CliRunner().invoke(cli, ["replay", *map(str, arguments)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_losses_come_out_again_from_the_beginning_and_from_a_checkpoint(tmp_path: Path, model: Path):
    records = record(tmp_path, model)
    spool = spooled(tmp_path / "spool", records)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file())
    arguments = (run_file(tmp_path, model), "--spool", spool, "--metrics", tmp_path / "out/metrics.jsonl")
    held = Spool(spool)  # a live orchestrator's lock
    lines = replay(*arguments)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in replay(*arguments, "--from", "4")] == [5]
    several = replay(*arguments, "--from", "4", "--set", "trainer.replicas=2")
    assert [line["step"] for line in several] == [5], "one rank, whatever the run had"
    held.close()
    after = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file())
    assert [each for each in after if each[0].name != "run.toml"] == before, "it only reads"

    changed = tmp_path / "changed"
    spooled(changed, [_other_reward(each) if _is_of_step_3(each) else each for each in records])
    with pytest.raises(TrainingError, match="step 4 is the first that differs: loss is"):
        replay(run_file(tmp_path, model), "--spool", changed, "--metrics", tmp_path / "out/metrics.jsonl")
    with pytest.raises(ConfigError, match="is no spool"):
        replay(run_file(tmp_path, model), "--spool", tmp_path / "out")


def _is_of_step_3(record: Record) -> bool:
    """Its weights are those after step 4."""
    return isinstance(record, Arrived) and record.ordinal == 3 * GROUPS


def _other_reward(record: Record) -> Record:
    assert isinstance(record, Arrived)
    group = group_of(record)
    samples = tuple(msgspec.structs.replace(sample, reward=1.0 - sample.reward) for sample in group.samples)
    body = encode_group(msgspec.structs.replace(group, samples=samples))
    return msgspec.structs.replace(record, group=msgspec.Raw(body))
