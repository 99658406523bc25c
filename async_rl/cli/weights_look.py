"""`async-rl weights ls | show | diff | du`: what is there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from async_rl.cli.options import store_option
from async_rl.cli.weights_common import (
    VERSION,
    json_option,
    mb,
    opened,
    percent,
    reporting,
    version_name,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from async_rl.weights.difference import Difference
    from async_rl.weights.report import Row, Shown

__all__ = ["diff", "du", "ls", "show"]

LAST = 50
TENSORS = 15  # shown, unless all are asked for


@click.command("ls")
@store_option
@click.option(
    "--last", default=LAST, show_default=True, type=click.IntRange(0), help="So many of the newest."
)
@click.option("--all", "everything", is_flag=True, help="Every version.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(store_url: str, last: int, everything: bool, as_json: bool) -> None:
    """The committed versions: step, kind, bytes, what they changed, where their ways begin, age.

    `bases` are the versions from which a way leads straight to this one: its own first, then skip deltas; `full`
    needs none.
    """
    from rich.console import Console
    from rich.table import Table

    from async_rl.weights.report import list_rows

    with opened(store_url) as (store, run):
        with reporting() as report:
            rows = list_rows(store, run, None if everything else last, report)
        if as_json:
            for row in rows:
                write_json(row)
            return
        table = Table()
        table.add_column("version", justify="right", no_wrap=True)
        for title in ("step", "kind", "MB", "changed", "B/changed"):
            table.add_column(title, justify="left" if title == "kind" else "right", no_wrap=True)
        table.add_column("bases")
        table.add_column("age", justify="right", no_wrap=True)
        table.add_column("")
        now = time.time()
        for row in rows:
            table.add_row(*_cells(row, now), style="dim" if row.ignored or row.gone else None)
        console = Console()
        console.print(table)
        if not everything and len(rows) == last:
            console.print(f"the newest {last}; --all lists every version")


def _cells(row: Row, now: float) -> list[str]:
    if row.error:
        return [str(row.version), "", row.kind, "", "", "", _bases(row.bases), "", row.error]
    notes = [
        *(["of a replaced trainer, ignored"] if row.ignored else []),
        *(["its own way was given up"] if row.gone else []),
        *([f"branch: follows {row.parent}"] if row.parent != row.version - 1 and row.parent >= 0 else []),
    ]
    return [
        str(row.version),
        str(row.step),
        row.kind,
        mb(row.nbytes),
        "-" if row.changed_part is None else percent(row.changed_part),
        "-" if row.bytes_per_changed is None else f"{row.bytes_per_changed:.3f}",
        _bases(row.bases),
        _age(now - row.created),
        "; ".join(notes),
    ]


def _bases(bases: tuple[int, ...]) -> str:
    return ", ".join("full" if base < 0 else str(base) for base in bases)


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@click.command("show")
@click.argument("version", type=VERSION)
@store_option
@click.option(
    "--from",
    "base",
    default=None,
    type=click.IntRange(-1),
    metavar="V",
    help="Look into the way from V (-1: full).",
)
@click.option("--tensors", is_flag=True, help="Every tensor, not only those with most bytes.")
@json_option
def show(version: int | str, store_url: str, base: int | None, tensors: bool, as_json: bool) -> None:
    """One version (a number or `newest`): all ways to it, the cheapest paths, its packs, tiles and tensors."""
    from rich.console import Console

    from async_rl.weights.lineage import wanted_version
    from async_rl.weights.report import show as look

    with opened(store_url) as (store, run):
        shown = look(store, run, wanted_version(store, version_name(version)), base)
    if as_json:
        write_json(shown)
    else:
        _print_version(shown, Console(), everything=tensors)


def _print_version(shown: Shown, console: Console, *, everything: bool) -> None:
    from rich.table import Table

    manifest = shown.manifest
    console.print(
        f"version {manifest.version}, step {manifest.step}, follows {manifest.parent}; incarnation "
        f"{manifest.incarnation}; {manifest.dtype}; digest {manifest.digest}"
    )
    table = Table(
        "way from", "", "MB", "packs", "changed", "described by", title="ways to it", title_justify="left"
    )
    for way in shown.ways:
        table.add_row(
            "nothing (full)" if way.base < 0 else str(way.base),
            way.kind + (", given up" if way.gone else ""),
            mb(way.nbytes),
            str(way.packs),
            f"{way.changed:,}" if way.base >= 0 else "-",
            way.key,
            style="dim" if way.gone else None,
        )
    console.print(table)
    console.print("cheapest paths")
    for path in shown.paths:
        console.print(f"  {path.describes}", soft_wrap=True)
    start = "nothing" if shown.base < 0 else f"version {shown.base}"
    table = Table("pack", "MB", "tiles", title=f"the way from {start}", title_justify="left")
    for pack in shown.packs:
        table.add_row(pack.key, mb(pack.nbytes), str(pack.tiles) if pack.tiles else "-")
    console.print(table)
    if shown.modes:
        table = Table("tiles", "count", "MB", "changed", "B/changed")
        for mode in shown.modes:
            table.add_row(
                mode.mode,
                str(mode.tiles),
                mb(mode.nbytes),
                f"{mode.changed:,}",
                f"{mode.nbytes / max(1, mode.changed):.3f}",
            )
        console.print(table)
        console.print(f"headers and tables of tiles: {shown.table_bytes:,} bytes")
    rows = shown.tensors if everything else shown.tensors[:TENSORS]
    table = Table("tensor", "shape", "MB", "changed")
    for tensor in rows:
        changed = percent(tensor.changed_part) if shown.base >= 0 else "-"
        table.add_row(tensor.name, "x".join(map(str, tensor.shape)), mb(tensor.nbytes), changed)
    console.print(table)
    if len(rows) < len(shown.tensors):
        console.print(f"{len(shown.tensors) - len(rows)} more tensors: --tensors shows them, --json too")


@click.command("diff")
@click.argument("before", type=VERSION)
@click.argument("after", type=VERSION)
@store_option
@click.option("--tensors", is_flag=True, help="Every tensor, not only those that changed most.")
@json_option
def diff(before: int | str, after: int | str, store_url: str, tensors: bool, as_json: bool) -> None:
    """What lies between two versions (numbers or `newest`): how many weights moved, and how far.

    A step is one representable value. Deltas that can be read without the weights are enough; else both versions are
    put together in the system's temporary folder.
    """
    from rich.console import Console

    from async_rl.weights.difference import difference
    from async_rl.weights.lineage import wanted_version

    with opened(store_url) as (store, run), reporting() as report:
        manifests = [wanted_version(store, version_name(version)) for version in (before, after)]
        found = difference(store, run, manifests[0], manifests[1], report=report)
    if as_json:
        import msgspec

        write_json({**msgspec.to_builtins(found), "changed_part": found.changed_part})
    else:
        _print_difference(found, Console(), everything=tensors)


def _print_difference(found: Difference, console: Console, *, everything: bool) -> None:
    from rich.table import Table

    console.print(f"read {found.how}", soft_wrap=True)
    console.print(
        f"version {found.before} to {found.after}: {found.changed:,} of {found.weights:,} weights changed "
        f"({percent(found.changed_part)})"
    )
    if not found.changed:
        return
    table = Table("steps", "up", "down", "of the changed")
    for bucket in found.buckets:
        table.add_row(
            str(bucket.least) if bucket.least == bucket.most else f"{bucket.least} to {bucket.most}",
            f"{bucket.up:,}",
            f"{bucket.down:,}",
            percent((bucket.up + bucket.down) / found.changed),
        )
    console.print(table)
    rows = found.tensors if everything else found.tensors[:TENSORS]
    table = Table("tensor", "shape", "changed", "", "largest step")
    for tensor in rows:
        table.add_row(
            tensor.name,
            "x".join(map(str, tensor.shape)),
            f"{tensor.changed:,}",
            percent(tensor.changed_part),
            f"{tensor.largest:,}",
        )
    console.print(table)
    if len(rows) < len(found.tensors):
        console.print(f"{len(found.tensors) - len(rows)} more tensors: --tensors shows them, --json too")
    console.print("moved furthest:")
    for mover in found.largest:
        console.print(
            f"  {mover.name}[{', '.join(map(str, mover.index))}] by {mover.steps:+,} steps", markup=False
        )


@click.command("du")
@store_option
@json_option
def du(store_url: str, as_json: bool) -> None:
    """What takes the space, by kind, and what the deltas save against full versions."""
    from rich.console import Console
    from rich.table import Table

    from async_rl.weights.report import usage

    with opened(store_url) as (store, run), reporting() as report:
        found = usage(store, run, report)
    if as_json:
        import msgspec

        write_json({**msgspec.to_builtins(found), "saved_part": found.saved_part})
        return
    table = Table("what", "objects", "MB", "")
    for part in found.parts:
        table.add_row(
            part.kind, f"{part.objects:,}", mb(part.nbytes), percent(part.nbytes / max(1, found.nbytes))
        )
    table.add_section()
    table.add_row("all", f"{sum(part.objects for part in found.parts):,}", mb(found.nbytes), "")
    console = Console()
    console.print(table)
    if found.versions:
        console.print(
            f"{found.versions:,} versions as full ones: {mb(found.as_full_nbytes)} MB; the weights that are there "
            f"take {mb(found.weights_nbytes)} MB, {percent(found.saved_part)} saved",
            soft_wrap=True,
        )
