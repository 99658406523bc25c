"""Hostile bytes against every decoder and against a live orchestrator.

    python -m tests.chaos.fuzz [--messages N] [--seed N]

Messages of every kind are mutated: bits flipped, bytes cut out, doubled, put elsewhere, lengths made huge, parts of
one message put into another; there is pure noise; and there are well-formed groups with one thing wrong. Each is
decoded, and goes to an orchestrator with a trainer, workers and leases. It must answer or drop it, keep its memory,
and take no group that breaks a rule.
"""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from async_rl import wire
from async_rl.errors import Malformed
from async_rl.wire import Array, Group, Key, LeaseProgress, Sample
from orchestrator.acceptance import Fault, Requirements, explain
from orchestrator.config import VerifyConfig
from orchestrator.ledger import hash_of
from orchestrator.records import decode_record, encode_group, encode_record
from tests.orchestration import TRAINER, VOCAB, Play, group, hello

__all__ = ["Fuzz", "seeds"]

WORKER = b"w1:1"
GROWTH_MB = 64
"""What the process may grow by: caches and pools of the interpreter."""
PROGRESS = 50_000
"""Messages between two lines about it."""
HUGE = tuple(kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"))
"""MessagePack's headers of an array, a map, bytes, a string and an extension of four thousand million."""


NUMBERS = (b"\xca\x7f\xc0\0\0", b"\xcb\xff\xf0" + 6 * b"\0", b"\xd3\x80" + 7 * b"\0", b"\xcf" + 8 * b"\xff")
"""NaN, minus infinity, the smallest and the greatest integer."""


def seeds() -> list[bytes]:
    """A right message of every kind."""
    key = Key("train", 0)
    made = group(key)
    progress = (LeaseProgress(100, 5),)
    messages: list[Any] = [
        hello(),
        wire.Welcome(wire.PROTOCOL, "run", wire.RunSettings("e", {"a": 1}, wire.Sampling(), 2, 1), 0),
        wire.Refused("no", "because", True),
        wire.Credit(4, 0),
        wire.Lease(100, key, wire.Prompt((wire.Message("user", "hi"),)), (1, 2), wire.Sampling(), 60.0, 0),
        wire.Heartbeat(0, "serving", progress),
        wire.GroupDone(100, made),
        wire.GroupDone(101, group(Key("train", 1))),
        wire.GroupDone(102, group(Key("eval", 0, 0), n=1)),
        wire.Failed(100, key, "it raised"),
        wire.Ack(100, key),
        wire.Nack(100, key, "no"),
        wire.Announce(1, 1),
        wire.Cancel((100, 101), "stop"),
        wire.Drain("done"),
        wire.Bye("leaving"),
        wire.Attach(
            wire.PROTOCOL, "run", "model", 1, 0, 0, 0, VOCAB, 3, (1, 2), -1, "d", -1, ((0, -1, 0, "d"),)
        ),
        wire.Attached("run", 1, 2),
        wire.NextBatch(1, 0),
        wire.Batch(1, 0, (made,), ((0, 0),), 3, {"lag": 1}, (wire.EvalScore(0, 0, 0.5, 3),), 0.1, (2,)),
        wire.Published(1, 1, 1, 0, "d"),
        wire.Checked(1, 0, (wire.Measured(key, 0, True, 4, 0.1, 0.1, 0.1),)),
        wire.Finish(1, 5),
        wire.Finished(()),
        wire.StatusRequest(),
    ]
    return [wire.encode(message) for message in messages]


def mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    """One to four changes of a right message, or noise."""
    if chance.random() < 0.02:
        return chance.randbytes(chance.randrange(400))
    data = bytearray(chance.choice(frames))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1) if data else 0
        match chance.randrange(9):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2 if data:
                data[at % len(data)] = chance.choice((0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xCB, 0xFF))
            case 3:
                del data[at:]
            case 4:
                del data[at : at + chance.randrange(1, 9)]
            case 5:
                data[at:at] = data[at : at + chance.randrange(1, 33)]
            case 6:
                data[at:at] = chance.choice(HUGE)
            case 7:
                other = chance.choice(frames)
                start = chance.randrange(len(other))
                data[at : at + chance.randrange(17)] = other[start : start + chance.randrange(65)]
            case _:
                data[at:at] = chance.choice(
                    (b"\xca\x7f\xc0\x00\x00", b"\xcb\xff\xf0" + 6 * b"\0", b"\xd3\x80" + 7 * b"\0")
                )
    return bytes(data)


def wrong_groups(chance: random.Random) -> Iterator[bytes]:
    """Well-formed groups for leases that run: right, or with a thing wrong, or at its edge."""

    def some(usual: float, others: tuple[float, ...], length: int) -> list[float]:
        return [chance.choice(others) if not chance.randrange(40) else usual for _ in range(length)]

    while True:
        samples = []
        for index in range(2):
            length = chance.choice((1, 4, 4, 8, 8, 0, 9))
            fields: dict[str, list[Any]] = {
                "tokens": some(1, (0, VOCAB - 1, VOCAB, -1), length),
                "logprobs": some(-1.0, (0.0, 1.0, float("nan"), float("-inf")), length),
                "mask": some(1, (0, 2), length),
                "spans": chance.choice(
                    [[0, length]] * 6 + [[1, length], [0, 1, 0, length - 1], [], [0, -1]]
                ),
            }
            cut = chance.choice((*8 * [""], *fields))
            if cut:
                fields[cut] = fields[cut][:-1]
            samples.append(
                Sample(
                    Array.of(fields["tokens"], "<i4"),
                    Array.of(fields["logprobs"], "<f4"),
                    Array.of(fields["mask"], "|u1"),
                    Array.of(fields["spans"], "<i4"),
                    chance.choice((*6 * [float(index)], 2.0, float("nan"))),
                    "stop",
                )
            )
        lease = 100 + chance.randrange(6)
        ordinal = chance.choice((*6 * [lease - 100], 0, 10**9, 2**62))
        made = Group(Key("train", ordinal), Array.of([1], "<i4"), tuple(samples), "w1")
        yield wire.encode(wire.GroupDone(lease, made))


class Fuzz:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._frames = seeds()
        self._groups = wrong_groups(self._chance)
        self.counts: Counter[str] = Counter()
        self._need = Requirements(samples=2, max_tokens=8, vocab_size=VOCAB, reward_range=(0.0, 1.0))
        self._begin()

    def _begin(self) -> None:
        """An orchestrator with everything that a message can touch."""
        # A worker that sends so much nonsense would be quarantined, and nothing it says looked at any more.
        self.play = Play(batch_groups=3, max_lag=1, verify=VerifyConfig(quarantine=False))
        self.play.attach()
        self.play.join(capacity=6)
        self.play.mail.clear()

    def play_messages(self, count: int) -> None:
        for number in range(count):
            if number % 15 == 0 or self.play.control.finished:  # a Finish that was right ends a run
                self._begin()
            well_formed = self._chance.random() < 0.3
            frame = next(self._groups) if well_formed else mutated(self._chance, self._frames)
            self._decode_record(frame)
            try:
                message = wire.decode(frame)
                wire.encode(message)
                self.counts["decoded"] += 1
            except Malformed as error:
                message = error  # type: ignore[assignment]
                self.counts["malformed"] += 1
            peer = WORKER if well_formed else self._chance.choice((WORKER, WORKER, TRAINER, b"stranger"))
            self.play.now += 0.001
            outgoing = self.play.control.receive(peer, message, self.play.now)
            for _, answer in outgoing:
                wire.encode(answer)
                self.counts[type(answer).__name__] += 1
                if isinstance(answer, wire.Ack) and isinstance(message, wire.GroupDone):
                    self._must_be_right(message)

    def _must_be_right(self, done: wire.GroupDone) -> None:
        session = self.play.control._session
        if (
            done.group.key.split == "train"
            and session is not None
            and not session.ledger.hash_of(done.group.key)
        ):
            return  # delivered long ago: it may be forgotten
        if done.group.key.split == "train":
            said = explain(done.group, self._need, session.versions)  # type: ignore[union-attr]
            if isinstance(said, Fault) and not self._taken_before(done):
                raise AssertionError(f"a wrong group was taken: {said}: {done}")

    def _taken_before(self, done: wire.GroupDone) -> bool:
        """Whether the Ack is for a group that was settled before this one came."""
        session = self.play.control._session
        assert session is not None
        return session.ledger.hash_of(done.group.key) != hash_of(encode_group(done.group))

    def _decode_record(self, frame: bytes) -> None:
        with contextlib.suppress(Malformed):
            encode_record(decode_record(frame))


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command()
@click.option("--messages", default=1_000_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(messages: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    fuzz = Fuzz(seed)
    fuzz.play_messages(min(messages, 20_000))  # caches are warm then
    before, began = rss_mb(), time.monotonic()
    for done in range(0, messages, PROGRESS):
        fuzz.play_messages(min(PROGRESS, messages - done))
        click.echo(
            f"{min(done + PROGRESS, messages):>9} messages, {time.monotonic() - began:.0f} s, "
            f"{rss_mb() - before:+.1f} MB"
        )
    grown = rss_mb() - before
    click.echo(
        f"{messages} messages in {time.monotonic() - began:.0f} s, memory grew by {grown:.1f} MB, seed {seed}"
    )
    for name, count in sorted(fuzz.counts.items()):
        click.echo(f"  {count:>9} {name}")
    sys.exit(grown > GROWTH_MB)


if __name__ == "__main__":
    main()
