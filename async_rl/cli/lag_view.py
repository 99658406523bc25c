"""A View as something rich can print: the run, its clusters, its workers. `-` is unknown, or none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from async_rl.log import plain
from async_rl.view.model import ClusterView, View, WorkerView, idle_share

__all__ = ["duration", "render_view"]

BARS = " ▁▂▃▄▅▆▇█"
MOST_BARS = 24
"""Lags shown one by one; what is greater is in the last bar."""

_STYLES = {
    "gone": "red",
    "silent": "red",
    "no way": "red",
    "quarantined": "red",
    "draining": "yellow",
    "paused": "yellow",
    "not fetching": "yellow",
    "long samples": "yellow",
    "current": "green",
}


def render_view(view: View) -> RenderableType:
    parts: list[RenderableType] = [_summary(view)]
    if not view.workers:
        parts.append(Text("no rollout worker has connected yet", style="yellow"))
        return Group(*parts)
    if len(view.workers) > 1:
        parts.append(_clusters(view))
    parts.append(_workers(view))
    return Group(*parts)


# ---------------------------------------------------------------- the run


def _summary(view: View) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    up = f", up {duration(view.uptime_s)}" if view.uptime_s is not None else ""
    table.add_row("run", _plain(f"{view.run or '-'}  incarnation {_n(view.incarnation)}{up}"))
    trainer = view.trainer if view.trainer is not None else "its state is unknown here"
    table.add_row("trainer", _plain(f"step {_n(view.step)}, {trainer}"))
    table.add_row(
        "newest version",
        "none yet"
        if view.newest_version is None
        else f"{view.newest_version} (step {_n(view.newest_version_step)}), "
        f"{duration(view.newest_version_age_s)} old",
    )
    if view.checkpoint_step is not None:
        table.add_row(
            "checkpoint", f"of step {view.checkpoint_step}, {duration(view.checkpoint_age_s)} old"
        )
    for name, said in _told_by_orchestrator(view):
        table.add_row(name, said if isinstance(said, Text) else _plain(said))
    if view.source.partition("://")[0] in ("s3", "file"):
        table.add_row(
            "source", _plain(f"{view.source}: what only the orchestrator knows is not shown", "dim")
        )
    if view.note:
        table.add_row("note", Text(view.note, style="yellow"))
    return table


def _told_by_orchestrator(view: View) -> Iterator[tuple[str, str | Text]]:
    if view.step is not None and view.batch_groups is not None:
        admitted = view.step * view.batch_groups + (view.buffered or 0) + (view.outstanding or 0)
        yield (
            "groups",
            f"{_n(view.buffered)}/{view.batch_groups} buffered, {_n(view.outstanding)} outstanding, "
            f"{admitted}/{_n(view.admitted_limit)} admitted",
        )
    if view.lag_counts is not None and not view.lag_counts:
        yield "lag of trained samples", f"-  (limit {_n(view.max_lag)}, in optimizer steps)"
    elif view.lag_max is not None:
        late = "red" if view.max_lag is not None and view.lag_max > view.max_lag else "green"
        yield (
            "lag of trained samples",
            Text.assemble(
                f"p50 {view.lag_p50 or 0:.0f}  p95 {view.lag_p95 or 0:.0f}  max ",
                (str(view.lag_max), late),
                f"  (limit {_n(view.max_lag)}, in optimizer steps)",
            ),
        )
    if view.lag_counts:
        yield "", histogram(view.lag_counts)
    if view.trainer_here_s is not None and view.trainer_waited_s is not None:
        yield "waiting", _who_waits(view)
    if view.dropped is not None:
        yield "dropped", _counts(view.dropped)
    if view.refused:
        yield "refused", _counts(view.refused)
    if view.evals is not None:
        reward = "-" if view.reward is None else f"{view.reward:.3f}"
        yield "reward", f"last batch {reward}" + _scores(view)
    for standing in view.standings or ():
        if (state := standing["state"]) in ("suspect", "quarantined"):
            kept = state == "quarantined"
            left = f" ({duration(float(str(standing['left_s'])))} more)" if kept else ""
            said = f"{standing['worker']}{left}: {standing['reason']}"
            yield str(state), _plain(said, "red" if kept else "yellow")
    for key, reason in (view.dead_letters or ())[-3:]:
        letter = _plain(f"{key}: {reason}", "yellow")
        letter.overflow, letter.no_wrap = "ellipsis", True
        yield "given up", letter


def histogram(counts: dict[int, int]) -> Text:
    """One bar per lag from 0 on, as high as its share of the samples; the shares of the largest ones behind."""
    total, last = sum(counts.values()), min(max(counts), MOST_BARS - 1)
    heights = [0] * (last + 1)
    for lag, count in counts.items():
        heights[min(lag, last)] += count
    most = max(heights)
    bars = "".join(
        BARS[max(1, round(height / most * (len(BARS) - 1))) if height else 0] for height in heights
    )
    top = sorted(range(last + 1), key=lambda lag: -heights[lag])[:4]
    plus = "+" if max(counts) > last else ""
    shares = "  ".join(
        f"{lag}{plus if lag == last else ''}: {heights[lag] / total:.0%}"
        for lag in sorted(top)
        if heights[lag]
    )
    return Text.assemble((bars, "cyan"), (f"  lag 0 to {last}{plus}   ", "dim"), shares)


def _who_waits(view: View) -> str:
    """Whom the run waits for: the trainer for groups, the engines for leases."""
    here = view.trainer_here_s or 0.0
    share = f"{min(1.0, (view.trainer_waited_s or 0.0) / here):.0%}" if here > 0 else "-"
    said = f"trainer {share} of its time for batches"
    if view.batch_waits_for:
        said += f" (now: {view.batch_waits_for})"
    idle = idle_share(each for each in view.workers if each.state != "gone")
    if idle is not None:
        said += f"; engines idle {idle:.0%}"
    if view.leasing_waits_for:
        said += f"; leases wait for {view.leasing_waits_for}"
    return said


def _scores(view: View) -> str:
    if not view.evals:
        return ""
    shown = ", ".join(f"v{score['version']:.0f} {score['reward']:.3f}" for score in view.evals[-5:])
    return f"; held out: {shown}"


# ---------------------------------------------------------------- clusters and workers


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _clusters(view: View) -> Table:
    table = _table(("cluster",), ("workers", "versions", "lag", "behind", "tokens/s", "synced", "idle"))
    for each in view.clusters:
        table.add_row(
            _plain(each.cluster),
            _members(each),
            _versions(each),
            _lag(each.lag, view.max_lag),
            _behind(each),
            _n(each.tokens_per_s),
            _bytes(each.sync_bytes),
            "-" if each.idle is None else f"{each.idle:.0%}",
        )
    return table


def _members(cluster: ClusterView) -> str:
    """How many there are, and who of them does not count for the rest."""
    others = {"quarantined": cluster.quarantined, "gone": cluster.gone}
    said = ", ".join(f"{count} {state}" for state, count in others.items() if count)
    return f"{cluster.workers - cluster.quarantined}" + (f" (+{said})" if said else "")


def _workers(view: View) -> Table:
    """Narrow enough for a terminal of 80 columns as long as there is one cluster; --json has every field."""
    clusters, caches = len(view.clusters) > 1, any(each.cache_used for each in view.workers)
    left = ("worker", *(["cluster"] if clusters else []), "state")
    right = (
        "version",
        "lag",
        "behind",
        "tokens/s",
        "in flight",
        *(["cache"] if caches else []),
        "done",
        "seen",
    )
    table = _table(left, right)
    table.columns[0].overflow = "fold"  # a name that is cut names nobody
    table.columns[len(left) - 1].no_wrap = True
    for each in view.workers:
        table.add_row(
            _plain(each.worker),
            *([_plain(each.cluster if each.cluster is not None else "-")] if clusters else []),
            _why(each),
            _n(each.version),
            _lag(each.lag, view.max_lag),
            _behind(each),
            _n(each.tokens_per_s),
            "-" if each.leases is None else f"{each.leases} ({_n(each.running)}+{_n(each.queued)})",
            *([f"{each.cache_used:.0%}" if each.cache_used else "-"] if caches else []),
            _n(each.groups_done),
            duration(each.last_seen_s),
        )
    return table


def _why(worker: WorkerView) -> Text:
    """Why it lags; where it does not, its state."""
    style, said = _STYLES.get(worker.why, "cyan"), worker.why
    if worker.why in ("", "current", "unknown"):
        said = worker.state or "unknown"
    if worker.why == "fetching":
        said = f"fetching {worker.fetching_version}"
        if worker.fetched_fraction is not None:
            said += f" {worker.fetched_fraction:.0%}"
    elif worker.why == "no way":
        said = f"no way to {worker.lacks}"
    elif worker.why == "long samples":
        said = f"long samples: {duration(worker.oldest_s)}"
    elif worker.why == "paused" and worker.pause_s:
        said = f"paused (before: {duration(worker.pause_s)})"
    return _plain(said, style)


def _plain(said: str, style: str = "") -> Text:
    """Neither markup nor anything that moves a terminal's cursor."""
    return Text(plain(said), style=style)


def _versions(cluster: ClusterView) -> str:
    oldest, newest = cluster.oldest_version, cluster.newest_version
    return _n(oldest) if oldest == newest else f"{oldest} to {newest}"


def _behind(each: ClusterView | WorkerView) -> str:
    """In versions, and for how long."""
    if each.lag_versions is None:
        return "-"
    return "0" if not each.lag_versions else f"{each.lag_versions}, {duration(each.lag_s)}"


def _lag(lag: int | None, max_lag: int | None) -> Text:
    if lag is None:
        return Text("-", style="dim")
    return Text(str(lag), style="red" if max_lag is not None and lag > max_lag else "green")


def _n(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
