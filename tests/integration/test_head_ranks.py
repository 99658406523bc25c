"""A head that FSDP shards over ranks: scores in tiles have the gradients of whole logits, tied or not, in both
types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.algo.losses import LossConfig
from tests.learner_support import (
    CPU,
    gradients,
    make_learner,
    make_samples,
    on_ranks,
    save_tiny_model,
    share,
)
from workers import head_tile, learner
from workers.process_group import RankGroup, rank_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KINDS = [("untied", "float32"), ("tied", "bfloat16")]
ALL_KINDS = [(tied, dtype) for tied in ("tied", "untied") for dtype in ("float32", "bfloat16")]
WAYS = ("logits", "fused", "twice")
BATCHES = ((12, 40), (1, 40))
"""Samples and tokens of a row. Of one sample, the second rank has a filler without loss tokens."""


def trained(folder: Path, group: RankGroup, dtype: str, way: str) -> dict[str, torch.Tensor]:
    """Gradients of two batches, with an update after each: what was gathered for one must not be used in the next."""
    made = make_learner(
        folder,
        group,
        temperature=0.7,
        dtype=dtype,
        learning_rate=1e-3,
        head="logits" if way == "logits" else "auto",
    )
    policy = made._policy
    assert policy.in_tiles == (way != "logits")
    # So many tiles that every kind of boundary occurs: 40 words, seven at a time.
    policy._settings = replace(policy._settings, tile_bytes=12 * 7 * 5)
    found = {}
    for number, (samples, limit) in enumerate(BATCHES):
        stats = made.forward_backward(*share(make_samples(samples, number), limit, group))
        found |= {f"{number}/{name}": each.contiguous() for name, each in gradients(made).items()}
        found |= {f"{number}/loss": torch.tensor([stats.loss, stats.entropy])}
        assert made.optimizer_step(stats)
    return found


def fused(config: LossConfig) -> bool:
    return True


def not_fused(config: LossConfig) -> bool:
    return False


def all_ways(
    group: RankGroup, models: Path, out: Path, kinds: list[tuple[str, str]], ways: tuple[str, ...]
) -> None:
    head_tile.NARROWEST = 7
    for tied, dtype in kinds:
        for way in ways:
            learner.by_token = fused if way == "fused" else not_fused
            found = trained(models / tied, group, dtype, way)
            if group.rank == 0:
                save_file(found, out / f"{group.size}-{tied}-{dtype}-{way}.safetensors")


def play(folder: Path, kinds: list[tuple[str, str]], alone_too: tuple[str, ...]) -> Path:
    """All ways on two ranks, some on one; the folder of the results."""
    for tied in ("tied", "untied"):
        save_tiny_model(folder / tied, tie_word_embeddings=tied == "tied")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_tile, "NARROWEST", head_tile.NARROWEST)
        patch.setattr(learner, "by_token", learner.by_token)
        torch.set_num_threads(1)
        with rank_group(CPU, 60.0) as alone:
            all_ways(alone, folder, folder, kinds, alone_too)
    on_ranks(all_ways, 2, folder, folder, kinds, WAYS)
    return folder


def assert_all_the_same(results: Path, tied: str, dtype: str) -> None:
    found = {path.name: load_file(path) for path in results.glob(f"*-{tied}-{dtype}-*")}
    wanted = found[f"1-{tied}-{dtype}-logits.safetensors"]
    assert ("0/lm_head.weight" in wanted) == (tied == "untied")
    for each in found.values():
        assert each.keys() == wanted.keys()
        assert_same(each, wanted, dtype)


def test_gradients_in_tiles_are_those_of_whole_logits_on_one_rank_and_on_two(tmp_path: Path):
    results = play(tmp_path, KINDS, WAYS[:1])
    for tied, dtype in KINDS:
        assert_all_the_same(results, tied, dtype)


@pytest.mark.long
def test_the_same_for_heads_of_every_kind(tmp_path: Path):
    results = play(tmp_path, ALL_KINDS, WAYS)
    for tied, dtype in ALL_KINDS:
        assert_all_the_same(results, tied, dtype)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: str) -> None:
    for name, expected in wanted.items():
        if name.startswith("0/") and dtype == "float32":  # before any update: Adam makes rounding large
            assert (found[name] - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(min=1e-3), name
        else:
            assert (found[name] - expected).norm() <= 0.1 * expected.norm(), name
