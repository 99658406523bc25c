"""The few facts an engine reads from a Hugging Face folder's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.errors import EngineError
from workers.context import longest_of

__all__ = ["longest_sequence", "stop_tokens"]

CPU_LONGEST = 4096
"""Default limit on a CPU, where models advertise contexts whose KV cache would not fit in memory."""


def stop_tokens(folder: Path) -> frozenset[int]:
    """The token ids that end a completion: of config.json and of generation_config.json.

    Only these come from generation_config.json. Its temperature, top-k and top-p are recipes for chatting; under
    them the sampled distribution would not be the policy's.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name, optional=name.startswith("generation")).get("eos_token_id")
        found.update([value] if isinstance(value, int) else value or [])
    if not found:
        raise EngineError(
            f"{folder} names no end token: no sample could ever stop",
            hint="set eos_token_id in the model's config.json",
        )
    return frozenset(found)


def longest_sequence(folder: Path, wanted: int, on_cpu: bool) -> int:
    """Tokens of prompt and completion together: `wanted`, or for 0 what the model allows (bounded on a CPU)."""
    config = _read(folder / "config.json")
    allowed = longest_of(config) or CPU_LONGEST
    if wanted > allowed:
        raise EngineError(
            f"rollout.max_model_len = {wanted}, but the model allows {allowed} tokens",
            hint="lower it, or set 0",
        )
    return wanted or (min(allowed, CPU_LONGEST) if on_cpu else allowed)


def _read(path: Path, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise EngineError(
            f"{path} is missing", hint="an engine starts from a Hugging Face folder"
        ) from None
    except (OSError, ValueError) as error:
        raise EngineError(f"can't read {path}: {error}") from error
    return content if isinstance(content, dict) else {}
