"""`async-rl weights estimate`: what deltas between two checkpoints at hand would cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from async_rl.weights.estimate import Cost, Estimate

__all__ = ["estimate"]

SHOWN = 12
"""Tensors in the table of those with most bytes, unless all are asked for."""


@click.command("estimate")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--bfloat16",
    is_flag=True,
    help="Round float32 tensors to bfloat16 first, as a trainer publishes its float32 masters.",
)
@click.option("--tensors", is_flag=True, help="Show every tensor, not only those that cost most.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, every tensor in it.")
def estimate(old: Path, new: Path, bfloat16: bool, tensors: bool, as_json: bool) -> None:
    """What a delta from OLD to NEW costs, in every format; how near that is to the entropy of the change.

    OLD and NEW are safetensors files, or folders with some: two checkpoints of one model, best one optimizer step
    apart. Nothing is written. Every format is run, timed on one thread of this machine, and checked to give NEW's
    bits back.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from async_rl.weights.estimate import estimate as run
    from async_rl.weights.statefiles import StateFiles

    states = StateFiles(old), StateFiles(new)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("compiling, then coding", total=states[0].nbytes)
        found = run(
            *states, bfloat16=bfloat16, progress=lambda nbytes: progress.update(task, advance=nbytes)
        )
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    show(found, Console(), everything=tensors)


def show(found: Estimate, console: Console, *, everything: bool) -> None:
    """A summary, the formats, the tensors that cost most, what was left out."""
    from rich.table import Table

    if found.weights:
        console.print(
            f"{found.weights:,} 16-bit weights, {found.changed:,} changed "
            f"({100 * found.changed / found.weights:.3g} %)"
        )
        if found.changed:
            console.print("steps: " + _histogram(found))
        console.print(_formats(found))
    if found.other_bytes:
        console.print(
            f"other dtypes: {found.other_bytes / 1e6:,.1f} MB, as byte planes of what differs "
            f"{found.other.nbytes / 1e6:,.2f} MB, encoded at {_speed(found.other_bytes, found.other.encode_s)} GB/s"
        )
    rows = sorted(found.tensors, key=lambda row: -_ours(row.formats))
    shown = rows if everything else [row for row in rows if row.changed][:SHOWN]
    if shown:
        table = Table(
            "tensor", "dtype", "shape", "changed %", "ours, B", "small, B", "no context", "given exp."
        )
        for column in table.columns[3:]:
            column.justify = "right"
        for row in shown:
            sixteen = "ours, default" in row.formats
            table.add_row(
                row.name,
                row.dtype,
                "x".join(map(str, row.shape)),
                f"{100 * row.changed / row.weights:.3g}" if row.weights else "-",
                f"{_ours(row.formats):,}",
                f"{row.formats['ours, small']:,}" if sixteen else "",
                f"{row.no_context_bytes:,.0f}" if sixteen else "",
                f"{row.given_exponent_bytes:,.0f}" if sixteen else "",
            )
        table.caption = "each coded by itself: the header and table of a pack, some 300 bytes, are in it"
        table.caption_justify = "left"
        console.print(table)
        if len(shown) < len(rows):
            console.print(f"{len(rows) - len(shown)} more tensors: --tensors shows them, --json too")
    for title, names in (("only in OLD", found.missing), ("only in NEW", found.extra)):
        if names:
            console.print(f"{len(names)} tensors {title}, left out: {_some(names)}")
    for name, what in found.unlike.items():
        console.print(
            f"left out: {name}, its {what}" if what.startswith("shape") else f"left out: {name}, {what}"
        )


def _formats(found: Estimate) -> object:
    from rich.table import Table

    table = Table()
    table.add_column("format", no_wrap=True)
    for title in ("MB", "B / changed", "x no context", "x given exp.", "encode GB/s", "apply GB/s"):
        table.add_column(title, justify="right")
    limits = (
        ("entropy, no context", found.no_context_bytes),
        ("entropy, given exponent", found.given_exponent_bytes),
    )
    for name, nbytes in limits:
        table.add_row(name, *_ratios(found, nbytes), "", "", style="dim")
    for name, cost in found.formats.items():
        table.add_row(
            name,
            *_ratios(found, cost.nbytes),
            *_speeds(found, cost),
            style="bold" if "ours" in name else "",
        )
    return table


def _ratios(found: Estimate, nbytes: float) -> list[str]:
    return [f"{nbytes / 1e6:,.3f}"] + [
        f"{nbytes / unit:.3f}" if unit else "-"
        for unit in (found.changed, found.no_context_bytes, found.given_exponent_bytes)
    ]


def _speeds(found: Estimate, cost: Cost) -> list[str]:
    return [_speed(2 * found.weights, seconds) for seconds in (cost.encode_s, cost.apply_s)]


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}" if seconds else "-"


def _histogram(found: Estimate) -> str:
    parts = []
    low = 1
    for high, count in zip(found.steps.up_to, found.steps.count, strict=True):
        if count:
            parts.append(f"{low if low == high else f'{low}-{high}'}: {100 * count / found.changed:.3g} %")
        low = high + 1
    return ", ".join(parts)


def _ours(formats: dict[str, int]) -> int:
    return formats.get("ours, default", formats.get("byte planes", 0))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
