"""Who may import whom (pyproject.toml, [tool.importlinter]), and what an import may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_rules_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("orchestrator.server", ("torch", "vllm", "transformers", "boto3")),
        ("async_rl.wire", ("torch", "boto3", "zmq")),
        ("async_rl.cli.runfile", ("torch", "vllm", "transformers", "boto3", "zmq")),
        ("async_rl.weights.subscriber", ("torch", "vllm", "transformers")),
        ("workers.rollout", ("vllm",)),
    ],
)
def test_an_import_loads_only_what_it_needs(module, unwanted):
    code = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
