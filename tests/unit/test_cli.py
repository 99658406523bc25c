"""The command line answers at once, and errors end with a message and a hint, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "boto3", "transformers", "numpy")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "async_rl", *argv], capture_output=True, text=True, timeout=60
    )


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom async_rl.cli.main import cli\n"
        "try: cli.main(['--help'], prog_name='async-rl')\nexcept SystemExit: pass\n"
        f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr
    for command in ("demo", "trainer", "rollout", "lag", "store"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "command", ["demo", "trainer", "rollout", "orchestrator", "lag", "weights", "store", "model"]
)
def test_every_command_has_help_and_needs_no_torch_for_it(command):
    code = (
        "import sys\nfrom async_rl.cli.main import cli\n"
        f"try: cli.main([{command!r}, '--help'], prog_name='async-rl')\n"
        "except SystemExit as e: assert not e.code\n"
        "print('LOADED', [m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr
    assert "Usage: async-rl" in done.stdout


def test_an_unknown_key_ends_with_the_place_and_the_choices(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text('[run]\nstore = "s3://b/p"\n[trainer]\nlearning_rat = 1.0\n')
    done = run("trainer", str(run_file))
    assert done.returncode == 2
    assert "unknown key 'learning_rat' in [trainer]" in done.stderr
    assert "did you mean 'learning_rate'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_impossible_combinations_are_refused(tmp_path):
    run_file = tmp_path / "run.toml"
    base = '[run]\nstore = "s3://b/p"\n[model]\npath = "m"\n'
    for text, said in (
        ("[orchestrator]\nmax_lag = 1\n[trainer]\npublish_every = 3\n", "can't go on"),
        ("[sampling]\ngroup_size = 1\n", "sampling.group_size: expected `int` >= 2"),
        ('[orchestrator]\nbind = "tcp://0.0.0.0:5577"\n', "can be reached from other machines"),
    ):
        run_file.write_text(base + text)
        done = run("trainer", str(run_file))
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


def test_a_worker_is_told_that_it_can_not_choose_what_the_run_is():
    done = run(
        "rollout",
        "--store",
        "file:///nowhere",
        "--orchestrator",
        "tcp://127.0.0.1:1",
        "--set",
        "sampling.temperature=2",
    )
    assert done.returncode == 2
    assert "learns [sampling] from its run" in done.stderr
