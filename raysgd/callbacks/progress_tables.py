"""The two tables of the progress display, metrics and workers, as rich renderables. Pure drawing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from raysgd.callbacks.formatting import is_finite, short, size, time_span
from raysgd.callbacks.progress_state import History, Snapshot

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _NARROW_SPARK_WIDTH, _NARROW = 32, 20, 92


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
#: What a narrow terminal does without, in this order.
_DROPPED_FIRST = ("time_per_report_s", "pid", "gpu_memory_bytes", "rss_bytes", "reports_per_s", "gpu_percent")


def metrics_table(snapshot: Snapshot, max_rows: int, width: int, *, spark: bool) -> Table:
    """Each metric's last value, range and course, in the order in which they were first reported."""
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
            cells += [short(history.smallest), short(history.largest), sparkline(history, spark_width)]
        table.add_row(*map(Text, cells[: len(table.columns)]))
    if hidden:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    return table


def workers_table(workers: Sequence[dict[str, Any]], max_rows: int, console: Console, options: ConsoleOptions) -> Table:
    """Where each worker runs and how busy it is, with as many columns as the width allows."""
    # GPU columns only where there is a GPU, and no numbers before the first sample.
    columns = [column for column in _COLUMNS if any(row.get(column.key) is not None for row in workers)]
    table = _workers_table(workers, columns, max_rows)
    for key in _DROPPED_FIRST:
        if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width:
            break
        columns = [column for column in columns if column.key != key]
        table = _workers_table(workers, columns, max_rows)
    return table


def sparkline(history: History, width: int) -> str:
    """The history as bars of the block characters, the run's beginning at the left."""
    values = history.means()
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
    """The rows to show, and how many are hidden; the line that says so takes the place of one."""
    if len(rows) <= max_rows:
        return rows, 0
    return rows[: max_rows - 1], len(rows) - max_rows + 1


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
