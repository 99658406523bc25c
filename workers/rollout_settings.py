"""`[rollout]`: how a rollout worker runs on its machine. What the run is, it learns from the run.

No heavy imports: the CLI and the run file read this section without loading an engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["RolloutConfig", "seats"]

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


CPU_SEATS, GPU_SEATS = 64, 512


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[rollout]`: the engine and the manners of a worker."""

    engine: Literal["vllm", "reference"] = "vllm"
    """vllm, or the small one on plain transformers (for tests and for platforms without vLLM)."""
    cluster: str = "default"
    """The name under which `async-rl lag` lists this worker."""
    max_sequences: Annotated[int, Meta(ge=0)] = 0
    """Sequences generated at once, at most; how many there are is found from the engine's load (rollout_load.py).
    0: 64 on a CPU (on 2 cores throughput of a 1M-parameter model grows to about there), 512 on a GPU (beyond it, a
    step of most models takes longer by what it makes more)."""
    max_groups: Annotated[int, Meta(ge=0)] = 0
    """Leases held at once, at most, likewise. 0: as many as sequences: with more, some group would have none in the
    engine."""
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """Prompt and completion together, in tokens; 0: what the model allows, at most 4096 on a CPU (the KV cache of
    one longest sequence must fit in memory)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of weights, products and KV cache in the engine. auto, as the trainer's `model.dtype`: bfloat16, as published,
    except on a CPU without bfloat16 instructions. There products of bfloat16 are emulated (on AVX2 a step of vLLM
    took four times as long); float32 holds the published weights exactly, and takes twice the memory."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    kv_cache_gib: NotNegative = 0.0
    """Size of the KV cache; 0: on a GPU what gpu_memory leaves, on a CPU 0.5 GiB."""
    gpu_memory: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory the engine may take."""
    cpu_bind: str = ""
    """Cores of vLLM's CPU backend, for example `0-3`; empty: all that this process may use. With
    tensor_parallel > 1, one list per part in vLLM's own notation, `0-3|4-7`."""
    stage: Literal["auto", "off"] = "auto"
    """auto: new weights are loaded beside those that serve, and the engine stands still only while they change
    places; it takes the memory of a second model meanwhile. On CPUs, for models of plain layers; all others, and all
    with off, are loaded while the engine stands still."""
    start_timeout_s: Positive = 600.0
    """Of the engine. Large models load and compile for minutes."""
    join_timeout_s: Positive = 600.0
    """How long a worker that comes before the trainer waits for run.json and for the first version."""
    reward_timeout_s: Positive = 60.0
    """A reward that takes longer fails its lease. The wait for its turn is not counted."""
    reward_parallel: Annotated[int, Meta(ge=1)] = 64
    """Rewards computed at once; more wait for their turn. A judge that is asked over the network may want more."""
    drain_s: NotNegative = 30.0
    """On a stop, what is being generated may finish within this; the rest is given back."""
    cache_dir: str = ""
    """Where this worker's copy of the weights is kept: it survives a restart (hashed before it is used again), and a
    delta changes it in place. One worker per folder. Empty: a temporary folder, in shared memory (/dev/shm) where
    that has room for one and a half models, removed at the end."""


def seats(config: RolloutConfig, *, on_cpu: bool) -> int:
    """Sequences that an engine generates at once, at most."""
    return config.max_sequences or (CPU_SEATS if on_cpu else GPU_SEATS)
