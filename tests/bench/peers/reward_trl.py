"""TRL's GRPOTrainer on the reverse task, with its own generation, until the held-out reward is reached.

    python -m tests.bench.peers.reward_trl ARGUMENTS RESULT      (with an interpreter that has trl)

ARGUMENTS: model, environment (its arguments), slow, groups, group, max_tokens, learning_rate, warmup_steps,
clip_norm, threads, goal, eval_every, eval_prompts, steps, limit_s, seed.

The clock begins with the first step and stands still while the held-out reward is measured. One optimizer step per
generated batch and the whole batch in one pass, which is the fastest on this machine; rewards are an async function
that scores all samples at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from async_rl.envs.reverse import Reverse, ReverseArgs
from tests.bench.peers.slow import latency_s
from workers.tiny_model import END, PAD
from workers.warm_up import Task, sample


class Watch(TrainerCallback):  # type: ignore[misc]
    """Measures every so many steps, and ends the training at the goal or at the limit."""

    def __init__(self, asked: dict[str, Any], task: Task) -> None:
        self._asked, self._task = asked, task
        self.points: list[tuple[float, float]] = []
        self.steps = 0
        self._measuring = 0.0
        self._began = 0.0

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.points.append((0.0, self._reward(model)))
        self._measuring, self._began = 0.0, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps = state.global_step
        elapsed = time.monotonic() - self._began - self._measuring
        if self.steps % self._asked["eval_every"] == 0:
            began = time.monotonic()
            self.points.append((elapsed, self._reward(model)))
            self._measuring += time.monotonic() - began
            control.should_training_stop = self.points[-1][1] >= self._asked["goal"]
        control.should_training_stop |= elapsed > self._asked["limit_s"]

    @torch.no_grad()
    def _reward(self, model: Any) -> float:
        prompts = self._task.prompts("eval", 0, self._asked["eval_prompts"])
        source = torch.Generator().manual_seed(0)
        ids = self._task.prompt_ids(prompts)
        model.eval()
        drawn = sample(model, ids, self._asked["max_tokens"], END, PAD, source)
        model.train()
        rewards = self._task.rewards(prompts, drawn)
        return sum(rewards) / len(rewards)


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked["threads"])
    environment = Reverse(ReverseArgs(**asked["environment"]))
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    watch = Watch(asked, Task(environment, tokenizer, END, PAD))
    prompts = [environment.prompt("train", ordinal) for ordinal in range(asked["groups"] * asked["steps"])]

    async def judge(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        async def one(prompt: Any, completion: Any, answer: str) -> float:
            text = completion[0]["content"]
            if asked["slow"]:
                await asyncio.sleep(latency_s(prompt[-1]["content"], text))
            return await environment.reward(environment_prompt(prompt, answer), text)

        return list(await asyncio.gather(*map(one, prompts, completions, answer)))

    trainer = trl.GRPOTrainer(
        model=asked["model"],
        args=config(asked),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": m.role, "content": m.content} for m in p.messages], "answer": p.answer}
                for p in prompts
            ]
        ),
        processing_class=tokenizer,
        reward_funcs=judge,
        callbacks=[watch],
    )
    trainer.train()
    seconds = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    return {
        "points": watch.points,
        "steps": watch.steps,
        "train_step_s": seconds,
        "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def environment_prompt(messages: list[dict[str, str]], answer: str) -> Any:
    from async_rl.wire import Message, Prompt

    return Prompt(messages=tuple(Message(m["role"], m["content"]) for m in messages), answer=answer)


def config(asked: dict[str, Any]) -> Any:
    return trl.GRPOConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=asked["groups"] * asked["group"],
        num_generations=asked["group"],
        max_completion_length=asked["max_tokens"],
        max_steps=asked["steps"],
        seed=asked["seed"],
        learning_rate=asked["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=asked["warmup_steps"],
        max_grad_norm=asked["clip_norm"],
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
