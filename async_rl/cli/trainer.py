"""`async-rl trainer`: the trainer's ranks and, unless one is named, an orchestrator: one family of processes.

async-rl trainer run.toml                              one rank, own orchestrator
async-rl trainer run.toml --nproc-per-node 8           eight ranks on this node
torchrun --nnodes 4 … -m async_rl trainer run.toml     every process is one rank; rank 0's node starts the
                                                       orchestrator unless --orchestrator names one
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from async_rl.cli.options import client_key, key_options, metrics_option, set_option
from async_rl.errors import ConfigError, ProcessFailed, WaitTimeout
from async_rl.procs import Child, Fleet, Stopped, stop_signals

if TYPE_CHECKING:
    from async_rl.cli.runfile import RunFile

__all__ = ["command"]

ORCHESTRATOR_START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
"""A stopping trainer ends its step; after this, and checkpoint_wait_s where it writes one, it is killed."""


@click.command("trainer")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--nproc-per-node", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this node."
)
@click.option(
    "--orchestrator",
    "orchestrator_address",
    default="",
    metavar="tcp://HOST:PORT",
    help="Use this orchestrator instead of starting one.",
)
@click.option(
    "--resume", default="latest", show_default=True, help="latest, never, or the step of a checkpoint."
)
@key_options
@metrics_option
@set_option
def command(
    run_file: Path,
    nproc_per_node: int,
    orchestrator_address: str,
    resume: str,
    key_file: str,
    server_key: str,
    metrics_address: str,
    overrides: tuple[str, ...],
) -> None:
    """Train a run: publish every version to its store, take groups from its orchestrator.

    A key is needed only for an orchestrator that is named: the one that it starts knows the trainer.
    """
    from async_rl.cli.runfile import check_model, read_run_file

    if resume not in ("latest", "never") and not resume.isdigit():
        raise ConfigError(f"--resume {resume!r} is neither latest, never nor a step")
    if metrics_address:
        overrides = (*overrides, f'metrics.trainer="{metrics_address}"')
    config = read_run_file(run_file, overrides)  # refuse bad input here, once, before any process starts
    check_model(config.model.path)
    if "LOCAL_RANK" in os.environ:
        if nproc_per_node != 1:
            raise ConfigError("under torchrun every process is one rank", hint="leave out --nproc-per-node")
        _under_torchrun(config, run_file, orchestrator_address, resume, overrides, key_file, server_key)
        return
    if orchestrator_address:
        client_key(key_file, server_key)  # likewise
    with stop_signals(), Fleet(grace_s=STOP_LIMIT_S) as fleet, tempfile.TemporaryDirectory() as scratch:
        address = orchestrator_address
        if not address:
            address, key_file = _start_orchestrator(fleet, config, run_file, overrides, Path(scratch))
            server_key = ""
        argv = [sys.executable, "-m", "async_rl", "trainer", str(run_file)]
        argv += ["--orchestrator", address, "--resume", resume]
        # Also where they are empty: those of the environment are not meant for an orchestrator of our own.
        argv += ["--key", key_file, "--server-key", server_key]
        argv += [arg for item in overrides for arg in ("--set", item)]
        threads = config.trainer.threads or max(1, (os.cpu_count() or 1) // nproc_per_node)
        ranks = [
            fleet.start(f"trainer rank {rank}", argv, env={**env, "OMP_NUM_THREADS": str(threads)})
            for rank, env in enumerate(_rank_environments(nproc_per_node))
        ]
        try:
            for rank in ranks:
                fleet.wait(rank)
        except Stopped:  # not where a rank has died: then the others wait for it in vain
            if config.trainer.checkpoint_every:
                fleet.grace_s += config.trainer.checkpoint_wait_s
            raise
        fleet.check()


def _rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set on one node. Its agent would only add a start of its own, some seconds, and a
    traceback of its own below every error of ours."""
    from async_rl.store.local_server import free_ports

    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _start_orchestrator(
    fleet: Fleet, config: RunFile, run_file: Path, overrides: tuple[str, ...], scratch: Path
) -> tuple[str, str]:
    """Start an orchestrator, wait until it is bound, and give its address, and the file of a key for us where
    it asks for keys: made for this life only. `scratch` is readable only by us."""
    address_file = scratch / "orchestrator-address"
    key_file, public = (
        _ephemeral_key(Path(config.orchestrator.keys), scratch) if config.orchestrator.keys else ("", "")
    )
    argv = [
        sys.executable,
        "-m",
        "async_rl",
        "orchestrator",
        str(run_file),
        "--address-file",
        str(address_file),
        *(["--trainer-key", public] if public else []),
    ]
    child = fleet.start("orchestrator", argv + [arg for item in overrides for arg in ("--set", item)])
    deadline = time.monotonic() + ORCHESTRATOR_START_LIMIT_S
    while not address_file.exists():
        _check_alive(child)
        if time.monotonic() > deadline:
            raise WaitTimeout(f"the orchestrator was not bound within {ORCHESTRATOR_START_LIMIT_S:.0f} s")
        time.sleep(0.05)
    return address_file.read_text().strip(), key_file


def _ephemeral_key(folder: Path, scratch: Path) -> tuple[str, str]:
    """The file of a new key, and its public half. Raises ConfigError where the folder has no server's key."""
    from async_rl.transport.allowed import Keyring
    from async_rl.transport.keys import client_key_text, new_secret, public_of, write_private

    secret, path = new_secret(), scratch / "trainer.key"
    write_private(path, client_key_text("trainer", secret, Keyring.open(folder).public))
    return str(path), public_of(secret).hex()


def _check_alive(child: Child) -> None:
    if not child.running():
        raise ProcessFailed(
            f"the {child.name} ended with status {child.process.returncode} before it was ready",
            hint="the cause stands in its log above",
        )


def _under_torchrun(
    config: RunFile,
    run_file: Path,
    address: str,
    resume: str,
    overrides: tuple[str, ...],
    key_file: str = "",
    server_key: str = "",
) -> None:
    from async_rl.log import get_logger, setup

    rank = int(os.environ["RANK"])
    setup(f"trainer[{rank}]" if int(os.environ["WORLD_SIZE"]) > 1 else "trainer")
    from async_rl.cli.runfile import cautions
    from workers.trainer import run_rank

    if rank == 0:
        for each in cautions(config):
            get_logger(__name__).warning(each)

    def run(address: str, key_file: str, server_key: str) -> None:
        run_rank(
            store_url=config.run.store,
            store=config.store,
            model=config.model,
            trainer=config.trainer,
            loss=config.loss,
            weights=config.weights,
            temperature=config.sampling.temperature,
            orchestrator_address=address,
            seed=config.run.seed,
            resume=resume,
            advantage=config.advantage,
            max_tokens=config.sampling.max_tokens,
            key=client_key(key_file, server_key) if rank == 0 else None,  # only rank 0 dials
            metrics_config=config.metrics,
        )

    if address or rank != 0:
        run(address, key_file, server_key)
    else:
        with (
            Fleet() as fleet,
            tempfile.TemporaryDirectory() as scratch,
        ):  # torchrun without an orchestrator named
            run(*_start_orchestrator(fleet, config, run_file, overrides, Path(scratch)), "")
    if int(os.environ["WORLD_SIZE"]) > 1:
        _leave()


def _leave() -> NoReturn:
    """Ends a rank whose work is done, without the interpreter's teardown. Caches of torch keep the groups' threads
    alive after destroy_process_group; one that had no processor time since its last collective (a busy host) still
    lets go of tensors, and in an interpreter that ends this aborts the process: a run that succeeded would count as
    failed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
