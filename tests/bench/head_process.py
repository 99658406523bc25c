"""One way to the log-probabilities of a batch, forward and backward, measured in a process of its own.

    PYTHON -m tests.bench.head_process WAY TOKENS VOCABULARY WIDTH REPEATS

prints one line of JSON. PYTHON may be the interpreter of another environment: ways of others import nothing of ours.

Every way makes the log-probability of each target, with gradients of hidden states and head in float32, and the
entropy of each token without (trainers report it). Memory is resident memory of the process, by the kernel's own
high-water mark, above what it was with the inputs there and the libraries warm: everything counts, the two gradients
too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEMPERATURE = 0.9
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(hidden [K, D], head [V, D], targets [K], weight of each token in the loss [K]) -> log-probabilities [K], after the
backward pass."""


def logits(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    """All of them: what everybody writes first."""
    table = ((hidden @ weight.T).float() / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        _entropy = -(table.exp() * table).nan_to_num().sum(-1)
    found = table.gather(-1, targets[:, None]).squeeze(-1)
    (found * g).sum().backward()
    return found.detach()


def _settings(weight: Tensor) -> Any:
    from workers.head import HeadSettings, LogitMap, usual_budget

    budget = usual_budget(len(weight) * weight.element_size(), accelerator=False)
    return HeadSettings(LogitMap(), TEMPERATURE, budget)


def tiles(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    from workers.head import token_scores

    found, _entropy = token_scores(hidden, weight, None, targets, _settings(weight))
    (found * g).sum().backward()
    return found.detach()


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    from workers.head import token_loss

    loss, found, _entropy = token_loss(
        hidden, weight, None, targets, _settings(weight), lambda lp, h, k: (lp * g[k]).sum()
    )
    loss.backward()
    return found


def trl_trainer(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    """What TRL's GRPO trainer puts in the place of the head, with its own chunk size and outputs."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    found, *_ = ChunkedLogProbFunction.apply(
        hidden,
        weight,
        None,
        targets,
        TEMPERATURE,
        _CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs", "entropy"),
    )
    (found * g).sum().backward()
    return found.detach()


def trl_logits(hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> Tensor:
    """TRL's functions for logits that are there: what its trainer did before, and other trainers still do."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    table = (hidden @ weight.T)[None] / TEMPERATURE
    found = selective_log_softmax(table, targets[None])[0]
    with torch.no_grad():
        _entropy = entropy_from_logits(table)
    (found * g).sum().backward()
    return found.detach()


WAYS: dict[str, Way] = {way.__name__: way for way in (logits, tiles, fused, trl_trainer, trl_logits)}


def inputs(tokens: int, words: int, width: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, width, generator=draw).requires_grad_()
    weight = torch.randn(words, width, generator=draw).mul_(3 / width**0.5).requires_grad_()
    return (
        hidden,
        weight,
        torch.randint(words, (tokens,), generator=draw),
        torch.randn(tokens, generator=draw),
    )


def measure(way: Way, tokens: int, words: int, width: int, repeats: int) -> dict[str, Any]:
    way(*inputs(64, 4096, width))
    hidden, weight, targets, g = inputs(tokens, words, width)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _kib("VmRSS")
    seconds, cpu_s = [], []
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        found = way(hidden, weight, targets, g)
        seconds.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    assert hidden.grad is not None and weight.grad is not None
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "bytes": (_kib("VmHWM") - before) << 10,
        "gradient_bytes": hidden.grad.nbytes + weight.grad.nbytes,
        # Sums that any two ways agree on to rounding.
        "checks": [float(found.sum()), float(hidden.grad.abs().sum()), float(weight.grad.abs().sum())],
        "versions": {
            name: module.__version__ for name in ("torch", "trl") if (module := sys.modules.get(name))
        },
    }


def _kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"the kernel shows no {field} in /proc/self/status: this bench needs Linux")


def main() -> None:
    name, *numbers = sys.argv[1:]
    tokens, words, width, repeats = map(int, numbers)
    sys.stdout.write(json.dumps(measure(WAYS[name], tokens, words, width, repeats)) + "\n")


if __name__ == "__main__":
    main()
