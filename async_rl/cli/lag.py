"""`async-rl lag`: how far the workers are behind the trainer, once, as it changes, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_rl.cli.options import client_key, key_options
from async_rl.transport.link import StatusLink
from async_rl.wire import Status, WorkerStatus

__all__ = ["command", "render"]

REFRESH_S = 1.0
CONNECT_LIMIT_S = 5.0


@click.command("lag")
@click.option(
    "--orchestrator",
    envvar="ASYNC_RL_ORCHESTRATOR",
    default="tcp://127.0.0.1:5577",
    show_default=True,
    help="Its address; also read from ASYNC_RL_ORCHESTRATOR.",
)
@key_options
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per refresh.")
def command(orchestrator: str, key_file: str, server_key: str, watch: bool, as_json: bool) -> None:
    """Show the newest policy version and how far each rollout worker lags behind it."""
    with StatusLink(orchestrator, client_key(key_file, server_key)) as link:
        if as_json:
            for status in _statuses(link, watch):
                click.echo(
                    msgspec.json.encode(msgspec.to_builtins(as_dict(status), str_keys=True)).decode()
                )
        elif watch:
            with Live(render(link.ask(CONNECT_LIMIT_S)), auto_refresh=False) as live:
                try:
                    for status in _statuses(link, watch):
                        live.update(render(status), refresh=True)
                except KeyboardInterrupt:
                    pass
        else:
            Console().print(render(link.ask(CONNECT_LIMIT_S)))


def _statuses(link: StatusLink, watch: bool) -> Iterator[Status]:
    yield link.ask(CONNECT_LIMIT_S)
    while watch:
        time.sleep(REFRESH_S)
        yield link.ask(CONNECT_LIMIT_S)


def as_dict(status: Status) -> dict[str, object]:
    """With names: on the wire the fields travel as arrays."""
    fields = msgspec.structs.asdict(status)
    fields["workers"] = [msgspec.structs.asdict(worker) for worker in status.workers]
    fields["standings"] = [msgspec.structs.asdict(standing) for standing in status.standings]
    fields["evals"] = [msgspec.structs.asdict(score) for score in status.evals]
    return fields


# ---------------------------------------------------------------- the picture


def render(status: Status) -> RenderableType:
    """A Status as something rich can print; `async-rl demo` shows the same."""
    return Group(_summary(status), _workers(status))


def _summary(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row(
        "run", f"{status.run or '-'}  incarnation {status.incarnation}, up {_duration(status.uptime_s)}"
    )
    table.add_row("trainer", f"step {status.step}, {status.trainer}")
    table.add_row(
        "newest version",
        f"{status.newest_version} (step {status.newest_version_step}), "
        f"{_duration(status.newest_version_age_s)} old"
        if status.newest_version >= 0
        else "none yet",
    )
    admitted = status.step * status.batch_groups + status.buffered + status.outstanding
    table.add_row(
        "groups",
        f"{status.buffered}/{status.batch_groups} buffered, {status.outstanding} outstanding, "
        f"{admitted}/{status.admitted_limit} admitted",
    )
    late = "red" if status.lag_max > status.max_lag else "green"
    table.add_row(
        "lag of trained samples",
        Text.assemble(
            f"p50 {status.lag_p50:.0f}  p95 {status.lag_p95:.0f}  max ",
            (str(status.lag_max), late),
            f"  (limit {status.max_lag}, in optimizer steps)",
        ),
    )
    table.add_row("dropped", _counts(status.dropped))
    if status.refused:
        table.add_row("refused", _counts(status.refused))
    reward = "-" if status.reward != status.reward else f"{status.reward:.3f}"
    table.add_row("reward", f"last batch {reward}" + "".join(_scores(status)))
    for standing in status.standings:
        if standing.state in ("suspect", "quarantined"):
            style = "red" if standing.state == "quarantined" else "yellow"
            left = f" ({_duration(standing.left_s)} more)" if standing.state == "quarantined" else ""
            table.add_row(standing.state, Text(f"{standing.worker}{left}: {standing.reason}", style=style))
    for key, reason in status.dead_letters[-3:]:
        table.add_row(
            "given up", Text(f"{key}: {reason}", style="yellow", overflow="ellipsis", no_wrap=True)
        )
    return table


def _scores(status: Status) -> Iterator[str]:
    if status.evals:
        yield "; held out: " + ", ".join(
            f"v{score.version} {score.reward:.3f}" for score in status.evals[-5:]
        )


def _workers(status: Status) -> RenderableType:
    if not status.workers:
        return Text("no rollout worker has connected yet", style="yellow")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("worker", "cluster", "state"):
        table.add_column(name)
    for name in ("version", "lag", "age", "tokens/s", "in flight", "done", "last seen"):
        table.add_column(name, justify="right")
    for worker in status.workers:
        table.add_row(
            worker.worker,
            worker.cluster,
            _state(worker),
            str(worker.version) if worker.version >= 0 else "-",
            _lag(worker, status.max_lag),
            _duration(worker.age_s) if worker.age_s >= 0 else "-",
            f"{worker.tokens_per_s:.0f}",
            f"{worker.leases} ({worker.running}+{worker.queued})",
            str(worker.groups_done),
            f"{_duration(worker.last_seen_s)} ago",
        )
    return table


def _state(worker: WorkerStatus) -> Text:
    if worker.fetching_version >= 0 and worker.state != "gone":
        return Text(f"fetching {worker.fetching_version} {worker.fetched_fraction:.0%}", style="cyan")
    style = {"serving": "green", "gone": "red", "draining": "yellow"}.get(worker.state, "cyan")
    return Text(worker.state, style=style)


def _lag(worker: WorkerStatus, max_lag: int) -> Text:
    if worker.lag < 0:
        return Text("-", style="dim")
    return Text(str(worker.lag), style="red" if worker.lag > max_lag else "green")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
