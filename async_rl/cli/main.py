"""`async-rl`: the command line. Each command lives in a module of its own, loaded when it is called.

Nothing heavy is imported here, so that `async-rl --help` answers at once (a test holds this: no torch, no
vllm, no boto3). Errors of ours end with their message, their hint and their exit code, never a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

import click

from async_rl import __version__
from async_rl.errors import AsyncRLError
from async_rl.procs import Stopped

__all__ = ["cli", "main"]

COMMANDS = {
    "demo": ("async_rl.cli.demo", "Run everything on this machine: a model learns to reverse strings."),
    "trainer": ("async_rl.cli.trainer", "Train the policy of a run (starts its orchestrator too)."),
    "rollout": ("async_rl.cli.rollout", "Generate rollouts for a run, on any machine that reaches it."),
    "orchestrator": (
        "async_rl.cli.orchestrator",
        "Run the control plane by itself (a trainer starts its own).",
    ),
    "replay": ("async_rl.cli.replay", "Train a recorded run's groups again, and compare the losses."),
    "lag": ("async_rl.cli.lag", "Show how far every worker's policy version is behind."),
    "keys": ("async_rl.cli.keys", "Make, list, allow and revoke the keys of an orchestrator."),
    "weights": (
        "async_rl.cli.weights",
        "List, compare, verify and fetch a run's policy versions.",
    ),
    "store": ("async_rl.cli.store", "Run a local S3 server for development, or make a bucket."),
    "model": ("async_rl.cli.model", "Make a tiny model to try things with."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, help_) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="async-rl")
def cli() -> None:
    """Reinforcement learning of language models with trainer and rollouts on separate clusters.

    They share a ZeroMQ address and an S3-compatible bucket, nothing else.
    """


def main(argv: list[str] | None = None) -> None:
    """The entry point. Set ASYNC_RL_TRACEBACK=1 to see where an error of ours came from."""
    # A user's own `module:function` is looked for in the folder we stand in, however we were started
    # (`python -m async_rl` puts it on the path, the `async-rl` script does not).
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        cli.main(args=argv, prog_name="async-rl", standalone_mode=False)
    except AsyncRLError as error:
        if os.environ.get("ASYNC_RL_TRACEBACK"):
            raise
        _fail(error.message, error.hint, error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _interrupted()
    except Stopped as stopped:
        sys.exit(128 + stopped.signum)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _interrupted() -> None:
    """Ctrl-C. All was cleaned up on the way here; threads that wait for a store that hangs are not waited for."""
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    if any(not each.daemon for each in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    sys.exit(130)


def _fail(message: str, hint: str, code: int) -> Any:
    click.echo(click.style("error: ", fg="red", bold=True) + message, err=True)
    if hint:
        click.echo(click.style("  try: ", bold=True) + hint, err=True)
    sys.exit(code)
