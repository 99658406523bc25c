"""What the tests of the learner share: a tiny model, samples, and the same function on several real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from async_rl.algo.losses import DppoTv, LossConfig, Totals, totals_of
from async_rl.algo.packing import MicroBatch, TrainSample, pack
from async_rl.store.base import ObjectStore
from tests.ranks import as_ranks, start_ranks
from workers import checkpoints
from workers.checkpoints import Checkpoint, Progress, Snapshot
from workers.learner import Learner
from workers.pretrained import hide_broken_media_packages
from workers.process_group import RankGroup, rank_group
from workers.settings import ModelConfig, TrainerConfig

__all__ = [
    "CPU",
    "VOCABULARY",
    "as_ranks",
    "gradients",
    "make_learner",
    "make_samples",
    "on_ranks",
    "save_checkpoint",
    "save_tiny_model",
    "share",
    "start_ranks",
]

VOCABULARY = 40
CPU = torch.device("cpu")


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen3 of about 30k parameters; 5 of its matrices have a number of rows that 2 and 3 do not divide."""
    hide_broken_media_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 49,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # large, so that a wrong attention mask shows
    }
    Qwen3ForCausalLM(Qwen3Config(**settings | changes)).save_pretrained(folder)
    return folder


def make_samples(count: int, seed: int = 0) -> list[TrainSample]:
    """Prompts of 1 to 6 tokens and completions of 1 to 12, behaviour logprobs near those of a random model."""
    draw = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        length = int(draw.integers(1, 13))
        samples.append(
            TrainSample(
                prompt_P=draw.integers(0, VOCABULARY, int(draw.integers(1, 7))),
                tokens_C=draw.integers(0, VOCABULARY, length),
                logprobs_C=draw.uniform(-5.0, -2.5, length).astype(np.float32),
                mask_C=(draw.random(length) < 0.9).astype(np.uint8),
                lags_C=draw.integers(0, 3, length),
                advantage=float(draw.normal()),
            )
        )
    return samples


def make_learner(
    model: Path, group: RankGroup, *, temperature: float = 1.0, dtype: str = "float32", **trainer: Any
) -> Learner:
    checkpointing = trainer.pop("activation_checkpointing", False)
    loss: LossConfig = trainer.pop("loss", DppoTv())
    return Learner(
        ModelConfig(path=str(model), dtype=dtype, activation_checkpointing=checkpointing),  # type: ignore[arg-type]
        TrainerConfig(**{"learning_rate": 1e-2, "warmup_steps": 0} | trainer),
        loss,
        temperature=temperature,
        group=group,
        device=CPU,
        max_tokens=16,
    )


def share(samples: list[TrainSample], limit: int, group: RankGroup) -> tuple[list[MicroBatch], Totals]:
    """This rank's micro-batches, and the totals of all."""
    return pack(samples, limit, group.size)[group.rank], totals_of(samples)


def save_checkpoint(
    store: ObjectStore, group: RankGroup, learner: Learner, progress: Progress, parent: str = ""
) -> Checkpoint:
    """Collective: what the trainer does in the background, at once."""
    rows = learner.rows()
    snapshot = Snapshot(rows)
    snapshot.take(rows)
    written = checkpoints.write_rank(store, checkpoints.name_of(progress), group.rank, snapshot)
    tables = [each.decode() for each in group.gather(written.encode())]
    made = b""
    if group.rank == 0:
        made = msgspec.json.encode(
            checkpoints.commit(
                store, progress, tables, fingerprint="f", parent=parent, adapters=learner.adapters
            )
        )
    return msgspec.json.decode(group.broadcast(made), type=Checkpoint)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Whole gradients by name. Collective."""
    return {
        name: p.grad.full_tensor().clone() for name, p in learner.parameters().items() if p.grad is not None
    }


def on_ranks(function: Callable[..., None], ranks: int, *args: object) -> None:
    """`function(group, *args)` on `ranks` ranks."""
    as_ranks(_in_group, ranks, function, *args)


def _in_group(function: Callable[..., None], *args: object) -> None:
    with rank_group(CPU, 60.0) as group:
        function(group, *args)
