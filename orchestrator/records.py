"""What the orchestrator writes down, as it happens. Read again in order, it is where it was.

    Opened        which run this is
    Took          a trainer took the run, at a step                       durable
    Version       a policy version is committed
    Leased        a prompt went to a worker
    Returned      and came back without a group
    Arrived       a group: from its Ack on it can't be lost               durable
    Settled       a prompt that will not be trained, and why              durable
    Assigned      the groups of one step, before they leave               durable
    Dropped       a group that is not wanted any more: its prompt waits again
    Quarantined   a worker gets nothing until
    Released      it may try again
    Resumable     what lies before this step can't be asked for again
    Snapshot      all of the state but the groups, at the head of each file

A durable record is on disk before anything that follows from it is sent. The others may lag behind: losing the
last of them costs a lease that is given twice, never a group.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Raw, Struct

from async_rl.errors import Malformed
from async_rl.wire import Group

__all__ = [
    "DURABLE",
    "Arrived",
    "Assigned",
    "Dropped",
    "Kept",
    "Leased",
    "LeasedPrompt",
    "Opened",
    "Quarantined",
    "Record",
    "Released",
    "Resumable",
    "Returned",
    "Settled",
    "Snapshot",
    "Took",
    "Version",
    "decode_group",
    "decode_record",
    "encode_group",
    "encode_record",
    "group_of",
    "parts_of",
    "rewards_of",
]


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    run: str
    fingerprint: str


class Took(Struct, frozen=True, array_like=True, tag="took"):
    """See wire.Attach, where these come from."""

    incarnation: int
    step: int
    origin: int
    frontier: int
    open: tuple[int, ...]
    anew: bool


class Version(Struct, frozen=True, array_like=True, tag="version"):
    version: int
    parent: int
    step: int
    digest: str


class Leased(Struct, frozen=True, array_like=True, tag="leased"):
    lease: int
    ordinal: int
    worker: str
    version: int  # that the worker served then


class Returned(Struct, frozen=True, array_like=True, tag="returned"):
    lease: int
    counted: bool  # as a failed attempt
    final: bool  # no late result will come
    dropped: str = ""  # under this reason it counts as dropped work; empty: it does not


class Arrived(Struct, frozen=True, array_like=True, tag="arrived"):
    lease: int
    ordinal: int
    versions: tuple[tuple[int, ...], ...]  # [samples]: the policies that sampled each one
    hash: bytes  # of the group's encoding
    group: Raw  # a wire.Group
    worker: str = ""  # that delivered it


class _Scored(Struct, frozen=True, array_like=True):
    """What of a wire.Sample is wanted without looking at its arrays."""

    tokens: Raw
    logprobs: Raw
    mask: Raw
    spans: Raw
    reward: float


class _Scores(Struct, frozen=True, array_like=True):
    key: Raw
    prompt: Raw
    samples: tuple[_Scored, ...]


class Settled(Struct, frozen=True, array_like=True, tag="settled"):
    ordinal: int
    reason: str  # no_signal, lag, failed; damaged, too_large: a step had it
    detail: str = ""
    hash: bytes = b""  # of the group, where there was one


class Assigned(Struct, frozen=True, array_like=True, tag="assigned"):
    incarnation: int
    step: int
    ordinals: tuple[int, ...]  # in the order in which they are trained
    frontier: int  # these three as wire.Batch tells them
    open: tuple[int, ...]
    replayed: bool = False


class Dropped(Struct, frozen=True, array_like=True, tag="dropped"):
    ordinal: int
    reason: str  # quarantined


class Quarantined(Struct, frozen=True, array_like=True, tag="quarantined"):
    worker: str
    reason: str


class Released(Struct, frozen=True, array_like=True, tag="released"):
    worker: str


class Kept(Struct, frozen=True, array_like=True):
    """What a Snapshot says about a worker that is, or was, in quarantine."""

    worker: str
    reason: str
    times: int
    now: bool


class Resumable(Struct, frozen=True, array_like=True, tag="resumable"):
    step: int


class LeasedPrompt(Struct, frozen=True, array_like=True):
    """A prompt that still needs a group."""

    ordinal: int
    failures: int
    grants: dict[int, str]  # lease: worker, of every lease whose result may still come
    held: int = -1  # the lease that runs; -1: none
    version: int = -1  # of it


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    run: str
    fingerprint: str
    incarnation: int
    next_step: int
    frontier: int
    resumable: int
    level_at: int
    sources: dict[int, tuple[int, int]]
    assigned: tuple[Assigned, ...]
    replay: tuple[Assigned, ...]
    prompts: tuple[LeasedPrompt, ...]
    versions: tuple[Version, ...]
    dropped: dict[str, int]
    given_up: tuple[int, ...]
    dead_letters: tuple[tuple[str, str], ...]
    quarantine: tuple[Kept, ...] = ()
    left_out: tuple[int, ...] = ()


Record: TypeAlias = (
    Opened
    | Took
    | Version
    | Leased
    | Returned
    | Arrived
    | Settled
    | Assigned
    | Dropped
    | Quarantined
    | Released
    | Resumable
    | Snapshot
)
DURABLE = (Took, Arrived, Settled, Assigned, Dropped, Quarantined)

_NOTHING = Raw(b"")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_groups: msgspec.msgpack.Decoder[Group] = msgspec.msgpack.Decoder(Group)
_scores: msgspec.msgpack.Decoder[_Scores] = msgspec.msgpack.Decoder(_Scores)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes | memoryview) -> Record:
    """Raises Malformed."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a record of a spool: {error}") from error


def parts_of(record: Record) -> tuple[bytes | memoryview, ...]:
    """The same in pieces: a group is large, and is not copied."""
    if not isinstance(record, Arrived):
        return (_encoder.encode(record),)
    end = _encoder.encode(record.worker)
    around = _encoder.encode(msgspec.structs.replace(record, group=_NOTHING))
    return around[: -len(end)], memoryview(record.group), end


def encode_group(group: Group) -> bytes:
    return _encoder.encode(group)


def group_of(record: Arrived) -> Group:
    """Raises Malformed."""
    return decode_group(record.group)


def decode_group(body: Raw) -> Group:
    """Raises Malformed."""
    try:
        return _groups.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a group: {error}") from error


def rewards_of(body: Raw) -> tuple[float, ...]:
    """Of each sample of an encoded group. Raises Malformed."""
    try:
        return tuple(sample.reward for sample in _scores.decode(body).samples)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a group: {error}") from error
