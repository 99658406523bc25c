"""What the bench of a run's memory computes by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from async_rl.cli.runfile import read_run_file
from async_rl.envs import make_environment
from async_rl.wire import Message, Prompt
from tests.bench import memory_watch
from tests.bench.memory_watch import (
    SHARED,
    MemoryWatch,
    Reading,
    descendants,
    highest,
    pss_bytes,
    shared_bytes,
)
from tests.bench.size import EXAMPLE, example_tables, phases_of, process_name, served_versions


def fake_process(proc: Path, pid: int, parent: int, command: str, pss_kib: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a) (name S) S {parent} 1 1 0")
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "smaps_rollup").write_text(
        f"00400000-7fff ---p 0 [rollup]\nRss: 9999 kB\nPss: {pss_kib} kB\n"
    )


def test_every_process_of_a_run_is_found_and_called_after_what_it_does(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1, "weed mini")
    fake_process(tmp_path, 20, 1, "python -m async_rl trainer run.toml")
    fake_process(tmp_path, 21, 20, "python -m async_rl orchestrator run.toml")
    fake_process(tmp_path, 22, 21, "python -c spawn_main")  # scores rewards again
    fake_process(tmp_path, 30, 1, "python -m async_rl rollout")
    fake_process(tmp_path, 31, 30, "python -c spawn_main")
    fake_process(tmp_path, 32, 30, "python -c resource_tracker")
    fake_process(tmp_path, 33, 30, "VLLM::EngineCore")
    fake_process(tmp_path, 40, 1, "python somebody_elses.py")
    roots = {10: "S3 server", 20: "trainer", 30: "worker", 50: "gone"}
    assert descendants(roots, process_name, tmp_path) == {
        10: "S3 server",
        20: "trainer",
        21: "orchestrator",
        22: "orchestrator",
        30: "worker",
        31: "vLLM engine",
        32: "worker",
        33: "vLLM engine",
    }


def test_a_process_counts_with_its_share_and_one_that_has_ended_with_nothing(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1, "x", pss_kib=3)
    assert pss_bytes(10, tmp_path) == 3 << 10
    assert pss_bytes(11, tmp_path) == 0


def test_shared_memory_counts_with_the_files_in_its_folders(tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "weights").write_bytes(b"x" * 100_000)
    (tmp_path / "psm").write_bytes(b"x" * 50_000)
    found = shared_bytes([tmp_path / "shadow", tmp_path / "psm", tmp_path / "gone"])
    assert 150_000 <= found < 200_000


@pytest.mark.skipif(not pss_bytes(1) and sys.platform != "linux", reason="Linux tells it")
def test_the_memory_of_a_child_and_of_its_files_in_shared_memory_is_seen_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "SHM", tmp_path)
    (tmp_path / "older").write_bytes(b"x" * 1_000_000)  # not the run's
    code = "import sys; x = b'1' * 30_000_000; print(len(x), flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    watch = MemoryWatch(lambda: {child.pid: "child"}, process_name)
    try:
        assert child.stdout.readline() == "30000000\n"
        (tmp_path / "shadow").write_bytes(b"x" * 20_000)
        reading = watch.read()
    finally:
        child.communicate("")
    assert 30_000_000 < reading.parts["child"] < 100_000_000
    assert 20_000 <= reading.parts[SHARED] < 100_000
    assert reading.total == sum(reading.parts.values())
    assert watch.read().parts == {SHARED: reading.parts[SHARED]}, "a child that has ended holds nothing"


def test_a_watch_that_failed_says_so_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> dict[int, str]:
        raise PermissionError("/proc")

    with (
        pytest.raises(RuntimeError, match="memory of the run could not be read"),
        MemoryWatch(unreadable, process_name, every_s=0.0) as watch,
    ):
        watch._thread.join(10.0)


def test_a_peak_belongs_to_the_phase_in_which_it_was_read() -> None:
    rows = [
        {"step": 0, "time": 103.0, "eval/reward": 0.1},
        {"step": 1, "time": 110.0, "reward/mean": 0.2},
        {"step": 2, "time": 120.0, "reward/mean": 0.3},
    ]
    phases = phases_of(rows, serving=100.0)
    assert [phase.name for phase in phases] == ["start", "step 1", "step 2", "end"]
    readings = [
        Reading(each, {"trainer": int(each), "engine": 1}) for each in (90.0, 99.9, 100.0, 110.0, 121.0)
    ]
    peaks = [highest(readings, phase.begin, phase.end) for phase in phases]
    assert [peak.time for peak in peaks if peak] == [99.9, 100.0, 110.0, 121.0]
    assert highest(readings, 0.0, 1.0) is None


def test_versions_that_a_worker_took_over_are_read_from_its_log() -> None:
    log = (
        "12:00:00.123 rollout w1 INFO version served version=1 step=1 pause_s=0.012\n"
        "12:00:01.123 rollout w1 INFO no new version could be had version=7\n"
        "12:00:09.123 rollout w1 INFO version served version=2 step=2 pause_s=1e-3\n"
    )
    assert served_versions(log) == [(1, 0.012), (2, 0.001)]


def test_the_example_that_is_measured_trains_all_weights_on_a_task_that_works_in_its_own_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    config = read_run_file(EXAMPLE)
    assert config.model.lora_rank == 0 and config.trainer.optimizer == "adamw"
    environment = make_environment(config.environment)
    assert environment.prompt("eval", 0).answer
    prompt = Prompt((Message("user", "Which is the highest mountain?"),), answer="Mount Everest")
    for completion, reward in (
        ("mount everest.", 1.0),
        ("It is Everest", 0.4),
        ("Mount Mount", 0.5),
        ("", 0),
    ):
        assert asyncio.run(environment.reward(prompt, completion)) == pytest.approx(reward)


def test_what_is_measured_is_the_example_but_for_places_and_length(tmp_path: Path) -> None:
    changed, example = example_tables(tmp_path), tomllib.loads(EXAMPLE.read_text())
    places = {"run.store", "orchestrator.bind", "model.path", "environment.args"}
    assert {
        f"{section}.{key}"
        for section, table in example.items()
        for key, value in table.items()
        if changed[section].get(key) != value
    } == {*places, "trainer.steps", "orchestrator.batch_groups", "eval.prompts"}
