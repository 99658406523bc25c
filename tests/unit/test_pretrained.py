"""Packages that nobody needs and that would keep every model from loading."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from workers.pretrained import hide_broken_media_packages


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; what is imported from it is forgotten afterwards."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back as it was
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"import {name}.part\n{code}\n")
    (folder / name / "part.py").write_text("")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
@pytest.mark.parametrize(
    "code",
    ["raise RuntimeError('operator does not exist')", "raise OSError('libcudart')", "import its_own_need"],
)
def test_a_package_that_can_not_be_loaded_looks_like_one_that_is_not_there(packages, name, code):
    install(packages, name, code)
    assert importlib.util.find_spec(name) is not None
    hide_broken_media_packages()
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert f"{name}.part" not in sys.modules


def test_a_package_that_loads_stays(packages):
    install(packages, "torchvision", "")
    hide_broken_media_packages()
    assert importlib.import_module("torchvision").__file__ == str(packages / "torchvision" / "__init__.py")
    sys.modules.pop("torchvision.part")
