"""`make bench`: every performance claim, measured now, on this machine, as a ratio.

Machines are noisy and differ, so a figure is compared with a peer or a physical limit of the same run,
never with a number from elsewhere.

    python -m tests.bench [NAME …] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.claims import Claim

BENCHES = {
    "codec": "bytes and speed of a delta, ours and others', on real optimizer steps",
    "fleet": "a thousand workers at one orchestrator against a bare ROUTER; encoding",
    "full": "full versions against bare boto3, and the memory of weight sync",
    "head": "memory and time of log-probabilities in tiles, against whole logits and TRL",
    "history": "bytes of 300 versions in the bucket, and what a late reader reads",
    "load": "tokens/s with as many leases as the engine's load asks for, against a constant",
    "overlap": "asynchronous step time against the slower of rollout and training",
    "pause": "the engine's pause for a new version against a full checkpoint inside it",
    "reward": "time to a reward of 0.9 on the reverse task, against TRL's GRPO with its own generation",
    "size": "the memory of a whole run with a real model of 135M weights, all processes together",
    "stability": "reward at lag 0, 4, 8 of six losses, three seeds each",
    "sync": "publish to ready over a link of 200 Mbit/s and 40 ms, against others",
    "throughput": "the optimisation step alone against TRL's GRPO: tokens/s and memory",
    "upkeep": "a trainer's steps with skip deltas, anchors and garbage collection, against without",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHES))
    if unknown:
        parser.error(f"unknown bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    console = Console()
    claims: list[Claim] = []
    for name in options.names or BENCHES:
        console.print(f"[bold]{name}[/]: {BENCHES[name]}")
        with tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as scratch:
            claims += importlib.import_module(f"tests.bench.{name}").run(Path(scratch), console)
    console.print(table(claims))
    if options.json:
        options.json.write_text(json.dumps([claim.row() for claim in claims], indent=1) + "\n")
    return 0


def table(claims: list[Claim]) -> Table:
    result = Table("claim", "measured", "aim", "", "how")
    for claim in claims:
        verdict = "" if claim.met is None else "[green]met[/]" if claim.met else "[red]missed[/]"
        result.add_row(claim.name, f"{claim.value:.3g}{claim.unit}", claim.aim_text(), verdict, claim.how)
    return result


if __name__ == "__main__":
    sys.exit(main())
