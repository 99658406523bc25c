"""What runs inside vLLM's worker processes: mixed into its Worker class, called through `collective_rpc`.

Arguments and results are plain lists, strings and numbers, which vLLM carries to its engine's process as MessagePack.
With tensor_parallel > 1 vLLM pickles them between its own processes on this machine; nothing of ours is pickled, and
no pickle comes from a socket or a store.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

from safetensors import safe_open

from workers.engines.vllm_staging import Staging, forget_packed_experts, pack_tied_heads

__all__ = ["PolicyExtension", "end_with"]


class PolicyExtension:
    """Methods named so that none can collide with one of vLLM's own Worker."""

    model_runner: Any  # vLLM's, from the Worker this is mixed into
    _policy_staging: Staging | None = None

    def policy_protect(self, owner: int) -> None:
        """Leave it to the rollout worker, process `owner`, when this process ends: not before it, and with it.

        Ctrl-C and a supervisor's SIGTERM reach the whole process group. An engine that obeyed would take the
        samples with it that the rollout worker, which got the same signal, is about to finish. And a worker that
        is killed outright tells nobody: vLLM's processes would stay, and hold their memory.
        """
        threading.Thread(target=end_with, args=(owner,), name="end-with-owner", daemon=True).start()
        self._handlers = {
            each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)
        }

    def policy_release(self) -> None:
        """Let vLLM stop this process again, as `AsyncLLM.shutdown` does with a SIGTERM."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def policy_prepare(self) -> str:
        """Get ready to stage. Returns why this model's versions must be loaded in the pause, or nothing."""
        self._policy_staging = Staging(self.model_runner)
        return self._policy_staging.refused

    def policy_stage(self, version: int, shards: list[str]) -> str:
        """Begin to load `version` beside the weights that serve, in the background. Returns why not, or how far it
        is, as `policy_staged`."""
        if self._policy_staging is None:
            return "it was not prepared"
        return self._policy_staging.begin(version, lambda: _tensors(shards)) or self.policy_staged(version)

    def policy_staged(self, version: int) -> str:
        """`working`, `ready`, `unreadable: …` or `failed: …`."""
        return (
            self._policy_staging.state(version) if self._policy_staging is not None else "failed: dropped"
        )

    def policy_swap(self, version: int, shards: list[str]) -> dict[str, Any]:
        """Serve `version`, while generation is paused: by a flip where it is staged, else by loading `shards`.

        Returns `counts`, the number of tokens every request in the engine had sampled under the old weights, by
        vLLM's own request ids (a request that is not listed has not been scheduled at all), and `loaded`: empty,
        or why nothing was flipped.
        """
        counts = {name: len(state.output_token_ids) for name, state in self.model_runner.requests.items()}
        loaded = self._policy_flip(version)
        if loaded:
            forget_packed_experts(self.model_runner.get_model())
            self.model_runner.reload_weights(weights_iterator=_tensors(shards))
            pack_tied_heads(self.model_runner.get_model())
        return {"counts": counts, "loaded": loaded}

    def _policy_flip(self, version: int) -> str:
        staging = self._policy_staging
        if staging is None:
            return "not prepared"
        try:
            if staging.flip(version):
                return ""
        except Exception as error:  # noqa: BLE001  (half flipped: loading puts everything right)
            return f"the flip failed: {type(error).__name__}: {error}"
        staging.drop()
        return "not staged"

    def policy_settle(self) -> None:
        """After generation has resumed: give back the memory of the old weights."""
        if self._policy_staging is not None:
            self._policy_staging.settle()


def end_with(owner: int) -> None:
    """Block until process `owner` has ended, then end this one. Returns at once where the system can't tell."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # forbidden here (a sandbox), or a process of another machine
        return
    select.select([watched], [], [])
    os._exit(1)


def _tensors(shards: list[str]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) from memory-mapped files: nothing is copied before the model's own loader does."""
    for path in shards:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)
