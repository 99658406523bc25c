"""How long a sequence a model allows, from its config.json: engines load no more, the trainer trains no more. No
torch.

Models with "longrope" positions have two tables of frequencies, one for sequences within the context that they were
first trained with and one for longer ones. vLLM takes one of them for all that it computes, by the longest sequence
it is started for (model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py), transformers by the longest
sequence of a batch. Both take the short one, always, where no sequence is longer than that first context: so it is
the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["longest_of", "rope_kinds"]


def longest_of(config: Mapping[str, Any]) -> int:
    """Tokens of prompt and completion together; 0: no limit is known. `config`: as config.json has it."""
    allowed = _number(config, "max_position_embeddings")
    for rope in _ropes(config):
        if _kind(rope) == "longrope":
            name = "original_max_position_embeddings"
            first = _number(rope, name) or _number(config, name)
            allowed = min(allowed or first, first or allowed)
    return allowed


def rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Of its layers; "default" is not told by every model."""
    return {_kind(rope) for rope in _ropes(config)} - {""}


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping):
            yield rope
            yield from (each for each in rope.values() if isinstance(each, Mapping))


def _kind(rope: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "")
    return "longrope" if kind == "su" else kind  # its name in the first models


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return int(value) if isinstance(value, int | float) else 0
