"""`async-rl rollout`: a rollout worker. All it needs is the run's store and the orchestrator's address
(and a key, where that asks for one)."""

from __future__ import annotations

import sys

import click

from async_rl.cli.options import (
    client_key,
    key_options,
    metrics_option,
    orchestrator_option,
    set_option,
    store_option,
)

__all__ = ["command"]


@click.command("rollout")
@store_option
@orchestrator_option
@key_options
@click.option(
    "--worker-id",
    default="",
    help="A name that stays the same across restarts (default: host, pid, chance). With a key, NAME/… of the key.",
)
@metrics_option
@set_option
def command(
    store_url: str,
    orchestrator_address: str,
    key_file: str,
    server_key: str,
    worker_id: str,
    metrics_address: str,
    overrides: tuple[str, ...],
) -> None:
    """Generate rollouts with vLLM and send them to the orchestrator.

    What the run is (environment, sampling, model, limits) the worker learns from its run. How it runs here
    can be chosen: `--set rollout.engine=reference`, `--set rollout.tensor_parallel=2`, …
    """
    from async_rl.cli.runfile import read_worker_options
    from async_rl.exporter import address_of
    from async_rl.log import setup

    rollout, store, weights = read_worker_options(overrides)
    key = client_key(key_file, server_key)
    if metrics_address:
        address_of(metrics_address)  # refused now, not after the wait for a run
    setup(f"rollout {worker_id}".strip())
    from workers.rollout_process import run_worker

    sys.exit(
        run_worker(
            store_url=store_url,
            orchestrator_address=orchestrator_address,
            worker_id=worker_id,
            rollout=rollout,
            store=store,
            weights=weights,
            key=key,
            metrics=metrics_address,
        )
    )
