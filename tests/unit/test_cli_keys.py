"""`async-rl keys`, and the keys of the other commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_rl.cli import trainer
from async_rl.cli.keys import command
from async_rl.cli.options import client_key
from async_rl.cli.runfile import read_run_file
from async_rl.errors import ConfigError
from async_rl.procs import Fleet
from async_rl.transport.allowed import Keyring
from async_rl.transport.keys import read_client_key, read_secret


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Runs `async-rl keys …` in a folder of its own; errors of ours come out."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        done = CliRunner().invoke(command, argv, catch_exceptions=True)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_one_command_makes_the_folder_the_key_and_the_file_to_copy(keys):
    said = keys("new", "fleet-a", "--server", "keys")
    key, ring = read_client_key(Path("fleet-a.key")), Keyring.open(Path("keys"))
    assert (key.name, key.server) == ("fleet-a", ring.public)
    assert [(e.role, e.name, e.public) for e in ring.entries] == [("worker", "fleet-a", key.public.hex())]
    assert "async-rl rollout" in said and "--key fleet-a.key" in said
    assert key.secret.hex() not in said


def test_a_key_made_on_the_workers_side_is_allowed_by_its_public_half(keys):
    keys("new", "me", "--server", "keys", "--role", "watcher")
    said = keys("new", "fleet-b", "--out", "b.key")
    line = next(line for line in said.splitlines() if "keys allow" in line)
    argv = line.replace("DIR", "keys").split()[2:]
    server = keys(*argv).split()[-1]
    key = client_key("b.key", server)
    assert key.public.hex() in argv and read_secret(Path("b.key")).hex() not in argv
    assert key.server == Keyring.open(Path("keys")).public
    listed = json.loads(keys("list", "--server", "keys", "--json"))
    assert listed["server"] == server
    assert [(k["role"], k["name"]) for k in listed["keys"]] == [("watcher", "me"), ("worker", "fleet-b")]


def test_a_revoked_key_is_gone_from_the_list(keys):
    for name in ("a", "b"):
        keys("new", name, "--server", "keys")
    keys("revoke", "a", "--server", "keys")
    said = keys("list", "--server", "keys")
    assert Keyring.open(Path("keys")).public.hex() in said
    assert read_client_key(Path("b.key")).public.hex() in said
    assert read_client_key(Path("a.key")).public.hex() not in said


def test_what_cant_be_done_changes_nothing(keys):
    keys("new", "a", "--server", "keys")
    before = (Path("keys/allowed").read_text(), Path("a.key").read_text())
    for argv in (
        ("new", "a", "--server", "keys"),  # the file is there
        ("new", "a", "--server", "keys", "--out", "other.key"),  # the name is taken
        ("new", "a b", "--server", "keys"),
        ("allow", "b", "not-a-key", "--server", "keys"),
        ("revoke", "b", "--server", "keys"),
        ("list", "--server", "nowhere"),
        ("revoke", "a", "--server", "nowhere"),
    ):
        with pytest.raises(ConfigError) as caught:
            keys(*argv)
        assert caught.value.hint
    assert (Path("keys/allowed").read_text(), Path("a.key").read_text()) == before
    assert sorted(path.name for path in Path().iterdir()) == ["a.key", "keys"]


@pytest.mark.parametrize("with_keys", [True, False])
def test_the_trainers_own_orchestrator_knows_it_by_a_key_for_this_life_only(
    keys, tmp_path, monkeypatch, with_keys
):
    keys("new", "w1", "--server", "keys")
    Path("run.toml").write_text(
        f'[run]\nstore = "file://{tmp_path}/run"\n[model]\npath = "{tmp_path}"\n'
        + ('[orchestrator]\nkeys = "keys"\nbind = "tcp://*:0"\n' if with_keys else "")
    )
    config = read_run_file(Path("run.toml"))
    commands = []

    def start(self, name, argv, **_):
        commands.append(argv)
        (tmp_path / "orchestrator-address").write_text("tcp://127.0.0.1:1")

    monkeypatch.setattr(Fleet, "start", start)
    with Fleet() as fleet:
        address, key_file = trainer._start_orchestrator(fleet, config, Path("run.toml"), (), tmp_path)
    assert address == "tcp://127.0.0.1:1" and commands[0][:3] == [sys.executable, "-m", "async_rl"]
    if with_keys:
        key = client_key(key_file, "")
        told = commands[0][commands[0].index("--trainer-key") + 1]
        assert told == key.public.hex() and key.server == Keyring.open(Path("keys")).public
        assert key.secret.hex() not in commands[0]
        assert key.public.hex() not in Path("keys/allowed").read_text()
    else:
        assert key_file == "" and "--trainer-key" not in commands[0]


def test_a_trainer_whose_keys_are_missing_ends_before_anything_starts(keys, tmp_path):
    Path("run.toml").write_text(
        f'[run]\nstore = "file://{tmp_path}/run"\n[model]\npath = "{tmp_path}"\n'
        '[orchestrator]\nkeys = "keys"\n'
    )
    with Fleet() as fleet, pytest.raises(ConfigError, match="no folder of keys"):
        trainer._start_orchestrator(
            fleet, read_run_file(Path("run.toml")), Path("run.toml"), (), tmp_path / "scratch"
        )
    assert fleet.children == []
