"""What a trainer computes with and does not train: with adapters all weights of the model's folder, always its
buffers. No checkpoint holds them, so it holds their digest, and a resume on others is refused (adapter_scale.py).

The digest is that of the codec (async_rl/weights/codec/digest.py), a sum over elements by their places: the tensors
one after the other, by name, in bfloat16. So ranks add up their rows, and it is the same for any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.weights.codec import digest_of
from async_rl.weights.codec.tensors import bits_of, digest, unsigned
from workers.masters import local
from workers.process_group import RankGroup
from workers.sharding import Placement

__all__ = ["frozen_digest"]

_PART = 1 << 24
"""Elements that are rounded at once."""


@torch.no_grad()
def frozen_digest(tensors: Mapping[str, Tensor], placement: Placement, group: RankGroup) -> str:
    """16 hex digits; empty where there are no tensors. Collective. Each rank has its rows of a DTensor, and the whole
    of any other tensor."""
    if not tensors:
        return ""
    total, place = 0, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if placement.replica == 0 and (isinstance(tensor, DTensor) or group.rank == 0):
            total += _digest(local(tensor).reshape(-1), place + _before(tensor, placement, group))
        place += tensor.numel()
    signed = torch.from_numpy(np.array([unsigned(total)], np.uint64).view(np.int64))
    group.sum(signed)  # modulo 2^64
    return f"{unsigned(int(signed)):016x}"


def _before(tensor: Tensor, placement: Placement, group: RankGroup) -> int:
    """Elements in the rows of the ranks before. torch.chunk's rule, as FSDP splits."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return 0
    chunk = -(-tensor.shape[0] // placement.shards)
    first = min(group.rank % placement.shards * chunk, tensor.shape[0])
    return first * math.prod(tensor.shape[1:])


def _digest(values_W: Tensor, place: int) -> int:
    total = 0
    for start in range(0, len(values_W), _PART):
        bits_W = bits_of(values_W[start : start + _PART].to(torch.bfloat16).contiguous())
        if bits_W.device.type == "cpu":
            total += digest_of(bits_W.numpy().view(np.uint16), place + start)
        else:
            total += int(digest(bits_W, place + start))
    return total
