"""No child outlives its parent, whatever ends the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import ProcessFailed
from async_rl.procs import Fleet

# A child that starts a grandchild, tells both pids, and ignores SIGTERM if asked to.
FAMILY = """
import os, signal, subprocess, sys
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with open(sys.argv[2] + ".tmp", "w") as f:
    f.write(f"{os.getpid()} {grandchild.pid}")
os.rename(sys.argv[2] + ".tmp", sys.argv[2])
signal.pause()
"""


def wait_for(condition, what: str, limit_s: float = 20.0):
    """Poll with a blocking select-free wait; the limit is a net, not a measure."""
    import time

    deadline = time.monotonic() + limit_s
    pause = __import__("threading").Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        pause.wait(0.02)


def alive(pid: int) -> bool:
    """Running; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
def test_stopping_a_fleet_ends_children_and_grandchildren(manner, tmp_path):
    with Fleet(grace_s=1.0) as fleet:
        fleet.start("family", [sys.executable, "-c", FAMILY, manner, str(tmp_path / "pids")])
        wait_for((tmp_path / "pids").exists, "the family to start")
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_of_a_killed_parent_get_a_sigterm(tmp_path):
    parent = (
        "import sys, signal\nfrom async_rl.procs import Fleet\nfleet = Fleet()\n"
        f"fleet.start('family', [sys.executable, '-c', {FAMILY!r}, 'obedient', sys.argv[1]])\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path / "pids")])
    wait_for((tmp_path / "pids").exists, "the family to start")
    child, grandchild = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    wait_for(lambda: not alive(child), "the child to end")
    if alive(grandchild):  # the kernel tells children only; every process of ours tells its own
        os.kill(grandchild, signal.SIGKILL)


def test_a_child_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    with Fleet() as fleet:
        child = fleet.start(
            "store",
            [sys.executable, "-c", "print('port taken'); raise SystemExit(3)"],
            log_path=tmp_path / "store.log",
        )
        child.process.wait(20)
        with pytest.raises(ProcessFailed, match="store process ended with status 3") as caught:
            fleet.check()
        assert "port taken" in str(caught.value)
        assert str(tmp_path / "store.log") in caught.value.hint
