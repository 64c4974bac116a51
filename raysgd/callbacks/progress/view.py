"""Draw a snapshot of a run with rich: a head line, its metrics, its workers, and recent warnings and failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from raysgd.callbacks.progress.state import Snapshot
from raysgd.callbacks.values import clip, duration, goodput_text, is_finite, short, size, time_span

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _NARROW_SPARK_WIDTH, _NARROW = 32, 20, 92
_STYLES = {
    "starting": "cyan",
    "running": "green",
    "recovering": "yellow",
    "stopping": "cyan",
    "ending": "cyan",
    "finished": "green",
    "stopped": "cyan",
}
_MAX_WIDTH = 116
_SPARK_FROM_WIDTH = 76
_MAX_METRICS, _MIN_METRICS, _MIN_WORKERS = 12, 3, 4
_FRAME_LINES = 9  # borders, head line, blank lines, heads of the tables, and the line of the cursor


@dataclass(frozen=True)
class _Column:
    title: str
    key: str
    write: Callable[[Any], str]
    justify: Literal["left", "right"] = "right"


def _measure(write: Callable[[float], str]) -> Callable[[Any], str]:
    return lambda value: write(value) if is_finite(value) else "-"


def _percent(value: float) -> str:
    return f"{value:.0f}%"


_COLUMNS = (
    _Column("rank", "rank", str),
    _Column("node", "node", str, "left"),
    _Column("pid", "pid", str),
    _Column("cpu", "cpu_percent", _measure(_percent)),
    _Column("memory", "rss_bytes", _measure(size)),
    _Column("gpu", "gpu_percent", _measure(_percent)),
    _Column("gpu memory", "gpu_memory_bytes", _measure(size)),
    _Column("reports/s", "reports_per_s", _measure(short)),
    _Column("per report", "time_per_report_s", _measure(time_span)),
)
#: Columns that a narrow terminal leaves out, in this order.
_DROPPED_FIRST = ("time_per_report_s", "pid", "gpu_memory_bytes", "rss_bytes", "reports_per_s", "gpu_percent")


def metrics_table(snapshot: Snapshot, max_rows: int, width: int, *, spark: bool) -> Table:
    """Draw each metric's last value, range and history, in the order in which they were first reported."""
    spark_width = _NARROW_SPARK_WIDTH if width < _NARROW else _SPARK_WIDTH
    table = _table()
    table.add_column("metric", style="cyan", max_width=32, no_wrap=True)
    for title in ("last", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True, min_width=9, max_width=20)
    if spark:
        table.add_column("history", style="green", no_wrap=True)
    shown, hidden = _cut(list(snapshot.metrics), max_rows)
    for name in shown:
        history = snapshot.histories.get(name)
        cells = [name, short(snapshot.metrics[name])]
        if history is not None:
            cells += [short(history.smallest), short(history.largest), sparkline(history.means(), spark_width)]
        table.add_row(*map(Text, cells[: len(table.columns)]))
    if hidden:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    return table


def workers_table(workers: Sequence[dict[str, Any]], max_rows: int, console: Console, options: ConsoleOptions) -> Table:
    """Draw the node and the load of each worker, with as many columns as the width allows."""
    # GPU columns only where there is a GPU, and no numbers before the first sample.
    columns = [column for column in _COLUMNS if any(row.get(column.key) is not None for row in workers)]
    table = _workers_table(workers, columns, max_rows)
    for key in _DROPPED_FIRST:
        if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width:
            break
        columns = [column for column in columns if column.key != key]
        table = _workers_table(workers, columns, max_rows)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw finite values as bars of block characters, oldest at the left; the mean of each stretch where there are more."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        groups = [values[start:end] for start, end in itertools.pairwise(edges)]
        values = [sum(group) / len(group) for group in groups]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _workers_table(workers: Sequence[dict[str, Any]], columns: Sequence[_Column], max_rows: int) -> Table:
    table = _table()
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True, max_width=32)
    shown, hidden = _cut(workers, max_rows)
    for row in shown:
        table.add_row(*(Text(column.write(row.get(column.key, ""))) for column in columns))
    if hidden:
        table.add_row("", Text(f"and {hidden} more", style="dim"))
    return table


def _cut(rows: Sequence[Any], max_rows: int) -> tuple[Sequence[Any], int]:
    """Return the rows to show and the number of hidden ones; the line that says so takes the place of a row."""
    if len(rows) <= max_rows:
        return rows, 0
    return rows[: max_rows - 1], len(rows) - max_rows + 1


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


class ProgressView:
    """Draws one snapshot within the width and height of the console."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot, style = self._snapshot, _STYLES.get(self._snapshot.state, "red")
        width = min(options.max_width, _MAX_WIDTH)
        title = Text.assemble(("raysgd ", "bold"), (clip(snapshot.info.name, max(width - 20, 10)), "bold cyan"))
        yield Panel(
            Group(*self._parts(console, options.update(width=width - 4), style)),
            title=title,
            title_align="left",
            box=box.ROUNDED,
            border_style=style,
            padding=(0, 1),
            width=width,
        )

    def _parts(self, console: Console, options: ConsoleOptions, style: str) -> list[RenderableType]:
        snapshot, foot = self._snapshot, _foot(self._snapshot)
        num_metrics, num_workers = _rows(snapshot, options.size.height - _FRAME_LINES - len(foot))
        parts: list[RenderableType] = [_head(snapshot, style)]
        if snapshot.metrics:
            spark = not options.ascii_only and options.max_width >= _SPARK_FROM_WIDTH
            parts += ["", metrics_table(snapshot, num_metrics, options.max_width, spark=spark)]
        if snapshot.workers:
            parts += ["", workers_table(list(snapshot.workers.values()), num_workers, console, options)]
        if foot:
            parts += ["", *foot]
        return parts


def _rows(snapshot: Snapshot, height: int) -> tuple[int, int]:
    """Return the rows of metrics and of workers so that all fits: a terminal cannot redraw what does not fit."""
    num_metrics = height - min(len(snapshot.workers), _MIN_WORKERS)
    num_metrics = min(max(num_metrics, _MIN_METRICS), _MAX_METRICS, len(snapshot.metrics))
    return num_metrics, max(height - num_metrics, 2)


def _head(snapshot: Snapshot, style: str) -> Text:
    workers = f"{snapshot.world_size} worker{'s' if snapshot.world_size != 1 else ''}, {snapshot.info.backend}"
    planned = "" if snapshot.num_iterations is None else f" of {snapshot.num_iterations:,}"
    facts = [duration(snapshot.elapsed_s), f"iteration {snapshot.iteration:,}{planned}", workers]
    if snapshot.left_s is not None and snapshot.state == "running":
        facts.insert(1, f"about {duration(snapshot.left_s)} left")
    if snapshot.attempt > 1:
        facts.append(f"attempt {snapshot.attempt}")
    return _line((snapshot.state, f"bold {style}"), *(f"   {fact}" for fact in facts))


def _foot(snapshot: Snapshot) -> list[Text]:
    lines = []
    if (checkpoint := snapshot.checkpoint) is not None:
        text = f"checkpoint {checkpoint.get('number', '?')} at iteration {checkpoint.get('iteration', '?')}"
        place = checkpoint.get("uri") or checkpoint.get("path") or "in memory"
        lines.append(_line((text, "cyan"), f", {time_span(int(snapshot.checkpoint_age_s))} ago  {place}"))
    lines += [_line(("! ", "bold yellow"), note) for note in snapshot.notes]
    is_over = snapshot.state in ("finished", "failed", "stopped")
    if is_over and (goodput := goodput_text(snapshot.info)):
        lines.append(_line(goodput))
    if snapshot.error:
        lines.append(_line((snapshot.error, "bold red")))
    if snapshot.num_warnings > 1:  # older ones are not shown any more
        lines.append(
            _line((f"{snapshot.num_warnings} warnings", "bold yellow"), ", all of them in the log and in run_info")
        )
    return lines


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
