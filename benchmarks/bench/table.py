"""The page of results, from the document alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.rows import fill_rows
from bench.systems import TITLES

_PEERS = ("bare", "torchrun", "dd", "pyarrow")

_HEAD = """\
# Benchmarks

<!-- Written by benchmarks/report.py from results.json; changes made here are lost. -->

raysgd beside Ray Train, on the same machine, in one run, doing the same work. Write these figures anew with:

```console
$ make bench
```
"""

_METHOD = """\
## Method

Measured on {machine}. Two workers with a gloo group, `OMP_NUM_THREADS=1` everywhere, a local Ray with four logical CPUs
and without a dashboard. The systems take turns: each repetition runs every one of them in a process of its own, with
another one first each time; what is told is the median of all samples (p99 where it says so), and every sample is in
[results.json](results.json). Ray Train is used as its guides show, once with its defaults and once with
`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.05`. It has no stream of results to the driver, so its reports count as arrived in a
callback of its controller process, one hop earlier than raysgd's. A start counts from the call to the first line of
train_func on the last rank, with Ray up and idle; *bare actors* is the same chain of driver, controller actor and workers
in plain Ray, without a service around it. DDP steps of all systems are made with the same niceness: Ray's workers would have
15 (`RAY_worker_niceness`), and yield to all else. Checkpoints are of random numbers; raysgd's count as durable when they are
synced and committed, Ray Train's, which syncs nothing, when its controller has them. raysgd's display is off.
"""


#: Why a target is missed, by the row's key, as far as it is known.
_WHY_MISSED = {
    "cold": (
        "Processes of raysgd import what bare actors do not have, 0.08 s in the TrainerActor and 0.09 s in each worker, beside "
        "torch on two cores; the run's folder, its journal and the nodes' agents are made meanwhile. Earlier runs of this "
        "benchmark were within 1.2x."
    ),
    "overhead": (
        "The two workers keep both cores busy, so what a report costs anywhere is taken from them: sending it, making a round "
        "of it, the journal, the driver's loop and the loggers, in four processes that are woken up for it."
    ),
    "ddp_conv": (
        "Ray's own processes run on the two cores that train, which torchrun's need not share with anything. Ray Train's step, "
        "on the same cluster, tells how much that is."
    ),
}


def render_page(document: Mapping[str, Any]) -> str:
    """The Markdown of the page."""
    rows = fill_rows(document)
    parts = [_HEAD]
    if any(measure["quick"] for measure in document["measures"].values()):
        parts.append("**A quick run: tiny sizes, one repetition. These figures say that it works and no more.**\n")
    if rows:
        parts += [comparison(rows), "![The figures of the table](results.svg)\n", missed(rows, _WHY_MISSED)]
    parts.append(_METHOD.format(machine=machine_line(document["machine"])))
    if document.get("scale"):
        parts.append(_scale(document["scale"]))
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
    """What was to be reached and was not, a line each; nothing where all was.

    Args:
        rows: Of the table.
        why: Reasons, by the keys of the rows.
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
    """A median of ratios, and the interval that it is in, if that is known."""
    shown = f"{number(ratio['value'])}x"
    return f"{shown} ({' to '.join(map(number, ratio['interval']))})" if ratio["interval"] else shown


def spread(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        for name in TITLES:
            cell = row["cells"].get(name)
            if cell is not None and "value" in cell:
                spread = f"{number(cell['q1'])} to {number(cell['q3'])} {row['unit']}"
                lines.append((row["title"], TITLES[name], show_cell(cell, row["unit"]), spread, str(cell["n"])))
    head = ("measure", "system", "value", "quartiles", "samples")
    return "## Spread\n\n" + make_table(head, lines)


def _scale(scale: Mapping[str, Any]) -> str:
    text = (
        "## Scale\n\nThe controller's own cost, with simulated workers that report at 10 Hz and flush as real ones do. A "
        "process of its own holds nothing but the run's loop and one reader; what the simulated workers cost is "
        "subtracted.\n\n"
    )
    head = ("workers", "reports/s", "items/s", "CPU", "CPU per report", "memory growth", "report to frame, p50", "p99")
    lines = [_scale_line(point) for point in scale.get("simulated", [])]
    if lines:
        text += make_table(head, lines) + "\n"
        text += f"{scale['verdict']}\n\n![How the controller's cost grows](scale.svg)\n\n" if "verdict" in scale else ""
    if real := scale.get("real"):
        text += (
            "Simulated workers hide what connections cost, so here are real ones: actors without a CPU, streaming to a "
            "real TrainerActor, read by the driver.\n\n"
        )
        head = (
            "workers",
            "reports/s",
            "TrainerActor CPU",
            "CPU per report",
            "TrainerActor memory",
            "to driver, p50",
            "p99",
        )
        text += make_table(head, [_real_line(real)])
    return text


def _scale_line(point: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in point:
        return (str(point["workers"]), f"failed: {point['error']}", *["-"] * 6)
    return (
        str(point["workers"]),
        number(point["reports_per_s"]),
        number(point["items_per_s"]),
        f"{number(100 * point['cpu_share'])} %",
        f"{number(1e6 * point['cpu_per_report_s'])} us",
        f"{number(point['memory_growth_mib'])} MiB",
        f"{number(1e3 * point['latency_p50_s'])} ms",
        f"{number(1e3 * point['latency_p99_s'])} ms",
    )


def _real_line(point: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in point:
        return (str(point["workers"]), f"failed: {point['error']}", *["-"] * 5)
    return (
        str(point["workers"]),
        number(point["reports_per_s"]),
        f"{number(100 * point['cpu_share'])} %",
        f"{number(1e6 * point['cpu_per_report_s'])} us",
        f"{number(point['memory_mib'])} MiB",
        f"{number(1e3 * point['latency_p50_s'])} ms",
        f"{number(1e3 * point['latency_p99_s'])} ms",
    )


def number(value: float) -> str:
    """Three digits that matter, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    text = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0") if "e" in text else text


def show_cell(cell: Mapping[str, Any] | None, unit: str) -> str:
    """A cell's value with its unit, or what went wrong."""
    if cell is None:
        return "-"
    if "error" in cell:
        return f"failed: {_cell_text(cell['error'])}"
    failed = f" ({cell['failed']} failed)" if cell.get("failed") else ""
    return f"{number(cell['value'])} {unit}{failed}"


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, {machine['system']}; {versions}"


def days_line(measures: Mapping[str, Any]) -> str:
    """On which days what was measured; empty where it was one day."""
    days: dict[str, list[str]] = {}
    for measure in measures.values():
        days.setdefault(measure.get("measured", ""), []).append(measure["title"].lower())
    if len(days) < 2:
        return ""
    told = "; ".join(f"{', '.join(titles)} on {day or 'another day'}" for day, titles in days.items())
    return f"Measured on several days, whose figures do not compare with each other: {told}.\n"


def _cell_text(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def make_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines)) + "\n"
