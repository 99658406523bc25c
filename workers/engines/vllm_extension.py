"""What runs inside vLLM's worker processes: mixed into its Worker class, called through `collective_rpc`.

Arguments and results are plain lists, strings and numbers, which vLLM carries as MessagePack: nothing is pickled.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from safetensors import safe_open

__all__ = ["PolicyExtension"]


class PolicyExtension:
    """Methods named so that none can collide with one of vLLM's own Worker."""

    model_runner: Any  # vLLM's, from the Worker this is mixed into

    def policy_protect(self) -> None:
        """Leave it to the rollout worker when this process ends.

        Ctrl-C and a supervisor's SIGTERM reach the whole process group. An engine that obeyed would take the
        samples with it that the rollout worker, which got the same signal, is about to finish.
        """
        self._handlers = {
            each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)
        }

    def policy_release(self) -> None:
        """Let vLLM stop this process again, as `AsyncLLM.shutdown` does with a SIGTERM."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def policy_swap(self, shards: list[str]) -> dict[str, int]:
        """Load the weights in `shards` in place, while generation is paused.

        Returns the number of tokens every request in the engine had sampled under the old weights, by vLLM's own
        request ids; a request that is not listed has not been scheduled at all.
        """
        counts = {name: len(state.output_token_ids) for name, state in self.model_runner.requests.items()}
        self.model_runner.reload_weights(weights_iterator=_tensors(shards))
        return counts


def _tensors(shards: list[str]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) from memory-mapped files: nothing is copied before the model's own loader does."""
    for path in shards:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)
