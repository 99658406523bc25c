"""For tests of engines and of the worker: small models whose samples tell which weights made them, what
transformers says about a completion, a trainer that only publishes, a scripted orchestrator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from async_rl.errors import Malformed
from async_rl.store import ObjectStore
from async_rl.transport.memory import MemoryNetwork
from async_rl.weights.run import RunInfo
from async_rl.wire import PROTOCOL, AnyMessage, Heartbeat, Hello, Message, Prompt, RunSettings, Welcome

T = TypeVar("T")

VOCAB, END = 61, 1
BLOCK = 32
"""Tokens per block of vLLM's prefix cache on a CPU (workers/engines/vllm_engine.py)."""


def write_model(folder: Path, seed: int, *, memoryless: bool = False, layers: int = 2) -> Path:
    """A random Qwen3, sharp enough that two seeds rarely agree. A `memoryless` one looks at its last token only
    (attention adds nothing), so what it says does not depend on who filled the KV cache."""
    import torch

    from workers.pretrained import hide_broken_media_packages

    hide_broken_media_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=END,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).to(torch.bfloat16)
    if memoryless:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


class Truth:
    """What transformers says about a policy, all by itself."""

    def __init__(self, folder: Path) -> None:
        import torch

        from workers.pretrained import load_causal_lm

        torch.set_num_threads(1)  # the models are tiny, and the cores are shared
        self._model: Any = load_causal_lm(folder, dtype=torch.bfloat16, attention="sdpa").eval()

    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """float32 [T], of `tokens` after `prompt`."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens]])
            logits = self._model(input_ids=ids).logits[0].float() / temperature
            each = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
            return each.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Let the event loop run until `condition` holds."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110  (an engine's progress is no event)
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(look(), limit_s)
    except TimeoutError:
        raise AssertionError(f"waited {limit_s} s for {what}") from None


class Trainer:
    """Publishes versions of one small model into a store, each with other weights than the one before."""

    def __init__(self, store: ObjectStore, model_dir: Path) -> None:
        import torch

        from async_rl.weights.config import WeightsConfig
        from async_rl.weights.lineage import claim
        from async_rl.weights.publisher import Publisher
        from async_rl.weights.run import ensure_run
        from workers.pretrained import load_causal_lm

        model = load_causal_lm(model_dir, dtype=torch.float32, attention="sdpa")
        self._parameters = dict(model.named_parameters())
        self.run: RunInfo = ensure_run(store, model_dir, self._parameters)
        self._publisher = Publisher(store, self.run, claim(store), self._parameters, WeightsConfig())
        self._step = 0

    def publish(self) -> int:
        import torch

        version = self._publisher.publish(self._step)
        self._publisher.flush(30.0)
        self._step += 1
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter += 0.02 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(version)
                )
        return version


class Orchestrator:
    """A scripted orchestrator: a test says what it answers, and expects what it hears."""

    def __init__(self, network: MemoryNetwork, settings: RunSettings) -> None:
        self._network, self.settings = network, settings
        self._listener = network.bind()
        self.address = self._listener.address
        self.heard: list[AnyMessage] = []  # all but heartbeats, not yet expected
        self.beat: Heartbeat | None = None  # the newest
        self.peer = b""
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            self.peer, message = await self._listener.recv()
            assert not isinstance(message, Malformed), message
            if isinstance(message, Heartbeat):
                self.beat = message
            else:
                self.heard.append(message)
            self._news.set()

    async def say(self, message: AnyMessage) -> None:
        await self._listener.send(self.peer, message)

    async def expect(self, kind: type[T], limit_s: float = 30.0) -> T:
        """The next message of a kind; what comes before it stays to be expected."""
        await self.until(
            lambda: any(isinstance(each, kind) for each in self.heard), f"a {kind.__name__}", limit_s
        )
        found = next(each for each in self.heard if isinstance(each, kind))
        self.heard.remove(found)  # type: ignore[arg-type]
        return found

    async def until(self, condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        """Until `condition` holds, looked at whenever something was heard."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(
                f"waited {limit_s} s for {what}; heard {self.heard}, {self.beat}"
            ) from None

    async def welcome(self) -> Hello:
        hello = await self.expect(Hello)
        await self.say(Welcome(PROTOCOL, hello.run, self.settings, 0))
        return hello

    async def restart(self) -> None:
        """Another life at the same address: it knows nobody."""
        await self.close()
        self._listener = self._network.bind(self.address)
        self.heard, self.beat = [], None
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._listener.close()


class Steps:
    """Lets a reference engine make as many steps as the test allows, and no more."""

    def __init__(self, engine: Any) -> None:
        self._allowed = threading.Semaphore(0)
        self._step = engine._batch.step
        engine._batch.step = self._gated
        engine._batch.stops = frozenset()  # sequences end at their limit alone

    def _gated(self) -> None:
        assert self._allowed.acquire(timeout=60.0), "the test allowed no step"
        self._step()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)


class Judge:
    """An environment for tests: `tests.rollout_support:Judge`. The reward is the share of letters; an answer of
    `raise` makes it raise."""

    name = "judge"
    reward_range = (0.0, 1.0)

    def prompt(self, split: str, ordinal: int) -> Prompt:
        return Prompt(messages=(Message("user", f"say {ordinal}"),))

    async def reward(self, prompt: Prompt, completion: str) -> float:
        if prompt.answer == "raise":
            raise RuntimeError("the judge is out of office")
        return sum(c.isalpha() for c in completion) / max(1, len(completion))
