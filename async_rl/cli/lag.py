"""`async-rl lag`: how far the workers are behind the trainer, once, as it changes, or as JSON; from the orchestrator,
or from the bucket alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from async_rl.cli.lag_view import render_view
from async_rl.cli.options import client_key, key_options
from async_rl.log import plain
from async_rl.view.model import View, of_status, over
from async_rl.wire import Status

__all__ = ["OVER", "command", "render"]

REFRESH_S = 1.0
STORE_REFRESH_S = 5.0
"""From the bucket: a look costs a few requests, and workers write there every minute or so."""
CONNECT_LIMIT_S = 5.0

OVER = 3
"""Exit status where a lag is over --fail-over. 1 and 2 are errors."""

Look = Callable[[], View]


@click.command("lag")
@click.option(
    "--orchestrator",
    envvar="ASYNC_RL_ORCHESTRATOR",
    default="tcp://127.0.0.1:5577",
    show_default=True,
    help="Its address; also read from ASYNC_RL_ORCHESTRATOR.",
)
@click.option(
    "--store",
    "store_url",
    default="",
    metavar="URL",
    help="Look into the run's store instead, where the orchestrator can't be reached.",
)
@key_options
@click.option("--watch", is_flag=True, help="Refresh every second (5 with --store), until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per refresh.")
@click.option(
    "--fail-over",
    type=click.IntRange(min=0),
    metavar="STEPS",
    help=f"Exit with status {OVER} when a worker lags by more optimizer steps; with --watch, as soon as one does.",
)
def command(
    orchestrator: str,
    store_url: str,
    key_file: str,
    server_key: str,
    watch: bool,
    as_json: bool,
    fail_over: int | None,
) -> None:
    """Show the newest policy version and how far each rollout worker lags behind it, and why.

    A worker that is gone or in quarantine, or serves no version yet, does not count for --fail-over: it
    generates nothing. One whose lag is unknown does.
    """
    with (
        _from_store(store_url)
        if store_url
        else _from_orchestrator(orchestrator, key_file, server_key) as look
    ):
        views = _views(look, watch, STORE_REFRESH_S if store_url else REFRESH_S)
        if as_json:
            _follow(views, fail_over, lambda view: click.echo(msgspec.json.encode(view).decode()))
        elif watch:
            first = next(views)
            with Live(render_view(first), auto_refresh=False) as live:
                try:
                    _check(first, fail_over)
                    _follow(views, fail_over, lambda view: live.update(render_view(view), refresh=True))
                except KeyboardInterrupt:
                    pass
        else:
            _follow(views, fail_over, lambda view: Console().print(render_view(view)))


def _follow(views: Iterator[View], fail_over: int | None, show: Callable[[View], None]) -> None:
    for view in views:
        show(view)
        _check(view, fail_over)


def _check(view: View, fail_over: int | None) -> None:
    """Ends the process where a lag is over the limit, and says whose."""
    late = over(view, fail_over) if fail_over is not None else []
    if late:
        said = ", ".join(
            f"{plain(each.worker)} {'by an unknown number' if each.lag is None else each.lag}"
            for each in late
        )
        click.echo(f"over {fail_over} optimizer steps behind: {said}", err=True)
        sys.exit(OVER)


def _views(look: Look, watch: bool, pause_s: float) -> Iterator[View]:
    yield look()
    while watch:
        time.sleep(pause_s)
        yield look()


@contextmanager
def _from_orchestrator(address: str, key_file: str, server_key: str) -> Iterator[Look]:
    from async_rl.transport.link import StatusLink

    with StatusLink(address, client_key(key_file, server_key)) as link:
        yield lambda: of_status(link.ask(CONNECT_LIMIT_S), address)


@contextmanager
def _from_store(url: str) -> Iterator[Look]:
    from async_rl.cli.weights_common import opened
    from async_rl.view.bucket import BucketWatch

    with opened(url) as (store, run):
        yield BucketWatch(store, run, url=url).look


def render(status: Status) -> RenderableType:
    """A Status as something rich can print; `async-rl demo` shows the same."""
    return render_view(of_status(status))
