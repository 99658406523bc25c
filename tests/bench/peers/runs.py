"""Processes that are measured: a script, a JSON of arguments, a JSON of results, a limit.

The peers have an interpreter of their own (trl_env.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "SideFailed", "run_side"]

ROOT = Path(__file__).resolve().parents[3]
OURS = sys.executable


class SideFailed(RuntimeError):
    """A measured process failed or took longer than its limit; its last lines are in the message."""


def run_side(
    python: Path | str, module: str, arguments: dict[str, Any], folder: Path, limit_s: float
) -> dict[str, Any]:
    """What `python -m module ARGUMENTS RESULT` wrote into RESULT. Raises SideFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, result, log = folder / "arguments.json", folder / "result.json", folder / "log.txt"
    asked.write_text(json.dumps(arguments))
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(arguments["threads"]),
    }
    with log.open("w") as out:
        try:
            done = subprocess.run(
                [python, "-m", module, str(asked), str(result)],
                cwd=folder,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise SideFailed(f"{module} took more than {limit_s:g} s; {_tail(log)}") from error
    if done.returncode or not result.exists():
        raise SideFailed(f"{module} ended with {done.returncode}; {_tail(log)}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def _tail(log: Path) -> str:
    return "its last lines:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
