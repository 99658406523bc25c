"""`async-rl store`: an S3 server on this machine, for development; buckets anywhere."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

__all__ = ["command"]


@click.group()
def command() -> None:
    """Run a local S3 server for development, or make a bucket."""


@command.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("async-rl-store"),
    show_default=True,
    help="Where the data and the secret key are kept; a later start serves them again.",
)
@click.option("--bucket", default="async-rl", show_default=True, help="Made if it is not there.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Of the endpoint; by default a free one."
)
@click.option("--print-env", is_flag=True, help="Print nothing but the export lines, for eval or a pipe.")
@click.option(
    "--env-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the export lines here once the server is ready; removed when it stops.",
)
def up(directory: Path, bucket: str, port: int, print_env: bool, env_file: Path | None) -> None:
    """Start a local S3 server (a minio on PATH, else SeaweedFS) and keep it in the foreground.

    It listens on 127.0.0.1 only. Ctrl-C stops it.
    """
    from async_rl.log import setup
    from async_rl.procs import Stopped, stop_signals
    from async_rl.store.local_server import LocalServer

    setup("store", "WARNING")
    server = LocalServer(directory, bucket=bucket, port=port)
    try:
        with stop_signals(), server:
            lines = export_lines(server.env, server.url)
            if env_file is not None:
                write_env_file(env_file, lines)
            if not print_env:
                click.echo(
                    f"{server.kind} at {server.endpoint}, data in {directory}; the store is {server.url}"
                )
                click.echo("in the shells that use it:\n")
            click.echo(lines, nl=False)
            if not print_env:
                click.echo("\nCtrl-C stops it.")
            server.wait()
    except Stopped:
        if not print_env:
            click.echo("stopped.")
    finally:
        if env_file is not None:
            env_file.unlink(missing_ok=True)


@command.command("mb")
@click.argument("url")
def make_bucket(url: str) -> None:
    """Make the bucket of URL (s3://bucket or s3://bucket/prefix); one that is there already is fine."""
    from async_rl.store import StoreConfig
    from async_rl.store.s3 import S3Store

    store = S3Store(url, StoreConfig())
    store.make_bucket()
    click.echo(f"the bucket {store.bucket} is there")
    store.close()


def export_lines(env: dict[str, str], url: str) -> str:
    """For a POSIX shell; ASYNC_RL_STORE is the store URL, `$ASYNC_RL_STORE/my-run` names a run in it."""
    return "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in {**env, "ASYNC_RL_STORE": url}.items()
    )


def write_env_file(path: Path, lines: str) -> None:
    """Whole or not at all, so that a script may wait for it to be there; it holds a secret."""
    from async_rl.errors import ConfigError

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(lines)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"can't write {path}: {error.strerror}", hint="name another --env-file"
        ) from error
