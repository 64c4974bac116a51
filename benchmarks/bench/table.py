"""Results as tables: their rows, units and targets, and the page around a table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.results import median_interval, quantile, rounded
from bench.systems import PRELOADING, TITLES, VARIANTS

_PEERS = ("bare", "torchrun", "monarch", "dd", "pyarrow")


@dataclass(frozen=True)
class Limit:
    """A target of raysgd: a figure, or a multiple of another system's figure."""

    value: float
    of: str | None = None

    def figure(self, values: Mapping[str, float]) -> float | None:
        """Return the limit in the row's unit, or None if the system it refers to has no value."""
        if self.of is None:
            return self.value
        return self.value * values[self.of] if self.of in values else None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        share: The quantile that is shown; 0.5 is the median.
        scale: The factor from the series' unit to ``unit``.
        better: Whether less or more is better.
        ours: The system that is shown as raysgd.
        peers: The systems it is compared with; None: all that are not raysgd.
        is_paired: The systems took their samples in turns, one each. The median of the ratios of neighbours is compared.
    """

    key: str
    title: str
    measure: str
    series: str
    unit: str
    limits: tuple[Limit, ...]
    share: float = 0.5
    scale: float = 1.0
    better: Literal["less", "more"] = "less"
    ours: str = "raysgd"
    peers: tuple[str, ...] | None = None
    is_paired: bool = False

    def target(self) -> str:
        sign = "≤" if self.better == "less" else "≥"
        parts = []
        for limit in self.limits:
            if limit.of is None:
                parts.append(f"{sign} {limit.value:,g} {self.unit}")
            else:
                parts.append(f"{sign} {limit.value:g}x {TITLES[limit.of]}")
        return ", ".join(parts)


def fill_rows(document: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows that were measured as data: each system's value, the ratio, the target, and whether it was met."""
    filled = [fill_row(row, document["measures"][row.measure]) for row in rows if row.measure in document["measures"]]
    return [row for row in filled if "raysgd" in row["cells"]]


def fill_row(row: Row, measure: Mapping[str, Any]) -> dict[str, Any]:
    systems = {"raysgd" if name == row.ours else name: entry for name, entry in measure["systems"].items()}
    cells = {system: _cell(row, entry) for system, entry in systems.items() if _is_shown(row, system)}
    cells = {system: cell for system, cell in cells.items() if cell is not None}
    values = {system: cell["value"] for system, cell in cells.items() if "value" in cell}
    if row.is_paired:
        for system, ratios in _ratios(row, systems).items():
            ratio, interval = quantile(ratios, 0.5), median_interval(ratios)
            cells[system]["ratio"] = {
                "value": rounded(ratio),
                "interval": interval and [rounded(end) for end in interval],
            }
            values[system] = values["raysgd"] / ratio  # only for the comparison with the limits
    return {
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "better": row.better,
        "cells": cells,
        "times_better_than_ray_train": _factor(row, values),
        "target": row.target(),
        "limits": [limit.figure(values) for limit in row.limits],
        "met": _is_met(row, values),
    }


def _is_shown(row: Row, system: str) -> bool:
    if row.peers is None:
        return system not in (*VARIANTS, PRELOADING)
    return system == "raysgd" or system in row.peers


def _cell(row: Row, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    series = entry["series"].get(row.series)
    if series is not None:
        samples = series["samples"]
        value, low, high = (quantile(samples, share) * row.scale for share in (row.share, 0.25, 0.75))
        cell = {"value": rounded(value), "q1": rounded(low), "q3": rounded(high), "n": len(samples)}
        return cell | ({"failed": len(entry["errors"])} if entry["errors"] else {})
    return {"error": entry["errors"][0]} if entry["errors"] else None


def _ratios(row: Row, systems: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return raysgd's samples divided by each peer's, except peers that failed: their samples do not form pairs."""
    samples = {name: entry["series"].get(row.series, {}).get("samples", []) for name, entry in systems.items()}
    ours = samples.get("raysgd", [])
    return {
        name: [a / b for a, b in zip(ours, theirs, strict=True)]
        for name, theirs in samples.items()
        if name != "raysgd" and _is_shown(row, name) and theirs and len(theirs) == len(ours)
    }


def _factor(row: Row, values: Mapping[str, float]) -> float | None:
    """Return how many times better raysgd is than Ray Train with its defaults."""
    ours, theirs = values.get("raysgd"), values.get("ray_train")
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return rounded(theirs / ours if row.better == "less" else ours / theirs)


def _is_met(row: Row, values: Mapping[str, float]) -> bool | None:
    """Return whether the targets are met; None if there is no target, or no value to compare."""
    figures = [limit.figure(values) for limit in row.limits]
    if "raysgd" not in values or not figures or None in figures:
        return None
    ours = values["raysgd"]
    return all(ours <= figure if row.better == "less" else ours >= figure for figure in figures if figure is not None)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of results: a table and the text around it.

    Attributes:
        rows: The rows of the table.
        stem: The name of its files: the document, the picture and, unless ``page_name`` is given, the page.
        head: The text above the table.
        method: The text below it, with ``{machine}`` and the names of ``fields``.
        reasons: Why a target is missed, by the row's key.
        quick: What a quick run did.
        compare: Makes the table from the rows.
        intro: Makes a paragraph above the table from the document.
        fields: Makes further fields of ``method`` from the document.
        extra: Makes a section below the method from the document.
        packages: Further packages whose versions belong to the results.
        page_name: The name of the page's file, if it is not ``stem``.
        unmeasured: The text in place of a table, where there are no results.
        has_picture: Whether the page shows a picture of its rows.
    """

    rows: Sequence[Row]
    stem: str
    head: str
    method: str
    reasons: Mapping[str, str]
    quick: str
    compare: Callable[[Sequence[Mapping[str, Any]]], str]
    intro: Callable[[Mapping[str, Any]], str] | None = None
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda document: {}
    extra: Callable[[Mapping[str, Any]], str] | None = None
    packages: Sequence[str] = ()
    page_name: str = ""
    unmeasured: str = "Nothing has been measured yet.\n"
    has_picture: bool = True

    @property
    def file_name(self) -> str:
        return f"{self.page_name or self.stem}.md"

    def render(self, document: Mapping[str, Any]) -> str:
        """Return the Markdown of the page."""
        if not document["machine"]:  # nothing has run
            return f"{self.head}\n{self.unmeasured}"
        rows = fill_rows(document, self.rows)
        parts = [self.head]
        if any(measure["quick"] for measure in document["measures"].values()):
            parts.append(f"**A quick run: {self.quick}. These figures only show that the benchmark works.**\n")
        if rows:
            parts += [self.intro(document)] if self.intro is not None else []
            picture = [f"![The figures of the table]({self.stem}.svg)\n"] if self.has_picture else []
            parts += [self.compare(rows), *picture, missed(rows, self.reasons)]
        else:
            parts.append(self.unmeasured)
        parts.append(self.method.format(machine=machine_line(document["machine"]), **self.fields(document)))
        if failed := list_failures(document):
            parts.append("## What failed\n\n" + "\n".join(f"- {line}" for line in failed) + "\n")
        if self.extra is not None:
            parts.append(self.extra(document))
        if rows:
            parts.append(spread(rows))
        return "\n".join(parts)


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("measure", "Ray Train", "Ray Train, 0.05 s", "peers", "raysgd", "better than Ray Train by", "target", "met")
    lines = []
    for row in rows:
        cells = row["cells"]
        peers = [f"{TITLES[name]} {show_cell(cells[name], row['unit'])}" for name in _PEERS if name in cells]
        factor = row["times_better_than_ray_train"]
        lines.append(
            (
                row["title"],
                show_cell(cells.get("ray_train"), row["unit"]),
                show_cell(cells.get("ray_train_tuned"), row["unit"]),
                ", ".join(peers) or "-",
                f"**{show_cell(cells.get('raysgd'), row['unit'])}**",
                "-" if factor is None else f"{number(factor)}x",
                row["target"] or "-",
                {True: "yes", False: "**no**", None: "-"}[row["met"]],
            )
        )
    return make_table(head, lines)


def missed(rows: Sequence[Mapping[str, Any]], why: Mapping[str, str]) -> str:
    """Return a section with a line for each missed target; empty if none is missed.

    Args:
        rows: The rows of the table.
        why: The reasons, by the keys of the rows.
    """
    lines = []
    for row in rows:
        if row["met"] is False:
            value = show_cell(row["cells"].get("raysgd"), row["unit"])
            for name, cell in row["cells"].items():
                if "ratio" in cell:
                    value += f", {show_ratio(cell['ratio'])} {TITLES[name]}"
            reason = why.get(row["key"], "No reason is known.")
            lines.append(f"- **{row['title']}**: {value} ({row['target']}). {reason}")
    return "## What is missed\n\n" + "\n".join(lines) + "\n" if lines else ""


def show_ratio(ratio: Mapping[str, Any]) -> str:
    """Return a median of ratios as text, with its confidence interval if it has one."""
    shown = f"{number(ratio['value'])}x"
    return f"{shown} ({' to '.join(map(number, ratio['interval']))})" if ratio["interval"] else shown


def spread(rows: Sequence[Mapping[str, Any]]) -> str:
    """The quartiles of each system, and in brackets the number of its samples; medians are in the table above."""
    lines = []
    for row in rows:
        cells = [(TITLES[name], row["cells"][name]) for name in TITLES if "value" in row["cells"].get(name, {})]
        if cells:
            shown = [f"{title}: {number(cell['q1'])} to {number(cell['q3'])} ({cell['n']})" for title, cell in cells]
            lines.append((row["title"], "; ".join(shown), row["unit"]))
    return "## Spread\n\n" + make_table(("measure", "quartiles (samples)", "unit"), lines)


def number(value: float) -> str:
    """Format with three significant digits and thousands separators."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    text = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0") if "e" in text else text


def show_cell(cell: Mapping[str, Any] | None, unit: str) -> str:
    """Return a cell's value with its unit, or its error."""
    if cell is None:
        return "-"
    if "error" in cell:
        return f"failed: {_cell_text(cell['error'])}"
    failed = f" ({cell['failed']} failed)" if cell.get("failed") else ""
    return f"{number(cell['value'])} {unit}{failed}"


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return f"{gpu}{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, {machine['system']}; {versions}"


def days_line(measures: Mapping[str, Any]) -> str:
    """Return which measures were taken on which days; empty if it was one day."""
    days: dict[str, list[str]] = {}
    for measure in measures.values():
        days.setdefault(measure.get("measured", ""), []).append(measure["title"].lower())
    if len(days) < 2:
        return ""
    titles_by_day = "; ".join(f"{', '.join(titles)} on {day or 'another day'}" for day, titles in days.items())
    return f"Measured on several days, whose figures do not compare with each other: {titles_by_day}.\n"


def _cell_text(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def say_met(is_met: bool) -> str:
    """Return how a page says whether a target is met."""
    return "met" if is_met else "**missed**"


def make_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines)) + "\n"


def list_failures(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of failure, with the number of its repetitions."""
    counts = Counter(
        f"{measure['title']}, {system}: {error}"
        for measure in document["measures"].values()
        for system, entry in measure["systems"].items()
        for error in entry["errors"]
    )
    return [f"{line} ({number(count)} times)" if count > 1 else line for line, count in counts.items()]
