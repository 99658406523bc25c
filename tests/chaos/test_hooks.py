"""What the hooks do to a process, and that they do nothing to one that they were not asked for."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

from tests.chaos.evidence import read_log
from tests.chaos.faults import family, set_clock, was_killed
from tests.chaos.lives import HOOKS, ROOT


def run(
    program: str, tmp_path: Path, role: str = "orchestrator", **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {
        "ASYNC_RL_TEST_LOG": str(tmp_path / "log"),
        "PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]),
        **{f"ASYNC_RL_TEST_{name}": value for name, value in environment.items()},
    }
    words = [sys.executable, "-c", program, role]
    return subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )


SPOOL = """
import sys
from pathlib import Path
from orchestrator.spool import Spool
from orchestrator.records import Settled
spool = Spool(Path(sys.argv[1] + "-spool"))
spool.begin(Settled(0, "lag"))
for ordinal in (1, 2, 3, 4):
    spool.append(Settled(ordinal, "lag"))
    spool.commit()
print("alive")
"""


def test_a_process_dies_at_its_point_once_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kills = "orchestrator commit:before 3 7; trainer commit:before 1"
    first = run(SPOOL, tmp_path, KILLS=kills)
    assert first.returncode == -signal.SIGKILL
    lines = read_log(tmp_path / "log")
    assert [line["killed"] for line in lines if "killed" in line] == ["orchestrator commit:before 3 7"]
    assert [line["settled"] for line in lines if "settled" in line] == [1, 2, 3]


def test_another_role_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "alive" in run(SPOOL, tmp_path, role="watcher", KILLS="orchestrator commit:before 1").stdout
    assert not (tmp_path / "log").exists()


def test_a_process_lives_through_every_jump_of_its_clock(tmp_path):
    clock = tmp_path / "clock"
    set_clock(clock, 0.0)
    program = """
import os, time
from pathlib import Path
from tests.chaos.faults import set_clock
clock = Path(os.environ["ASYNC_RL_TEST_CLOCK"])
jumper = os.fork()
if not jumper:
    for jump in range(20_000):
        set_clock(clock, float(jump))
    os._exit(0)
while os.waitpid(jumper, os.WNOHANG) == (0, 0):
    for _ in range(100):
        time.time()
print("alive")
"""
    assert run(program, tmp_path, CLOCK=str(clock)).stdout == "alive\n"


def test_the_wall_clock_jumps_and_the_other_does_not(tmp_path):
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("<d", 86400.0))
    program = """
import os, struct, time
from pathlib import Path
clock = Path(os.environ["ASYNC_RL_TEST_CLOCK"])
wall, steady = time.time(), time.monotonic()
clock.write_bytes(struct.pack("<d", 0.0))
print(wall - time.time() > 86000, time.monotonic() - steady < 1000)
"""
    assert run(program, tmp_path, CLOCK=str(clock)).stdout.split() == ["True", "True"]


def test_a_guard_is_out_where_it_was_asked_for(tmp_path):
    program = """
import orchestrator.server as server
print(server.Commits.begin.__name__)
"""
    assert "answer_at_once" in run(program, tmp_path, WITHOUT="fsync before the ack").stdout
    assert run(program, tmp_path).stdout.strip() == "begin"


def test_half_a_line_of_a_process_that_was_killed_is_passed_over(tmp_path):
    whole = json.dumps({"made": 1})
    (tmp_path / "log").write_text(f'{whole}\n{{"acknow{whole}\n{whole}\n')
    assert read_log(tmp_path / "log") == [{"made": 1}, {"made": 1}]


def test_a_family_is_known_by_its_youngest():
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as child:
        try:
            while len(family(child.pid)) < 2:
                assert child.poll() is None
            youngest = family(child.pid)[-1]
            assert Path(f"/proc/{youngest}/comm").read_text().strip() in ("sleep", "sh")
        finally:
            os.kill(family(child.pid)[-1], signal.SIGKILL)
    assert not was_killed(Gone(child))


class Gone:
    """An async_rl.procs.Child that has ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def log_tail(self, lines: int) -> str:
        return ""
