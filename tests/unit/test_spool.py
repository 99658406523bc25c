"""The orchestrator's disk: what was committed is there after any end, and what was damaged is told."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys

import msgspec
import pytest

from async_rl import wire
from async_rl.errors import ConfigError, Corrupt, StoreUnavailable
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger, hash_of
from orchestrator.records import (
    Arrived,
    Leased,
    Snapshot,
    Took,
    Version,
    decode_record,
    encode_group,
    group_of,
)
from orchestrator.spool import Spool
from orchestrator.versions import Versions
from tests.orchestration import Play, group, train_key

NOW = 0.0


def arrived(ordinal, n=2):
    body = encode_group(group(train_key(ordinal), n=n))
    return Arrived(ordinal, ordinal, ((0,),) * n, hash_of(body), msgspec.Raw(body))


def empty_snapshot():
    return GroupLedger(OrchestratorConfig(), None, itertools.count()).snapshot()  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


def opened(folder, **options):
    spool = Spool(folder, **options)
    records = list(spool.replay())
    if spool.due():
        spool.begin(empty_snapshot())
    return spool, records


def write(folder, *records):
    spool, _ = opened(folder)
    places = [spool.append(record) for record in records]
    spool.commit()
    spool.close()
    return places


def a_ledger(config, spool):
    """With a trainer that has taken the run."""
    ledger = GroupLedger(config, spool, itertools.count(1))
    ledger.restore(spool.replay(), NOW)
    ledger.open("run", "model")
    ledger.publish(Version(0, -1, 0, ""))
    ledger.take(Took(1, 0, -1, 0, (), False))
    ledger.versions = Versions(ledger.tree, 0, NOW)
    return ledger


def newest(folder):
    return max(folder.glob("*.log"))


def test_what_was_committed_is_read_again_in_order(folder):
    records = [Took(1, 0, -1, 0, (), False), Leased(7, 0, "w1", 0), arrived(0)]
    places = write(folder, *records)
    spool, found = opened(folder)
    assert isinstance(found[0][0], Snapshot) and [record for record, _ in found[1:]] == records
    assert [place for _, place in found[1:]] == places
    assert group_of(spool.read(places[2])) == group(train_key(0))
    spool.close()


def test_what_was_not_committed_yet_can_be_read_too(folder):
    spool, _ = opened(folder)
    place = spool.append(arrived(3))
    assert group_of(spool.read(place)).key == train_key(3)
    assert spool.pending, "it is not on the disk for that"
    spool.close()


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40])
def test_a_write_that_was_cut_short_is_cut_off_and_writing_goes_on(folder, cut):
    write(folder, arrived(0), arrived(1))
    path = newest(folder)
    os.truncate(path, path.stat().st_size - cut)
    spool, found = opened(folder)
    assert [record.ordinal for record, _ in found[1:]] == [0] and spool.damaged == 0
    spool.append(arrived(2))
    spool.commit()
    spool.close()
    _, found = opened(folder)
    assert [record.ordinal for record, _ in found[1:]] == [0, 2]


def test_what_waits_for_a_commit_is_counted_and_written_by_it(folder):
    spool, _ = opened(folder)
    before = spool.unwritten
    place = spool.append(arrived(0))
    assert before == 0 and spool.unwritten > place.size
    spool.commit()
    assert spool.unwritten == 0


def test_what_is_appended_while_a_write_goes_on_is_of_the_next_one(folder, monkeypatch):
    spool, _ = opened(folder)
    places = [spool.append(arrived(0))]
    assert spool.seal()
    write = os.pwritev

    def meanwhile(file, parts, offset):
        if len(places) == 1:
            places.append(spool.append(arrived(1)))
            assert [spool.read(place).ordinal for place in places] == [0, 1], "neither is on the disk yet"
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", meanwhile)
    spool.write()
    assert spool.pending and spool.unwritten > places[1].size
    on_disk = newest(folder).read_bytes()
    assert len(on_disk) == places[1].offset - 16, "a header and a body, and then nothing"
    assert [spool.read(place).ordinal for place in places] == [0, 1]
    spool.close()
    assert [place for record, place in opened(folder)[1] if isinstance(record, Arrived)] == places


def test_what_was_sealed_is_what_must_be_on_the_disk(folder):
    spool, _ = opened(folder)
    spool.append(Leased(7, 0, "w1", 0))
    assert not spool.seal(), "a lease that is lost is given twice, and that is all"
    spool.append(arrived(0))
    assert spool.pending and spool.seal() and spool.pending
    spool.write()
    assert not spool.pending and spool.unwritten == 0
    spool.close()


def test_a_group_lies_in_the_file_as_its_worker_encoded_it(folder):
    spool, _ = opened(folder)
    body = encode_group(group(train_key(3)))
    padded = bytes([body[0] + 1]) + body[1:] + b"\xa3new"  # a field of a release to come
    record = msgspec.structs.replace(arrived(3), group=msgspec.Raw(memoryview(b"??" + padded)[2:]))
    place = spool.append(record)
    spool.commit()
    assert padded in newest(folder).read_bytes()
    assert spool.read(place) == record and group_of(spool.read(place)) == group(train_key(3))
    spool.close()


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_damaged_record_is_passed_over_and_counted(folder, where):
    _, second, _ = write(folder, arrived(0), arrived(1), arrived(2))
    path = newest(folder)
    data = bytearray(path.read_bytes())
    data[second.offset + (5 if where == "body" else -5)] ^= 1
    path.write_bytes(data)
    spool, found = opened(folder)
    assert [record.ordinal for record, _ in found[1:]] == [0, 2] and spool.damaged == 1
    with pytest.raises(Corrupt, match="damaged"):
        spool.read(second)


def test_every_cut_and_every_flipped_byte_leaves_a_spool_that_opens(folder):
    write(folder, arrived(0), arrived(1))
    path = newest(folder)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at])
        Spool(folder).close()
        flipped = bytearray(whole)
        flipped[at] ^= 0x40
        path.write_bytes(flipped)
        spool = Spool(folder)
        found = [record.ordinal for record, _ in spool.replay() if isinstance(record, Arrived)]
        assert set(found) <= {0, 1} and len(found) >= 1
        spool.close()


def test_a_new_file_begins_with_the_state_and_old_ones_go_when_nothing_needs_them(folder):
    spool, _ = opened(folder, segment_bytes=2000)
    places = []
    for ordinal in range(30):
        places.append(spool.append(arrived(ordinal)))
        if spool.due():
            spool.begin(empty_snapshot())
    assert len(list(folder.glob("*.log"))) > 3
    needed = places[20]
    spool.keep_from(needed.segment)
    assert min(folder.glob("*.log")).stem == f"{needed.segment:08}"
    assert spool.read(needed).ordinal == 20
    spool.close()
    _, found = opened(folder)
    assert isinstance(found[0][0], Snapshot)
    assert [r.ordinal for r, _ in found if isinstance(r, Arrived)][-10:] == list(range(20, 30))


def test_records_of_the_release_before_have_what_they_lack_by_default():
    body = encode_group(group(train_key(3)))
    older = [
        ["arrived", 1, 3, [[0], [0]], hash_of(body), msgspec.Raw(body)],
        ["returned", 1, True, False],
        ["snapshot", "run", "model", 1, 2, 3, 0, 0, {}, [], [], [[7, 0, {}]], [], {}, [], []],
    ]
    found = [decode_record(msgspec.msgpack.encode(each)) for each in older]
    assert (found[0].worker, found[1].dropped, found[2].quarantine) == ("", "", ())
    assert group_of(found[0]).key == train_key(3)


def test_two_orchestrators_never_write_to_one_spool(folder):
    spool, _ = opened(folder)
    with pytest.raises(ConfigError, match="another orchestrator holds the spool"):
        Spool(folder, lock_limit_s=0.0)
    spool.close()
    Spool(folder, lock_limit_s=0.0).close()


def test_a_killed_process_lets_go_of_the_spool(folder):
    script = "import sys, pathlib, os, signal; from orchestrator.spool import Spool; " + (
        "Spool(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], timeout=60, check=False)
    Spool(folder, lock_limit_s=0.0).close()


def test_a_folder_that_can_not_be_used_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't be used") as refused:
        Spool(tmp_path / "file" / "spool")
    assert "orchestrator.spool" in refused.value.hint


def test_a_full_disk_loses_nothing_and_is_tried_again(folder, monkeypatch):
    spool, _ = opened(folder)
    place = spool.append(arrived(0))
    room = [30]
    write = os.pwritev

    def small_disk(file, parts, offset):
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        wrote = write(file, [b"".join(parts)[: room[0]]], offset)
        room[0] -= wrote
        return wrote

    monkeypatch.setattr(os, "pwritev", small_disk)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="is full"):
            spool.commit()
        assert spool.pending
        assert spool.read(place).ordinal == 0, "what waits for the disk can be read"
        room[0] = 10
    monkeypatch.setattr(os, "pwritev", write)
    spool.append(arrived(1))
    spool.commit()
    spool.close()
    _, found = opened(folder)
    assert [record.ordinal for record, _ in found[1:]] == [0, 1]


def test_a_disk_that_is_full_when_a_new_file_is_begun_leaves_the_old_one_in_use(folder, monkeypatch):
    spool, _ = opened(folder)
    spool.append(arrived(0))
    spool.commit()
    files = sorted(folder.glob("*.log"))

    def full(self, path, data):
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_write_file", full)
        with pytest.raises(StoreUnavailable, match="is full"):
            spool.begin(empty_snapshot())
    assert sorted(folder.glob("*.log")) == files
    spool.append(arrived(1))
    spool.commit()
    spool.begin(empty_snapshot())
    spool.append(arrived(2))
    spool.close()
    _, found = opened(folder)
    assert [record.ordinal for record, _ in found if hasattr(record, "ordinal")] == [0, 1, 2]


def test_an_orchestrator_that_starts_on_a_full_disk_goes_on_with_the_file_it_has(folder, monkeypatch):
    config = OrchestratorConfig()
    spool = Spool(folder, segment_bytes=100)
    ledger = GroupLedger(config, spool, itertools.count())
    ledger.restore(spool.replay(), 0.0)
    ledger.open("run", "model")
    for version in range(10):
        ledger.publish(Version(version, version - 1, version, ""))
    spool.commit()
    spool.close()
    (folder / "00000002.log").write_bytes(b"aRL1 cut short")  # the end came while it was begun

    def full(self, path, data):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_write_file", full)
        spool = Spool(folder, segment_bytes=100)
        ledger = GroupLedger(config, spool, itertools.count())
        ledger.restore(spool.replay(), 0.0)
        assert spool.due() and [path.name for path in folder.glob("*.log")] == ["00000001.log"]
        assert ledger.opened.run == "run" and len(ledger.tree) == 10
        ledger.publish(Version(10, 9, 10, ""))
        spool.commit()
        with pytest.raises(StoreUnavailable, match="is full"):
            GroupLedger(config, new := Spool(folder / "new"), itertools.count()).restore(new.replay(), 0.0)
    ledger.rotate()
    ledger.publish(Version(11, 10, 11, ""))
    spool.close()
    spool = Spool(folder)
    ledger = GroupLedger(config, spool, itertools.count())
    ledger.restore(spool.replay(), 0.0)
    assert sorted(ledger.tree) == list(range(12))


def test_a_ledger_on_a_disk_keeps_only_the_files_it_may_need(folder):
    config = OrchestratorConfig(batch_groups=2, max_lag=1, straggler_hold_s=0.0)
    spool = Spool(folder, segment_bytes=4000)
    ledger = a_ledger(config, spool)
    for step in range(60):
        while not ledger.readiness(NOW).ready:
            held = ledger.lease("w1", step, NOW)
            ledger.deliver(held.lease, "w1", group(held.key), ((step,), (step,)), NOW)
        ledger.form_batch(NOW)
        ledger.publish(Version(step + 1, step, step + 1, ""))
        ledger.versions.add(step + 1, NOW)
        ledger.keep_from(max(0, step - 10))
        spool.commit()
        ledger.rotate()
    files = sorted(folder.glob("*.log"))
    assert int(files[0].stem) > 5 and sum(path.stat().st_size for path in files) < 30_000
    before = ledger.snapshot()
    spool.close()
    spool = Spool(folder)
    again = GroupLedger(config, spool, itertools.count(1000))
    again.restore(spool.replay(), NOW)
    assert again.snapshot() == before
    again.versions = Versions(again.tree, 60, NOW)
    assert len(again.formed(59).groups) == 2
    assert again.take(Took(2, 49, 1, 98 + 4, (98, 99, 100, 101), False)) is not None
    assert again.replaying == 11, "a resume at the oldest checkpoint has all that it repeats"
    spool.close()


# ---------------------------------------------------------------- what another life left in the page cache


class Killed(BaseException):
    pass


def end_at_once(spool):
    """As a SIGKILL would."""
    os.close(spool._file)
    os.close(spool._lock)
    spool._file = -1


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "broken")])
def test_what_was_written_and_not_synced_is_synced_before_anybody_hears_of_it_again(
    folder, monkeypatch, error
):
    spool = Spool(folder)
    play = Play(journal=spool)
    play.control.restore(spool.replay(), play.now)
    play.attach()
    lease = play.leases(play.join("w1"))[0]
    spool.commit()
    play.deliver(b"w1:1", lease)

    def ends(_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", ends)
        with pytest.raises(type(error)):
            spool.commit()
    end_at_once(spool)

    done = []  # what the disk was asked to do, in order
    write, sync = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda *args: done.append("written") or write(*args))
    monkeypatch.setattr(os, "fsync", lambda file: done.append("synced") or sync(file))
    spool = Spool(folder)
    play = Play(journal=spool)
    play.control.restore(spool.replay(), play.now)
    assert done == ["written", "synced", "synced"], (
        "after an fsync that failed another one alone does nothing"
    )
    play.attach()
    spool.commit()
    assert wire.Ack(lease.lease, lease.key) in play.deliver(play.join("w1"), lease)
    assert not spool.seal(), "for this the disk is not asked again"
    spool.close()


def test_a_power_cut_after_a_new_file_was_begun_loses_no_prompt(folder, monkeypatch):
    synced = {}  # of each file, how much is on the disk

    def sync(file):
        status = os.fstat(file)
        synced[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "fsync", sync)
    config = OrchestratorConfig(batch_groups=4, max_lag=1)
    spool = Spool(folder, segment_bytes=300)
    ledger = a_ledger(config, spool)

    def deliver():
        lease = ledger.lease("w1", 0, NOW)
        ledger.deliver(lease.lease, "w1", group(lease.key), ((0,), (0,)), NOW)
        spool.commit()

    deliver()
    leased = ledger.lease("w1", 0, NOW)  # nothing durable waits ...
    ledger.rotate()  # ... when the new file is begun, whose Snapshot holds it
    deliver()
    for path in folder.glob("*.log"):
        os.truncate(path, synced.get(path.stat().st_ino, 0))
    end_at_once(spool)

    spool = Spool(folder)
    again = GroupLedger(config, spool, itertools.count(1000))
    again.restore(spool.replay(), NOW)
    assert spool.damaged == 0
    assert leased.key in again.pool and not again.settled(leased.key), "or its group would be thrown away"
    spool.close()


def test_after_an_end_while_a_new_file_was_begun_the_old_one_is_appended_to_behind_its_last_record(folder):
    write(folder, arrived(0), Leased(7, 1, "w1", 0))
    path = newest(folder)
    os.truncate(path, path.stat().st_size - 5)
    (folder / f"{int(path.stem) + 1:08}.log").write_bytes(b"aRL1 cut short")
    spool, _ = opened(folder)
    for ordinal in (5, 6):
        spool.append(arrived(ordinal))
    spool.commit()
    spool.close()
    _, found = opened(folder)
    assert [record.ordinal for record, _ in found if isinstance(record, Arrived)] == [0, 5, 6]


def test_a_sector_that_cannot_be_read_costs_the_records_in_it(folder, monkeypatch):
    places = write(folder, arrived(0), arrived(1, n=2000), arrived(2))
    broken = places[1].offset + (64 << 10)
    read = os.pread

    def pread(file, size, at):
        if at <= broken < at + size:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size, at)

    monkeypatch.setattr(os, "pread", pread)
    spool, found = opened(folder)
    assert places[1].size > 128 << 10 and spool.damaged
    assert [record.ordinal for record, _ in found if isinstance(record, Arrived)] == [0, 2]
    assert spool.read(places[0]).ordinal == 0
    with pytest.raises(Corrupt):
        spool.read(places[1])
    spool.close()
