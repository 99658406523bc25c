"""vLLM as a rollout engine: continuous batching, and weights that are swapped in flight.

An update in five moves: `PolicyExtension.policy_stage` in the worker processes, which load the shards beside the
weights that serve (on a CPU; see `staging.py`); close the gate for new requests; `pause_generation(mode="keep")`,
which returns when the step in progress is done and keeps every sequence and its KV cache; `policy_swap`, which first
counts the tokens each request has sampled and then flips to the staged weights, or loads the shards in place;
resume. Those counts are the version spans' boundaries. Arrival times could not be: outputs are still on their way
here when the engine already stands still.

The prefix cache stays on, salted with the version. A request that has sampled nothing when the weights change
(queued, or somewhere in its prefill) is aborted and submitted again under the new salt; otherwise it would start
under the new version from blocks the old one computed. One that has sampled goes on: its older tokens are its
history, and its salt is never given to a new request again.

Only this file, the extension, `vllm_staging.py` and `vllm_gauges.py` import vllm.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.errors import EngineError
from async_rl.log import get_logger
from workers.engines.base import Completion, EngineLoad, Update
from workers.engines.model_files import longest_sequence, stop_tokens
from workers.engines.shards import Table, check_same_model, find_shards, read_table
from workers.engines.spans import version_spans
from workers.engines.vllm_gauges import Gauges
from workers.pretrained import hide_broken_media_packages
from workers.rollout_settings import RolloutConfig, seats

__all__ = ["VLLMEngine"]

log = get_logger(__name__)

EXTENSION = "workers.engines.vllm_extension.PolicyExtension"

CPU_KV_CACHE_GIB = 0.5
"""Default KV cache on a CPU: 128k tokens of a 0.5B-parameter model in bfloat16, and far more of a tiny one."""

CLOSE_S = 3.0
"""What vLLM's processes get to end by themselves. They hold nothing that must be saved, and their tidying up on a
busy machine would hold up the worker's end for longer."""

STREAM_INTERVAL = 8
"""Tokens between two outputs of a request. Each output costs this process some 20 us, and all it is needed for
before the last one is `progress`; 8 keeps a lease alive and takes most of that cost away."""

STAGED_POLL_S = 0.05
"""Between two questions whether a version is staged. Each is asked between two steps of the engine."""

BROKEN_IMPORT = (
    "is it installed (pip install 'async-rl[cpu]' or 'async-rl[gpu]')? Builds of torchvision, torchaudio and "
    "torchcodec for another torch also break it, and no text model needs them: pip uninstall them"
)

SEED_MASK = (1 << 63) - 1  # torch's generators take no more


class _Request:
    """One sequence on its way: what it has sampled, and under which versions."""

    def __init__(self, version: int) -> None:
        self.begin(version)

    def begin(self, version: int) -> None:
        """Start, or start over with nothing sampled, under `version`."""
        self.attempt = f"{time.monotonic_ns():x}"
        self.starts = [(version, 0)]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stale = False  # it had sampled nothing when the weights changed: start over

    @property
    def version(self) -> int:
        return self.starts[0][0]


class VLLMEngine:
    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._version = -1
        self._max_model_len = 0
        self._llm: Any = None
        self._starting: asyncio.Future[Any] | None = None
        self._table: Table = {}
        self._stops: list[int] = []
        self._requests: dict[str, _Request] = {}  # by the id vLLM was given
        self._tokens_done = 0
        self._gauges = Gauges()
        self._failure = ""
        self.staging = config.stage == "auto"
        """Whether updates are staged: from the start on no longer where the model can't be."""
        self._said = False
        self._gate = asyncio.Event()  # closed while the weights are swapped
        self._updating = asyncio.Lock()
        # vLLM's processes are started from this thread, which lives as long as the engine: starting takes tens of
        # seconds and must not stop this event loop (the worker's heartbeats).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def failed(self) -> str:
        if not self._failure and self._llm is not None and self._llm.errored:
            self._failure = "the vLLM engine process has died"
        return self._failure

    async def start(self, model_dir: Path, version: int) -> None:
        self._table = read_table(find_shards(model_dir))
        self._stops = sorted(stop_tokens(model_dir))
        loop = asyncio.get_running_loop()
        self._starting = loop.run_in_executor(self._thread, self._start_vllm, model_dir)
        try:
            self._llm = await asyncio.wait_for(asyncio.shield(self._starting), self.config.start_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"vLLM was not ready after {self.config.start_timeout_s:.0f} s",
                hint="raise rollout.start_timeout_s for a large model",
            ) from None
        # Asked now and kept by vLLM; in the first request it would put an await between the gate and the engine.
        await self._llm.get_supported_tasks()
        await self._llm.collective_rpc("policy_protect", args=(os.getpid(),))
        if self.staging and (reason := _first(await self._llm.collective_rpc("policy_prepare"))):
            self.staging = False
            log.info("new versions are loaded while the engine stands still", why=reason)
        self._version = version
        self._gate.set()

    def _start_vllm(self, model_dir: Path) -> Any:
        os.environ.update(_environment())
        hide_broken_media_packages()
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(f"vLLM can't be imported: {error}", hint=BROKEN_IMPORT) from error
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            os.environ.update(_cpu_environment(self.config))
            if self.config.cpu_bind and self.config.tensor_parallel == 1:
                _pin_this_thread(self.config.cpu_bind)
        self._max_model_len = longest_sequence(model_dir, self.config.max_model_len, on_cpu)
        if self._failure:  # closed meanwhile
            raise EngineError(self._failure)
        try:
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**_arguments(self.config, model_dir, self._max_model_len, on_cpu)),
                stat_loggers=[self._gauges.logger()],
            )
            self._gauges.read(llm.vllm_config)
            return llm
        except Exception as error:
            raise EngineError(
                f"vLLM could not start: {type(error).__name__}: {error}",
                hint="its own log above says more; on a small machine lower rollout.max_model_len or max_sequences",
            ) from error

    async def generate(
        self, prompt_ids: list[int], *, seed: int, temperature: float, max_tokens: int, request_id: str
    ) -> Completion:
        while True:
            await self._gate.wait()
            if self.failed or self._llm is None:
                raise self._error(None, f"request {request_id}")
            # From here to vLLM's own table of requests there is no await, so that an update sees the request there
            # or does not see it at all.
            request = _Request(self._version)
            name = f"{request_id}/{request.attempt}"
            self._requests[name] = request
            try:
                finish = await self._sample(name, request, prompt_ids, seed, temperature, max_tokens)
            finally:
                del self._requests[name]
            if finish:
                self._tokens_done += len(request.tokens)
                return Completion(
                    tokens=np.asarray(request.tokens, np.int32),
                    # vLLM's log-softmax can round to a hair above 0
                    logprobs=np.minimum(np.asarray(request.logprobs, np.float32), 0.0),
                    spans=version_spans(request.starts, len(request.tokens)),
                    finish=finish,
                )

    async def _sample(
        self,
        name: str,
        request: _Request,
        prompt_ids: list[int],
        seed: int,
        temperature: float,
        max_tokens: int,
    ) -> str:
        """Run one request to its end: the finish reason, or empty where it went stale and must start over."""
        stream = self._submit(name, request.version, prompt_ids, seed, temperature, max_tokens)
        try:
            async for output in stream:
                if request.stale:
                    return ""
                part = output.outputs[0]
                request.tokens.extend(part.token_ids)
                request.logprobs.extend(part.logprobs.logprobs)
                if output.finished:
                    if part.finish_reason not in ("stop", "length"):
                        raise EngineError(f"vLLM ended request {name} with {part.finish_reason!r}")
                    return str(part.finish_reason)
        except EngineError:
            raise
        except Exception as error:
            raise self._error(error, f"request {name}") from error
        finally:
            await stream.aclose()  # aborts inside the engine what has not finished
        raise self._error(None, f"request {name}")

    def _submit(
        self, name: str, version: int, prompt_ids: list[int], seed: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Any, None]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # vLLM tells of the first token of a stream, however long the interval.
        streams = max_tokens > STREAM_INTERVAL
        stream: AsyncGenerator[Any, None] = self._llm.generate(
            tokens_input(prompt_ids, cache_salt=f"v{version}"),
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed & SEED_MASK,
                stop_token_ids=list(self._stops),
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,  # made for this request: a deep copy of it is a tenth of what submitting costs
                output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
            ),
            name,
        )
        return stream

    def progress(self, request_id: str) -> int:
        prefix = f"{request_id}/"
        return sum(len(r.tokens) for name, r in self._requests.items() if name.startswith(prefix))

    async def update(self, version: int, shards: list[Path]) -> Update:
        async with self._updating:
            if version <= self._version:
                raise EngineError(
                    f"version {version} can't follow version {self._version}: versions only grow"
                )
            check_same_model(self._table, await asyncio.to_thread(read_table, shards), f"version {version}")
            paths = [str(path) for path in shards]
            staging = self.staging
            asked = time.monotonic()
            staged = staging and await self._stage(version, paths)
            staged_s = time.monotonic() - asked if staged else 0.0
            self._gate.clear()
            began = time.monotonic()
            try:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                replies = await self._llm.collective_rpc("policy_swap", args=(version, paths))
                self._version = version
                await self._split(version, replies[0]["counts"])
                await self._llm.resume_generation()
            except Exception as error:
                # Weights half of one version and half of another must not sample a single token.
                self._failure = f"the swap to version {version} failed: {type(error).__name__}: {error}"
                for name in list(self._requests):
                    await self._abort_quietly(name)
                raise EngineError(self._failure, hint="restart the worker") from error
            finally:
                self._gate.set()
            pause_s = time.monotonic() - began
            if staged and (why := _first(reply["loaded"] for reply in replies)):
                log.warning("a staged version was loaded in the pause", version=version, why=why)
            if staging:
                await self._settle()
            return Update(version, pause_s, staged_s)

    async def _stage(self, version: int, shards: list[str]) -> bool:
        """Load `version` beside the weights that serve. False where it must be loaded in the pause.

        Raises EngineError for files that can't be read: the pause would find them no better, and has no way back.
        """
        limit_s = self.config.start_timeout_s
        try:
            states = await self._llm.collective_rpc("policy_stage", args=(version, shards))
            until = time.monotonic() + limit_s
            while not (reason := _first(state for state in states if state not in ("ready", "working"))):
                if all(state == "ready" for state in states):
                    return True
                if time.monotonic() > until:
                    reason = f"it took longer than {limit_s:.0f} s (rollout.start_timeout_s)"
                    break
                await asyncio.sleep(STAGED_POLL_S)
                states = await self._llm.collective_rpc("policy_staged", args=(version,))
        except Exception as error:
            raise self._error(error, f"the staging of version {version}") from error
        if reason.startswith("unreadable"):
            raise EngineError(
                f"version {version} can't be loaded, the engine serves {self._version}: {reason}",
                hint="fetch this version again",
            )
        if reason.startswith("failed"):  # and would fail again: no version after this one is tried
            self.staging = False
            log.warning("from now on versions are loaded while the engine stands still", why=reason)
        else:
            (log.debug if self._said else log.warning)(
                "a version is loaded while the engine stands still", version=version, why=reason
            )
            self._said = True
        return False

    async def _settle(self) -> None:
        try:
            await self._llm.collective_rpc("policy_settle")
        except Exception as error:  # noqa: BLE001  (the version is served; an engine that has died says so itself)
            log.warning("the memory of the old weights was not given back", error=str(error))

    async def _split(self, version: int, counts: Mapping[str, int]) -> None:
        """Begin a span in every request that has sampled, and start the others over under `version`."""
        # vLLM appends a dash and 8 characters of its own to the ids it is given.
        counted = {name[:-9]: count for name, count in counts.items()}
        stale = []
        for name, request in self._requests.items():
            if count := counted.get(name, 0):
                request.starts.append((version, count))
            else:
                request.stale = True
                stale.append(name)
        if stale:
            await self._llm.abort(stale)

    async def _abort_quietly(self, name: str) -> None:
        try:
            await self._llm.abort(name)
        except Exception as error:  # noqa: BLE001  (the engine is lost already)
            log.debug("abort failed", request=name, error=str(error))

    def _error(self, error: Exception | None, what: str) -> EngineError:
        if self.failed or self._llm is None:
            return EngineError(
                f"{what} was lost: {self._failure or 'the engine was not started'}",
                hint="restart the worker",
            )
        reason = f"{type(error).__name__}: {error}" if error else "the stream of outputs ended early"
        return EngineError(f"vLLM refused or lost {what}: {reason}")

    def load(self) -> EngineLoad:
        present, gauges = len(self._requests), self._gauges
        running = min(present, gauges.running)
        tokens = self._tokens_done + sum(len(request.tokens) for request in self._requests.values())
        return EngineLoad(
            running=running,
            queued=present - running,
            tokens=tokens,
            seats=gauges.seats,
            cache_used=gauges.cache_used if present else 0.0,
            cache_tokens=gauges.cache_tokens,
            preempted=gauges.preempted,
        )

    async def close(self) -> None:
        """Stop vLLM's processes, ready or still starting. Nothing of theirs is left afterwards."""
        self._failure = self._failure or "the engine is closed"
        if self._starting is not None and self._llm is None:  # closed while it starts
            for process in _engine_processes():
                process.kill()  # the start then fails at once
            await asyncio.wait([self._starting], timeout=CLOSE_S)
            if self._starting.done() and self._starting.exception() is None:
                self._llm = self._starting.result()
        if self._llm is not None and not self._llm.errored:
            try:
                await asyncio.wait_for(self._llm.collective_rpc("policy_release"), CLOSE_S)
            except Exception as error:  # noqa: BLE001  (it is stopped by force then)
                log.debug("the engine did not answer before its end", error=str(error))
        if self._llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, _shut_down, self._llm)
            self._llm = None
        self._thread.shutdown(wait=False)


def _first(reasons: Iterable[str]) -> str:
    """The first of the worker processes' reasons that is one."""
    return next((each for each in reasons if each), "")


def _shut_down(llm: Any) -> None:
    llm.shutdown(timeout=CLOSE_S)
    for process in _engine_processes():  # killed by now, if not ended
        process.join(CLOSE_S)
    llm.shutdown = lambda: None  # its __del__ calls it once more, and fails loudly at the interpreter's end


def _engine_processes() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]


def _environment() -> dict[str, str]:
    """What vLLM reads from the environment, set before it is imported."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the run's files are all a worker may need
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # This process has threads (sockets, downloads): a forked child could inherit a held lock.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The extension reads counts of sampled tokens from this runner's state.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def _arguments(config: RolloutConfig, model_dir: Path, max_model_len: int, on_cpu: bool) -> dict[str, Any]:
    from workers.compute_type import engine_dtype  # loads torch, for seconds

    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's: its top-k and top-p would change the policy
        "dtype": str(engine_dtype(config.dtype, on_cpu=on_cpu)).removeprefix("torch."),
        "max_model_len": max_model_len,
        "max_num_seqs": seats(config, on_cpu=on_cpu),
        "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.gpu_memory,
        "enable_prefix_caching": True,
        "async_scheduling": False,  # a step planned ahead samples tokens that are then dropped: counts would drift
        "stream_interval": STREAM_INTERVAL,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "worker_extension_cls": EXTENSION,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if config.kv_cache_gib or on_cpu:
        arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30)
    return arguments | (_cpu_arguments(config, max_model_len) if on_cpu else {})


def _cpu_environment(config: RolloutConfig) -> dict[str, str]:
    if config.tensor_parallel > 1:
        return {"VLLM_CPU_OMP_THREADS_BIND": config.cpu_bind or "auto"}
    return {
        # One process less: the model runs in the engine's own, which saves its start (10 s of imports) and a hop
        # through shared memory per step. vLLM's objection, that it can't bind threads there, is met by
        # `_pin_this_thread`.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise the first sample waits 25 s for a C++ compiler, for one comparison in the sampler.
        "TORCHDYNAMO_DISABLE": "1",
    }


def _cpu_arguments(config: RolloutConfig, max_model_len: int) -> dict[str, Any]:
    return {
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "enforce_eager": True,  # compiling costs a minute at every start and gains little here
        # vLLM's 128 would never share the prompts of a group, which are often shorter; its kernels want 32s.
        "block_size": 32,
        # A prompt cut in two ends the engine: vLLM then rewinds a seeded request's generator, and a CPU's has no
        # offset to rewind.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, max_model_len),
    }


def _pin_this_thread(cpus: str) -> None:
    """Onto the cores in `cpus` (`0-3,6`); the processes that this thread starts inherit it."""
    wanted: set[int] = set()
    try:
        for part in cpus.split(","):
            first, _, last = part.partition("-")
            wanted.update(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, wanted)
    except (ValueError, OSError) as error:
        raise EngineError(
            f"rollout.cpu_bind = {cpus!r} can't be followed: {error}",
            hint=f"list cores of this machine, for example 0-{(os.cpu_count() or 1) - 1}",
        ) from error
