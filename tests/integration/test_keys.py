"""A run of real processes with keys: who is let in trains, who is not is told why and disturbs nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.transport.allowed import Allowed, Keyring, add
from async_rl.transport.keys import client_key_text, new_secret, public_of, read_client_key, write_private
from tests.runs import PACED, LocalRun

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.slow, pytest.mark.timeout(240)]

START_S = 90.0


def make(
    folder: Path, name: str, role: str = "worker", *, allowed: bool = True, server: bytes = b""
) -> Path:
    """A key's file, as `async-rl keys new` writes it."""
    ring, secret, path = Keyring.create(folder / "keys"), new_secret(), folder / f"{name}.key"
    write_private(path, client_key_text(name, secret, server or ring.public))
    if allowed:
        add(ring.folder, Allowed(role, name, public_of(secret).hex()))  # type: ignore[arg-type]
    return path


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "async_rl", *args], capture_output=True, text=True, timeout=60
    )


def test_a_run_with_keys_trains_on_whom_it_allows_until_they_are_revoked(
    tmp_path: Path, s3_url: str, tiny_model: Path
):
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    watcher = make(tmp_path, "me", "watcher")
    turned_away = {
        "no-key": ([], "asks for a key"),
        "stranger": (["--key", str(make(tmp_path, "stranger", allowed=False))], "does not allow our key"),
        "misled": (
            ["--key", str(make(tmp_path, "misled", server=b"\7" * 32))],
            "does not have the server key",
        ),
        "watcher": (["--key", str(watcher)], "key 'me' has the role watcher, which may not send Hello"),
    }
    settings = {
        "orchestrator": {"keys": str(tmp_path / "keys")},
        "trainer": {"steps": 4000},
        "environment": PACED,
    }
    with LocalRun(tmp_path, s3_url, tiny_model, **settings) as run:
        run.key = read_client_key(watcher)
        trainer = run.start_trainer()
        one = run.start_worker("first", "--key", str(first))
        two = run.start_worker("gpu7", "--key", str(second))
        run.wait("two steps", lambda: run.steps() >= 2, START_S, trainer, one, two)

        def serving() -> set[str]:
            status = run.status()
            return {w.worker for w in status.workers if w.groups_done} if status else set()

        run.wait("both workers", lambda: serving() == {"first", "second/gpu7"}, START_S, trainer, one, two)

        # They never come to their engine; vLLM is not even imported before it is started.
        outside = {
            name: run.start_worker(name, *args, engine="vllm") for name, (args, _) in turned_away.items()
        }
        for name, (_, reason) in turned_away.items():
            assert run.finish(outside[name], START_S) == 1, run.log(name)
            assert reason in run.log(name) and "Traceback" not in run.log(name)

        looked = cli("lag", "--json", "--orchestrator", run.address, "--key", str(watcher))
        assert looked.returncode == 0 and "second/gpu7" in looked.stdout, looked.stderr
        refused = cli("lag", "--orchestrator", run.address)
        assert refused.returncode == 1 and "asks for a key" in refused.stderr

        gone = cli("keys", "revoke", "first", "--server", str(tmp_path / "keys"))
        assert gone.returncode == 0, gone.stderr
        assert run.finish(one, START_S) == 1 and "key 'first' was revoked" in run.log("first")
        goal = run.steps() + 2
        run.wait("two more steps", lambda: run.steps() >= goal, START_S, trainer, two)
        status = run.status()
        assert status is not None and [w.worker for w in status.workers] == ["second/gpu7"]
        assert status.refused["key_revoked"] >= 1 and status.refused["key_role"] >= 1

        trainer.process.send_signal(signal.SIGTERM)
        assert run.finish(trainer, 60.0) in (0, 128 + signal.SIGTERM, -signal.SIGTERM), run.logs()
