"""Each sample of a packed row attends by itself: the same as one attention under the row's mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from async_rl.errors import ConfigError
from tests.learner_support import save_tiny_model
from workers.packed_attention import (
    Cuts,
    attends_packed,
    attention_inputs,
    cuts_of,
    fits,
    load_model,
    packed_attention,
    use_packed_attention,
)
from workers.pretrained import hide_broken_media_packages

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
LENGTHS = (7, 5, 5, 5, 1, 1, 3)
VOCABULARY = 30


class Layer:
    is_causal = True


class TwoWays:
    is_causal = False


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def random_heads(seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    return [
        torch.randn(1, heads, tokens, WIDTH, generator=source, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def under_one_mask(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    place_T = torch.arange(sum(LENGTHS))
    sample_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = place_T[:, None] - place_T[None]
    seen = (sample_T[:, None] == sample_T[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return under_mask(query, key, value, seen)


def under_mask(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    repeats = HEADS // KEY_HEADS
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3).transpose(1, 2)


def test_neighbours_of_one_length_are_cut_out_together() -> None:
    assert cuts_of(positions()) == Cuts([(1, 7), (3, 5), (2, 1), (1, 3)])
    assert cuts_of(positions((4,))) == Cuts([(1, 4)])
    assert cuts_of(torch.zeros(1, dtype=torch.int64)) == Cuts([(1, 1)])


@pytest.mark.parametrize("window", [None, 3, 100])
def test_values_and_gradients_are_those_of_one_attention_under_the_rows_mask(window: int | None) -> None:
    heads = random_heads(1)
    weights = torch.randn(1, sum(LENGTHS), HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    results = []
    for packed in (True, False):
        if packed:
            value, _ = packed_attention(
                Layer(), *heads, None, cuts=cuts_of(positions()), scaling=0.3, sliding_window=window
            )
        else:
            value = under_one_mask(*heads, window)
        results.append([value, *torch.autograd.grad((value * weights).sum(), heads)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_layer_that_was_not_told_the_cuts_is_refused() -> None:
    """The row would be one sample to it, and each sample would see those before it."""
    with pytest.raises(ConfigError, match="was not told where the samples of its row begin"):
        packed_attention(Layer(), *random_heads(3), None)


def test_a_layer_that_is_not_plainly_causal_is_refused() -> None:
    heads = random_heads(4)
    with pytest.raises(ConfigError, match="does not attend causally"):
        packed_attention(TwoWays(), *heads, None)
    with pytest.raises(ConfigError, match="a mask of its own"):
        packed_attention(Layer(), *heads, torch.ones(1, 1, 22, 22, dtype=torch.bool))


def small(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
        "pad_token_id": 0,
        **changes,
    }


def model_of(family: str, **changes: Any) -> Any:
    hide_broken_media_packages()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**small(**changes))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3", {}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 3}),
        ("Gemma3", {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_a_model_says_the_same_with_it_as_with_transformers_own(
    family: str, changes: dict[str, Any]
) -> None:
    name = f"{family}Text" if family == "Gemma3" else family
    model = model_of(family, **changes) if family != "Gemma3" else gemma3(changes)
    assert fits(model), name
    ids = torch.randint(1, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "position_ids": positions()[None], "use_cache": False}
    model.set_attn_implementation("sdpa")
    expected = model(**inputs, **attention_inputs(model, positions())).logits
    use_packed_attention(model)
    found = model(**inputs, **attention_inputs(model, positions())).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # One sample of it all: it must matter, or this test says nothing.
    mixed = model(**inputs, cuts=Cuts([(1, sum(LENGTHS))])).logits
    assert not torch.allclose(mixed, expected, rtol=1e-3, atol=1e-3)


def gemma3(changes: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**small(**changes))).eval()


def test_checkpointed_layers_are_cut_again_when_they_are_computed_again() -> None:
    model = model_of("Qwen3")
    use_packed_attention(model)
    ids = torch.randint(1, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        output = model(
            input_ids=ids,
            position_ids=positions()[None],
            use_cache=False,
            **attention_inputs(model, positions()),
        )
        output.logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_models_whose_attention_is_more_than_causal_are_left_alone() -> None:
    capped = model_of("Gemma2", attn_logit_softcapping=20.0)
    assert not fits(capped)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM"):
        use_packed_attention(capped)
    assert attention_inputs(capped, positions()) == {}
    chunked = model_of("Qwen3")
    chunked.config.layer_types = ["chunked_attention", "full_attention"]
    assert not fits(chunked)


def test_a_model_that_hands_no_cuts_on_is_left_its_own_attention(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model_of("Nemotron").save_pretrained(folder)
    assert not attends_packed(load_model(folder, "auto", torch.device("cpu")))


def test_scores_that_are_capped_are_not_left_to_an_attention_without_a_cap(tmp_path: Path) -> None:
    model_of("Gemma2", attn_logit_softcapping=2.0).save_pretrained(tmp_path)
    place = positions((7,))
    said = []
    for attention in ("auto", "eager", "sdpa"):
        model = load_model(str(tmp_path), attention, torch.device("cpu"))
        said.append(model(input_ids=place[None], use_cache=False, **attention_inputs(model, place)).logits)
    assert torch.equal(said[0], said[1])
    assert not torch.allclose(said[0], said[2], rtol=1e-2), "or it says nothing"


def test_it_is_the_choice_on_a_cpu_and_nobodys_elsewhere_unless_it_is_named(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path))

    def is_packed(attention: str, device: str) -> bool:
        return "cuts" in attention_inputs(load_model(folder, attention, torch.device(device)), positions())

    assert is_packed("auto", "cpu") and is_packed("packed", "cuda")
    assert not is_packed("auto", "cuda") and not is_packed("sdpa", "cpu") and not is_packed("eager", "cpu")
