"""A spool read by others: the history that survives, and nothing on the disk changes."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import ConfigError
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger, hash_of
from orchestrator.recorded import Recorded, read_recorded
from orchestrator.records import Arrived, Assigned, Record, Resumable, Settled, Took, Version, encode_group
from orchestrator.spool import Spool
from tests.orchestration import group, train_key


def arrived(ordinal: int) -> Arrived:
    body = encode_group(group(train_key(ordinal), n=2))
    return Arrived(ordinal, ordinal, ((0,), (0,)), hash_of(body), msgspec.Raw(body))


def assigned(incarnation: int, step: int, *ordinals: int, replayed: bool = False) -> Assigned:
    return Assigned(incarnation, step, ordinals, 10 * step, (), replayed)


LIVES: list[Record] = [
    Took(0, 0, -1, 0, (), False),
    Version(0, -1, 0, "zero"),
    *map(arrived, range(4)),
    assigned(0, 0, 0),
    Version(1, 0, 1, "one"),
    assigned(0, 1, 1),
    assigned(0, 2, 2),  # its checkpoint: step 1
    Took(1, 1, 0, 10, (), False),
    Version(2, 1, 1, "one"),
    assigned(1, 1, 1, replayed=True),
]


def write(folder: Path, records: list[Record]) -> Path:
    spool = Spool(folder)
    list(spool.replay())
    if spool.due():
        spool.begin(GroupLedger(OrchestratorConfig(), None, itertools.count()).snapshot())  # type: ignore[arg-type]
    for record in records:
        spool.append(record)
    spool.commit()
    spool.close()
    return folder


def told(recorded: Recorded, first: int = 0) -> list[tuple[int, int, list[int], bool]]:
    return [
        (batch.step, batch.incarnation, [each.key.ordinal for each in batch.groups], batch.replayed)
        for batch in recorded.batches(first)
    ]


def test_every_step_has_the_groups_of_the_life_that_survives(tmp_path: Path):
    recorded = read_recorded(write(tmp_path, LIVES))
    assert told(recorded) == [(0, 0, [0], False), (1, 1, [1], True), (2, 0, [2], False)]
    assert told(recorded, first=2) == [(2, 0, [2], False)]
    assert recorded.newest == {0: 1, 1: 2} and recorded.tree[2].step == 1


def test_the_version_that_a_trainer_comes_with_is_its_own_and_not_of_the_one_before(tmp_path: Path):
    at = next(index for index, each in enumerate(LIVES) if isinstance(each, Took) and each.incarnation == 1)
    took, version = LIVES[at : at + 2]
    lives = [*LIVES[:at], version, took, *LIVES[at + 2 :]]  # as it is written when a trainer attaches
    assert read_recorded(write(tmp_path, lives)).newest == {0: 1, 1: 2}


def test_a_run_begun_anew_forgets_the_one_before(tmp_path: Path):
    again: list[Record] = [Took(2, 0, -1, 0, (), True), arrived(0), assigned(2, 0, 0)]
    assert told(read_recorded(write(tmp_path, LIVES + again))) == [(0, 2, [0], False)]


def test_what_a_resume_can_not_need_any_more_may_still_be_there(tmp_path: Path):
    recorded = read_recorded(write(tmp_path, [*LIVES, Resumable(1)]))
    assert [step for step, *_ in told(recorded)] == [0, 1, 2]


def test_a_trainer_that_had_nothing_to_repeat_any_more_began_anew(tmp_path: Path):
    lives = [*LIVES, Resumable(2), Took(2, 1, 1, 10, (), False), arrived(0), assigned(2, 1, 0)]
    assert told(read_recorded(write(tmp_path, lives)), first=1) == [(1, 2, [0], False)]


def test_it_ends_where_a_group_is_missing(tmp_path: Path):
    lost = [each for each in LIVES if not (isinstance(each, Arrived) and each.ordinal == 1)]
    assert [step for step, *_ in told(read_recorded(write(tmp_path, lost)))] == [0]


@pytest.mark.parametrize("reason", ["damaged", "too_large"])
def test_what_was_left_out_of_a_step_is_left_out_here_and_the_steps_after_it_follow(
    tmp_path: Path, reason: str
):
    lives = [*LIVES[:-1], assigned(1, 1, 1, 3, replayed=True), Settled(3, reason)]
    assert told(read_recorded(write(tmp_path, lives)))[1:] == [(1, 1, [1], True), (2, 0, [2], False)]


def test_a_write_that_is_under_way_is_left_out_and_left_alone(tmp_path: Path):
    write(tmp_path, LIVES)
    write(tmp_path, [assigned(1, 2, 3, replayed=False)])
    (log,) = tmp_path.glob("*.log")
    log.write_bytes(log.read_bytes()[:-3])
    before = log.read_bytes()
    owner = Spool(tmp_path)
    recorded = read_recorded(tmp_path)
    owner.close()
    assert told(recorded)[2] == (2, 0, [2], False)
    assert log.read_bytes() == before


def test_a_folder_without_a_log_is_no_spool(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no spool"):
        read_recorded(tmp_path)
