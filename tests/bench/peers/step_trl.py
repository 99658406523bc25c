"""The optimisation step of TRL's GRPOTrainer, measured: its own training loop, padding, loss and optimizer.

    python -m tests.bench.peers.step_trl ARGUMENTS RESULT      (with an interpreter that has trl)

ARGUMENTS: model, samples, threads, batch (samples per micro-batch), checkpointing, compact, steps, gradients (a file,
or nothing).

Only generation is replaced, through the trainer's own door for that (`rollout_func`). Where the time of a step is
taken, generation, rewards and the padding of the batch are left out. The settings are TRL's, but for those that must
be like ours (no clipping in effect, the learning rate, advantages that are not divided by the deviation, no logging
service), float32 (this is a CPU without bfloat16 instructions), and those that are measured.

compact: on a GPU, TRL's head scores the completions' tokens only, elsewhere all positions, padding too. This makes it
do so here as well.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from tests.bench.peers import memory
from tests.bench.peers.samples import load


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times of the optimizer steps, the base of memory after the first, and the first one's gradients."""

    def __init__(self, gradients: str) -> None:
        self.gradients = gradients
        self.times: list[float] = []
        self.cpu_s: list[float] = []
        self.base = 0
        self.prepared = self.cpu_prepared = 0.0
        self._began = self._cpu_began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.prepared = self.cpu_prepared = 0.0
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if not self.times and self.gradients:
            from safetensors.torch import save_file

            save_file({name: p.grad for name, p in model.named_parameters()}, self.gradients)

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.times.append(time.perf_counter() - self._began - self.prepared)
        self.cpu_s.append(time.process_time() - self._cpu_began - self.cpu_prepared)
        if len(self.times) == 1:
            model.zero_grad(set_to_none=True)
            self.base = memory.base_bytes()


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked["threads"])
    samples = load(Path(asked["samples"]))
    pairs = samples.pairs()
    watch = Watch(asked["gradients"])
    if asked["compact"]:
        trl.trainer.utils._use_triton = lambda device: True

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.process_time()
            try:
                return super()._generate_and_score_completions(inputs)
            finally:
                watch.prepared += time.perf_counter() - began
                watch.cpu_prepared += time.process_time() - cpu_began

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [prompt.tolist() for prompt, _ in pairs],
            "completion_ids": [completion.tolist() for _, completion in pairs],
            "logprobs": None,
            "score": samples.rewards_S.tolist(),
        }

    def reward(completions: list[str], score: list[float], **_: Any) -> list[float]:
        return score

    trainer = Trainer(
        model=asked["model"],
        args=config(asked, len(pairs), samples.group),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(pairs)}),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=reward,
        rollout_func=rollouts,
        callbacks=[watch],
    )
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trainer.train()
    peak = memory.field_bytes("VmHWM")
    first = next(row for row in trainer.state.log_history if "loss" in row)
    return {
        "times": watch.times[1:],
        "cpu_s": watch.cpu_s[1:],
        "loss": first["loss"],
        "micro_batches": len(pairs) // asked["batch"],
        "base": watch.base,
        "peak": peak,
        "above": peak - watch.base - 4 * parameters,
        "parameters": parameters,
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def config(asked: dict[str, Any], count: int, group: int) -> Any:
    return trl.GRPOConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=asked["checkpointing"],
        per_device_train_batch_size=asked["batch"],
        gradient_accumulation_steps=count // asked["batch"],
        num_generations=group,
        max_completion_length=4096,
        max_steps=asked["steps"] + 1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        adam_beta2=0.95,
        beta=0.0,
        scale_rewards="none",
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
