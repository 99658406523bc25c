"""What a rollout engine is, to the rollout worker. Two implementations: vLLM, and a small reference engine."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

__all__ = ["Completion", "Engine", "EngineLoad", "Update"]


class Completion(Struct, frozen=True):
    """One sample: T generated tokens, the end token included if it was reached."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], of the distribution that sampled (at its temperature)
    spans: tuple[tuple[int, int], ...]  # (policy version, tokens), in order; tokens sum to T
    finish: str  # stop | length


class EngineLoad(Struct, frozen=True):
    running: int  # sequences being generated
    queued: int  # sequences waiting
    tokens: int  # generated since the start, for tokens/s
    seats: int  # sequences that it generates at once, at most
    cache_used: float = 0.0  # share of the KV cache
    cache_tokens: int = 0  # its size; 0: it grows as it is needed
    preempted: int = 0  # sequences put out of a full cache since the start, to be computed once more


class Update(Struct, frozen=True):
    """What a change of the weights took."""

    version: int
    pause_s: float  # generation stood still for this long
    staged_s: float = 0.0  # before it, they were loaded beside those that served; 0: in the pause


class Engine(Protocol):
    """Used from a single event loop; `generate` is called concurrently, `update` by one task.

    Versions: `version` is what a request that starts now is sampled with. An update in the middle of a request
    adds a span; how many tokens the old weights produced is read inside the engine at the swap, not guessed from
    arrival times. A request never starts under a new version from cache computed under an old one.
    """

    @property
    def version(self) -> int:
        """The policy version that serves; -1 before `start`."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and completion together, in tokens. Known after `start`."""
        ...

    @property
    def failed(self) -> str:
        """Why the engine can't go on, or empty. Every running request then gets an EngineError at once."""
        ...

    async def start(self, model_dir: Path, version: int) -> None:
        """Load a Hugging Face folder that holds `version` and get ready. Raises EngineError."""
        ...

    async def generate(
        self, prompt_ids: list[int], *, seed: int, temperature: float, max_tokens: int, request_id: str
    ) -> Completion:
        """Ends at a stop token, after `max_tokens` or at `max_model_len`. Raises EngineError: for this request alone,
        or for all where `failed` says so. On cancellation the request is aborted inside the engine."""
        ...

    def progress(self, request_id: str) -> int:
        """Tokens generated so far for a running request; 0 if unknown."""
        ...

    async def update(self, version: int, shards: list[Path]) -> Update:
        """Swap the weights for the verified safetensors files in `shards`, in flight: running requests go on.

        Raises EngineError. Files of another model, older versions and unreadable files are refused before anything
        is touched; after a failure in the middle of a swap the engine has `failed`."""
        ...

    def load(self) -> EngineLoad:
        """What it is doing now."""
        ...

    async def close(self) -> None:
        """Stop, also in the middle of `start`. Requests that still run get an EngineError."""
        ...
