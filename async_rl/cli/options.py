"""Options that several commands share."""

from __future__ import annotations

import click

__all__ = ["orchestrator_option", "set_option", "store_option"]

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
