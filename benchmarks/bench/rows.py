"""The rows of the table: which series, in which unit, and what was to be reached (DESIGN, budgets). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.stats import median_interval, quantile, rounded
from bench.systems import TITLES, VARIANTS


@dataclass(frozen=True)
class Limit:
    """What raysgd must reach: a figure, or so many times another system's."""

    value: float
    of: str | None = None

    def figure(self, values: Mapping[str, float]) -> float | None:
        """The limit in the row's unit; None where the system it refers to has no value."""
        if self.of is None:
            return self.value
        return self.value * values[self.of] if self.of in values else None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        share: The quantile that is told; 0.5 is the median.
        scale: From the series' unit to ``unit``.
        better: Whether less or more is better.
        ours: The system that is told as raysgd.
        peers: The systems beside it; None: all that are not raysgd.
        is_paired: The systems' samples were taken right after each other, one of each: what is compared is the median of the
            ratios of those.
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


_MS = 1e3
_TO_LOOP = "`report()` to the driver's loop"
ROWS = (
    Row("report", "`report()` in the training thread", "report_cost", "call_s", "ms", (Limit(0.01),), scale=_MS),
    Row("latency_p50", f"{_TO_LOOP}, 10 Hz, p50", "latency", "at_10hz_s", "ms", (Limit(3),), scale=_MS),
    Row("latency_p99", f"{_TO_LOOP}, 10 Hz, p99", "latency", "at_10hz_s", "ms", (Limit(30),), share=0.99, scale=_MS),
    Row("latency_100hz", f"{_TO_LOOP}, 100 Hz, p50", "latency", "at_100hz_s", "ms", (Limit(15),), scale=_MS),
    Row("rate", "reports a second, 2 workers, none lost", "rate", "reports_per_s", "/s", (Limit(100_000),), better="more"),
    Row("overhead", "cost in a 10 ms step that reports every 10th", "overhead", "percent", "%", (Limit(1),)),
    Row("cold", "cold: call to first line of train_func", "start", "cold_s", "s", (Limit(0.5, "ray_train"), Limit(1.2, "bare"))),
    Row("warm", "warm: second run to first line", "start", "warm_s", "s", (Limit(0.1),)),
    Row("warm_returned", "warm: second run to its return", "start", "warm_returned_s", "s", (Limit(0.1),)),
    Row("exception", "exception to raised in the driver", "exception", "seconds", "s", (Limit(0.3),)),
    Row("stall", "stall of a 512 MB checkpoint, second and later", "checkpoint", "stall_s", "s", (Limit(0.1),)),
    Row("first_stall", "stall of the first 512 MB checkpoint", "checkpoint", "first_stall_s", "s", ()),
    Row("durable", "512 MB checkpoint, to durable", "checkpoint", "mb_per_s", "MB/s", (Limit(0.8, "dd"),), better="more"),
    Row("ddp_conv", "DDP step, small convolutional net", "ddp", "conv_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
    Row("ddp_mlp", "DDP step, MLP of 670k parameters", "ddp", "mlp_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
)  # fmt: skip


def fill_rows(document: Mapping[str, Any], rows: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    """The table as data: each row's value per system, the ratio, the target, and whether it was met."""
    return [fill_row(row, document["measures"][row.measure]) for row in rows if row.measure in document["measures"]]


def fill_row(row: Row, measure: Mapping[str, Any]) -> dict[str, Any]:
    systems = {"raysgd" if name == row.ours else name: entry for name, entry in measure["systems"].items()}
    cells = {system: _cell(row, entry) for system, entry in systems.items() if _is_told(row, system)}
    cells = {system: cell for system, cell in cells.items() if cell is not None}
    values = {system: cell["value"] for system, cell in cells.items() if "value" in cell}
    if row.is_paired:
        for system, ratios in _ratios(row, systems).items():
            ratio, interval = quantile(ratios, 0.5), median_interval(ratios)
            cells[system]["ratio"] = {
                "value": rounded(ratio),
                "interval": interval and [rounded(end) for end in interval],
            }
            values[system] = values["raysgd"] / ratio  # as far as it is compared
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


def _is_told(row: Row, system: str) -> bool:
    if row.peers is None:
        return system not in VARIANTS
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
    """raysgd's value by each peer's, pair by pair; none of a peer that failed in between, whose samples are not in pairs."""
    samples = {name: entry["series"].get(row.series, {}).get("samples", []) for name, entry in systems.items()}
    ours = samples.get("raysgd", [])
    return {
        name: [a / b for a, b in zip(ours, theirs, strict=True)]
        for name, theirs in samples.items()
        if name != "raysgd" and _is_told(row, name) and theirs and len(theirs) == len(ours)
    }


def _factor(row: Row, values: Mapping[str, float]) -> float | None:
    """How many times better than Ray Train with its default."""
    ours, theirs = values.get("raysgd"), values.get("ray_train")
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return rounded(theirs / ours if row.better == "less" else ours / theirs)


def _is_met(row: Row, values: Mapping[str, float]) -> bool | None:
    """None where there is nothing to reach, or nothing to compare with."""
    figures = [limit.figure(values) for limit in row.limits]
    if "raysgd" not in values or not figures or None in figures:
        return None
    ours = values["raysgd"]
    return all(ours <= figure if row.better == "less" else ours >= figure for figure in figures if figure is not None)
