"""`async-rl weights`: the policy versions in a run's store."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from async_rl.cli.options import store_option
from async_rl.cli.weights_estimate import estimate

__all__ = ["command"]


@click.group("weights")
def command() -> None:
    """List a run's policy versions, or pull one as a Hugging Face folder."""


command.add_command(estimate)


@command.command("ls")
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(store_url: str, as_json: bool) -> None:
    """Every committed version: step, kind, bytes, age."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from async_rl.store import open_store
    from async_rl.weights.lineage import admissible, list_versions, read_claims, read_manifest
    from async_rl.weights.run import open_run

    store = open_store(store_url)
    open_run(store)
    # Versions before claims: a claim that comes between must not make a manifest look like a zombie's.
    manifests = [read_manifest(store, version) for version in list_versions(store)]
    claims = read_claims(store)
    if as_json:
        for manifest in manifests:
            row = {**msgspec.to_builtins(manifest), "ignored": not admissible(manifest, claims)}
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        return
    table = Table("version", "step", "parent", "incarnation", "kind", "MB", "packs", "age", "")
    for m in manifests:
        table.add_row(
            str(m.version),
            str(m.step),
            str(m.parent) if m.parent >= 0 else "-",
            str(m.incarnation),
            m.way.kind,
            f"{m.way.total_bytes / 1e6:.2f}",
            str(len(m.way.packs)),
            f"{max(0.0, time.time() - m.created):.0f} s",
            "" if admissible(m, claims) else "of a replaced trainer, ignored",
        )
    Console().print(table)


@command.command("pull")
@click.argument("version")
@store_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new or empty folder.")
def pull(version: str, store_url: str, out: Path) -> None:
    """Fetch VERSION (a number or `newest`), verify it, and write a folder that `from_pretrained` loads."""
    from rich.console import Console
    from rich.progress import Progress

    from async_rl.store import open_store
    from async_rl.weights.subscriber import pull as pull_version

    if version != "newest" and not version.isdigit():
        raise click.BadParameter(f"{version!r} is neither a number nor newest", param_hint="VERSION")
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("fetching and verifying", total=1.0)
        pull_version(
            open_store(store_url),
            None if version == "newest" else int(version),
            out,
            progress=lambda fraction: progress.update(task, completed=fraction),
        )
    console.print(f"version {version} is in {out}, verified")
