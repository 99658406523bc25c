"""The rollout protocol: every message that crosses a socket, and nothing else. Read it as the specification.

    worker  (DEALER)                        orchestrator (ROUTER)                trainer rank 0 (DEALER)
    Hello         ──────────────────────►                        ◄──────────────  Attach
                  ◄──────────  Welcome | Refused        Attached | Refused  ─────────────►
    Credit        ──────────────────────►                        ◄──────────────  NextBatch(step)
                  ◄──────────────────────  Lease                       Batch  ───────────►
    Heartbeat     ──────────────────────►                        ◄──────────────  Published(version)
    GroupDone     ──────────────────────►                        ◄──────────────  Checked(step)
                  ◄──────────────────────  Ack | Nack
    Failed        ──────────────────────►                        ◄──────────────  Finish
                  ◄── Announce | Cancel | Drain             Finished  ───────────────────►
    Bye           ──────────────────────►
    anyone: StatusRequest ──────────────►  Status

One message is one ZeroMQ frame of MessagePack: a tagged array, so a field may only be appended, with a
default. Unknown tags and wrong types are refused (`Malformed`). Arrays travel as raw little-endian bytes and
decode into views, without copies. Every request may be sent again: the answers are idempotent. Durations are
relative (`_s`), because clocks on two clusters do not agree. What there is many of keeps out of the garbage
collector's sight (gc=False): frozen values make no cycles.
"""

from __future__ import annotations

import gc
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from async_rl.errors import Malformed

PROTOCOL = 3
"""Version of this file. Hello and Attach carry it; any difference is refused."""

MAX_MESSAGE_BYTES = 64 << 20
"""Nothing larger is decoded: a group of 16 samples of 128k tokens is about 20 MB."""

MAX_BATCH_BYTES = 2 << 30
"""The limit for what the trainer takes from its own orchestrator: a Batch holds many groups."""

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 20)]
LongText = Annotated[str, Meta(max_length=MAX_MESSAGE_BYTES)]
"""What the policy reads and writes: a completion of 300k tokens is over a million characters. A message bounds it."""
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""What a worker says of itself: finite and not NaN, or whoever shows it, or adds it up, would trip over it."""
MOST_LEASES = 1 << 16
"""In the hands of one worker, as far as a heartbeat can tell; a list of millions would only keep us busy."""


class Array(Struct, frozen=True, array_like=True, gc=False):
    """A one-dimensional array as raw little-endian bytes."""

    dtype: Literal["<i4", "<i8", "<f4", "|u1"]
    data: memoryview

    @classmethod
    def of(cls, values: Any, dtype: Literal["<i4", "<i8", "<f4", "|u1"]) -> Array:
        return cls(dtype, np.ascontiguousarray(values, dtype=dtype).reshape(-1).view(np.uint8).data)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A read-only view, shape [n]. Raises Malformed where the bytes are no whole number of items."""
        if len(self.data) % np.dtype(self.dtype).itemsize:
            raise Malformed(f"array of {len(self.data)} bytes is not a whole number of {self.dtype} items")
        return np.frombuffer(self.data, dtype=self.dtype)


# ---------------------------------------------------------------- what is generated


class Message(Struct, frozen=True, array_like=True, gc=False):
    """One turn of a chat prompt."""

    role: Name
    content: LongText


class Prompt(Struct, frozen=True, array_like=True, gc=False):
    """What the policy is asked. `messages` goes through the run's chat template; with none, `text` is used raw."""

    messages: tuple[Message, ...] = ()
    text: LongText = ""
    answer: LongText = ""  # what the environment's reward compares with; never shown to the policy
    info: dict[str, str] = {}


class Sampling(Struct, frozen=True, array_like=True, gc=False):
    """How to sample. Behaviour logprobs are those of the distribution at this temperature."""

    temperature: Annotated[float, Meta(gt=0)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] = 256  # per sample, the prompt not counted


class Key(Struct, frozen=True, array_like=True, gc=False, order=True):
    """Names one group for ever. For `eval`, `group` is the policy version that is being measured."""

    split: Literal["train", "eval"]
    ordinal: Count  # of the prompt, in the environment's endless sequence
    group: Count = 0


class Sample(Struct, frozen=True, array_like=True, gc=False):
    """One completion: T tokens after the prompt (with its end token, if it reached one)."""

    tokens: Array  # <i4 [T]
    logprobs: Array  # <f4 [T], behaviour logprobs (0 where the mask is 0)
    mask: Array  # |u1 [T], 1 where the policy sampled the token and it is trained
    spans: Array  # <i4 [S, 2] flattened: (policy version, tokens), in order; the tokens sum to T
    reward: float
    finish: Literal["stop", "length"]
    text: LongText = ""


class Group(Struct, frozen=True, array_like=True, gc=False):
    """The n samples of one prompt: the unit of advantage, lease and acknowledgement."""

    key: Key
    prompt: Array  # <i4 [P], the prompt's token ids, shared by all samples
    samples: tuple[Sample, ...]
    worker: Name = ""
    generate_s: Amount = 0.0
    reward_s: Amount = 0.0


class EvalScore(Struct, frozen=True, array_like=True):
    """Mean reward on the held-out prompts for one policy version."""

    version: int
    step: int
    reward: float
    prompts: int


# ---------------------------------------------------------------- worker <-> orchestrator


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    protocol: int
    worker: Name  # unique and stable across reconnects
    cluster: Name
    run: Name = ""  # run id from run.json
    fingerprint: Name = ""  # of the model, from run.json
    version: int = -1  # policy version served, -1 while the engine starts
    engine: Name = ""


class RunSettings(Struct, frozen=True, array_like=True):
    """What the orchestrator owns and a worker must not choose."""

    environment: Name
    environment_args: dict[str, Any]
    sampling: Sampling
    group_size: int
    max_lag: int
    heartbeat_s: Seconds = 2.0


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    protocol: int
    run: Name
    settings: RunSettings
    newest_version: int


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """No, and why. `retry`: the same request may succeed later (say Hello again after a pause)."""

    reason: Text
    hint: Text = ""
    retry: bool = False


class Credit(Struct, frozen=True, array_like=True, gc=False, tag="credit"):
    """How many leases the worker can hold at once. A level, not an increment: a lost message costs nothing."""

    capacity: Count
    version: int  # served now


class Lease(Struct, frozen=True, array_like=True, gc=False, tag="lease"):
    lease: Count  # unique within one life of the orchestrator
    key: Key
    prompt: Prompt
    seeds: tuple[int, ...]  # one per sample: the same key always has the same seeds
    sampling: Sampling
    deadline_s: Seconds  # from now, extended by progress
    oldest_version: int  # a group begun under an older policy would be dropped


class LeaseProgress(Struct, frozen=True, array_like=True, gc=False):
    lease: Count
    tokens: Count  # generated so far, all samples; only growth extends the lease


class Heartbeat(Struct, frozen=True, array_like=True, gc=False, tag="heartbeat"):
    version: int  # served
    state: Literal["starting", "serving", "updating", "draining"]
    progress: Annotated[tuple[LeaseProgress, ...], Meta(max_length=MOST_LEASES)] = ()
    fetching_version: int = -1  # -1: none
    fetched_fraction: Amount = 0.0
    tokens_per_s: Amount = 0.0
    running: Count = 0  # sequences in the engine
    queued: Count = 0
    sync_bytes: Count = 0  # of the versions fetched so far, what was downloaded for them
    pause_s: Amount = 0.0  # the last pause of generation for an update
    cache_used: Amount = 0.0  # share of the engine's KV cache
    oldest_s: Amount = 0.0  # since the oldest sequence in the engine began
    idle_s: Amount = 0.0  # in all, since it began to serve: the engine had nothing to do
    # Leases whose groups wait for their Ack:
    finished: Annotated[tuple[Count, ...], Meta(max_length=MOST_LEASES)] = ()


class GroupDone(Struct, frozen=True, array_like=True, gc=False, tag="group_done"):
    lease: Count
    group: Group


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """This lease will not be fulfilled. `returned`: unstarted or given back in a drain; not counted as an attempt."""

    lease: Count
    key: Key
    reason: Text
    returned: bool = False


class Ack(Struct, frozen=True, array_like=True, gc=False, tag="ack"):
    """The group is the orchestrator's now; the worker may forget it."""

    lease: Count
    key: Key


class Nack(Struct, frozen=True, array_like=True, tag="nack"):
    """The group will never be accepted, and why; the worker may forget it."""

    lease: Count
    key: Key
    reason: Text


class Announce(Struct, frozen=True, array_like=True, tag="announce"):
    """A version is committed. A hint: the store is the truth."""

    version: int
    step: int


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    leases: tuple[int, ...]
    reason: Text


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Finish or give back what is leased, then leave."""

    reason: Text


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The worker leaves; its leases, if any are left, go back at once."""

    reason: Text


# ---------------------------------------------------------------- trainer <-> orchestrator


class Attach(Struct, frozen=True, array_like=True, tag="attach"):
    """A trainer takes the run: from here on, older incarnations get nothing."""

    protocol: int
    run: Name
    fingerprint: Name
    incarnation: int
    step: Count  # optimizer steps done
    version: int  # newest published version
    version_step: int  # the step it holds
    vocab_size: int
    frontier: Count = 0  # next prompt ordinal, from the checkpoint
    open: tuple[Count, ...] = ()  # ordinals below it that no step so far has used, likewise
    parent: int = -1  # of `version`
    digest: Name = ""  # of the state of `version`
    origin: int = -1  # incarnation that wrote the checkpoint we resumed from; -1: there was none
    known: tuple[tuple[int, int, int, str], ...] = ()  # version, parent, step, digest: before `version`
    anew: bool = False  # --resume never: what was delivered before is not wanted any more
    longest: Count = 0  # tokens that the model allows, prompt and sample together; 0: none is known


class Attached(Struct, frozen=True, array_like=True, tag="attached"):
    run: Name
    max_lag: int
    batch_groups: int


class NextBatch(Struct, frozen=True, array_like=True, tag="next_batch"):
    """The groups of step `step` (0-based: `step` optimizer steps are done). Asked again, the same answer."""

    incarnation: int
    step: Count
    resumable: Count = 0  # the oldest step that a later trainer may resume from: what it needs is kept


class Batch(Struct, frozen=True, array_like=True, tag="batch"):
    incarnation: int
    step: Count
    groups: tuple[Group, ...]
    lags: tuple[tuple[int, ...], ...]  # [groups][samples], optimizer steps
    frontier: Count  # next prompt ordinal to lease, for the checkpoint
    dropped: dict[str, int] = {}  # groups since the start, by reason: lag, no_signal, failed, …
    evals: tuple[EvalScore, ...] = ()  # finished since the last batch
    waited_s: Seconds = 0.0  # from the first NextBatch of this step to this answer
    open: tuple[Count, ...] = ()  # ordinals below the frontier that no batch has used, likewise
    replayed: bool = False  # a repeated step: these groups were admitted before, and not again


class Published(Struct, frozen=True, array_like=True, tag="published"):
    incarnation: int
    version: int
    step: Count
    parent: int = -1
    digest: Name = ""  # of the state


class Measured(Struct, frozen=True, array_like=True):
    """How well the behaviour logprobs of a part of one group fit the policy that was trained with it: means over its
    loss tokens, as async_rl/algo/mismatch.py defines them."""

    key: Key
    lag: Count  # of these tokens, optimizer steps
    pure: bool  # sampled before the sample met an update of the engine
    tokens: Count
    kl: float
    ratio: float
    surprise: float


class Checked(Struct, frozen=True, array_like=True, tag="checked"):
    """What the forward pass of step `step` has shown. Sent once and not answered: a lost one is evidence lost."""

    incarnation: int
    step: Count
    rows: tuple[Measured, ...]


class Finish(Struct, frozen=True, array_like=True, tag="finish"):
    """No more steps. The last held-out evaluation runs, workers are drained, then Finished is sent."""

    incarnation: int
    step: Count
    evaluate: bool = True


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    evals: tuple[EvalScore, ...] = ()


# ---------------------------------------------------------------- anyone


class StatusRequest(Struct, frozen=True, array_like=True, tag="status_request"):
    pass


class WorkerStatus(Struct, frozen=True, array_like=True):
    worker: str
    cluster: str
    state: str  # starting, serving, updating, draining, quarantined, gone
    version: int
    lag: int  # optimizer steps behind the trainer; -1 while unknown
    age_s: float  # since this version was committed
    fetching_version: int
    fetched_fraction: float
    tokens_per_s: float
    leases: int
    running: int
    queued: int
    groups_done: int
    sync_bytes: int
    pause_s: float
    last_seen_s: float  # ago
    lag_versions: int = -1  # versions committed after the one that it serves; -1 while unknown
    lag_s: float = -1.0  # since the first of them was committed: out of date for so long; -1 while unknown
    cache_used: float = 0.0  # these three as in Heartbeat
    oldest_s: float = 0.0
    idle_s: float = 0.0
    capacity: int = 0  # leases that it can hold
    serving_s: float = 0.0  # since it began to serve, as far as we have seen


class Standing(Struct, frozen=True, array_like=True):
    """Whether a worker's numbers fit."""

    worker: str
    state: str  # unjudged (too little was seen), good, suspect, quarantined
    reason: str = ""
    groups: int = 0  # whose behaviour logprobs were compared
    left_s: float = 0.0  # of its quarantine


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """One consistent picture, for `async-rl lag` and for exporters."""

    run: str
    incarnation: int
    trainer: str  # absent, waiting (for a batch), training, finishing, finished
    step: int
    newest_version: int
    newest_version_step: int
    newest_version_age_s: float
    max_lag: int
    batch_groups: int
    buffered: int
    outstanding: int
    admitted_limit: int  # groups that may be trained, buffered or outstanding now
    trained_groups: int
    lag_p50: float
    lag_p95: float
    lag_max: int
    lag_counts: dict[int, int]  # trained samples by lag, the whole run
    dropped: dict[str, int]
    reward: float  # mean of the last batch, nan before
    evals: tuple[EvalScore, ...]
    workers: tuple[WorkerStatus, ...]
    uptime_s: float
    dead_letters: tuple[tuple[str, str], ...] = ()  # (key, last reason), newest last
    refused: dict[str, int] = {}  # messages and groups that were not accepted, by reason
    standings: tuple[Standing, ...] = ()  # of the workers that something is known about
    heartbeat_s: float = 2.0
    trainer_waited_s: float = 0.0  # for batches since it attached, the wait that goes on now included
    trainer_here_s: float = 0.0  # since it attached
    batch_waits_for: str = ""  # what the trainer's request waits for; empty: it has none
    leasing_waits_for: str = ""  # why one that serves the newest version gets no lease; empty: it would


FromWorker: TypeAlias = Hello | Credit | Heartbeat | GroupDone | Failed | Bye
ToWorker: TypeAlias = Welcome | Refused | Lease | Ack | Nack | Announce | Cancel | Drain
FromTrainer: TypeAlias = Attach | NextBatch | Published | Checked | Finish
ToTrainer: TypeAlias = Attached | Batch | Finished
AnyMessage: TypeAlias = (
    Hello
    | Credit
    | Heartbeat
    | GroupDone
    | Failed
    | Bye
    | Welcome
    | Refused
    | Lease
    | Ack
    | Nack
    | Announce
    | Cancel
    | Drain
    | Attach
    | NextBatch
    | Published
    | Checked
    | Finish
    | Attached
    | Batch
    | Finished
    | StatusRequest
    | Status
)

_MANY_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes | memoryview, limit: int = MAX_MESSAGE_BYTES) -> AnyMessage:
    """The message in one frame. Raises Malformed: too large, no MessagePack, unknown tag, wrong types."""
    size = len(frame)
    if size > limit:
        raise Malformed(f"message of {size} bytes is over the limit of {limit}")
    # Thousands of new views at once would set the collector off again and again, in vain.
    pause = size > _MANY_BYTES and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a message of protocol {PROTOCOL}: {error}") from error
    finally:
        if pause:
            gc.enable()
