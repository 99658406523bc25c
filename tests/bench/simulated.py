"""A whole run in one process: the orchestrator's own control decides what is leased, buffered, dropped and trained,
the learner is the trainer's own, and a worker that always serves the newest version samples with plain torch.

Nothing takes time here but the computing: a worker that has leases fulfils them at once. So the buffer is always as
full as admission allows, and in the steady state every group is trained max_lag steps after it was sampled: the lag
that a run of real processes has at worst, all the time.

Legend: B samples, P prompt tokens (padded on the left), C completion tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from async_rl import wire
from async_rl.algo.losses import LossConfig
from async_rl.envs import EnvironmentConfig, make_environment
from async_rl.wire import Array, Group, Lease, Sample
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.control import Control
from orchestrator.spool import MemoryJournal
from workers.batches import Lineage, prepare
from workers.learner import Learner, StepStats
from workers.process_group import RankGroup
from workers.settings import ModelConfig, TrainerConfig
from workers.tiny_model import END, PAD, new_tokenizer
from workers.updates import train_batch
from workers.warm_up import Task, sample

__all__ = ["Settings", "Simulated", "StepDone"]

TRAINER, WORKER = b"trainer:1", b"worker:1"


class Settings(NamedTuple):
    model: Path
    environment: EnvironmentConfig
    loss: LossConfig
    max_lag: int
    seed: int
    steps: int
    learning_rate: float
    batch_groups: int = 8
    group_size: int = 8
    max_tokens: int = 6
    eval_prompts: int = 128
    lora_rank: int = 0


class StepDone(NamedTuple):
    step: int
    stats: StepStats
    lag: float  # mean over the samples
    lag_max: int
    reward: float  # of the samples trained


class Simulated:
    def __init__(self, settings: Settings, group: RankGroup) -> None:
        self.settings = settings
        device = torch.device("cpu")
        torch.manual_seed(settings.seed)
        self._group = group
        self._trainer = TrainerConfig(
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            warmup_steps=5,
            clip_norm=0.5,
            microbatch_tokens=1024,
        )
        self.learner = Learner(
            ModelConfig(path=str(settings.model), dtype="float32", lora_rank=settings.lora_rank),
            self._trainer,
            settings.loss,
            temperature=1.0,
            group=group,
            device=device,
            max_tokens=settings.max_tokens,
        )
        from transformers import AutoModelForCausalLM

        self._policy = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()
        self._draws = torch.Generator().manual_seed(settings.seed)
        environment = make_environment(settings.environment)
        self._task = Task(environment, new_tokenizer(), END, PAD)
        self._lineage = Lineage()
        self._mail: list[tuple[bytes, wire.AnyMessage]] = []
        self._now = 1000.0
        self._control = Control(
            environment=environment,
            environment_config=settings.environment,
            sampling=SamplingConfig(
                group_size=settings.group_size, temperature=1.0, max_tokens=settings.max_tokens
            ),
            config=OrchestratorConfig(
                batch_groups=settings.batch_groups, max_lag=settings.max_lag, straggler_hold_s=0.0
            ),
            evaluation=EvalConfig(every=0),
            seed=settings.seed,
            lease_ids=itertools.count(1),
            now=self._now,
            journal=MemoryJournal(),
        )
        self._version = -1

    def run(self) -> Iterator[StepDone]:
        self._say(TRAINER, wire.Attach(wire.PROTOCOL, "run", "model", 1, 0, 0, 0, self.learner.vocab_size))
        self._publish(0)
        self._say(WORKER, wire.Hello(wire.PROTOCOL, "worker", "here", "run", "model", 0, "simulated"))
        for step in range(self.settings.steps):
            yield self._step(step)
            self._publish(step + 1)

    def held_out(self, seed: int) -> float:
        """Mean reward of one sample per held-out prompt, by the newest version."""
        prompts = self._task.prompts("eval", 0, self.settings.eval_prompts)
        draws = torch.Generator().manual_seed(seed)
        done = sample(
            self._policy, self._task.prompt_ids(prompts), self.settings.max_tokens, END, PAD, draws
        )
        return sum(self._task.rewards(prompts, done)) / len(prompts)

    def _step(self, step: int) -> StepDone:
        self._say(TRAINER, wire.NextBatch(1, step))
        while True:
            batch = next((m for peer, m in self._mail if isinstance(m, wire.Batch)), None)
            if batch is not None:
                break
            self._work()
        self._work()  # up to the limit that admission sets, before the weights change
        self._mail.clear()
        received = wire.decode(
            wire.encode(batch), wire.MAX_BATCH_BYTES
        )  # groups leave as they lie in the spool
        assert isinstance(received, wire.Batch)
        trained = prepare(
            received,
            self._lineage,
            step=step,
            max_lag=self.settings.max_lag,
            vocab_size=self.learner.vocab_size,
        )
        updates = train_batch(self.learner, self._group, trained.samples, self._trainer, step=step)
        return StepDone(
            step,
            updates.stats,
            float(np.mean(trained.lags)),
            max(trained.lags),
            float(np.mean(trained.rewards)),
        )

    def _publish(self, step: int) -> None:
        self._lineage.committed(step, step - 1, step)
        with torch.no_grad():
            seen = {name: p.full_tensor() for name, p in self.learner.parameters().items()}
            for name, parameter in self._policy.named_parameters():
                parameter.copy_(seen[name].to(torch.bfloat16))
        self._version = step
        if step:
            self._say(TRAINER, wire.Published(1, step, step, step - 1))

    # ------------------------------------------------------------ the worker

    def _work(self) -> None:
        """Ask for leases and fulfil all of them, until there are no more."""
        self._say(WORKER, wire.Heartbeat(self._version, "serving"))
        while True:
            self._say(WORKER, wire.Credit(4 * self.settings.batch_groups, self._version))
            leases = [m for peer, m in self._mail if isinstance(m, Lease)]
            self._mail = [(peer, m) for peer, m in self._mail if not isinstance(m, Lease)]
            if not leases:
                return
            for done in self._generate(leases):
                self._say(WORKER, done)

    def _generate(self, leases: list[Lease]) -> Iterator[wire.GroupDone]:
        size = self.settings.group_size
        prompts = [lease.prompt for lease in leases]
        ids = self._task.prompt_ids(prompts)
        repeated = [each for each in ids for _ in range(size)]
        completions, logprobs = self._sample(repeated)
        rewards = self._task.rewards([p for p in prompts for _ in range(size)], completions)
        for index, lease in enumerate(leases):
            rows = range(index * size, (index + 1) * size)
            samples = tuple(self._as_sample(completions[r], logprobs[r], rewards[r]) for r in rows)
            yield wire.GroupDone(
                lease.lease,
                Group(key=lease.key, prompt=Array.of(ids[index], "<i4"), samples=samples, worker="worker"),
            )

    def _as_sample(self, ids: list[int], logprobs: list[float], reward: float) -> Sample:
        stopped = len(ids) < len(logprobs)  # the end token is a token that was sampled, and is trained
        tokens = [*ids, END] if stopped else ids
        return Sample(
            tokens=Array.of(tokens, "<i4"),
            logprobs=Array.of(logprobs[: len(tokens)], "<f4"),
            mask=Array.of([1] * len(tokens), "|u1"),
            spans=Array.of([self._version, len(tokens)], "<i4"),
            reward=reward,
            finish="stop" if stopped else "length",
        )

    @torch.inference_mode()
    def _sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """As warm_up.sample, with the logprobs of what was drawn, the end token's included."""
        longest = max(map(len, prompts))
        ids_BP = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in prompts])
        mask_BP = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        inputs = {"input_ids": ids_BP, "position_ids": (mask_BP.cumsum(1) - 1).clamp(min=0)}
        cache, drawn, chances = None, [], []
        for _ in range(self.settings.max_tokens):
            output = self._policy(
                **inputs, attention_mask=mask_BP, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            logprobs_BV = output.logits[:, -1].float().log_softmax(-1)
            drawn.append(torch.multinomial(logprobs_BV.exp(), 1, generator=self._draws))
            chances.append(logprobs_BV.gather(1, drawn[-1]))
            mask_BP = torch.cat([mask_BP, torch.ones_like(drawn[-1])], dim=1)
            inputs = {"input_ids": drawn[-1], "position_ids": mask_BP.sum(1, keepdim=True) - 1}
        rows, values = torch.cat(drawn, dim=1).tolist(), torch.cat(chances, dim=1).tolist()
        completions, kept = [], []
        for row, logprobs in zip(rows, values, strict=True):
            length = row.index(END) if END in row else len(row)
            completions.append(row[:length])
            kept.append([min(value, 0.0) for value in logprobs[: length + 1]])
        return completions, kept

    def _say(self, peer: bytes, message: wire.AnyMessage) -> None:
        self._now += 0.001
        self._mail += self._control.receive(peer, message, self._now)
