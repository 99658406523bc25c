"""What must be true of a run, from the test's own log (hooks/sitecustomize.py), the manifests in the store and the
records in the spool; never from a counter of the product.

    made         a worker sent a group: lease, ordinal, hash, rewards, tokens
    acknowledged a worker got the Ack of a lease
    settled      the orchestrator wrote down that an ordinal will not be trained, and why
    life         a trainer took the run: incarnation, step
    checkpoint   one was committed
    ordinals     what a trainer was about to train in a step, with hashes and the policies that sampled
    state        the hash of the weights that a trainer published after a step
    served       the hash of the weights that a worker was about to serve
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.store import ObjectStore
from async_rl.weights.lineage import Manifest, admissible, list_versions, read_claims, read_manifest
from orchestrator.config import OrchestratorConfig
from orchestrator.ledger import GroupLedger
from orchestrator.spool import Spool

__all__ = ["History", "Left", "Line", "Versions", "failures", "history_of", "left_in", "read_log"]

Line = dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """A process that was killed while it wrote may have left half a line, with the next one behind it."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class Left(NamedTuple):
    """What the spool holds for later, by ordinal."""

    buffered: frozenset[int]
    asked: frozenset[int]  # leased, or waiting to be
    assigned: frozenset[int]  # of steps that were handed out and not trained
    frontier: int  # the next prompt that was never asked


def left_in(spool: Path, config: OrchestratorConfig, steps: int) -> Left:
    """After the orchestrator has ended. `steps`: those that were trained."""
    journal = Spool(spool, lock_limit_s=5.0)
    try:
        ledger = GroupLedger(config, journal, itertools.count(1 << 60))
        ledger.restore(journal.replay(), 0.0)
        later = [ledger._branches.lookup(ledger.incarnation, step) for step in range(steps, steps + 1000)]
        return Left(
            frozenset(key.ordinal for key in ledger._buffer),
            frozenset(key.ordinal for key in ledger.pool),
            frozenset(ordinal for each in later if each is not None for ordinal in each.ordinals),
            ledger.frontier,
        )
    finally:
        journal.close()


class History(NamedTuple):
    """`steps`: of the history that survives, the line of each. `wrong`: what was wrong on the way to it."""

    steps: dict[int, Line]
    incarnation: int
    lives: int
    repeated: int
    zombies: int  # steps of trainers that had been replaced
    wrong: list[str]

    @property
    def trained(self) -> list[int]:
        return [ordinal for step in sorted(self.steps) for ordinal in self.steps[step]["ordinals"]]


def history_of(lines: Iterable[Line]) -> History:
    """Who resumes at a step throws away what came after it, and must be given the same groups again."""
    steps: dict[int, Line] = {}
    before: dict[int, Line] = {}  # what the steps had that a resume repeats
    incarnation, repeated, zombies, checkpoint = -1, 0, 0, 0
    lives: set[int] = set()
    wrong = []
    for line in lines:
        if "checkpoint" in line:
            checkpoint = max(checkpoint, line["checkpoint"])
        elif "life" in line:
            lives.add(line["life"])
            if line["resumed"] < checkpoint:
                wrong.append(
                    f"incarnation {line['life']} resumed at {line['resumed']}, not at {checkpoint}"
                )
        elif "ordinals" in line:
            step = line["step"]
            if line["incarnation"] < incarnation:
                zombies += 1
                continue
            if line["incarnation"] > incarnation:
                before = {**before, **steps}
                before = {at: had for at, had in before.items() if at >= step}
                steps = {at: had for at, had in steps.items() if at < step}
                incarnation = line["incarnation"]
            if (had := before.pop(step, None)) is not None:
                repeated += 1
                if had["ordinals"] != line["ordinals"]:
                    wrong.append(f"step {step} was repeated with {line['ordinals']}, not {had['ordinals']}")
            steps[step] = line
    return History(steps, incarnation, len(lives), repeated, zombies, wrong)


# ---------------------------------------------------------------- versions


class Versions:
    """Every manifest of a run, and lags as they are defined: along the branches, equal states being one policy."""

    def __init__(self, store: ObjectStore) -> None:
        self.claims = read_claims(store)
        self.manifests: dict[int, Manifest] = {
            number: read_manifest(store, number) for number in list_versions(store)
        }

    def path(self, version: int) -> dict[int, Manifest]:
        """By step, from `version` back to the root."""
        found: dict[int, Manifest] = {}
        while version >= 0:
            manifest = self.manifests[version]
            found.setdefault(manifest.step, manifest)
            version = manifest.parent
        return found

    def lag(self, then: int, now: int, step: int) -> int:
        """Steps from the policy `then` back to where its branch meets that of `now`, and forward to `step`."""
        ours = self.path(now)
        began = self.manifests[then].step
        for at, theirs in sorted(self.path(then).items(), reverse=True):
            if at in ours and ours[at].digest == theirs.digest:
                return (began - at) + (step - at)
        raise AssertionError(f"versions {then} and {now} have no common ancestor")

    def lags_of(self, line: Line) -> list[int]:
        """[samples of the step]; a step that is repeated has those that it had."""
        step, now = line["step"], line["now"]
        lags = []
        for versions in itertools.chain.from_iterable(line["versions"]):
            if line["replayed"]:
                lags.append(max(step - self.manifests[each].step for each in versions))
            else:
                lags.append(max(self.lag(each, now, step) for each in versions))
        return lags

    def wrong(self, lines: Iterable[Line], history: History, max_lag: int) -> list[str]:
        found = []
        for step, line in sorted(history.steps.items()):
            lags = self.lags_of(line)
            if max(lags, default=0) > max_lag:
                found.append(f"step {step} was trained with lags {lags} (it says {line['lags']})")
            elif lags != line["lags"]:
                found.append(f"step {step} has lags {lags}, the trainer counted {line['lags']}")
        return found + self._served(lines)

    def _served(self, lines: Iterable[Line]) -> list[str]:
        states: dict[tuple[int, int], str] = {}
        served: dict[int, set[str]] = defaultdict(set)
        for line in lines:
            if "state" in line:
                states[line["incarnation"], line["after"]] = line["state"]
            elif "served" in line:
                served[line["served"]].add(line["hash"])
        found = []
        for version, hashes in sorted(served.items()):
            manifest = self.manifests.get(version)
            if manifest is None or not admissible(manifest, self.claims):
                found.append(f"version {version} was served, which does not count")
                continue
            right = states.get((manifest.incarnation, manifest.step))
            if hashes != {right}:
                found.append(f"version {version}: served {hashes}, published {right}")
        return found


# ---------------------------------------------------------------- groups


def failures(lines: list[Line], history: History, left: Left) -> tuple[list[str], dict[str, Any]]:
    """Of the groups: none lost, none twice, none that nobody made, none missing below the frontier; and counts."""
    found = list(history.wrong)
    trained, steps = history.trained, sorted(history.steps)
    if steps != list(range(len(steps))):
        found.append(f"steps {steps}")
    twice = sorted(ordinal for ordinal, count in Counter(trained).items() if count > 1)
    if twice:
        found.append(f"trained twice: {twice}")
    for line in history.steps.values():
        if line["left_out"]:
            found.append(f"step {line['step']} left out {line['left_out']}")
    found += _wrong_bytes(lines, history)

    made = [line for line in lines if "made" in line]
    flat = {line["made"] for line in made if len(set(line["rewards"])) == 1}
    settled: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        if "settled" in line:
            settled[line["reason"]].add(line["settled"])
    reasons = {reason: len(those - set(trained)) for reason, those in settled.items()}
    for ordinal in settled["no_signal"] - flat:
        found.append(f"{ordinal} was left out for want of a signal, but had one")
    known = set(trained) | left.buffered | left.assigned
    excused = settled["lag"] | settled["no_signal"] | settled["failed"]
    acknowledged = {line["acknowledged"] for line in lines if "acknowledged" in line}
    if lost := sorted(acknowledged - known - excused):
        found.append(f"acknowledged and lost: {lost}")
    reached = set(range(max(left.frontier, max(trained, default=-1) + 1)))
    if lost := sorted(reached - known - excused - left.asked):
        found.append(f"prompts that nobody trained, dropped or still asks for: {lost}")
    if double := sorted(set(trained) & (left.buffered | left.asked)):
        found.append(f"trained, and to be trained again: {double}")
    counts = {
        "steps": len(steps),
        "lives of the trainer": history.lives,
        "steps repeated": history.repeated,
        "zombie steps": history.zombies,
        "made": len(made),
        "acknowledged": len(acknowledged),
        "trained": len(trained),
        "dropped": reasons,
        "buffered": len(left.buffered),
    }
    return found, counts


def _wrong_bytes(lines: list[Line], history: History) -> list[str]:
    """What was trained must be what a worker made, and where a lease of it was acknowledged, what the first of those
    made: others with the same key are refused, so a group that was lost and made again shows."""
    hashes: dict[int, dict[int, str]] = defaultdict(dict)  # ordinal -> lease -> hash
    stored: dict[int, str] = {}
    for line in lines:
        if "made" in line:
            hashes[line["made"]][line["lease"]] = line["hash"]
        elif "acknowledged" in line:
            ordinal, lease = line["acknowledged"], line["lease"]
            stored.setdefault(ordinal, hashes[ordinal].get(lease, ""))
    found = []
    for line in history.steps.values():
        for ordinal, digest in zip(line["ordinals"], line["hashes"], strict=True):
            right = {stored[ordinal]} if ordinal in stored else set(hashes[ordinal].values())
            if digest not in right:
                found.append(
                    f"step {line['step']} trained other bytes of group {ordinal} than were acknowledged"
                )
    return found
