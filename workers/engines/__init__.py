"""Rollout engines behind one protocol: `make_engine(config)` gives the configured one, loading only that one."""

from __future__ import annotations

from workers.engines.base import Completion, Engine, EngineLoad, Update
from workers.rollout_settings import RolloutConfig

__all__ = ["Completion", "Engine", "EngineLoad", "Update", "make_engine"]


def make_engine(config: RolloutConfig) -> Engine:
    if config.engine == "vllm":
        from workers.engines.vllm_engine import VLLMEngine

        return VLLMEngine(config)
    from workers.engines.reference import ReferenceEngine

    return ReferenceEngine(config)
