"""Models for tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a Qwen3 of one million random weights and a tokenizer."""
    from workers.tiny_model import TinySettings, make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, TinySettings(steps=0))
    return folder
