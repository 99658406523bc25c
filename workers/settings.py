"""`[model]` and `[trainer]`: what a run file says about the learner. No torch here: the CLI reads it for
`--help`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from async_rl.algo.alerts import AlertsConfig
from workers.adapter_scale import NO_ADAPTERS, AdapterScale

__all__ = ["ModelConfig", "TrainerConfig"]

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[model]`: the policy and how it is computed. It is always trained in float32 and served in
    bfloat16."""

    path: str = ""
    """Required: a Hugging Face folder of a causal language model: config.json, tokenizer, safetensors.
    Never a hub name, and never code of its own."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the matrix products. The weights they see are rounded to bfloat16 in every case, because those are
    the weights that are published and that the engines sample from. auto: bfloat16, except on a CPU that
    has no bfloat16 instructions, where torch emulates them and a step takes six times as long (measured on
    AVX2)."""
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """packed: each sample of a row attends by itself (workers/packed_attention.py), so that the samples' own squares
    are computed and not the row's; on a CPU 4 to 6 times as fast. The others are those of transformers;
    flash_attention_2 has to be installed. auto: packed on a CPU where it computes what the model is, else sdpa, or
    eager where sdpa is not what the model is (gpt-oss, Gemma 2). Not every model keeps the samples of a row apart: at
    the start it is tried (workers/apart.py), and where it does not, a warning says so, and each sample gets a row of
    its own."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """torch.compile each decoder layer. On a CPU it needs a C++ compiler; the first steps take minutes while shapes
    are new; then a large model's step is faster, a tiny one's is not."""

    router_loss_coef: NotNegative | None = None
    """Of a mixture of experts: weight of its routers' balance loss. Left out: the model's own, router_aux_loss_coef
    of its config.json, which is what it was pretrained with and may be large beside a policy gradient (gpt-oss says
    0.9). 0: none, as for models that have no such loss, whatever is set."""

    lora_rank: Count = 0
    """Train low-rank adapters of this rank in the place of the weights; 0: train all weights. What is published and
    served is the merged weights, so engines and `async-rl weights` see no difference; what shrinks is the optimizer:
    no masters and no moments of the weights themselves."""
    lora_alpha: Positive = 32.0
    """The adapters' product counts lora_alpha / lora_rank times. 32 with rank 16 is what the field starts from."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers of the decoder layers by the last part of their name (q_proj, down_proj, …). Empty: all of them,
    which loses least against full training."""

    @property
    def adapters(self) -> AdapterScale:
        """What a checkpoint has to say about the adapters."""
        return AdapterScale(self.lora_rank, self.lora_alpha) if self.lora_rank else NO_ADAPTERS


class TrainerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[trainer]`: the optimiser, the rhythm of publishing and checkpoints, and the limits of every
    wait."""

    steps: AtLeastOne = 100
    """The run ends when this many steps are done, those before a resume included."""
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    """adamw keeps two float32 moments, 8 bytes per weight. adafactor keeps the second one as a row and a column per
    matrix and no first one: next to nothing, for updates that are somewhat noisier. Both take the same learning
    rates."""
    learning_rate: Positive = 1e-6
    """After the warm-up. 1e-6 is what RL on pretrained models of a billion weights and more is
    published with (prime-rl, DAPO); the demo's one-million-weight model wants a thousand times more."""
    warmup_steps: Count = 10
    """The learning rate rises linearly over this many updates, then stays."""
    weight_decay: NotNegative = 0.0
    """Decoupled, on matrices only (norms and biases never decay)."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW. 0.95 rather than torch's 0.999: a run is hundreds of steps, and lag makes old gradients
    stale."""
    eps: Positive = 1e-8
    """Of AdamW."""
    clip_norm: Positive = 1.0
    """The gradient's global norm is scaled down to this."""

    alerts: AlertsConfig = AlertsConfig()
    peak_tflops: NotNegative = 0.0
    """What one device can do in the type of the products, for the metric mfu. 0: known for NVIDIA's usual ones in
    bfloat16, else there is no such metric."""

    publish_every: AtLeastOne = 1
    """Steps per policy version."""
    checkpoint_every: Count = 0
    """Steps per checkpoint, written in the background; the last step is then always one, and so is a stop by
    SIGTERM. Each rank keeps a copy of its weights and moments in host memory, 12 bytes per parameter of its own. 0:
    no checkpoints at all: a trainer that is started again begins with step 0 and repeats every step with the groups
    that it had. For that the orchestrator keeps all groups on its disk; with checkpoints, those since the oldest."""
    keep_checkpoints: AtLeastOne = 2
    """Older ones are deleted after each commit."""

    replicas: AtLeastOne = 1
    """Copies of the model, each sharded over ranks / replicas ranks (HSDP). 1 shards over all ranks, which needs the
    least memory; with one copy per node, layers are gathered inside the node and only gradients cross between nodes.
    Ranks of a copy are neighbours: 0 to ranks / replicas - 1 are the first one."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What waits in host memory on a machine with an accelerator. optimizer: masters and moments, 12 bytes per
    weight, and the update runs there. all: the weights as well, brought to the device layer by layer. Slower by the
    bus; the same numbers."""

    minibatches: AtLeastOne = 1
    """Optimizer updates per step, each from its share of the step's batch (at most one per sample). 1: with lag the
    samples are off-policy enough. More make a step's samples go further and the policy move within the step; the
    step stays the unit of lag and of versions, and warmup_steps counts updates. Workers are compared
    (docs/verification.md) by the samples of the first share, another one at every step, because the others meet a
    policy that has moved; by all samples where the loss asks for the proximal policy (decoupled, icepop)."""
    microbatch_tokens: AtLeastOne = 4096
    """Tokens packed into one forward pass; a longer sample gets one of its own, as does every sample of a model that
    does not keep samples apart (model.attention). Memory grows with it; so does the
    time of attention, with its square, unless model.attention is packed or flash_attention_2."""
    share_prompts: Literal["auto", "off"] = "auto"
    """auto: the samples of a group lie behind one copy of their prompt, and all but attention is computed for it once
    (its tokens less n - 1 times); where attention is packed and was found to understand it, and a mixture's routers
    have no balance loss. off: each sample with a prompt of its own. Gradients are the same but for rounding."""
    head: Literal["auto", "logits"] = "auto"
    """How log-probabilities are made. auto: in tiles, never all logits at once (workers/head.py), where the model's
    last layer is a plain one; what it does to its logits is found out at the start. logits: all of them at once."""
    head_tile_mib: Count = 0
    """Memory of one tile of logits and of what is computed from it. 0: what the logits of 256 tokens take on a CPU,
    of 1024 on an accelerator, and a third more (workers/head.py, usual_budget); at least 64 and 512."""
    head_compile: Literal["auto", "always", "never"] = "auto"
    """The arithmetic on a tile by torch.compile, one pass over memory instead of ten. auto: on an accelerator, where
    memory is what it waits for; on a CPU it wants a C++ compiler."""
    max_refused_steps: AtLeastOne = 5
    """Stop after this many steps in a row were refused for a loss or gradient that is not finite."""

    batch_wait_s: Positive = 600.0
    """Limit on the wait for one batch of rollouts. It covers the start of an engine (minutes for large
    models)."""
    attach_wait_s: Positive = 60.0
    """Limit on the wait for the orchestrator's first answer."""
    finish_wait_s: Positive = 600.0
    """Limit on the last held-out evaluation and the draining of workers."""
    checkpoint_wait_s: Positive = 600.0
    """Limit on the wait for the last checkpoint, at the end and at a stop: 12 bytes per parameter over the ranks'
    way to the store, with room for a slow one."""
    collective_wait_s: Positive = 300.0
    """Limit on one collective operation between ranks: a rank that died must not hang the others."""

    out: str = "runs/default"
    """Folder of metrics.jsonl, on rank 0."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    threads: Count = 0
    """Of torch, per rank, on a CPU. 0: torch's own choice (all cores, or what torchrun sets)."""
