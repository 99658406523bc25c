"""An environment with TRL, beside ours: it has our torch and transformers, so that only what is TRL's differs.

ASYNC_RL_PEERS_PYTHON names an interpreter that has it. Without, `.venv-peers` is made in the working folder, once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from rich.console import Console

__all__ = ["trl_python"]

TRL = "trl==1.16.0"
FOLDER = Path(".venv-peers")
INSTALL_LIMIT_S = 600.0
"""pip fetches about 100 MB: minutes on a slow line."""
IMPORT_LIMIT_S = 120.0


def trl_python(console: Console) -> Path | None:
    """An interpreter that imports TRL; None, with the reason on the console, where there is none to be had."""
    named = os.environ.get("ASYNC_RL_PEERS_PYTHON")
    python = Path(named) if named else FOLDER.absolute() / "bin" / "python"
    if not named and not python.exists():
        _make(python, console)
    reason = _why_not(python)
    if reason:
        console.print(f"TRL could not be had, and is left out: {reason}")
        return None
    return python


def _make(python: Path, console: Console) -> None:
    console.print(f"installing {TRL} into {FOLDER}")
    venv.create(FOLDER, with_pip=True)
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    # Behind its own packages come ours.
    (packages / "zz-ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    try:
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TRL],
            check=True,
            timeout=INSTALL_LIMIT_S,
            stdout=sys.stderr,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        console.print(f"{TRL} could not be installed: {error}. Remove {FOLDER} to try again.")


def _why_not(python: Path) -> str:
    """Why this interpreter has no TRL; nothing if it has."""
    try:
        subprocess.run(
            [python, "-c", "import trl"], check=True, capture_output=True, text=True, timeout=IMPORT_LIMIT_S
        )
    except FileNotFoundError:
        return f"there is no {python}"
    except subprocess.TimeoutExpired:
        return f"importing it took more than {IMPORT_LIMIT_S:g} s"
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return ""
