"""`async-rl weights pull | export`: a version as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click

from async_rl.cli.options import store_option
from async_rl.cli.weights_common import VERSION, json_option, opened, reporting, version_name, write_json

__all__ = ["export", "pull"]

out_option = click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder.")


@click.command("pull")
@click.argument("version", type=VERSION)
@store_option
@out_option
@json_option
def pull(version: int | str, store_url: str, out: Path, as_json: bool) -> None:
    """Make --out a working copy of VERSION (a number or `newest`), verified: a folder that `from_pretrained` loads.

    A later pull of another version into the same folder fetches only what lies between.
    """
    from async_rl.weights.subscriber import pull as fetch

    _fetch("pulled", fetch, version, store_url, out, as_json)


@click.command("export")
@click.argument("version", type=VERSION)
@store_option
@out_option
@json_option
def export(version: int | str, store_url: str, out: Path, as_json: bool) -> None:
    """Write VERSION (a number or `newest`), verified, as a plain Hugging Face folder at --out: new or empty."""
    from async_rl.weights.subscriber import export as fetch

    _fetch("exported", fetch, version, store_url, out, as_json)


def _fetch(
    done: str,
    fetch: object,
    version: int | str,
    store_url: str,
    out: Path,
    as_json: bool,
) -> None:
    from rich.console import Console

    from async_rl.weights.lineage import wanted_version

    paths: list[str] = []
    with opened(store_url) as (store, _), reporting() as report:
        # `newest` becomes a number here, so that what is said is what was fetched.
        manifest = wanted_version(store, version_name(version))
        assert callable(fetch)
        fetch(
            store,
            manifest.version,
            out,
            progress=lambda fraction: report("fetching and verifying", round(1000 * fraction), 1000),
            describe=paths.append,
        )
    if as_json:
        write_json({"version": manifest.version, "step": manifest.step, "out": str(out), "path": paths})
        return
    console = Console()
    for path in paths:
        console.print(path, soft_wrap=True)
    console.print(
        f"version {manifest.version} (step {manifest.step}) is in {out}, verified", soft_wrap=True
    )
