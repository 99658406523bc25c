"""The tiny model's warm-up: supervised steps until it is right now and then, and no further.

The reward rises steeply once the model has found the trick, from 0.1 to 0.9 within some dozens of steps, so
a fixed number of steps would end anywhere. Therefore the held-out reward is measured during the warm-up,
sampled at temperature 1 as the run will sample; where a stretch of steps jumps over the goal, it is taken
back and done again with half the learning rate.

Where a task asks for it, the warm-up has two parts: flawless demonstrations until the model knows the task,
then blurred ones, in which most letters are wrong at random as in very poor data, until it is unsure enough.
A policy that knows what is right, and is unsure of it, is what reinforcement can work on. One that was merely
stopped half-way through flawless demonstrations is sure of the half it knows and random in the rest: its
entropy collapses before the rest is found, and the reward settles at about 0.75.

Legend: B samples, P prompt tokens (padded on the left), T completion tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from async_rl.envs import Environment, Split
from async_rl.errors import TrainingError
from async_rl.wire import Prompt

__all__ = ["GOAL", "Measure", "Task", "held_out_reward", "sample", "warm_up"]

GOAL = (0.34, 0.42)
"""Where the held-out reward may end, inside the promised 0.30 to 0.45 by twice the error of one measurement
(256 prompts: 0.02)."""

KNOWN = (0.92, 1.0)
"""Where the first of two parts ends. At 0.8 the rest is still to be found, and the run takes three times as
long."""

BATCH = 128
LEARNING_RATE = 1e-3
BLUR_LEARNING_RATE = 2e-4
"""Doubt is learned much faster than a skill."""
RAMP_STEPS = 20
MEASURE_EVERY = 5
MEASURE_PROMPTS = 256
MIN_LEARNING_RATE = 1e-5
"""Halved below this, the goal has been jumped over seven times: something else is wrong."""


class Measure(Struct, frozen=True):
    """How far the warm-up is."""

    step: int
    limit: int  # steps
    loss: float  # nats per token
    reward: float  # held out
    blurred: bool = False  # in the part whose demonstrations are wrong on purpose


class Task:
    """An environment seen through a tokenizer: token ids in, rewards out."""

    def __init__(
        self, environment: Environment, tokenizer: Any, end: int, pad: int, blur: float = 0.0
    ) -> None:
        """`blur`: the share of a demonstration's tokens that is replaced by random ones in the second part of
        the warm-up; 0: there is only one."""
        self.environment = environment
        self.blur = blur
        self.tokenizer = tokenizer
        self.end = end
        self.pad = pad

    def prompts(self, split: Split, first: int, count: int) -> list[Prompt]:
        return [self.environment.prompt(split, first + i) for i in range(count)]

    def prompt_ids(self, prompts: list[Prompt]) -> list[list[int]]:
        """Through the chat template, as the rollout worker does it."""
        chats = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in prompts]
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return self._ids(texts)

    def answer_ids(self, prompts: list[Prompt]) -> list[list[int]]:
        return [[*ids, self.end] for ids in self._ids([prompt.answer for prompt in prompts])]

    def demonstrations(self, prompts: list[Prompt], seed: int, blur: float) -> list[list[int]]:
        """Answers, blurred by tokens that occur in them; the end token stays."""
        answers = self.answer_ids(prompts)
        draws = random.Random(seed)
        tokens = sorted({token for answer in answers for token in answer[:-1]})
        return [
            [draws.choice(tokens) if draws.random() < blur else token for token in answer[:-1]]
            + answer[-1:]
            for answer in answers
        ]

    def rewards(self, prompts: list[Prompt], completions: list[list[int]]) -> list[float]:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]

        async def score() -> list[float]:
            return [await self.environment.reward(p, text) for p, text in zip(prompts, texts, strict=True)]

        return asyncio.run(score())

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])


def warm_up(model: Any, task: Task, limit: int, on_measure: Callable[[Measure], None]) -> int:
    """Train `model` (float32, in place) until its held-out reward lies in GOAL; the steps it took.

    Raises TrainingError after `limit` steps.
    """
    warming = _WarmUp(model, task, limit, on_measure)
    if task.blur:
        warming.approach(KNOWN, LEARNING_RATE, blur=0.0)
        warming.approach(GOAL, BLUR_LEARNING_RATE, blur=task.blur)
    else:
        warming.approach(GOAL, LEARNING_RATE, blur=0.0)
    return warming.step


class _WarmUp:
    def __init__(self, model: Any, task: Task, limit: int, on_measure: Callable[[Measure], None]) -> None:
        self._model, self._task, self._limit, self._on_measure = model, task, limit, on_measure
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.step = 0

    def approach(self, goal: tuple[float, float], learning_rate: float, *, blur: float) -> None:
        """Steps until the held-out reward lies in `goal`; it rises without blur, and falls with it."""
        before, reward = _state(self._model, self._optimizer), 0.0
        while self.step < self._limit:
            reward = self._stretch(learning_rate, blur)
            if goal[0] <= reward <= goal[1]:
                return
            if (reward > goal[1]) == bool(blur):  # on this side of the goal still
                before = _state(self._model, self._optimizer)
            elif (learning_rate := learning_rate / 2) < MIN_LEARNING_RATE:
                break
            else:
                _restore(self._model, self._optimizer, before)
        raise TrainingError(
            f"after {self.step} steps of warm-up the held-out reward is {reward:.2f}, "
            f"not {goal[0]} to {goal[1]}",
            hint="allow more --steps, or take another --seed",
        )

    def _stretch(self, learning_rate: float, blur: float) -> float:
        """MEASURE_EVERY steps; the held-out reward after them."""
        loss = 0.0
        for _ in range(min(MEASURE_EVERY, self._limit - self.step)):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (self.step + 1) / RAMP_STEPS)
            loss = _supervised_step(
                self._model, self._task, self._optimizer, first=self.step * BATCH, blur=blur
            )
            self.step += 1
        reward = held_out_reward(self._model, self._task)
        self._on_measure(Measure(self.step, self._limit, loss, reward, blurred=blur > 0))
        return reward


def held_out_reward(model: Any, task: Task) -> float:
    """Mean reward on the first held-out prompts, one sample each at temperature 1; always the same
    draws."""
    prompts = task.prompts("eval", 0, MEASURE_PROMPTS)
    longest = max(map(len, task.answer_ids(prompts)))
    generator = torch.Generator().manual_seed(0)
    completions = sample(model, task.prompt_ids(prompts), longest + 1, task.end, task.pad, generator)
    return sum(task.rewards(prompts, completions)) / len(prompts)


@torch.inference_mode()
def sample(
    model: Any, prompts: list[list[int]], max_tokens: int, end: int, pad: int, generator: torch.Generator
) -> list[list[int]]:
    """One completion per prompt at temperature 1, up to the end token or `max_tokens`, in one batch."""
    longest = max(map(len, prompts))
    ids_BP = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
    mask_BP = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    inputs = {"input_ids": ids_BP, "position_ids": (mask_BP.cumsum(1) - 1).clamp(min=0)}
    cache, drawn = None, []
    for _ in range(max_tokens):
        output = model(
            **inputs, attention_mask=mask_BP, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        probabilities_BV = output.logits[:, -1].float().softmax(-1)
        drawn.append(torch.multinomial(probabilities_BV, 1, generator=generator))
        mask_BP = torch.cat([mask_BP, torch.ones_like(drawn[-1])], dim=1)
        inputs = {"input_ids": drawn[-1], "position_ids": mask_BP.sum(1, keepdim=True) - 1}
    rows = torch.cat(drawn, dim=1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def _supervised_step(
    model: Any, task: Task, optimizer: torch.optim.Optimizer, *, first: int, blur: float
) -> float:
    """One step on demonstrations for BATCH training prompts; the loss before it, in nats per answer
    token."""
    prompts = task.prompts("train", first, BATCH)
    ids_BT, target_BT = _padded(
        task.prompt_ids(prompts), task.demonstrations(prompts, first, blur), task.pad
    )
    logits_BTV = model(input_ids=ids_BT[:, :-1]).logits.float()
    # Padding is on the right and attention is causal, so it needs no mask: -100 leaves it out of the loss.
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _padded(prompts: list[list[int]], answers: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets (the ids of the answer, -100 elsewhere), [B, T] each."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    ids = [row + [pad] * (longest - len(row)) for row in rows]
    targets = [
        [-100] * len(prompt) + answer + [-100] * (longest - len(prompt) - len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(targets)


def _state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def _restore(
    model: Any, optimizer: torch.optim.Optimizer, state: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    model.load_state_dict(state[0])
    optimizer.load_state_dict(copy.deepcopy(state[1]))
