"""The page of the controller's cost with up to 1,000 workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.table import machine_line, make_table, number

STEM = "scale"

_HEAD = """\
# Many workers

<!-- Written by benchmarks/scale.py; changes made here are lost. -->

What the TrainerActor costs with up to 1,000 workers, and how that grows. To measure again:

```console
$ python benchmarks/scale.py
```
"""
_QUICK = "**A quick run. These figures only show that the benchmark works.**\n"

_METHOD = """\
## Method

Measured {measured} on {machine}; the load of the machine was {load} before.

- A process has what the TrainerActor has, but for Ray: the run, the worker group, and a connection of each worker. All simulated
  workers are in another process, each with a thread, an event queue and the events of a real worker, samples of its process
  included. The driver is a third process. CPU and memory are those of the first process.
- Workers report all at the same moment. The delay of a report is the time until the driver's loop has its round; p99 counts from
  the oldest report of the round.
- A part of a checkpoint counts from when its worker has written it, until the manifest of all parts is on storage.
- A death is the end of a worker's connection. What Ray needs to notice that a process is gone comes in addition, and is part
  of the figures of real workers. So is what a call of an actor costs more than a message between two processes.
- Start and resize are CPU time of the controller, divided by the number of workers: from the order for a group to the last order
  of its attempt. The resume of real workers is all CPU time of the TrainerActor from the death to the next report, with the start
  of a process in it.
"""


class _Column(NamedTuple):
    """A figure: its title, its name in the results, by what it is multiplied, and its unit."""

    title: str
    name: str
    scale: float = 1
    unit: str = ""


_CPU = _Column("CPU of a core", "cpu_share", 100, " %")
_PER_REPORT = _Column("CPU per report", "cpu_per_report_s", 1e6, " us")
_P50, _P99 = _Column("to driver, p50", "latency_p50_s", 1e3, " ms"), _Column("p99", "latency_p99_s", 1e3, " ms")
_REPORTS = _Column("reports/s", "reports_per_s")
_MEMORY = _Column("memory", "memory_mib", 1, " MiB")
_DEATH = _Column("death to next order", "death_to_order_s", 1, " s")
_REPORTING = (_REPORTS, _Column("messages/s", "messages_per_s"), _CPU, _PER_REPORT, _P50, _P99)
_SAVING = (
    _CPU,
    _MEMORY,
    _Column("messages/s", "messages_per_s"),
    _Column("report to driver, p99", "latency_p99_s", 1, " s"),
    _Column("part to commit", "commit_s", 1, " s"),
    _DEATH,
    _Column("start, a worker", "start_per_worker_s", 1e3, " ms"),
    _Column("resize, a worker", "resize_per_worker_s", 1e3, " ms"),
)
_TARGETS = ("target at 1,000", "25 %", "500 MB", "", "2 s", "1 s", "1 s + heartbeat", "1 ms", "1 ms")
_REAL = (_REPORTS, _CPU, _PER_REPORT, _MEMORY, _P50, _P99)
_REAL_SAVING = (
    _CPU,
    _MEMORY,
    _Column("report to driver, p99", "latency_p99_s", 1, " s"),
    _Column("first save call to commit", "save_to_commit_s", 1, " s"),
    _DEATH,
    _Column("resume, a worker", "resume_per_worker_s", 1e3, " ms"),
)


def render(document: Mapping[str, Any]) -> str:
    """Return the Markdown of the page."""
    parts = [_HEAD, _QUICK] if document["quick"] else [_HEAD]
    method = {"measured": document["measured"], "machine": machine_line(document["machine"]), "load": document["load"]}
    parts += [_saving(document), _reporting(document), _real(document), _trainers(document), _METHOD.format(**method)]
    return "\n".join(part for part in parts if part)


def _saving(document: Mapping[str, Any]) -> str:
    lines = [_line(point, _SAVING) for point in document["saving"]]
    text = (
        "## Reports and saves\n\nSimulated workers report at 1 Hz, and each saves a part of its own every 10 s. Times are the "
        "longest of all. At the end one of them dies, and the group shrinks.\n\n"
        + make_table(["workers", *(column.title for column in _SAVING)], [*lines, _TARGETS])
        + "\nGrowth, as the exponent e of `cost ~ workers ** e`:\n\n"
    )
    for what, exponents in document["growth"].items():
        shown = ", ".join(f"{value:.2f} from {span} workers" for span, value in exponents.items())
        text += f"- {what}: {shown}\n"
    return text


def _reporting(document: Mapping[str, Any]) -> str:
    lines = [_line(point, _REPORTING) for point in document["simulated"]]
    text = "## Ten reports a second\n\n" + make_table(["workers", *(column.title for column in _REPORTING)], lines)
    return text + (
        f"\n{document['verdict']}\n\n![How the controller's cost grows](scale.svg)\n" if "verdict" in document else ""
    )


def _real(document: Mapping[str, Any]) -> str:
    return (
        "## Real workers\n\nActors without a CPU stream to a real TrainerActor. At 10 Hz:\n\n"
        + make_table(["workers", *(column.title for column in _REAL)], [_line(document["real"], _REAL)])
        + "\nAt 1 Hz, with a save of each worker every 10 s. One process is killed at the end:\n\n"
        + make_table(
            ["workers", *(column.title for column in _REAL_SAVING)], [_line(document["real_saving"], _REAL_SAVING)]
        )
    )


def _trainers(document: Mapping[str, Any]) -> str:
    found = document["trainers"]
    if "error" in found:
        return f"## Many Trainers\n\nThis failed: {found['error']}\n"
    reports = found["reports"] // found["trainers"]
    return (
        f"## Many Trainers\n\n{found['trainers']} Trainers with {found['workers']} workers each, without a CPU, ran in one "
        f"cluster at the same time, from one driver, in {number(found['seconds'])} s. Each got exactly its own {reports} "
        "reports, checkpoints and return value, and no actor, placement group, process or thread was left.\n"
    )


def _line(point: Mapping[str, Any], columns: Sequence[_Column]) -> tuple[str, ...]:
    if "error" in point:
        return (str(point["workers"]), f"failed: {point['error']}", *["-"] * (len(columns) - 1))
    return (f"{point['workers']:,}", *(_cell(point.get(column.name), column) for column in columns))


def _cell(value: Any, column: _Column) -> str:
    if isinstance(value, Mapping):  # CPU seconds by what they were spent on
        value = sum(value.values())
    return "-" if value is None else f"{number(column.scale * value)}{column.unit}"
