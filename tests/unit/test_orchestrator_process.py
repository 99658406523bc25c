"""The orchestrator as a process: where it listens, what it refuses to do, how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from async_rl import wire
from async_rl.errors import ConfigError
from async_rl.transport.link import ask_status
from async_rl.transport.zmq import ZmqListener
from orchestrator.config import (
    OrchestratorConfig,
    SamplingConfig,
    _group_bytes,
    check_bind,
    check_sizes,
    groups_that_fit,
)
from tests.orchestration import group, sample, train_key

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 20.0

SCRIPT = """
import sys, pathlib
from async_rl.envs.base import EnvironmentConfig
from async_rl.errors import AsyncRLError
from async_rl.log import setup
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.server import run_orchestrator
from tests.orchestration import Counting

setup("orchestrator")
try:
    run_orchestrator(
        environment=Counting(), environment_config=EnvironmentConfig(), sampling=SamplingConfig(),
        config=OrchestratorConfig(bind=sys.argv[1]), evaluation=EvalConfig(), seed=0,
        spool=pathlib.Path(sys.argv[2]).with_name("spool"), address_file=pathlib.Path(sys.argv[2]),
    )
except AsyncRLError as error:
    sys.exit(str(error))
"""


def start(bind, address_file):
    argv = [sys.executable, "-c", SCRIPT, bind, str(address_file)]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(file, process):
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return file.read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_its_address_serves_and_ends_cleanly_when_asked(tmp_path, signum):
    process = start("tcp://127.0.0.1:0", tmp_path / "address")
    try:
        address = wait_for(tmp_path / "address", process)
        assert ask_status(address, LIMIT_S).trainer == "absent"
        process.send_signal(signum)
        _, log = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert f"orchestrator listening address={address}" in log and "orchestrator stopped" in log


async def test_a_taken_port_is_a_clear_error(tmp_path):
    listener = ZmqListener("tcp://127.0.0.1:0")
    try:
        process = start(listener.address, tmp_path / "address")
        _, log = process.communicate(timeout=LIMIT_S)
    finally:
        await listener.close()
    assert process.returncode == 1
    assert f"{listener.address} is already taken by another process" in log and "Traceback" not in log


@pytest.mark.parametrize("bind", ["tcp://*:5577", "tcp://0.0.0.0:5577", "tcp://10.1.2.3:5577"])
def test_without_keys_it_listens_to_this_machine_only_unless_told_otherwise(bind):
    config = OrchestratorConfig(bind=bind)
    with pytest.raises(ConfigError, match="can be reached from other machines") as caught:
        check_bind(config)
    assert "insecure_remote = true" in caught.value.hint
    assert "orchestrator.keys = DIR" in caught.value.hint
    check_bind(msgspec.structs.replace(config, insecure_remote=True))
    check_bind(msgspec.structs.replace(config, keys="keys"))
    check_bind(OrchestratorConfig())


def test_groups_that_no_message_holds_are_refused_before_anything_is_generated():
    fits = SamplingConfig(group_size=8, max_tokens=100_000)
    check_sizes(fits)
    with pytest.raises(ConfigError, match="groups of long samples would be lost") as caught:
        check_sizes(msgspec.structs.replace(fits, group_size=100))
    assert "fewer or shorter samples" in caught.value.hint
    assert groups_that_fit(fits, OrchestratorConfig(batch_groups=100)) == 100
    assert groups_that_fit(fits, OrchestratorConfig(batch_groups=1024)) == 185, "if all samples are as long"


def test_a_group_counts_with_its_text():
    """What is compared with the limits is what a group of full length is on the wire."""
    n, length = 2, 4000
    whole = sample(0, length=length, text="word " * length)
    done = wire.GroupDone(1, group(train_key(0), samples=(whole,) * n))
    counted = _group_bytes(SamplingConfig(group_size=n, max_tokens=length))
    assert len(wire.encode(done)) == pytest.approx(counted, rel=0.01)
    fits = SamplingConfig(group_size=n, max_tokens=wire.MAX_MESSAGE_BYTES // n // 14)
    check_sizes(fits)
    with pytest.raises(ConfigError, match="with their text"):
        check_sizes(msgspec.structs.replace(fits, max_tokens=fits.max_tokens + 1))
