"""For tests that run in several processes (`make test`): what takes longest begins first, and the codec's kernels are
compiled once, while the tests are collected, and not by each process that comes to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = "import async_rl.weights.codec.small"
"""Loads all of them; in a fresh clone it compiles them first."""
KERNELS_LIMIT_S = 600.0
"""About a minute of one busy core."""

LONGEST_FIRST = (
    "chaos/test_matrix.py",
    "integration/test_run.py",
    "chaos/test_guards.py",
    "integration/test_store_outage.py",
    "chaos/test_storm.py",
    "integration/test_run_vllm.py",
    "integration/test_engine_parallel.py",
    "integration/test_keys.py",
    "integration/test_run_refusals.py",
    "chaos/test_lives.py",
    "contract/test_engine.py",
    "chaos/test_delivery.py",
    "chaos/test_weak_store.py",
    "unit/test_tiny_model.py",
)
"""Files of half a minute and more. Begun last, one of them would be all that runs in the end, on one of the cores."""

FOLDER = Path(__file__).parent

compiling = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.stash[compiling] = subprocess.Popen([sys.executable, "-c", KERNELS])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: object) -> None:
    """Waits for: the kernels. Without them the first tests would compile them all, each for itself."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    if (process := config.stash.get(compiling, None)) is not None:
        process.wait(KERNELS_LIMIT_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {FOLDER / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
