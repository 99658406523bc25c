"""Attention over a packed row, sample by sample.

The row's mask forbids a sample to see another, so most of a [T, T] attention is computed to be thrown away: for n
samples of one length all but one part in n, and half of that is above the diagonal. Here the row is cut where
positions restart. Each sample attends by itself, causally and without a mask; neighbours of one length go
together (packing lays the longest first, so equal ones are neighbours). The cuts are views, and torch glues their
gradients together in one go. Rows whose samples share prompts are attended by branched_attention.py.

It is a function that transformers calls in place of its own (its AttentionInterface). The cuts come with the model's
inputs, `cuts=cuts_of(position_ids)`, and transformers hands them on to every layer, in the recomputation of a
checkpointed layer too.

Legend: T tokens of a row, L of a sample, N samples of one length, H heads of queries, G heads of keys and values,
D width of a head.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from async_rl.errors import ConfigError
from async_rl.log import get_logger
from workers.branched_attention import Branches, branched_attention, branches_of, visible
from workers.context import rope_kinds
from workers.pretrained import load_causal_lm

__all__ = [
    "Cuts",
    "attends_packed",
    "attention_inputs",
    "caps_scores",
    "cuts_of",
    "fits",
    "load_model",
    "packed_attention",
    "use_packed_attention",
]

log = get_logger(__name__)

PACKED = "async_rl_packed"
"""Its name among transformers' attentions."""

LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers (`layer_types` of a config) that are right without the mask that transformers would make. Others,
attention in chunks for one, tell nothing of it but in the mask."""


class Cuts(tuple[tuple[int, int], ...]):
    """Of a row: (samples, their length), one pair per run of neighbours of one length."""


def cuts_of(position_ids_T: Tensor) -> Cuts:
    """A row begins anew where its positions restart at 0."""
    starts = [*(position_ids_T == 0).nonzero().flatten().tolist(), len(position_ids_T)]
    lengths = [end - start for start, end in zip([0, *starts[1:-1]], starts[1:], strict=True)]
    return Cuts((sum(1 for _ in run), length) for length, run in groupby(lengths))


def fits(model: Any) -> bool:
    """Whether a model of transformers computes the same with it as with its "sdpa"."""
    config = model.config.get_text_config()
    return (
        bool(
            getattr(model, "_supports_sdpa", False) and getattr(model, "_supports_attention_backend", False)
        )
        and LAYERS.issuperset(getattr(config, "layer_types", None) or ())
        and getattr(config, "attention_chunk_size", None) is None
        and not caps_scores(model)
    )


def caps_scores(model: Any) -> bool:
    """As Gemma 2: transformers' sdpa leaves the cap out, eager does not, nor do engines."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def load_model(folder: str, attention: str, device: torch.device) -> Any:
    """A policy in host memory and float32, with the attention that ModelConfig asks for. Raises ConfigError."""
    # None: sdpa, or eager where there is none.
    theirs = {"auto": None, "packed": "sdpa"}.get(attention, attention)
    model = load_causal_lm(Path(folder), dtype=torch.float32, attention=theirs)
    _refuse_moving_positions(model, folder)
    if attention == "packed":
        use_packed_attention(model)
    elif attention == "auto" and caps_scores(model):
        model.set_attn_implementation("eager")  # sdpa leaves the cap out, and engines do not
    elif attention == "auto" and device.type == "cpu" and fits(model):
        use_packed_attention(model)
        if not _is_told_the_cuts(model):
            model.set_attn_implementation("sdpa")
    return model


def _refuse_moving_positions(model: Any, folder: str) -> None:
    """Raises ConfigError where transformers chooses the frequencies of positions by the longest sample of a row: what
    it says of a sample would depend on the others. ("longrope" does so only beyond what context.py allows.)"""
    if "dynamic" in rope_kinds(model.config.get_text_config().to_dict()):
        raise ConfigError(
            f'the model in {folder} has rope_type = "dynamic": what it computes for a sample would depend on the '
            "other samples of the row, and differ from what engines compute",
            hint="train a model with another rope_type (default, linear, yarn, longrope, llama3)",
        )


@torch.no_grad()
def _is_told_the_cuts(model: Any) -> bool:
    """Of a model that is not sharded yet. Some layers drop what they are given for their attention."""
    place_T = torch.zeros(1, dtype=torch.int64)
    try:
        model(
            input_ids=place_T[None],
            position_ids=place_T[None],
            use_cache=False,
            **attention_inputs(model, place_T),
        )
    except ConfigError as error:
        log.info(
            "the model is not fit for packed attention: transformers' own takes its place",
            reason=error.message,
        )
        return False
    return True


def use_packed_attention(model: Any) -> None:
    """From now on this model attends so, and wants `cuts`. Raises ConfigError where it would not be the same.

    No mask is registered under the name, so transformers makes none."""
    if not fits(model):
        raise ConfigError(
            f"{type(model).__name__} has attention that is more than causal, or caps its scores",
            hint='set model.attention = "sdpa", or "eager"',
        )
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)


def attends_packed(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", "") == PACKED


def attention_inputs(model: Any, position_ids_T: Tensor) -> dict[str, Any]:
    """What a forward pass needs besides its tokens and positions."""
    if not attends_packed(model):
        return {}
    return {"cuts": branches_of(position_ids_T) or cuts_of(position_ids_T)}


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cuts: Cuts | Branches | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D].

    Raises ConfigError where the layer is not causal, comes with a mask, or was not given the cuts."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} does not attend causally, or has a mask of its own",
            hint='set model.attention = "sdpa"',
        )
    if cuts is None:
        raise ConfigError(
            f"{type(module).__name__} was not told where the samples of its row begin: the model hands nothing on",
            hint='set model.attention = "sdpa"',
        )
    if isinstance(cuts, Branches):
        return branched_attention(query[0], key[0], value[0], cuts, scaling, sliding_window)[None], None
    tokens = [samples * length for samples, length in cuts]
    queries, keys, values = (
        each[0].split(tokens, 1)  # type: ignore[no-untyped-call]
        for each in (query, key, value)
    )
    parts = [
        _attend(q, k, v, samples, scaling, sliding_window)
        for q, k, v, (samples, _) in zip(queries, keys, values, cuts, strict=True)
    ]
    return torch.cat(parts)[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, samples: int, scaling: float | None, window: int | None
) -> Tensor:
    """Of one run of samples, query [H, N L, D] -> [N L, H, D]."""
    split = (samples, -1)
    query_NHLD, key_NGLD, value_NGLD = (
        each.unflatten(1, split).transpose(0, 1)  # type: ignore[no-untyped-call]
        for each in (query, key, value)
    )
    length = query_NHLD.shape[2]
    mask = visible(length, 0, window, query.device) if window is not None and length > window else None
    result_NHLD = scaled_dot_product_attention(
        query_NHLD,
        key_NGLD,
        value_NGLD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return result_NHLD.transpose(1, 2).flatten(0, 1)
