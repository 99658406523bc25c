"""Log-probabilities in tiles against whole logits, and against TRL: memory and time of forward and backward.

Each way runs in processes of its own (head_process.py), in turns; the fastest of its runs counts, because what slows
a run down on a shared machine is not the way. The shapes are those of the last layers of SmolLM2-135M and
Qwen2.5-0.5B, in float32: the machine of a bench is a CPU.

    tiles   token_scores: any loss; each logit is computed twice
    fused   token_loss: losses that are sums over tokens, as the default one
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tests.bench.claims import Claim
from tests.bench.trl_env import trl_python

__all__ = ["run"]

LIMIT_S = 600.0
"""Of one process: four products of 0.6 TFLOP on one slow core take two minutes."""
REPEATS = 1


class Shape(NamedTuple):
    words: int
    width: int
    tokens: int
    rounds: int

    @property
    def name(self) -> str:
        return f"vocabulary {self.words // 1000}k"


SHAPES = (Shape(49152, 576, 2048, 2), Shape(151936, 896, 2048, 1))
OURS = ("tiles", "fused")
AIMS = {"tiles": 1.4, "fused": 1.1}
MEMORY_AIM = 0.25


def run(scratch: Path, console: Console) -> list[Claim]:
    python = trl_python(console)
    claims = []
    for shape in SHAPES:
        results = measure(shape, python, console)
        claims += compare(shape, results)
    return claims


def measure(shape: Shape, trl: Path | None, console: Console) -> dict[str, dict[str, Any]]:
    """By way: the least seconds and processor seconds, the most bytes, and the versions."""
    ways = {name: Path(sys.executable) for name in ("logits", *OURS)}
    if trl is not None:
        ways |= {"trl_trainer": trl, "trl_logits": trl}
    results: dict[str, dict[str, Any]] = {}
    for _ in range(shape.rounds):
        for name, python in ways.items():
            answer = ask(python, name, shape)
            known = results.setdefault(name, answer)
            for least in ("seconds", "cpu_s"):
                known[least] = [min(known[least] + answer[least])]
            known["bytes"] = max(known["bytes"], answer["bytes"])
    for name, answer in results.items():
        console.print(
            f"  {shape.name}, {name}: {answer['bytes'] / 1e6:.0f} MB, {answer['seconds'][0]:.2f} s, processor "
            f"{answer['cpu_s'][0]:.2f} s ({', '.join(' '.join(each) for each in answer['versions'].items())})"
        )
        for found, wanted in zip(answer["checks"], results["logits"]["checks"], strict=True):
            if abs(found - wanted) > 1e-3 * abs(wanted):
                raise RuntimeError(f"{name} computes something else: {found} for {wanted}")
    return results


def ask(python: Path, name: str, shape: Shape) -> dict[str, Any]:
    numbers = map(str, (shape.tokens, shape.words, shape.width, REPEATS))
    done = subprocess.run(
        [python, "-m", "tests.bench.head_process", name, *numbers],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(shape: Shape, results: dict[str, dict[str, Any]]) -> list[Claim]:
    claims = []
    whole = results["logits"]
    how = f"{shape.tokens} tokens of width {shape.width}, forward and backward"
    for name in OURS:
        ours = results[name]
        spare = [each["bytes"] - each["gradient_bytes"] for each in (ours, whole)]
        claims += [
            Claim(
                f"{name}: memory / whole logits', {shape.name}",
                ours["bytes"] / whole["bytes"],
                "x",
                at_most=MEMORY_AIM,
                how=f"{ours['bytes'] / 1e6:.0f} MB of {whole['bytes'] / 1e6:.0f}, both gradients counted; without "
                f"these {spare[0] / spare[1]:.3f} x",
            ),
            _time(f"{name}: time / whole logits', {shape.name}", ours, whole, how, AIMS[name]),
        ]
        for peer, title in (("trl_trainer", "TRL's trainer's"), ("trl_logits", "TRL's on logits")):
            if peer in results:
                theirs = results[peer]
                version = " ".join(("TRL", theirs["versions"]["trl"]))
                claims += [
                    Claim(
                        f"{name}: memory / {title}, {shape.name}",
                        ours["bytes"] / theirs["bytes"],
                        "x",
                        how=f"{ours['bytes'] / 1e6:.0f} MB of {theirs['bytes'] / 1e6:.0f}; {version}",
                    ),
                    _time(f"{name}: time / {title}, {shape.name}", ours, theirs, version),
                ]
    return claims


def _time(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], how: str, aim: float | None = None
) -> Claim:
    wall, cpu = (ours[what][0] / theirs[what][0] for what in ("seconds", "cpu_s"))
    return Claim(name, wall, "x", at_most=aim, how=f"{how}; processor time {cpu:.2f} x")
