"""Our optimisation step, measured: Learner.forward_backward and optimizer_step on packed micro-batches.

    python -m tests.bench.peers.step_ours ARGUMENTS RESULT

ARGUMENTS: model, samples, threads, microbatch_tokens, checkpointing, steps, gradients (a file, or nothing).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.algo.advantages import group_advantages
from async_rl.algo.losses import DppoTv, totals_of
from async_rl.algo.packing import TrainSample, pack
from tests.bench.peers import memory
from tests.bench.peers.samples import Samples, load
from workers.learner import Learner
from workers.process_group import rank_group
from workers.settings import ModelConfig, TrainerConfig

CPU = torch.device("cpu")
COLLECTIVE_S = 60.0


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(asked["threads"])
    samples = load(Path(asked["samples"]))
    model = ModelConfig(path=asked["model"], activation_checkpointing=asked["checkpointing"])
    # The rate of a real run: so small that the policy of the last step is still the one of the first.
    trainer = TrainerConfig(learning_rate=1e-6, warmup_steps=0, clip_norm=1e9)
    with rank_group(CPU, COLLECTIVE_S) as group:
        learner = Learner(model, trainer, DppoTv(), temperature=1.0, group=group, device=CPU)
        parameters = sum(p.numel() for p in learner.parameters().values())
        limit = learner.row_tokens(asked["microbatch_tokens"])
        batch = on_policy(learner, train_samples(samples), limit)
        times: list[float] = []
        cpu_s: list[float] = []
        rows = 0
        base, loss = 0, 0.0
        for step in range(asked["steps"] + 1):  # the first makes what is made once
            began, cpu_began = time.perf_counter(), time.process_time()
            rows_of_step = pack(batch, limit, 1)[0]
            stats = learner.forward_backward(rows_of_step, totals_of(batch))
            if step == 0 and asked["gradients"]:
                write_gradients(learner, Path(asked["gradients"]))
            assert learner.optimizer_step(stats)
            times.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - cpu_began)
            if step == 0:
                loss, rows = stats.loss, len(rows_of_step)
                base = memory.base_bytes()
        peak = memory.field_bytes("VmHWM")
    return {
        "times": times[1:],
        "cpu_s": cpu_s[1:],
        "loss": loss,
        "micro_batches": rows,
        "base": base,
        "peak": peak,
        "above": peak - base - 4 * parameters,
        "parameters": parameters,
        "versions": {"torch": torch.__version__},
    }


def train_samples(samples: Samples) -> list[TrainSample]:
    rewards = samples.rewards_S.reshape(-1, samples.group)
    advantages = np.concatenate([group_advantages(row) for row in rewards.tolist()]).tolist()
    return [
        TrainSample(
            prompt_P=prompt,
            tokens_C=completion,
            logprobs_C=np.zeros(len(completion), np.float32),
            mask_C=np.ones(len(completion), np.uint8),
            lags_C=np.zeros(len(completion), np.int64),
            advantage=advantage,
        )
        for (prompt, completion), advantage in zip(samples.pairs(), advantages, strict=True)
    ]


@torch.no_grad()
def on_policy(learner: Learner, batch: list[TrainSample], limit: int) -> list[TrainSample]:
    """With the policy's own logprobs as those of behaviour."""
    result = []
    for sample in batch:
        row = pack([sample], limit, 1)[0][0]
        logprobs_K = learner.logprobs(row)[0].cpu().numpy()
        result.append(
            TrainSample(
                sample.prompt_P, sample.tokens_C, logprobs_K, sample.mask_C, sample.lags_C, sample.advantage
            )
        )
    return result


def write_gradients(learner: Learner, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: p.grad.full_tensor() for name, p in learner.parameters().items()}, path)  # type: ignore[union-attr]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
