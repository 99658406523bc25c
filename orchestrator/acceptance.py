"""Whether a group means what a group must mean. The wire has checked its size and types; this checks the
rest.

A worker is not trusted: what it sends is trained on, so everything that training relies on is looked at
here, and nothing of a refused group is kept.
"""

from __future__ import annotations

import math
import struct

import msgspec
import numpy as np

from async_rl.errors import Malformed
from async_rl.wire import Array, Attach, Group, Key, RunSettings, Sample
from orchestrator.versions import Versions

__all__ = ["Fault", "Requirements", "examine", "explain", "quick", "required"]

LOGPROB_TOLERANCE = 1e-4
"""A log-softmax in 32 bits over a large vocabulary can come out this much above zero."""
REWARD_TOLERANCE = 1e-6
"""Rewards travel as 64-bit floats, but an environment may have summed them in fewer bits."""

SHOWN = 16
"""Numbers of a list that a detail names."""

_DTYPES = {"tokens": "<i4", "logprobs": "<f4", "mask": "|u1", "spans": "<i4"}


class Fault(msgspec.Struct, frozen=True):
    """Why a group is refused: a stable code to count by, and what exactly was found."""

    code: str  # shape, tokens, logprobs, version, early, reward
    detail: str

    @property
    def counts(self) -> bool:
        """Whether it is the worker's failure. It is none if the worker saw a new version in the store
        before the trainer's message reached us: the group is lost, the prompt goes to the next worker."""
        return self.code != "early"


class Requirements(msgspec.Struct, frozen=True):
    samples: int
    max_tokens: int  # sampled ones, per sample
    vocab_size: int
    reward_range: tuple[float, float]
    oldest_version: int = 0  # for a held-out group: the version that is measured
    longest: int = 0  # tokens that the model allows, prompt and sample together; 0: unknown


def required(
    key: Key, settings: RunSettings, attach: Attach, reward_range: tuple[float, float]
) -> Requirements:
    """Of the group that was leased under this key."""
    evaluation = key.split == "eval"
    return Requirements(
        samples=1 if evaluation else settings.group_size,
        max_tokens=settings.sampling.max_tokens,
        vocab_size=attach.vocab_size,
        reward_range=reward_range,
        oldest_version=key.group if evaluation else 0,
        longest=attach.longest,
    )


def examine(group: Group, need: Requirements, versions: Versions) -> tuple[tuple[int, ...], ...] | Fault:
    """Of each sample, the versions of the policies that sampled it; or what is wrong with the group."""
    right = quick(group, need, versions)
    return right if right is not None else explain(group, need, versions)


def quick(group: Group, need: Requirements, versions: Versions) -> tuple[tuple[int, ...], ...] | None:
    """The same for all samples at once, without saying why: None for a group that may be wrong. A tenth of the
    time, which is what limits how many workers one orchestrator can serve."""
    samples = group.samples
    if len(samples) != need.samples or group.prompt.dtype != "<i4":
        return None
    (lowest, highest), prompt_tokens = need.reward_range, len(group.prompt.data) // 4
    most = min(need.max_tokens, need.longest - prompt_tokens) if need.longest else need.max_tokens
    served, ids, logprobs, masks = [], [group.prompt.data], [], []
    # Spans and length of the sample before, and what was found: mostly all of a group's are equal.
    same, before = group.prompt.data, 0
    policies: tuple[int, ...] = ()
    for sample in samples:
        tokens, probs, mask, spans = sample.tokens, sample.logprobs, sample.mask, sample.spans
        if (tokens.dtype, probs.dtype, mask.dtype, spans.dtype) != _SAMPLE_DTYPES:
            return None
        tokens_data, probs_data, mask_data, spans_data = tokens.data, probs.data, mask.data, spans.data
        length = len(mask_data)
        if not 0 < length <= most or not 4 * length == len(tokens_data) == len(probs_data):
            return None  # one that is longer has tokens that were not sampled: seldom
        if not (lowest <= sample.reward <= highest and math.isfinite(sample.reward)):
            return None
        if length != before or spans_data != same:
            found = _quick_spans(spans_data, length, need.oldest_version, versions)
            if found is None:
                return None
            policies, same, before = found, spans_data, length
        served.append(policies)
        ids.append(tokens_data)
        logprobs.append(probs_data)
        masks.append(mask_data)
    if len(group.prompt.data) % 4 or not len(group.prompt.data):
        return None
    if b"".join(masks).translate(None, b"\0\1"):
        return None
    largest = _MAXIMUM(np.frombuffer(b"".join(ids), "<u4"))  # a negative id is a large one here
    if largest >= need.vocab_size:
        return None
    flat = np.frombuffer(b"".join(logprobs), "<f4")
    # Neither of the two is true of NaN.
    if not (_MINIMUM(flat) > -math.inf and _MAXIMUM(flat) <= LOGPROB_TOLERANCE):
        return None  # or one above 0 where the mask is 0
    return tuple(served)


_SAMPLE_DTYPES = ("<i4", "<f4", "|u1", "<i4")
_MINIMUM, _MAXIMUM = np.minimum.reduce, np.maximum.reduce
_SPAN = struct.Struct("<2i")


def _quick_spans(data: memoryview, length: int, oldest: int, versions: Versions) -> tuple[int, ...] | None:
    if len(data) == _SPAN.size:
        policy, count = _SPAN.unpack(data)
        if count != length or not oldest <= policy <= versions.newest or versions.step_of(policy) is None:
            return None
        return (policy,)
    if len(data) % 8 or not len(data):
        return None
    flat = np.frombuffer(data, "<i4").tolist()
    policies, counts = flat[0::2], flat[1::2]
    if min(counts) <= 0 or sum(counts) != length or policies != sorted(policies):
        return None
    if policies[-1] > versions.newest or policies[0] < oldest:
        return None
    if any(versions.step_of(version) is None for version in policies):
        return None
    return tuple(sorted(set(policies)))


def explain(group: Group, need: Requirements, versions: Versions) -> tuple[tuple[int, ...], ...] | Fault:
    """What a group must be, rule by rule: the definition that `quick` only repeats."""
    try:
        prompt = group.prompt.numpy()
        if group.prompt.dtype != "<i4" or not prompt.size:
            return Fault("shape", "the prompt has no token ids")
        if not _all_within(prompt, need.vocab_size):
            return Fault("tokens", f"a token id of the prompt is outside 0..{need.vocab_size - 1}")
        if len(group.samples) != need.samples:
            return Fault("shape", f"{len(group.samples)} samples, {need.samples} were leased")
        served = []
        for index, sample in enumerate(group.samples):
            length = len(prompt) + len(sample.tokens.numpy())
            if need.longest and length > need.longest:
                detail = f"{length} tokens with the prompt, the model allows {need.longest}"
                return Fault("shape", f"sample {index}: {detail}")
            result = _examine_sample(sample, need, versions)
            if isinstance(result, Fault):
                return Fault(result.code, f"sample {index}: {result.detail}")
            served.append(result)
        return tuple(served)
    except Malformed as error:  # bytes that are no whole number of items
        return Fault("shape", error.message)


def _examine_sample(sample: Sample, need: Requirements, versions: Versions) -> tuple[int, ...] | Fault:
    for name, dtype in _DTYPES.items():
        array: Array = getattr(sample, name)
        if array.dtype != dtype:
            return Fault("shape", f"{name} are {array.dtype}, not {dtype}")
    tokens, logprobs, mask = sample.tokens.numpy(), sample.logprobs.numpy(), sample.mask.numpy()
    length = len(tokens)
    if not length == len(logprobs) == len(mask) or not length:
        return Fault("shape", f"{length} tokens, {len(logprobs)} logprobs, mask of {len(mask)}")
    if (mask > 1).any():
        return Fault("shape", "the mask holds something else than 0 and 1")
    if (sampled := int(mask.sum())) > need.max_tokens:
        return Fault("shape", f"{sampled} sampled tokens, at most {need.max_tokens} were leased")
    if not _all_within(tokens, need.vocab_size):
        return Fault("tokens", f"a token id is outside 0..{need.vocab_size - 1}")
    chosen = logprobs[mask == 1]
    if not np.isfinite(logprobs).all():
        return Fault("logprobs", "a logprob is not finite")
    if (chosen > LOGPROB_TOLERANCE).any():
        return Fault("logprobs", f"a logprob is {float(chosen.max()):.4g}, above zero")
    low, high = need.reward_range
    if (
        not math.isfinite(sample.reward)
        or not low - REWARD_TOLERANCE <= sample.reward <= high + REWARD_TOLERANCE
    ):
        return Fault("reward", f"reward {sample.reward} is outside {low}..{high}")
    return _examine_spans(sample, length, need.oldest_version, versions)


def _examine_spans(sample: Sample, length: int, oldest: int, versions: Versions) -> tuple[int, ...] | Fault:
    flat = sample.spans.numpy()
    if not flat.size or flat.size % 2:
        return Fault("shape", f"{flat.size} numbers are no (version, tokens) pairs")
    served, counts = flat[0::2], flat[1::2]
    if (counts <= 0).any() or int(counts.sum(dtype=np.int64)) != length:
        return Fault("shape", f"spans of {_few(counts)} tokens do not sum to {length}")
    if (np.diff(served) < 0).any():
        return Fault("version", f"versions {_few(served)} go backwards")
    if (newest := int(served[-1])) > versions.newest:
        return Fault("early", f"version {newest} is not known here yet, the newest is {versions.newest}")
    if any(versions.step_of(version) is None for version in served.tolist()):
        return Fault("version", f"versions {_few(served)} are not all of this run")
    if int(served[0]) < oldest:
        return Fault("version", f"sampled by version {int(served[0])}, version {oldest} is being measured")
    return tuple(sorted(set(served.tolist())))


def _few(numbers: np.ndarray) -> str:
    """For people. A detail goes into logs, dead letters and every Status: millions of numbers would fill them."""
    listed = ", ".join(map(str, numbers[:SHOWN].tolist()))
    return f"[{listed}]" if len(numbers) <= SHOWN else f"[{listed}, … {len(numbers)} in all]"


def _all_within(ids: np.ndarray, size: int) -> bool:
    return bool((ids >= 0).all() and (ids < size).all())
