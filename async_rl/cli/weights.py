"""`async-rl weights`: the policy versions in a run's store. The commands stand in weights_*.py."""

from __future__ import annotations

import click

from async_rl.cli.weights_care import compact, gc, verify
from async_rl.cli.weights_estimate import estimate
from async_rl.cli.weights_fetch import export, pull
from async_rl.cli.weights_look import diff, du, ls, show

__all__ = ["command"]


@click.group("weights")
def command() -> None:
    """List, compare, verify and fetch a run's policy versions; keep their store small."""


for each in (ls, show, diff, verify, pull, export, compact, gc, du, estimate):
    command.add_command(each)
