"""The first page: raysgd compared with Ray Train, torchrun and bare actors."""

from __future__ import annotations

from bench.systems import PRELOADING
from bench.table import (
    Limit,
    Page,
    Row,
    comparison,
)

_MS = 1e3
_TO_LOOP = "`report()` to the driver's loop"
_BUSY = f"{_TO_LOOP} while both cores train"
_PRELOADED = "cold: the same on a Ray that preloads torch"
ROWS = (
    Row("report", "`report()` in the training thread", "report_cost", "call_s", "ms", (Limit(0.01),), scale=_MS),
    Row("latency_p50", f"{_TO_LOOP}, 10 Hz, p50", "latency", "at_10hz_s", "ms", (Limit(3),), scale=_MS),
    Row("latency_p99", f"{_TO_LOOP}, 10 Hz, p99", "latency", "at_10hz_s", "ms", (Limit(30),), share=0.99, scale=_MS),
    Row("latency_busy", f"{_BUSY}, p99", "latency_busy", "at_10hz_s", "ms", (Limit(30),), share=0.99, scale=_MS),
    Row("latency_100hz", f"{_TO_LOOP}, 100 Hz, p50", "latency", "at_100hz_s", "ms", (Limit(15),), scale=_MS),
    Row("rate", "reports a second, 2 workers, none lost", "rate", "reports_per_s", "/s", (Limit(100_000),), better="more"),
    Row("overhead", "cost in a 10 ms step that reports every 10th", "overhead", "percent", "%", (Limit(0.5),)),
    Row("overhead_itself", "the same loop without reports against itself", "overhead", "itself_percent", "%", ()),
    Row("report_cpu", "CPU time of a report in all processes", "report_cpu", "seconds", "us", (), scale=1e6),
    Row("cold", "cold: call to first line of train_func", "start", "cold_s", "s", (Limit(0.5, "ray_train"), Limit(1.15, "bare"))),
    Row("cold_preloading", _PRELOADED, "start", "cold_s", "s", (Limit(0.5, "bare"),), ours=PRELOADING),
    Row("script", "`python script.py` to first line of train_func", "script", "total_s", "s", ()),
    Row("script_imports", "of it: Python and imports", "script", "imports_s", "s", ()),
    Row("script_ray", "of it: Ray's start", "script", "ray_s", "s", ()),
    Row("script_train_func", "of it: from there to train_func", "script", "train_func_s", "s", ()),
    Row("warm", "warm: second run to first line", "start", "warm_s", "s", (Limit(0.03),)),
    Row("warm_returned", "warm: second run to its return", "start", "warm_returned_s", "s", (Limit(0.1),)),
    Row("warm_imports", "warm: the same, after large imports", "start", "warm_after_imports_s", "s", (Limit(0.1),)),
    Row("exception", "exception to raised in the driver", "exception", "seconds", "s", (Limit(0.3),)),
    Row("stall", "stall of a 512 MB checkpoint, second and later", "checkpoint", "stall_s", "s", (Limit(0.1),)),
    Row("first_stall", "stall of the first 512 MB checkpoint", "checkpoint", "first_stall_s", "s", (Limit(0.1),)),
    Row("durable", "512 MB checkpoint, to durable", "checkpoint", "mb_per_s", "MB/s", (Limit(0.8, "dd"),), better="more"),
    Row("ddp_conv", "DDP step, small convolutional net", "ddp", "conv_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
    Row("ddp_mlp", "DDP step, MLP of 670k parameters", "ddp", "mlp_step_s", "ms", (Limit(1.02, "torchrun"),), scale=_MS),
    Row("memory", "unique memory of its own processes, two workers", "memory", "mb", "MB", (Limit(130),)),
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
- Memory is what only one process has, of the processes that a system starts in addition to its workers. raysgd's callbacks run in
  the driver; those that run in the controller have one process more.
- A script starts a Ray of its own, with its dashboard; everything before it was in no cache but the file system's.
"""


#: Why a target is missed, by the row's key, as far as it is known.
_WHY_MISSED = {
    "cold": (
        "Processes of raysgd import more than bare actors do: 0.08 s in the TrainerActor and 0.09 s in each worker, "
        "in parallel with torch on two cores. Run folder, journal and agents are made meanwhile."
    ),
    "cold_preloading": (
        "Ray starts as many processes before they are needed as the machine has cores, which are two here. The "
        "TrainerActor takes one of them, so the second worker waits for a new process that imports torch."
    ),
    "warm": (
        "By a trace, three calls of Ray follow each other: to the TrainerActor (6 ms), to make the workers ready (7 ms) and "
        "to begin (8 ms). The rest are the run's folder (2 ms) and the group (4 ms)."
    ),
    "first_stall": "This figure is older than the mapping of memory in the background; it is to be measured again.",
    "overhead": (
        "The two workers keep both cores busy, so everything a report costs is taken from them: sending, rounds, the "
        "journal, the driver's loop and the loggers, in four processes."
    ),
    "ddp_conv": (
        "Ray's own processes run on the two training cores; torchrun has none. Ray Train's step, on the same cluster,"
        " shows how much that is."
    ),
}


PAGE = Page(
    rows=ROWS,
    stem="results",
    page_name="index",
    head=_HEAD,
    method=_METHOD,
    reasons=_WHY_MISSED,
    quick="tiny sizes, one repetition",
    compare=comparison,
)
