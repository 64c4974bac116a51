"""How a loaded run prints: a few lines of text, and in a notebook a table with a small curve for each metric. Pure."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from raysgd._util.redact import redact_uri
from raysgd.callbacks.values import duration, short
from raysgd.result import AUTOMATIC_KEYS, DATA_WAIT_FRACTION

#: Metrics that are shown; a run may have hundreds.
MAX_METRICS = 20
#: Points of a curve: a long run is drawn by the mean of each stretch.
MAX_POINTS = 120
_WIDTH, _HEIGHT, _MARGIN = 160, 28, 2
_OUTCOMES = {"done": "done", "stopped": "stopped by a callback", "cancelled": "cancelled", "error": "failed"}
_HEADER = ("metric", "first", "last", "lowest", "highest")
_LEFT_OUT = AUTOMATIC_KEYS | {DATA_WAIT_FRACTION}


@dataclass(frozen=True)
class MetricSummary:
    """A metric of a run that is a number: its finite values, by iteration."""

    name: str
    values: Sequence[float]

    def cells(self) -> tuple[str, ...]:
        shown = (self.values[0], self.values[-1], min(self.values), max(self.values))
        return (self.name, *map(short, shown))


@dataclass(frozen=True)
class RunSummary:
    """The part of a run that is shown.

    Attributes:
        title: Its name, its outcome and its size, in one line.
        run_dir: Its folder.
        metrics: The metrics that are numbers.
        num_hidden: The number of further such metrics.
    """

    title: str
    run_dir: str
    metrics: Sequence[MetricSummary]
    num_hidden: int

    def text(self) -> str:
        """Return the summary as lines of text."""
        lines = [self.title, f"in {self.run_dir}"]
        if self.metrics:
            rows = [_HEADER, *(metric.cells() for metric in self.metrics)]
            widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
            for name, *numbers in rows:
                cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
                lines.append("  ".join([f"  {name.ljust(widths[0])}", *cells]))
        if self.num_hidden:
            lines.append(f"  and {self.num_hidden} more metrics")
        lines.append("tables: .metrics .workers .events .samples; also .config .description .checkpoints")
        return "\n".join(lines)

    def html(self) -> str:
        """Return the summary as HTML with a curve for each metric."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

        head = row([_HEADER[0], "", *_HEADER[1:]], "th")
        body = ""
        for metric in self.metrics:
            name, *numbers = map(html.escape, metric.cells())
            body += row([name, curve(metric.values), *numbers], "td")
        if self.num_hidden:
            body += row([f"and {self.num_hidden} more"], "td")
        caption = f"<caption>{html.escape(self.title)}<br><code>{html.escape(self.run_dir)}</code></caption>"
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


def summarize(
    run_dir: str,
    metrics: pd.DataFrame,
    events: pd.DataFrame,
    description: Mapping[str, Any],
    num_checkpoints: int,
    outcome: str | None,
) -> RunSummary:
    """Summarize the contents of a run's folder; the arguments are fields of `raysgd.trainer.run_folder.LoadedRun`."""
    found = [MetricSummary(str(name), values) for name in metrics.columns if (values := _numbers(metrics, name))]
    kinds = list(events["kind"])
    facts = [_OUTCOMES.get(outcome or "", "live, or lost"), _count(len(metrics), "iteration")]
    if len(metrics) and "time_total_s" in metrics:
        facts[-1] += f" in {duration(float(metrics['time_total_s'].iloc[-1]))}"
    if "num_workers" in description:
        facts.append(f"{description['num_workers']} x {description.get('backend', '?')} worker")
    facts.append(_count(num_checkpoints, "checkpoint"))
    facts += [_count(kinds.count(kind), kind) for kind in ("failure", "warning") if kind in kinds]
    shown_dir = redact_uri(run_dir)
    name = shown_dir.partition("?")[0].rstrip("/").rpartition("/")[2]
    return RunSummary(f"{name}: {', '.join(facts)}", shown_dir, found[:MAX_METRICS], max(0, len(found) - MAX_METRICS))


def curve(values: Sequence[float]) -> str:
    """Return a small picture of a metric's values over the run, as SVG in the colour of the text around it."""
    points = _thin_out(values)
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    step = (_WIDTH - 2 * _MARGIN) / max(1, len(points) - 1)
    bottom, room = _HEIGHT - _MARGIN, _HEIGHT - 2 * _MARGIN
    places = [(_MARGIN + index * step, bottom - (value - low) / span * room) for index, value in enumerate(points)]
    if len(places) == 1:
        shape = f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="1.5" fill="currentColor"/>'
    else:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shape = f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{shape}</svg>'


def _thin_out(values: Sequence[float]) -> list[float]:
    """Return the values, or the mean of each of `MAX_POINTS` stretches of them."""
    if len(values) <= MAX_POINTS:
        return list(values)
    cuts = [index * len(values) // MAX_POINTS for index in range(MAX_POINTS + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(cuts)]


def _numbers(metrics: pd.DataFrame, name: Any) -> list[float]:
    """Return the finite values of a metric; none if it is not a number, or is one of raysgd's own."""
    column = metrics[name]
    if name in _LEFT_OUT or column.dtype.kind not in "iuf":
        return []
    return [value for value in map(float, column) if math.isfinite(value)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
