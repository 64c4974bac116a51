"""The pictures of the results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.systems import TITLES
from bench.table import number

_COLORS = {
    "ray_train": "#d08770",
    "ray_train_tuned": "#ebcb8b",
    "bare": "#a3a9b5",
    "torchrun": "#7d8597",
    "monarch": "#b48ead",
    "horovod_executor": "#7d8597",
    "horovodrun": "#a3a9b5",
    "tensorflow": "#7d8597",
    "jax": "#7d8597",
    "dd": "#7d8597",
    "pyarrow": "#7d8597",
    "pinned_copy": "#7d8597",
    "raysgd": "#3b6ea5",
    "raysgd_preloading": "#81a1c1",
}
_COLUMNS = 3
#: The characters in a line of a panel's title.
_TITLE_WIDTH = 44
#: The background of a figure, so that no target's line runs through it.
_BACKDROP = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def _set_up() -> None:
    import matplotlib

    matplotlib.use("Agg")
    # The same document gives the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "raysgd", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False})


def draw_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Draw a panel for each row that has something to show, and return the path; None without such a row."""
    from matplotlib import pyplot as plt

    _set_up()
    rows = [row for row in rows if _values(row)]
    if not rows:
        return None

    num_lines = -(-len(rows) // _COLUMNS)
    figure, axes = plt.subplots(
        num_lines, _COLUMNS, figsize=(13, 1.75 * num_lines), layout="constrained", squeeze=False
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        _draw_row(axis, row)
    for axis in list(axes.flat)[len(rows) :]:
        axis.set_axis_off()
    figure.suptitle("raysgd and its peers: medians on a logarithmic scale; the dashed line is the target")
    return _written(figure, path)


def _draw_row(axis: Any, row: Mapping[str, Any]) -> None:
    values = _values(row)
    names = [name for name in reversed(list(TITLES)) if name in values]
    limits = [limit for limit in row["limits"] if limit]
    every = [*values.values(), *limits]
    low, high = min(every) / 3, max(every) * 3
    axis.set_xscale("log")
    axis.set_xlim(low, high * (high / low) ** 0.25)  # room for the figures next to the bars
    for place, name in enumerate(names):
        axis.barh(place, values[name] - low, left=low, color=_COLORS[name], height=0.72)
        axis.text(values[name] * 1.08, place, number(values[name]), va="center", fontsize=8, bbox=_BACKDROP)
    for limit in limits:
        axis.axvline(limit, color="#333333", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axis.minorticks_off()
    arrow = "less is better" if row["better"] == "less" else "more is better"
    title = textwrap.fill(row["title"].replace("`", ""), _TITLE_WIDTH)
    axis.set_title(f"{title}\n{row['unit']}, {arrow}", fontsize=9, loc="left")


def draw_scale(document: Mapping[str, Any], path: Path) -> None:
    """Draw how the controller's cost grows, if the document has more than one point."""
    from matplotlib import pyplot as plt

    points = [point for point in document["simulated"] if "error" not in point]
    if len(points) < 2:
        return
    _set_up()
    workers = [point["workers"] for point in points]
    panels = (
        ("CPU of the controller, % of a core", [100 * point["cpu_share"] for point in points], True),
        ("CPU per report, us", [1e6 * point["cpu_per_report_s"] for point in points], False),
        ("report to driver, p50, ms", [1e3 * point["latency_p50_s"] for point in points], False),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.2), layout="constrained")
    for axis, (title, values, has_line) in zip(axes, panels, strict=True):
        axis.loglog(workers, values, marker="o", color=_COLORS["raysgd"], label="measured")
        if has_line:
            linear = [values[0] * count / workers[0] for count in workers]
            axis.loglog(workers, linear, linestyle="--", color="#333333", linewidth=1, label="linear")
            axis.legend(frameon=False)
        for count, value in zip(workers, values, strict=True):
            axis.annotate(number(value), (count, value), textcoords="offset points", xytext=(4, 6), fontsize=8)
        axis.set_xticks(workers, [str(count) for count in workers])
        axis.minorticks_off()
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("simulated workers at 10 Hz")
        axis.margins(0.15)
    _written(figure, path)


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that a logarithmic scale can show: not a cost that noise made negative."""
    return {name: cell["value"] for name, cell in row["cells"].items() if cell.get("value", 0) > 0}


def _written(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
