"""The sections that the orchestrator reads. No component reads another's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from async_rl.errors import ConfigError
from async_rl.transport.base import is_loopback
from async_rl.wire import MAX_BATCH_BYTES, MAX_MESSAGE_BYTES

__all__ = [
    "EvalConfig",
    "OrchestratorConfig",
    "SamplingConfig",
    "VerifyConfig",
    "check_bind",
    "check_sizes",
    "groups_that_fit",
]

MOST_BATCH_BYTES = MAX_BATCH_BYTES - (64 << 20)
"""Of groups: the rest is for what a batch says besides; of every prompt that is open it names the number."""
TOKEN_BYTES = 9
"""On the wire: id, logprob and mask."""
TEXT_BYTES = 5
"""And its text, which travels beside it: English and code have four to five bytes per token of a large vocabulary.
What has more may still be too long for a message; its worker then says so."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[sampling]`: how the policy is sampled, for training and for the held-out evaluation alike."""

    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    """Samples per prompt. The advantage compares them with each other, so one alone teaches nothing."""
    temperature: Positive = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Per sample, the prompt not counted."""


class VerifyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[orchestrator.verify]`: whether what workers send fits, and what becomes of one whose numbers do not. What is
    compared, and how: orchestrator/verification.py."""

    quarantine: bool = True
    """False: who would be quarantined is shown as suspect, and goes on."""
    kl_limit: Positive = 0.1
    """Nats per token by which a worker's policy may differ from the one it names. An engine in 16 bits has about
    0.001 to 0.01, in 8 bits up to 0.03; raise it for engines in 4 bits."""
    ratio_limit: Positive = 0.1
    """By which the mean weight pi / mu of its tokens may differ from 1: about the shift of its logprobs, in nats."""
    surprise_limit: Positive = 0.25
    """Nats per token by which its tokens may be more or less surprising than samples of the policy. Leaving out
    groups without signal moves it by up to 0.2 where nearly all answers are right."""
    min_groups: Annotated[int, Meta(ge=4)] = 16
    """Groups (and 2000 tokens, and 4 steps) before anything is said."""
    rescore_share: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """Share of the groups whose rewards are computed again, in a process beside the orchestrator. At 2 % a worker
    that makes up every reward is found after some 150 groups. 0: none, for rewards that are dear."""
    rescore_timeout_s: Positive = 60.0
    """Limit for the rewards of one group, one after another. Longer than workers need for all of a group's; beyond
    it the group is said to fail where its worker says that it took less than half as long."""
    rescore_wrong: Annotated[int, Meta(ge=1)] = 3
    """Groups with a wrong reward, of the last 64 that were looked at, that mean quarantine; one makes suspect. More
    than one, because the environment may be of another release on one side for a moment. And the least number of
    groups that can't be scored again, where others' can (orchestrator/unscored.py)."""
    max_faults: Annotated[int, Meta(ge=0)] = 5
    """Groups refused for what they say, of the last `fault_window`, that mean quarantine: an honest worker has none.
    0: never."""
    fault_window: Annotated[int, Meta(ge=1)] = 20
    quarantine_s: Positive = 600.0
    """How long. Then the worker may try again, and nothing is held against it; found again, it stays twice as long,
    up to a day. A restart of the orchestrator begins the time anew."""


class OrchestratorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[orchestrator]`: admission, leases and the roster."""

    bind: str = "tcp://127.0.0.1:5577"
    """Where workers and the trainer connect. Port 0 or `*`: any free one (it is logged)."""
    keys: str = ""
    """Folder of keys, as `async-rl keys` makes it: everything is encrypted, only allowed keys connect, and
    other machines may. Empty: no keys."""
    insecure_remote: bool = False
    """Without keys, listen where other machines can connect although nothing is encrypted and nobody is
    authenticated: for a network that you trust, a VPN or a tunnel."""
    batch_groups: Annotated[int, Meta(ge=1)] = 16
    """Groups per optimizer step."""
    max_lag: Annotated[int, Meta(ge=0)] = 2
    """Optimizer steps between the oldest policy that sampled a group and the one that trains it. 0:
    synchronous."""
    drop_no_signal: bool = True
    """Leave out groups whose rewards are all equal: their advantages are zero."""
    lease_s: Positive = 60.0
    """A lease without a new token for this long is given back. Covers the queue inside an engine and a slow
    reward function; progress (every heartbeat) extends it, so it need not cover a long generation."""
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    """Failures (error, expiry, worker lost, result refused, too old before it was done) after which a prompt is
    given up."""
    spool: str = ""
    """Folder on a local disk for the groups that were acknowledged and for what became of them; a restart goes on
    from it. Empty: one for this store URL in the folder trainer.out."""
    fsync: bool = True
    """Acknowledge only what the disk has. Without it a group survives the end of the process,
    not that of the machine."""
    batch_bytes: Annotated[int, Meta(ge=2 * MAX_MESSAGE_BYTES, le=MOST_BATCH_BYTES)] = MOST_BATCH_BYTES
    """Of the groups of one step: they leave in one message, and every rank holds them in memory. A step whose groups
    are larger gets those that fit, the oldest first, and the log says so; the others are next."""
    buffer_bytes: Annotated[int, Meta(ge=1)] = 4 << 30
    """Of groups that wait to be trained. They lie in the spool, not in memory; while there are more, nothing is
    leased. When it is full, a batch leaves with what is there."""
    spool_full_wait_s: Positive = 600.0
    """Limit on the wait for room on a full disk. Until then nothing is acknowledged and nothing lost."""
    straggler_hold_s: NotNegative = 5.0
    """A full batch waits this long for a lease that would be too old for the next one. Without it the
    longest samples are the ones that are dropped; with much more the trainer stands still for one slow
    worker."""
    heartbeat_s: Positive = 2.0
    """Workers' heartbeat; after five missed ones a worker counts as gone."""
    final_eval_s: NotNegative = 120.0
    """Limit for the held-out evaluation of the final version."""
    drain_s: NotNegative = 10.0
    """Limit for the workers to leave after the last step."""
    verify: VerifyConfig = VerifyConfig()


class EvalConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[eval]`: mean reward on held-out prompts, measured by the same workers."""

    every: Annotated[int, Meta(ge=0)] = 10
    """Versions between two evaluations; version 0 and the final one are always measured. 0: no
    evaluation."""
    prompts: Annotated[int, Meta(ge=1)] = 64


def check_sizes(sampling: SamplingConfig) -> None:
    """Raises ConfigError where a group of which every sample has its full length can't be sent: only the shorter ones
    would be trained."""
    size = _group_bytes(sampling)
    if size > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"sampling.group_size = {sampling.group_size} samples of up to sampling.max_tokens = "
            f"{sampling.max_tokens} tokens are about {size} bytes with their text, and a message holds "
            f"{MAX_MESSAGE_BYTES}: groups of long samples would be lost",
            hint="use fewer or shorter samples per group",
        )


def groups_that_fit(sampling: SamplingConfig, config: OrchestratorConfig) -> int:
    """Into one batch, where every sample has its full length; fewer than batch_groups: a step may be cut short."""
    return min(config.batch_groups, config.batch_bytes // _group_bytes(sampling))


def _group_bytes(sampling: SamplingConfig) -> int:
    return sampling.group_size * sampling.max_tokens * (TOKEN_BYTES + TEXT_BYTES)


def check_bind(config: OrchestratorConfig) -> None:
    """Raises ConfigError for an address that other machines can reach, unless there are keys or that was asked
    for in so many words."""
    if not config.keys and not config.insecure_remote and not is_loopback(config.bind):
        raise ConfigError(
            f"orchestrator.bind = {config.bind!r} can be reached from other machines, and there are no "
            "keys: anybody who connects could feed the trainer",
            hint="make keys (`async-rl keys new NAME --server DIR`) and set orchestrator.keys = DIR; or bind to "
            "tcp://127.0.0.1:PORT and tunnel; or, on a network you trust, set "
            "orchestrator.insecure_remote = true",
        )
