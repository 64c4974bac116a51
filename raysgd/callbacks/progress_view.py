"""A snapshot of a run as a rich renderable: a head line, its metrics, its workers, and what went wrong.

Pure drawing, the same for a terminal and a notebook.
"""

from __future__ import annotations

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text

from raysgd.callbacks.formatting import clip, duration, time_span
from raysgd.callbacks.progress_state import Snapshot
from raysgd.callbacks.progress_tables import metrics_table, workers_table

_STYLES = {"starting": "cyan", "running": "green", "recovering": "yellow", "stopping": "cyan", "finished": "green"}
_MAX_WIDTH = 116
_SPARK_FROM_WIDTH = 76
_MAX_METRICS, _MIN_METRICS, _MIN_WORKERS = 12, 3, 4
_FRAME_LINES = 9  # borders, head line, blank lines, heads of the tables, and the line of the cursor


class ProgressView:
    """Draws one snapshot into the width and height there are."""

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
            parts += ["", workers_table(snapshot.workers, num_workers, console, options)]
        if foot:
            parts += ["", *foot]
        return parts


def _rows(snapshot: Snapshot, height: int) -> tuple[int, int]:
    """How many rows metrics and workers may have, so that the whole fits: what does not fit, a terminal cannot redraw."""
    num_metrics = height - min(len(snapshot.workers), _MIN_WORKERS)
    num_metrics = min(max(num_metrics, _MIN_METRICS), _MAX_METRICS, len(snapshot.metrics))
    return num_metrics, max(height - num_metrics, 2)


def _head(snapshot: Snapshot, style: str) -> Text:
    workers = f"{snapshot.world_size} worker{'s' if snapshot.world_size != 1 else ''}, {snapshot.info.backend}"
    facts = [duration(snapshot.elapsed_s), f"iteration {snapshot.iteration:,}", workers]
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
    if snapshot.error:
        lines.append(_line((snapshot.error, "bold red")))
    return lines


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
