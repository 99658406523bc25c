"""`async-rl weights`: the policy versions in a run's store."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from async_rl.cli.options import store_option

__all__ = ["command"]


@click.group("weights")
def command() -> None:
    """List a run's policy versions, or pull one as a Hugging Face folder."""


@command.command("ls")
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def ls(store_url: str, as_json: bool) -> None:
    """Every committed version: step, kind, bytes, age."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from async_rl.store import open_store
    from async_rl.weights.lineage import list_claims, list_manifests, zombies

    store = open_store(store_url)
    manifests = list(list_manifests(store))
    ignored = zombies(manifests, list_claims(store))
    if as_json:
        for manifest in manifests:
            row = {**msgspec.to_builtins(manifest), "ignored": manifest.version in ignored}
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        return
    table = Table("version", "step", "parent", "incarnation", "kind", "MB", "packs", "age", "")
    for m in manifests:
        table.add_row(
            str(m.version),
            str(m.step),
            str(m.parent) if m.parent >= 0 else "-",
            str(m.incarnation),
            m.kind,
            f"{m.total_bytes / 1e6:.2f}",
            str(len(m.packs)),
            f"{max(0.0, time.time() - m.created):.0f} s",
            "of a replaced trainer, ignored" if m.version in ignored else "",
        )
    Console().print(table)


@command.command("pull")
@click.argument("version", type=int)
@store_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new or empty folder.")
def pull(version: int, store_url: str, out: Path) -> None:
    """Fetch VERSION, verify it, and write a folder that `from_pretrained` loads. -1: the newest."""
    from rich.console import Console

    from async_rl.store import open_store
    from async_rl.weights.subscriber import pull as pull_version

    local = pull_version(open_store(store_url), version, out)
    Console().print(f"version {local.version} (step {local.step}) is in {out}, verified")
