"""`async-rl weights verify | compact | gc`: what keeps a run's store sound and small."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_rl.cli.options import store_option
from async_rl.cli.weights_common import (
    VERSION,
    json_option,
    mb,
    opened,
    reporting,
    version_name,
    write_json,
)

if TYPE_CHECKING:
    from async_rl.weights.check import Verified
    from async_rl.weights.garbage import Plan

__all__ = ["compact", "gc", "verify"]


def _not_nan(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """It is within every range, and nothing is ever younger than it."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is no number of seconds")
    return value


scratch_option = click.option(
    "--scratch",
    default=None,
    type=click.Path(path_type=Path, file_okay=False),
    help="Make the scratch folder here; it is removed afterwards. [default: the system's temporary folder]",
)


@click.command("verify")
@click.argument("version", type=VERSION, required=False)
@store_option
@click.option("--all", "everything", is_flag=True, help="Every way to every version.")
@scratch_option
@json_option
def verify(
    version: int | str | None, store_url: str, everything: bool, scratch: Path | None, as_json: bool
) -> None:
    """Check VERSION (a number or `newest`) or, with --all, everything: the hashes of all objects, and the digest
    of the state that every way leads to. Ends with status 1 where something is wrong.

    Needs room for the model, once, and for the packs of the largest way.
    """
    from async_rl.weights.check import verify as verify_one
    from async_rl.weights.check import verify_all
    from async_rl.weights.files import temporary_folder
    from async_rl.weights.lineage import wanted_version

    if (version is None) == (not everything):
        raise click.UsageError("name a version, or give --all")
    with (
        opened(store_url) as (store, run),
        temporary_folder(scratch) as folder,
        reporting() as report,
    ):
        if version is None:
            found = verify_all(store, run, folder, report=report)
        else:
            manifest = wanted_version(store, version_name(version))
            found = verify_one(store, run, manifest, folder, report=report)
    if as_json:
        write_json(found)
    else:
        _print_verified(found, everything)
    if found.files:
        from async_rl.errors import Corrupt

        raise Corrupt(
            f"{len(found.files)} of the model's files in {store.url} are lost or damaged: {'; '.join(found.files)}",
            hint="workers need them: restore them from the model folder that the run was started with",
        )
    if found.wrong:
        from async_rl.errors import Corrupt

        raise Corrupt(
            f"{len(found.wrong)} of {len(found.ways)} ways in {store.url} are wrong or could not be checked",
            hint="readers go around them where they can; a new anchor of the trainer makes every later version "
            "independent of them",
        )


def _print_verified(found: Verified, everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for path in found.paths[-5:] if everything else found.paths:
        console.print(f"read {path}", soft_wrap=True)
    rows = found.wrong if everything else found.ways
    if rows:
        table = Table("version", "way from", "", "MB", "verdict", "")
        for way in rows:
            start = "nothing" if way.base < 0 else str(way.base)
            table.add_row(str(way.version), start, way.kind, mb(way.nbytes), way.verdict, way.reason)
        console.print(table)
    counts = Counter(way.verdict for way in found.ways)
    console.print(
        ", ".join(f"{count} ways {verdict}" for verdict, count in sorted(counts.items())) or "nothing there"
    )
    if found.ignored:
        console.print(
            f"{len(found.ignored)} versions of replaced trainers, which nobody reads, were left out"
        )


@click.command("compact")
@store_option
@click.option(
    "--span",
    "spans",
    multiple=True,
    type=click.IntRange(2),
    help="Spans of the skip deltas. [default: 16, 64, 256]",
)
@scratch_option
@json_option
def compact(store_url: str, spans: tuple[int, ...], scratch: Path | None, as_json: bool) -> None:
    """Write the skip deltas that are missing on the newest version's branch.

    The trainer does so by itself in the background; this is for what it left undone. Two at a time do no harm.
    """
    from rich.console import Console
    from rich.table import Table

    from async_rl.weights.compactor import Compactor, Skip
    from async_rl.weights.config import WeightsConfig
    from async_rl.weights.files import temporary_folder

    config = WeightsConfig(skip_spans=tuple(sorted(set(spans)))) if spans else WeightsConfig()
    with (
        opened(store_url) as (store, run),
        temporary_folder(scratch) as folder,
        reporting() as report,
    ):

        def said(skip: Skip, done: int, of: int) -> None:
            report(f"span {skip.span}: {skip.base} to {skip.version}", done, of)

        written = Compactor(store, run, config, folder, report=said).run()
    if as_json:
        write_json(written)
        return
    console = Console()
    kept = [each for each in written if each.kept]
    if written:
        table = Table("span", "from", "to", "MB", "replaces, MB", "")
        for each in written:
            note = "" if each.kept else each.error or "saves too little, not written"
            table.add_row(
                str(each.span), str(each.base), str(each.version), mb(each.nbytes), mb(each.replaces), note
            )
        console.print(table)
    console.print(f"{len(kept)} skip deltas written, {mb(sum(each.nbytes for each in kept))} MB")
    if failed := [each for each in written if each.error]:
        from async_rl.errors import Corrupt

        raise Corrupt(
            f"{len(failed)} skip deltas of {store.url} could not be made: {failed[0].error}",
            hint="async-rl weights verify --all tells what is damaged",
        )


@click.command("gc")
@store_option
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--keep-versions",
    default=None,
    type=click.IntRange(1),
    help="Keep a path to so many of the newest versions. [default: 64]",
)
@click.option(
    "--keep-anchors",
    default=None,
    type=click.IntRange(1),
    help="Keep so many of the newest anchors (and the first). [default: all]",
)
@click.option(
    "--grace-s",
    default=None,
    type=click.FloatRange(0),
    callback=_not_nan,
    help="Between announcement and deletion, seconds. [default: 900]",
)
@json_option
def gc(
    store_url: str,
    dry_run: bool,
    keep_versions: int | None,
    keep_anchors: int | None,
    grace_s: float | None,
    as_json: bool,
) -> None:
    """Announce what nobody needs any more, and delete what was announced longer than the grace ago.

    Manifests, checkpoints, and every path that a kept version or a live worker needs stay. Run it again after the
    grace, or let the trainer, to have the rest deleted.
    """
    import msgspec

    from async_rl.weights.config import WeightsConfig
    from async_rl.weights.gc import collect

    given = {"keep_versions": keep_versions, "gc_grace_s": grace_s}
    config = msgspec.structs.replace(
        WeightsConfig(), **{name: value for name, value in given.items() if value is not None}
    )
    with opened(store_url) as (store, _), reporting() as report:
        if not dry_run:
            store.probe()  # whether it takes care itself that one collector announces at a time
        planned = collect(store, config, keep_anchors=keep_anchors, dry_run=dry_run, report=report)
    if as_json:
        write_json({**msgspec.to_builtins(planned), "dry_run": dry_run})
    else:
        _print_plan(planned, dry_run, config.gc_grace_s)


def _print_plan(planned: Plan, dry_run: bool, grace_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "ways", "MB")
    for title, kept in (
        ("kept", planned.keep),
        ("given up", planned.drop),
        ("needed after all", planned.rescued),
    ):
        sums: dict[str, list[int]] = {}
        for each in kept:
            # A reader's way names the version; here all of them count together.
            sums.setdefault(each.reason.split(" from version")[0], []).append(each.way.nbytes)
        for reason, sizes in sorted(sums.items()):
            table.add_row(f"{title}: {reason}", str(len(sizes)), mb(sum(sizes)))
    console.print(table)
    would = "would be " if dry_run else ""
    for title, doomed in (
        (f"{would}announced as garbage", planned.doomed),
        (f"announced less than {grace_s:g} s ago, waiting", planned.waiting),
        (f"{would}deleted", planned.sweep),
    ):
        console.print(f"{title}: {len(doomed)} packs, {mb(sum(each.size for each in doomed))} MB")
    for note in planned.notes:
        console.print(f"held back: {note}", style="yellow")
