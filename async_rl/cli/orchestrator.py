"""`async-rl orchestrator`: the control plane of a run as a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from async_rl.cli.options import metrics_option, set_option

__all__ = ["command", "spool_folder"]


@click.command("orchestrator")
@click.argument("run_file", type=click.Path(path_type=Path))
@metrics_option
@set_option
@click.option(
    "--address-file", type=click.Path(path_type=Path), hidden=True, help="Write the bound address here."
)
@click.option("--trainer-key", default="", hidden=True, help="Public key of the trainer that starts us.")
def command(
    run_file: Path,
    metrics_address: str,
    overrides: tuple[str, ...],
    address_file: Path | None,
    trainer_key: str,
) -> None:
    """Lease prompts to workers, buffer their groups, hand batches to the trainer.

    `async-rl trainer` starts one by itself. Run it alone to keep it through a trainer's restarts, and name
    its address with `async-rl trainer --orchestrator`.
    """
    from async_rl.cli.runfile import read_run_file
    from async_rl.envs import make_environment
    from async_rl.log import setup
    from orchestrator.judge import Judge
    from orchestrator.server import run_orchestrator

    config = read_run_file(run_file, overrides)
    setup("orchestrator")
    environment = make_environment(config.environment)
    run_orchestrator(
        environment=environment,
        environment_config=config.environment,
        sampling=config.sampling,
        config=config.orchestrator,
        evaluation=config.eval,
        seed=config.run.seed,
        spool=spool_folder(config.orchestrator.spool, config.trainer.out, config.run.store),
        address_file=address_file,
        trainer_key=trainer_key,
        judge=Judge(environment, config.environment),
        model=Path(config.model.path),
        metrics=metrics_address or config.metrics.orchestrator,
    )


def spool_folder(folder: str, out: str, store: str) -> Path:
    """Runs that share trainer.out, as it is by default, do not share a spool."""
    return Path(folder or Path(out) / f"spool-{hashlib.sha256(store.encode()).hexdigest()[:8]}")
