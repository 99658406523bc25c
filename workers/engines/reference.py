"""A small engine on plain transformers: for tests, and for platforms without vLLM. Same protocol, same promises.

Every step generates one token for each active sequence, in one batch; sequences join and leave between steps.
The forward passes run in a thread of their own. An update waits for the step in progress, loads the weights and
computes the KV cache of the running sequences anew, so that what they sample next is the new policy's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from async_rl.errors import AsyncRLError, EngineError
from async_rl.log import get_logger
from workers.compute_type import engine_dtype
from workers.engines.base import Completion, EngineLoad, Update
from workers.engines.model_files import longest_sequence, stop_tokens
from workers.engines.shards import Table, check_same_model, find_shards, read_table
from workers.engines.spans import version_spans
from workers.file_names import find_names
from workers.packed_attention import caps_scores
from workers.pretrained import load_causal_lm
from workers.rollout_settings import RolloutConfig, seats

__all__ = ["ReferenceEngine"]

log = get_logger(__name__)

ONE_THREAD_BELOW = 20_000_000
"""Parameters. A step of a smaller model is over before a second thread has its share of it; on cores that others
use too, waiting for that thread made a step of a 1M model 30 times longer."""


class _Sequence:
    def __init__(
        self, prompt: list[int], seed: int, temperature: float, max_tokens: int, device: torch.device
    ) -> None:
        self.prompt = prompt
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.generator = torch.Generator("cpu").manual_seed(seed & ((1 << 63) - 1))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.starts: list[tuple[int, int]] = []  # (version, tokens it began at)
        self.finish = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def left(self) -> bool:
        """Finished, or nobody waits for it any more."""
        return bool(self.finish) or self.done.done()

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


class ReferenceEngine:
    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._version = -1
        self._max_model_len = 0
        self._model: Any = None
        self._table: Table = {}
        self._tensors: dict[str, torch.Tensor] = {}  # of the model, by the names of its files
        self._stops: frozenset[int] = frozenset()
        self._seats = seats(config, on_cpu=not torch.cuda.is_available())
        self._waiting: deque[_Sequence] = deque()
        self._by_name: dict[str, _Sequence] = {}
        self._batch: _Batch | None = None
        self._tokens_done = 0
        self._failure = ""
        self._work = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference")

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def failed(self) -> str:
        return self._failure

    async def start(self, model_dir: Path, version: int) -> None:
        self._table = read_table(find_shards(model_dir))
        self._stops = stop_tokens(model_dir)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._max_model_len = longest_sequence(model_dir, self.config.max_model_len, device.type == "cpu")
        self._model = await self._in_thread(self._load, model_dir, device)
        self._batch = _Batch(self._model, self._stops, self._max_model_len)
        self._version = version
        self._driver = asyncio.create_task(self._drive())

    def _load(self, model_dir: Path, device: torch.device) -> Any:
        dtype = engine_dtype(self.config.dtype, on_cpu=device.type == "cpu")
        try:
            model = load_causal_lm(model_dir, dtype=dtype, attention=None)
            if caps_scores(model):
                model.set_attn_implementation("eager")
            names = find_names(model, model_dir)
        except AsyncRLError:
            raise
        except Exception as error:
            raise EngineError(f"the model in {model_dir} can't be loaded: {error}") from error
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = (
                tensor.data.clone()
            )  # from_pretrained maps the files, and the next delta changes them
        if sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD_BELOW:
            torch.set_num_threads(1)  # of the engine's thread, in which all of this runs
        model.to(device).eval().requires_grad_(False)
        self._tensors = names.views(model)
        return model

    async def generate(
        self, prompt_ids: list[int], *, seed: int, temperature: float, max_tokens: int, request_id: str
    ) -> Completion:
        if self._failure or self._model is None:
            raise EngineError(f"request {request_id}: {self._failure or 'the engine was not started'}")
        if not 0 < len(prompt_ids) < self._max_model_len:
            raise EngineError(
                f"request {request_id}: a prompt of {len(prompt_ids)} tokens, with one to generate the limit is "
                f"{self._max_model_len}"
            )
        sequence = _Sequence(list(prompt_ids), seed, temperature, max_tokens, self._model.device)
        self._by_name[request_id] = sequence
        self._waiting.append(sequence)
        self._work.set()
        try:
            await sequence.done
        finally:  # cancelled: the future is, too, and the next step leaves the sequence out
            del self._by_name[request_id]
        self._tokens_done += len(sequence.tokens)
        return Completion(
            tokens=np.asarray(sequence.tokens, np.int32),
            logprobs=np.asarray(sequence.logprobs, np.float32),
            spans=version_spans(sequence.starts, len(sequence.tokens)),
            finish=sequence.finish,
        )

    def progress(self, request_id: str) -> int:
        sequence = self._by_name.get(request_id)
        return len(sequence.tokens) if sequence else 0

    async def update(self, version: int, shards: list[Path]) -> Update:
        if version <= self._version:
            raise EngineError(f"version {version} can't follow version {self._version}: versions only grow")
        check_same_model(self._table, await asyncio.to_thread(read_table, shards), f"version {version}")
        async with self._between_steps:
            began = time.monotonic()
            try:
                await self._in_thread(self._swap, shards)
            except Exception as error:
                # Weights half of one version and half of another must not sample a single token.
                self._fail(f"the swap to version {version} failed: {type(error).__name__}: {error}")
                raise EngineError(self._failure, hint="restart the worker") from error
            self._version = version
            assert self._batch is not None
            for sequence in self._batch.sequences:
                sequence.starts.append((version, len(sequence.tokens)))
            return Update(version, time.monotonic() - began)

    @torch.inference_mode()
    def _swap(self, shards: list[Path]) -> None:
        for path in shards:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    self._tensors[name].copy_(file.get_tensor(name))
        assert self._batch is not None
        self._batch.forget()

    async def _drive(self) -> None:
        """Waits for: a sequence to generate. Ends with the engine; an error in a step ends it for everybody."""
        assert self._batch is not None
        while True:
            await self._work.wait()
            async with self._between_steps:
                self._join()
                if not self._batch.sequences:
                    self._work.clear()
                    continue
                try:
                    await self._in_thread(self._batch.step)
                except Exception as error:  # noqa: BLE001  (kept as `failed`, and raised to every request)
                    self._fail(f"{type(error).__name__}: {error}")
                    return
            for sequence in self._batch.sequences:
                if sequence.finish and not sequence.done.done():
                    sequence.done.set_result(None)

    def _join(self) -> None:
        """Those that have left make room for those that wait."""
        assert self._batch is not None
        self._batch.drop_left()
        while self._waiting and len(self._batch.sequences) < self._seats:
            sequence = self._waiting.popleft()
            if not sequence.left:
                sequence.starts = [(self._version, 0)]
                self._batch.sequences.append(sequence)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        for sequence in self._by_name.values():
            if not sequence.done.done():
                sequence.done.set_exception(EngineError(f"the reference engine failed: {reason}"))

    def load(self) -> EngineLoad:
        running = len(self._by_name) - len(self._waiting)
        tokens = self._tokens_done + sum(len(sequence.tokens) for sequence in self._by_name.values())
        return EngineLoad(max(running, 0), len(self._waiting), tokens, self._seats)

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver
        if not self._failure:
            self._fail("the engine is closed")
        self._thread.shutdown(wait=True)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        """In the engine's thread. Awaited to the end even when cancelled: the model must not be in two hands."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


class _Batch:
    """The active sequences and their KV cache, left-padded: row i of the cache belongs to sequence i.

    Rows at the end that the cache does not have yet are new; they are prefilled with the next step.
    """

    def __init__(self, model: Any, stops: frozenset[int], max_model_len: int) -> None:
        self.model = model
        self.stops = stops
        self.max_model_len = max_model_len
        self.sequences: list[_Sequence] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values: [B, heads, S, D]
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [B, S], 0 where padded

    def forget(self) -> None:
        """The cache is of old weights: the next step computes all of it anew."""
        self._layers = []
        self._mask = self._mask[:0, :0]

    def drop_left(self) -> None:
        stay = [row for row, sequence in enumerate(self.sequences) if not sequence.left]
        if len(stay) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in stay]
        rows = torch.tensor([row for row in stay if row < len(self._mask)], device=self._mask.device)
        if not len(rows):
            return self.forget()
        self._mask = self._mask[rows]
        padding = int((self._mask.cumsum(1) == 0).sum(1).min())  # columns that are padding in every row
        self._mask = self._mask[:, padding:]
        self._layers = [(k[rows, :, padding:], v[rows, :, padding:]) for k, v in self._layers]

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every sequence."""
        old, new = self.sequences[: len(self._mask)], self.sequences[len(self._mask) :]
        logits_BV = [self._decode(old)] if old else []
        if new:
            logits_BV.append(self._prefill(new))
        self._sample(torch.cat(logits_BV).float().cpu())

    def _decode(self, sequences: list[_Sequence]) -> torch.Tensor:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        last = torch.tensor([[sequence.ids[-1]] for sequence in sequences], device=self._mask.device)
        logits, self._layers = self._forward(last, self._mask, self._layers)
        return logits

    def _prefill(self, sequences: list[_Sequence]) -> torch.Tensor:
        longest = max(len(sequence.ids) for sequence in sequences)
        padded = [longest - len(sequence.ids) for sequence in sequences]
        device = self._mask.device
        ids = torch.tensor([[0] * n + s.ids for n, s in zip(padded, sequences, strict=True)], device=device)
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padded], device=device)
        logits, layers = self._forward(ids, mask, [])
        width = max(self._mask.shape[1], longest)
        self._mask = torch.cat([_widen(self._mask, width), _widen(mask, width)])
        if self._layers:
            layers = [
                (
                    torch.cat([_widen(k, width, 2), _widen(a, width, 2)]),
                    torch.cat([_widen(v, width, 2), _widen(b, width, 2)]),
                )
                for (k, v), (a, b) in zip(self._layers, layers, strict=True)
            ]
        self._layers = layers
        return logits

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Last logits [B, V], and the cache with `ids` [B, T] added; `mask` [B, S + T] covers both."""
        from transformers import DynamicCache

        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=DynamicCache(layers) if layers else DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    def _sample(self, logits_BV: torch.Tensor) -> None:
        """Draw one token per row with its sequence's own generator: what others do cannot change the draw."""
        temperature_B = torch.tensor([sequence.temperature for sequence in self.sequences])
        logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], 1)
        probs_BV = logprobs_BV.exp()
        tokens_B = torch.cat(
            [
                torch.multinomial(probs_V, 1, generator=sequence.generator)
                for probs_V, sequence in zip(probs_BV, self.sequences, strict=True)
            ]
        )
        logprobs_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
        for sequence, token, logprob in zip(
            self.sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in self.stops:
                sequence.finish = "stop"
            elif len(sequence.tokens) >= sequence.max_tokens or len(sequence.ids) >= self.max_model_len:
                sequence.finish = "length"


def _widen(tensor: torch.Tensor, width: int, dim: int = 1) -> torch.Tensor:
    """Padded with zeros at the front of `dim` to `width`."""
    after = [0, 0] * (tensor.dim() - 1 - dim)
    return torch.nn.functional.pad(tensor, (*after, width - tensor.shape[dim], 0))
