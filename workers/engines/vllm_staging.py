"""Staging in one of vLLM's worker processes: which models, by which of vLLM's own code, and in which thread.

On a CPU vLLM's modules with weights are few: linear layers, embeddings, heads, norms. Their processing after the
loading packs weights into handlers for the matrix kernels. Both run here as they do at a start, on the twin. A
model that holds anything else (quantised layers, experts, state spaces, sinks in an attention layer) is loaded in
the pause instead.

This is the third and last file that knows vLLM.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from workers.engines.staging import Flip, Twin, kept_elsewhere

__all__ = ["Staging", "forget_packed_experts", "pack_tied_heads"]

NICE = 5
"""Of the thread that stages: a quarter of a core where vLLM's threads want them all, a whole one where they wait."""

SMALL_BYTES = 32 << 20
AT_ONCE_S = 0.03
"""Weights of no more bytes are loaded in about a step of their model. Generation waits for them, for at most so long,
and is saved two rounds of questions, each between two steps. For larger ones it goes on meanwhile."""

JOIN_S = 60.0
"""For a thread that was told to stop, which it does after the tensor at hand."""

ROOM = 1.25
"""Memory that must be free, as a multiple of the weights' own: heads and embeddings are held plain and packed."""


class Staging:
    """At most one staged version at a time. All methods are called by the process's main thread."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._task: _Task | None = None
        self._replaced: list[Any] = []
        self.refused = _refusal(runner)
        """Why this model can't be staged, or empty."""

    def begin(self, version: int, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> str:
        """Start to stage `version`, dropping what was staged before; a small model's is waited for, for a moment.
        Returns why not, or nothing."""
        self.drop()
        if self.refused:
            return self.refused
        model = self._runner.get_model()
        ranks = self._runner.parallel_config.world_size  # all on this machine, and all about to ask
        loaded = _loaded_bytes(model)
        needed, free = ROOM * ranks * loaded, _free_bytes()
        if needed > free:
            return f"it takes {needed / 1e9:.1f} GB beside the weights that serve, {free / 1e9:.1f} GB are free"
        self._task = _Task(version, model, tensors)
        self._task.start()
        if loaded <= SMALL_BYTES:
            self._task.join(AT_ONCE_S)
        return ""

    def state(self, version: int) -> str:
        """`working`, `ready`, or what went wrong: `unreadable: …` (the files) or `failed: …`."""
        task = self._task
        return task.state if task is not None and task.version == version else "failed: dropped"

    def flip(self, version: int) -> bool:
        """Serve `version`: False where it is not staged."""
        task = self._task
        if task is None or task.version != version or task.flip is None:
            return False
        self._task = None
        self._replaced.append(task.flip())
        return True

    def drop(self) -> None:
        """Forget what is staged or being staged. Raises TimeoutError for a thread that can't be stopped."""
        if (task := self._task) is not None:
            task.stopped.set()
            task.join(JOIN_S)
            if task.is_alive():
                raise TimeoutError(
                    f"the staging of version {task.version} did not stop within {JOIN_S:.0f} s"
                )
            self._task = None

    def settle(self) -> None:
        """Give back the memory of what was replaced, tensor by tensor, while the model serves."""
        replaced, self._replaced = self._replaced, []
        threading.Thread(target=_empty, args=(replaced,), name="drop-old-weights", daemon=True).start()


class _StoppedError(Exception):
    """Nobody waits for this version any more."""


class _Task(threading.Thread):
    """Stages one version; `state` says how far it is, `flip` is there once that is `ready`."""

    def __init__(
        self, version: int, model: nn.Module, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        super().__init__(name=f"stage-{version}", daemon=True)
        self.version, self._model, self._tensors = version, model, tensors
        self.stopped = threading.Event()
        self.flip: Flip | None = None
        self.state = "working"

    def run(self) -> None:
        _become_unobtrusive()
        try:
            with torch.no_grad():
                self.flip = self._stage()
            self.state = "ready"
        except (SafetensorError, OSError) as error:
            self.state = f"unreadable: {error}"
        except Exception as error:  # noqa: BLE001  (the model's loading code; the answer is a load in the pause)
            self.state = f"failed: {type(error).__name__}: {error}"

    def _stage(self) -> Flip:
        twin = Twin(self._model, _holds_weights, _blank)
        model: Any = twin.root
        loaded = model.load_weights(self._until_stopped())
        for name, tensor in twin.parameters():
            self._raise_if_stopped()
            if name not in loaded or tensor.isnan().any():
                raise ValueError(f"{name} was not loaded, or holds NaN")
        for module in twin.root.modules():
            if _holds_weights(module):
                self._raise_if_stopped()
                _process(module)
        return twin.as_flip()

    def _until_stopped(self) -> Iterable[tuple[str, torch.Tensor]]:
        for each in self._tensors():
            self._raise_if_stopped()
            yield each

    def _raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise _StoppedError


def pack_tied_heads(model: nn.Module) -> None:
    """After vLLM's own reload in place on a CPU. It packs a tied head's weights when the head itself is loaded,
    which never happens: the head would go on with the old ones."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    homes: dict[int, int] = {}
    for module in model.modules():
        for each in module.parameters(recurse=False):
            homes[id(each)] = homes.get(id(each), 0) + 1
    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(module, ParallelLMHead) and homes.get(id(module.weight), 0) > 1:
            _process(module)


def forget_packed_experts(model: nn.Module) -> None:
    """Before vLLM's own reload in place on a CPU. It packs the experts of a mixture when it makes their kernel, and
    a reload keeps that: the new weights would lie there as they are loaded, and be read as packed ones. Without a
    kernel it makes one, as at a start."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _refusal(runner: Any) -> str:
    """Why this model can't be staged, or empty. Looks at what the model is made of: nothing is tried out."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.platforms import current_platform

    config = runner.model_config
    if not current_platform.is_cpu():
        return "it is done on CPUs only"
    if config.quantization is not None:
        return f"the model is quantised ({config.quantization})"
    if runner.lora_config is not None or hasattr(runner, "drafter"):
        return "the engine serves more than one model"
    if getattr(config, "word_embeddings_untied_by_checkpoint", False):
        return "the checkpoint holds a head that its config calls tied"
    model = runner.get_model()
    for name, module in model.named_modules():
        if type(module) is Attention:
            continue  # its scales stay what they are where nothing is quantised
        what = f"{name or 'the model'} ({type(module).__name__})"
        if is_deferred_attention_layer(module):
            return f"{what} is an attention layer of a kind that is not known here"
        if callable(getattr(module, "process_weights_after_loading", None)):
            return f"{what} processes weights in a way of its own"
        loaded = [each for each in module._buffers if each not in module._non_persistent_buffers_set]
        if loaded or (not _holds_weights(module) and list(module.parameters(recurse=False))):
            return f"{what} has weights of a kind that is not known here"
    return kept_elsewhere(model)


def _holds_weights(module: nn.Module) -> bool:
    """Whether the checkpoint has this module's own parameters, and they are of a kind that can be staged."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    if isinstance(module, LinearBase):
        return type(module.quant_method) is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return type(module.quant_method) is UnquantizedEmbeddingMethod
    return isinstance(module, RMSNorm | GemmaRMSNorm | LayerNorm | nn.LayerNorm)


def _blank(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """In the form that vLLM made at the start and keeps a record of, for its own reloads: a packed weight is empty
    now. What is not in the record (a bias) has kept its form. All NaN, so that what is not loaded shows."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    blank: torch.Tensor
    recorded = get_layerwise_info(module).restore_metadata[0].get(name)
    if recorded is not None:
        blank = restore_layer_refs(materialize_meta_tensor(recorded), module)
    else:
        blank = torch.empty_like(tensor.data)
        blank.__class__ = tensor.__class__
        blank.__dict__ = tensor.__dict__.copy()
    for name, value in blank.__dict__.items():
        blank.__dict__[name] = _unwrapped(value)
    return blank.fill_(math.nan)


def _unwrapped(attribute: Any) -> Any:
    """vLLM's own reload leaves its loaders in the record, wrapped in one that loads nothing outside a reload."""
    while getattr(attribute, "__name__", "") == "online_process_loader":
        attribute = attribute.__wrapped__
    return attribute


def _process(module: nn.Module) -> None:
    """As vLLM does after the loading at a start."""
    method: Any = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)
    if (update := getattr(module, "update_param_tp_status", None)) is not None:
        update()


def _loaded_bytes(model: nn.Module) -> int:
    """Of the weights as they are loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    seen: dict[int, int] = {}
    for module in model.modules():
        recorded = get_layerwise_info(module).restore_metadata[0]
        for name, each in module.named_parameters(recurse=False):
            seen[id(each)] = recorded.get(name, each).nbytes
    return sum(seen.values())


def _free_bytes() -> int:
    """Of this machine and of the container that this process runs in, whichever has less; where neither says so, as
    much as is wanted."""
    free = sys.maxsize
    with suppress(OSError, ValueError, KeyError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].removesuffix("kB")) << 10
    with suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())  # `max` where there is none
        used = int((group / "memory.current").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(facts["inactive_file"]))
    return free


def _become_unobtrusive() -> None:
    """One thread for torch's operations here, and that one after vLLM's. vLLM's OpenMP threads spin while they wait
    for one of their own, so what this thread takes from one of them it takes from all."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    torch.get_num_threads()  # torch sets its number for a thread when that first asks, and would undo what follows
    for name in (None, "libgomp.so.1"):  # a preloaded runtime, or the one that came with torch
        with suppress(OSError, AttributeError):
            ctypes.CDLL(name).omp_set_num_threads(1)
            return


def _empty(replaced: list[Any]) -> None:
    """Drop what the lists in it hold, one by one."""
    while replaced:
        if isinstance(each := replaced.pop(), list):
            replaced.extend(each)
        del each
    with suppress(OSError, AttributeError):  # glibc would keep up to another model's size for itself
        ctypes.CDLL(None).malloc_trim(0)
