"""What is wrong with how a worker was started is said at once, and says what to do."""

from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner

from async_rl.cli.main import cli
from async_rl.errors import ConfigError
from async_rl.transport import address as address_module
from async_rl.transport.address import check_address, why_silent
from workers.rollout_process import LONGEST_NAME, worker_name


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5577", "tcp://head.cluster:1", "tcp://[::1]:65535", "ipc:///run/a", "memory://1"],
)
def test_an_address_that_can_be_one_is_taken(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "does not begin with tcp://"),
        ("http://head:5577", "does not begin with tcp://"),
        ("127.0.0.1:5577", "does not begin with tcp://"),
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://head:port", "has no port"),
        ("tcp://head:", "has no port"),
        ("tcp://:5577", "has no host"),
        ("tcp://head:0", "1 to 65535"),
        ("tcp://head:99999", "1 to 65535"),
        ("tcp://::1:5577", "in brackets"),
    ],
)
def test_an_address_that_can_be_none_is_refused_with_what_is_wrong_with_it(address, why):
    with pytest.raises(ConfigError, match=why) as refused:
        check_address(address)
    assert repr(address) in refused.value.message and "tcp://HOST:PORT" in refused.value.hint


def test_silence_has_a_reason(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert "something listens" in why_silent(listening)
    assert "nothing listens" in why_silent(listening)

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(address_module.socket, "create_connection", unknown)
    assert why_silent("tcp://haed:5577").startswith("the host 'haed' of tcp://haed:5577 is not known here")

    def vanish(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(address_module.socket, "create_connection", vanish)
    assert "no connection within" in why_silent("tcp://10.0.0.1:5577")


def test_a_worker_has_a_name_that_the_store_and_the_orchestrator_can_have():
    assert worker_name("fleet/1") == "fleet/1"
    assert worker_name("1", "fleet") == "fleet/1" and worker_name("fleet", "fleet") == "fleet"
    assert len(worker_name("")) > 5
    worker_name("x" * LONGEST_NAME)
    for name, why in {
        "x" * (LONGEST_NAME + 1): f"{LONGEST_NAME + 1} bytes",
        "é" * 40: "240 bytes",
        "a\nb": "can't be printed",
        " a": "a space at an end",
        "\udcff": "can't be printed",  # what a byte that is no UTF-8 becomes in an argument
    }.items():
        with pytest.raises(ConfigError, match=why):
            worker_name(name)
    with pytest.raises(ConfigError, match="bytes"):
        worker_name("x" * LONGEST_NAME, "fleet")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--orchestrator", "tcp://127.0.0.1"], "it has no port"),
        (["--worker-id", "x" * 300], "can't be the name of a worker"),
        (["--store", "/data/run"], "is no store URL"),
        (["--store", "s3://"], "is no store URL"),
        (["--set", "rollout.max_groups=-1"], "max_groups"),
        (["--set", "rollout.enigne=vllm"], "enigne"),
    ],
)
def test_the_command_refuses_nonsense_before_it_waits_for_anything(tmp_path, options, said):
    usual = ["--store", f"file://{tmp_path}", "--orchestrator", "tcp://127.0.0.1:5577"]
    done = CliRunner().invoke(cli, ["rollout", *usual, *options])
    assert isinstance(done.exception, ConfigError), done.output
    assert said in str(done.exception)
