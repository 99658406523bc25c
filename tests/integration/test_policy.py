"""Models of several families of transformers: scores in tiles are those from logits, with all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workers.head_tile import HeadSettings, LogitMap
from workers.policy import Ask, Policy
from workers.pretrained import hide_broken_media_packages

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # logits of the size that real ones have
}
FAMILIES: dict[str, tuple[dict[str, Any], LogitMap]] = {
    "qwen3": ({"tie_word_embeddings": True}, LogitMap()),
    "llama": ({"tie_word_embeddings": False}, LogitMap()),
    "phi": ({"partial_rotary_factor": 0.5}, LogitMap()),  # its head has a bias
    "gpt2": ({"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}, LogitMap()),
    "gemma2": ({"final_logit_softcapping": 2.0}, LogitMap(1.0, 2.0)),
    "cohere": ({"logit_scale": 0.25}, LogitMap(0.25)),
    "granite": ({"logits_scaling": 4.0}, LogitMap(0.25)),
    "mixtral": ({"num_local_experts": 4, "output_router_logits": True}, LogitMap()),
}


def make(family: str, changes: dict[str, Any]) -> Any:
    hide_broken_media_packages()
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **(SMALL | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


def gradients(policy: Policy, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_in_tiles_are_those_from_logits(family: str):
    changes, logits = FAMILIES[family]
    policy = Policy(make(family, changes), HeadSettings(LogitMap(), 0.7, 4096))
    policy.check(torch.device("cpu"))
    assert policy.in_tiles
    seen = policy._settings.logits
    assert (seen.scale, seen.cap) == (
        pytest.approx(logits.scale, rel=1e-6),
        logits.cap and pytest.approx(logits.cap, rel=1e-6),
    )

    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 50, (13,), generator=draw)
    positions = torch.cat([torch.arange(8), torch.arange(5)])
    kept = torch.tensor([0, 3, 4, 7, 9, 12])
    targets, g, gh = (torch.randint(1, 50, (6,), generator=draw) for _ in range(3))

    def answer(**how: Any) -> Any:
        return policy(ids, positions, Ask(kept, targets, entropy_gradient=True, **how))

    whole, tiles = answer(whole=True), answer()
    fused = answer(loss_of=lambda lp, h, k: (lp * g[k] + h * gh[k]).sum())
    wanted = gradients(policy, (whole.logprobs_K * g + whole.entropy_K * gh).sum())
    for scores, loss in ((tiles, (tiles.logprobs_K * g + tiles.entropy_K * gh).sum()), (fused, fused.loss)):
        assert torch.allclose(scores.logprobs_K, whole.logprobs_K, atol=1e-5)
        assert torch.allclose(scores.entropy_K, whole.entropy_K, atol=1e-5)
        found = gradients(policy, loss)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            scale = gradient.abs().max().clamp(min=1e-3)
            assert (found[name] - gradient).abs().max() <= 1e-4 * scale, name
    assert (tiles.aux_loss is not None) == (family == "mixtral"), "what routers add comes through"
