"""The first page: raysgd compared with Ray Train, torchrun and bare actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.table import (
    Limit,
    Page,
    Row,
    comparison,
    make_table,
    number,
)

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
    Row("warm_imports", "warm: the same, after large imports", "start", "warm_after_imports_s", "s", (Limit(0.1),)),
    Row("exception", "exception to raised in the driver", "exception", "seconds", "s", (Limit(0.3),)),
    Row("stall", "stall of a 512 MB checkpoint, second and later", "checkpoint", "stall_s", "s", (Limit(0.1),)),
    Row("first_stall", "stall of the first 512 MB checkpoint", "checkpoint", "first_stall_s", "s", ()),
    Row("durable", "512 MB checkpoint, to durable", "checkpoint", "mb_per_s", "MB/s", (Limit(0.8, "dd"),), better="more"),
    Row("ddp_conv", "DDP step, small convolutional net", "ddp", "conv_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
    Row("ddp_mlp", "DDP step, MLP of 670k parameters", "ddp", "mlp_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
)  # fmt: skip


_HEAD = """\
# Benchmarks

<!-- Written by benchmarks/report.py from results.json; changes made here are lost. -->

raysgd and Ray Train on the same machine, in one run, with the same work. To measure again:

```console
$ make bench
```
"""

_METHOD = """\
## Method

Measured on {machine}. Two workers with a gloo group, `OMP_NUM_THREADS=1` everywhere, a local Ray with four logical
CPUs and without a dashboard. Each repetition runs every system in its own process, in another order. Values are
medians of all samples (p99 where stated); every sample is in [results.json](results.json).

- Ray Train is used as its guides show, once with its defaults and once with `RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.05`.
  Its reports count when they reach a callback in its controller, one hop earlier than raysgd's, because it does not
  stream them to the driver.
- A start counts from the call to the first line of train_func on the last rank, with Ray started and idle. *Bare
  actors* is the same chain of driver, controller actor and workers in plain Ray, without a service.
- DDP steps of all systems run with the same niceness; Ray's workers would have 15 (`RAY_worker_niceness`).
- Checkpoints are random numbers. raysgd's are durable when synced and committed, Ray Train's, which are not synced,
  when its controller has them.
"""


#: Why a target is missed, by the row's key, as far as it is known.
_WHY_MISSED = {
    "cold": (
        "Processes of raysgd import more than bare actors do: 0.08 s in the TrainerActor and 0.09 s in each worker, "
        "in parallel with torch on two cores. Run folder, journal and agents are made meanwhile."
    ),
    "overhead": (
        "The two workers keep both cores busy, so everything a report costs is taken from them: sending, rounds, the "
        "journal, the driver's loop and the loggers, in four processes."
    ),
    "ddp_conv": (
        "Ray's own processes run on the two training cores; torchrun has none. Ray Train's step, on the same cluster,"
        " shows how much that is."
    ),
}


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


def _extra(document: Mapping[str, Any]) -> str:
    return _scale(document["scale"]) if document.get("scale") else ""


PAGE = Page(
    rows=ROWS,
    stem="results",
    page_name="index",
    head=_HEAD,
    method=_METHOD,
    reasons=_WHY_MISSED,
    quick="tiny sizes, one repetition",
    compare=comparison,
    extra=_extra,
)
