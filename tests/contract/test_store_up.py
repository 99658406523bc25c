"""`async-rl store up` as a user runs it: ready, used, stopped, started again, and nothing left behind."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import ProcessFailed
from async_rl.store import open_store
from async_rl.store.local_server import LocalServer, free_ports

LIMIT_S = 60.0


class StoreUp:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "async_rl", "store", "up", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def read_until(self, text: str) -> str:
        """What it prints, up to `text`; fails after the limit, or when the output ends before."""
        assert self.process.stdout is not None
        out, deadline = "", time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while text not in out:
                assert time.monotonic() < deadline, f"{text!r} did not come: {out}"
                selector.select(1.0)
                chunk = os.read(self.process.stdout.fileno(), 65536) if selector.select(0) else None
                assert chunk != b"", (
                    f"it ended before {text!r}: {out} {self.process.communicate(timeout=LIMIT_S)}"
                )
                out += (chunk or b"").decode()
        return out

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(LIMIT_S)


@pytest.fixture
def store_up() -> Iterator[type[StoreUp]]:
    started: list[StoreUp] = []

    class Started(StoreUp):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            started.append(self)

    yield Started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate(timeout=LIMIT_S)


def servers_in(folder: Path) -> list[int]:
    """Living `weed mini` processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text().split("\0")
        except (OSError, UnicodeDecodeError):  # it ended meanwhile
            continue
        if "mini" in arguments and any(str(folder) in argument for argument in arguments):
            found.append(int(path.parent.name))
    return found


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while servers_in(folder):
        assert time.monotonic() < deadline, f"still there: {servers_in(folder)}"
        time.sleep(0.05)


def use(lines: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Export what was printed, as a user would; the store's URL."""
    exports = dict(re.findall(r"^export (\w+)=(.*)$", lines, re.M))
    for name, value in exports.items():
        monkeypatch.setenv(name, "".join(shlex.split(value)))
    return exports["ASYNC_RL_STORE"]


def test_what_it_prints_is_enough_to_use_it_and_ctrl_c_stops_it(
    tmp_path: Path, store_up: type[StoreUp], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, env_file = tmp_path / "my data", tmp_path / "env"
    first = store_up("--dir", str(folder), "--bucket", "mine", "--env-file", str(env_file))
    printed = first.read_until("Ctrl-C stops it")
    assert "s3://mine" in printed and "http://127.0.0.1:" in printed
    assert env_file.read_text() in printed
    store = open_store(use(printed, monkeypatch) + "/run")
    assert store.probe().conditional_put
    store.put("k", b"kept")
    assert first.end(signal.SIGINT) == 0
    assert servers_in(folder) == []
    assert not env_file.exists()

    again = store_up(
        "--dir", str(folder), "--bucket", "mine", "--print-env"
    )  # same folder: same data, same keys
    printed = again.read_until("ASYNC_RL_STORE=s3://mine\n")
    assert all(line.startswith("export ") for line in printed.splitlines())
    assert open_store(use(printed, monkeypatch) + "/run").get("k") == b"kept"
    again.process.kill()  # not even the chance to clean up: the kernel tells the server
    wait_until_gone(folder)


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path, store_up: type[StoreUp]) -> None:
    up = store_up("--dir", str(tmp_path / "data"))
    up.read_until("Ctrl-C stops it")
    (pid,) = servers_in(tmp_path / "data")
    os.kill(pid, signal.SIGKILL)
    _, errors = up.process.communicate(timeout=LIMIT_S)
    assert up.process.returncode == 1
    assert "SIGKILL" in errors and "seaweedfs.log" in errors
    assert "Traceback" not in errors


def test_a_taken_port_is_a_clear_error(tmp_path: Path, store_up: type[StoreUp], seaweed: object) -> None:
    port = seaweed.endpoint.rsplit(":", 1)[1]  # type: ignore[attr-defined]
    up = store_up("--dir", str(tmp_path / "data"), "--port", port)
    out, errors = up.process.communicate(timeout=LIMIT_S)
    assert up.process.returncode == 2
    assert f"port {port}" in errors and "--port" in errors and "Traceback" not in errors
    assert out == ""


def test_two_servers_run_side_by_side_and_one_can_be_given_its_port(tmp_path: Path) -> None:
    port = free_ports(3)[0]
    with (
        LocalServer(None, port=port, grace_s=0) as one,
        LocalServer(tmp_path, bucket="two", grace_s=0) as two,
    ):
        assert one.endpoint == f"http://127.0.0.1:{port}"
        assert two.endpoint != one.endpoint
        assert one.running() and two.running()
    assert not one.running() and not two.running()


def test_a_server_that_ends_at_once_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "minio"
    fake.write_text("#!/bin/sh\necho 'FATAL: no licence'\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ProcessFailed, match=r"minio\) ended before it was ready with status 3:\nFATAL: no licence"
    ):
        LocalServer(tmp_path / "data").start()


def test_a_minio_on_the_path_is_started_as_minio_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With moto in the place of MinIO: what is checked is the command line, the bucket and the
    environment."""
    fake = tmp_path / "minio"
    fake.write_text(
        '#!/bin/sh\ntest "$1" = server && test -d "$2" && test "$3" = --address && '
        'test -n "$MINIO_ROOT_PASSWORD" && '
        f'exec {sys.executable} -m moto.server --host "${{4%:*}}" --port "${{4#*:}}"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with LocalServer(tmp_path / "data", bucket="mine") as server:
        assert server.kind == "minio"
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"{server.url}/run")
        store.put("k", b"1")
        assert store.get("k") == b"1"


def test_mb_makes_a_bucket_and_finds_one_that_is_there(seaweed, monkeypatch):
    seaweed.activate(monkeypatch)
    bucket = f"made-{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        command = [sys.executable, "-m", "async_rl", "store", "mb", f"s3://{bucket}/some/run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert bucket in done.stdout
    store = open_store(f"s3://{bucket}/some/run")
    store.put("key", b"value")
    assert store.get("key") == b"value"
