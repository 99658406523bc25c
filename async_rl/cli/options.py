"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from async_rl.transport.keys import ClientKey

__all__ = [
    "client_key",
    "key_options",
    "metrics_option",
    "orchestrator_option",
    "set_option",
    "store_option",
]

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of the run file (TOML syntax; may be given several times).",
)

store_option = click.option(
    "--store",
    "store_url",
    required=True,
    envvar="ASYNC_RL_STORE",
    metavar="URL",
    help="The run's store, s3://bucket/prefix or file:///path. [env: ASYNC_RL_STORE]",
)

orchestrator_option = click.option(
    "--orchestrator",
    "orchestrator_address",
    required=True,
    envvar="ASYNC_RL_ORCHESTRATOR",
    metavar="tcp://HOST:PORT",
    help="The orchestrator's address. [env: ASYNC_RL_ORCHESTRATOR]",
)

metrics_option = click.option(
    "--metrics",
    "metrics_address",
    default="",
    metavar="ADDRESS",
    help="Answer Prometheus (/metrics) and health checks (/health) here: PORT, on loopback, or HOST:PORT.",
)

F = TypeVar("F", bound=Callable[..., Any])


def key_options(function: F) -> F:
    """`--key` and `--server-key`, as `key_file` and `server_key` for `client_key`."""
    function = click.option(
        "--server-key",
        default="",
        envvar="ASYNC_RL_SERVER_KEY",
        metavar="HEX",
        help="The orchestrator's public key, where the key file does not hold it. [env: ASYNC_RL_SERVER_KEY]",
    )(function)
    return click.option(
        "--key",
        "key_file",
        default="",
        envvar="ASYNC_RL_KEY",
        metavar="FILE",
        help="Our key, for an orchestrator that asks for one (`async-rl keys`). [env: ASYNC_RL_KEY]",
    )(function)


def client_key(key_file: str, server_key: str) -> ClientKey | None:
    """The key of this process; None where none was given. Raises ConfigError where it can't be used."""
    if not key_file:
        return None
    from async_rl.transport.keys import read_client_key

    return read_client_key(Path(key_file), server_key)
