"""What vLLM's scheduler says of itself after every step: sequences that run, how full the KV cache is, preemptions.

vLLM hands these numbers to the loggers that it is given. The one made here keeps the last ones, and stands where vLLM
would otherwise put its own for Prometheus, which costs more per step than a small model's step may.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Gauges"]


class Gauges:
    """Written by vLLM's task in our event loop, read by the engine in the same."""

    def __init__(self) -> None:
        self.running = 0  # sequences, after the last step
        self.cache_used = 0.0  # share
        self.preempted = 0  # since the start
        self.seats = 0  # sequences that run at once, at most
        self.cache_tokens = 0

    def read(self, vllm_config: Any) -> None:
        """What stands when vLLM has started."""
        cache = vllm_config.cache_config
        self.seats = vllm_config.scheduler_config.max_num_seqs
        self.cache_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)

    def logger(self) -> Any:
        """A class of vLLM's loggers, all of whose instances write here."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        gauges = self

        class Logger(PrometheusStatLogger):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
                pass  # no metrics are registered

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if scheduler_stats is not None:
                    gauges.running = scheduler_stats.num_running_reqs
                    gauges.cache_used = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    gauges.preempted += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

            def record_sleep_state(self, *_: Any, **__: Any) -> None:
                pass

            def record_admission_rejection(self, reason: str) -> None:
                pass

        return Logger
