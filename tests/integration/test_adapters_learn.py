"""A whole run in one process (tests/bench/simulated.py) learns, with all weights trained and with adapters alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.algo.losses import DppoTv
from async_rl.envs import EnvironmentConfig
from async_rl.envs.base import Split
from async_rl.wire import Message, Prompt
from tests.bench.simulated import Settings, Simulated
from tests.learner_support import CPU
from workers.process_group import rank_group


class Letters:
    """The reward is the share of lower-case letters: a model that knows nothing is right now and then."""

    name = "letters"
    reward_range = (0.0, 1.0)

    def prompt(self, split: Split, ordinal: int) -> Prompt:
        return Prompt((Message("user", f"{split[0]}{ordinal}"),), "")

    async def reward(self, prompt: Prompt, completion: str) -> float:
        return sum("a" <= letter <= "z" for letter in completion) / max(len(completion), 1)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("lora_rank", "learning_rate", "count"), [(0, 3e-4, 20), (16, 1e-3, 30)], ids=["full", "adapters"]
)
def test_a_run_learns(tiny_model: Path, lora_rank: int, learning_rate: float, count: int):
    settings = Settings(
        tiny_model,
        EnvironmentConfig(f"{__name__}:Letters"),
        DppoTv(),
        max_lag=2,
        seed=1,
        steps=count,
        learning_rate=learning_rate,
        lora_rank=lora_rank,
    )
    with rank_group(CPU, 60.0) as group:
        run = Simulated(settings, group)
        trained = run.learner.rows()
        assert all(".lora_" in name for name in trained) == bool(lora_rank)
        before = run.held_out(0)
        steps = list(run.run())
        after = run.held_out(0)
    assert len(steps) == count and max(done.lag_max for done in steps) == 2
    assert before < 0.4 and after > before + 0.2, (before, after)
