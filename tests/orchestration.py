"""Hand-made groups, a small environment, and a Control whose messages are played by hand."""

from __future__ import annotations

import itertools

import msgspec

from async_rl import wire
from async_rl.envs.base import EnvironmentConfig
from async_rl.wire import Array, Group, Key, Prompt, Sample
from orchestrator.config import EvalConfig, OrchestratorConfig, SamplingConfig
from orchestrator.control import Control
from orchestrator.spool import MemoryJournal

VOCAB = 50
TRAINER = b"trainer:1"


class Counting:
    """Prompt `ordinal` asks for its own number."""

    name = "counting"
    reward_range = (0.0, 1.0)

    def prompt(self, split, ordinal):
        return Prompt(text=f"{split} {ordinal}", answer=str(ordinal))

    async def reward(self, prompt, completion):
        return float(prompt.answer in completion)


def sample(version=0, *, length=4, reward=1.0, spans=None, **changes):
    flat = [number for pair in spans or ((version, length),) for number in pair]
    made = Sample(
        tokens=Array.of(range(length), "<i4"),
        logprobs=Array.of([-0.5] * length, "<f4"),
        mask=Array.of([1] * length, "|u1"),
        spans=Array.of(flat, "<i4"),
        reward=reward,
        finish="stop",
    )
    return msgspec.structs.replace(made, **changes)


def group(key, version=0, *, n=2, rewards=None, worker="w1", **changes):
    """n samples of 4 tokens by one version; rewards 0, 1, 0, … so that there is a signal."""
    rewards = rewards if rewards is not None else [float(index % 2) for index in range(n)]
    samples = tuple(sample(version, reward=reward) for reward in rewards)
    made = Group(key=key, prompt=Array.of([1, 2, 3], "<i4"), samples=samples, worker=worker)
    return msgspec.structs.replace(made, **changes)


def train_key(ordinal):
    return Key("train", ordinal)


class Play:
    """A Control and a clock that a test moves. Outgoing messages are kept per peer until taken."""

    def __init__(
        self,
        *,
        environment=None,
        evaluation=None,
        group_size=2,
        seed=7,
        journal=None,
        rescoring_salt=None,
        **config,
    ):
        defaults = {
            "batch_groups": 2,
            "max_lag": 1,
            "lease_s": 60.0,
            "max_attempts": 2,
            "straggler_hold_s": 0.0,
            "heartbeat_s": 2.0,
        }
        self.now = 1000.0
        self.mail: dict[bytes, list] = {}
        self.journal = journal or MemoryJournal()
        self.control = Control(
            environment=environment or Counting(),
            environment_config=EnvironmentConfig(name="counting", args={"to": 9}),
            sampling=SamplingConfig(group_size=group_size, temperature=0.7, max_tokens=8),
            config=OrchestratorConfig(**{**defaults, **config}),
            evaluation=evaluation or EvalConfig(every=0),
            seed=seed,
            lease_ids=itertools.count(100),
            now=self.now,
            journal=self.journal,
            rescoring_salt=rescoring_salt,
        )

    # ---- in

    def say(self, peer, message, after=0.0):
        """Send a message `after` some seconds; gives what comes back to the same peer at once."""
        self.now += after
        before = self.mail.pop(peer, [])
        self._post(self.control.receive(peer, wire.decode(wire.encode(message)), self.now))
        answers = self.mail.pop(peer, [])
        if before:
            self.mail[peer] = before
        return answers

    def wait(self, seconds, step_s=1.0):
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            self._post(self.control.tick(self.now))

    def take(self, peer, kind=None):
        """What was sent to a peer since the last look; of one kind, the rest stays."""
        mail = self.mail.pop(peer, [])
        if kind is None:
            return mail
        rest = [message for message in mail if not isinstance(message, kind)]
        if rest:
            self.mail[peer] = rest
        return [message for message in mail if isinstance(message, kind)]

    def _post(self, outgoing):
        for peer, message in outgoing:
            self.mail.setdefault(peer, []).append(wire.decode(wire.encode(message), wire.MAX_BATCH_BYTES))

    # ---- the usual conversation

    def attach(
        self, *, incarnation=1, step=0, version=0, version_step=0, frontier=0, peer=TRAINER, **changes
    ):
        attach = wire.Attach(
            wire.PROTOCOL, "run", "model", incarnation, step, version, version_step, VOCAB, frontier
        )
        return self.say(peer, msgspec.structs.replace(attach, **changes))

    def join(self, name="w1", *, capacity=4, version=0, nonce="1"):
        """Hello and Credit; returns the peer. Leases are kept for `take`."""
        peer = f"{name}:{nonce}".encode()
        (welcome,) = self.say(peer, hello(name, version))
        assert isinstance(welcome, wire.Welcome)
        self.mail[peer] = self.say(peer, wire.Credit(capacity, version))
        return peer

    def leases(self, peer):
        return self.take(peer, wire.Lease)

    def deliver(self, peer, lease, version=0, **changes):
        n = len(lease.seeds)
        return self.say(peer, wire.GroupDone(lease.lease, group(lease.key, version, n=n, **changes)))

    def beat(self, peer, version=0, *, after=0.0, state="serving", progress=()):
        return self.say(peer, wire.Heartbeat(version, state, tuple(progress)), after)

    def ask(self, step, incarnation=1, peer=TRAINER):
        return self.say(peer, wire.NextBatch(incarnation, step))

    def status(self):
        (status,) = self.say(b"watcher", wire.StatusRequest())
        return status


def hello(name="w1", version=0, **changes):
    made = wire.Hello(wire.PROTOCOL, name, "here", "run", "model", version, "reference")
    return msgspec.structs.replace(made, **changes)
