"""The rows and the page of the measures of backends. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.measures.backends import SIZES
from bench.systems import TITLES, WITH_BACKEND
from bench.table import (
    Limit,
    Page,
    Row,
    days_line,
    make_table,
    number,
    show_cell,
    show_ratio,
)

#: Whose versions belong to the results.
PACKAGES = ("horovod", "tensorflow", "jax")

#: The framework by itself, as each backend is compared with it; the first one is what the limits are of.
PEERS = {
    "torch": ("torchrun",),
    "horovod": ("horovod_executor", "horovodrun"),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
}
#: In all-reduces also bare actors, which show the cost of a Ray process.
_BARE = {"torch": ("bare",)}
_NAMES = {"torch": "torch", "horovod": "Horovod", "tensorflow": "TensorFlow", "jax": "JAX"}
#: Seconds from a kill to the next step; Horovod's are its timeout and two.
_KILL_LIMITS = {"torch": (Limit(2),), "horovod": (Limit(12),)}
_MB = 1e-6


def _make_rows() -> Iterator[Row]:
    for key, title in _NAMES.items():
        ours, peers, own = WITH_BACKEND[key], PEERS[key], PEERS[key][0]
        start = (
            f"start_{key}",
            f"{title}: start to first all-reduce",
            "backend_start",
            "cold_s",
            "s",
            (Limit(1.2, own),),
        )
        yield Row(*start, ours=ours, peers=peers)
        yield Row(f"warm_{key}", f"{title}: a second run", "backend_start", "warm_s", "s", (), ours=ours, peers=())
    for name, title in _NAMES.items():
        ours, peers, own = WITH_BACKEND[name], PEERS[name] + _BARE.get(name, ()), PEERS[name][0]
        for size in SIZES:
            key = f"allreduce_{name}_{size.replace(' ', '_')}"
            at_least = (Limit(0.95, own),)
            series = (key, f"{title}: all-reduce of {size}", "backend_allreduce", size, "MB/s", at_least)
            yield Row(*series, scale=_MB, better="more", ours=ours, peers=peers, is_paired=True)
    for key, title in _NAMES.items():
        limits = _KILL_LIMITS.get(key, ())
        kill = (f"kill_{key}", f"{title}: rank killed to next step", "backend_kill", "seconds", "s", limits)
        yield Row(*kill, ours=WITH_BACKEND[key], peers=PEERS[key])


ROWS = tuple(_make_rows())

_HEAD = """\
# Backends

<!-- Written by benchmarks/backends.py from backends.json; changes made here are lost. -->

What a process group of raysgd's backends costs, compared with the same framework without raysgd on the same machine. To
measure again:

```console
$ python benchmarks/backends.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. `OMP_NUM_THREADS=1`; Ray runs locally without a dashboard, started before. Each repetition runs
every system in its own processes, in another order. Values are medians; every sample is in
[backends.json](backends.json).

- **By itself**: torch under `torchrun --standalone`; Horovod under its `RayExecutor` on Ray, and under
  `horovodrun --gloo`; TensorFlow as two plain processes with `TF_CONFIG` and a `MultiWorkerMirroredStrategy`; JAX as
  two plain processes with `jax.distributed.initialize` and gloo. *Bare actors* are two Ray actors with a gloo group.
- **All-reduces** use the same code in each system: `dist.all_reduce`, `hvd.allreduce_`, `all_reduce` of a replica
  context in a `tf.function`, a jitted `psum`. gloo uses the interface of the node's address in all systems.
- **A start** counts from the call, the launcher's command or the creation of the executor to the sum of one number on
  the last of two ranks. With TensorFlow and JAX that includes the strategy or the compilation. *A second run* uses
  the same Trainer. After four groups raysgd replaces TensorFlow's processes, which takes as long as a start.
- **Bandwidth** is the bytes of one float32 array divided by the time of its all-reduce, on the slower of two ranks. The
  systems of a framework are alive at the same time and take turns in short blocks, because the machine's speed changes
  from second to second. The ratio is the median of the ratios of neighbouring blocks, not the ratio of the medians;
  brackets show its 95 % confidence interval. All processes have the same niceness.
- **A kill** is SIGKILL to one of three ranks, not the first, in a loop of all-reduces of 256 KiB with 10 ms between
  them. The time ends when the slowest rank of the next group has finished its first step. raysgd has an idle spare.
  `torchrun --max-restarts` restarts all processes, with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which its second
  group did not form over gloo. Horovod's `timeout_s` is 10 s. Horovod's elastic mode cannot continue on a single
  machine, and nothing restarts plain processes of TensorFlow and JAX, so these have no value.
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED = {
    "allreduce_jax_1_MiB": (
        "No reason is certain. Groups of plain JAX differ as much by chance. Measured three times, a group with its loop in "
        "a thread, as in raysgd, had 0.93, 0.99 and 1.03 of the bandwidth of one without; with Ray imported as well 0.91, "
        "0.96 and 0.98. "
        "With arrays a sixteenth or sixteen times as large the ratio is 0.99."
    ),
    "start_horovod": (
        "`RayExecutor` only asks Ray for two workers. raysgd starts the TrainerActor, which starts them. Horovod's "
        "rendezvous server starts at the same time, on the cores on which the workers import torch."
    ),
    "start_jax": (
        "JAX's import is short: two plain processes have their sum before a worker has begun its import. By then Ray "
        "has started two processes one after the other, and each has imported Ray and raysgd."
    ),
}


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells, unit = row["cells"], row["unit"]
        peers = [name for name in TITLES if name in cells and name != "raysgd"]
        lines.append(
            (
                row["title"],
                ", ".join(f"{TITLES[name]} {show_cell(cells[name], unit)}" for name in peers) or "-",
                f"**{show_cell(cells.get('raysgd'), unit)}**",
                ", ".join(_ratio(cells, name) for name in peers) or "-",
                row["target"] or "-",
                {True: "yes", False: "**no**", None: "-"}[row["met"]],
            )
        )
    return make_table(("measure", "by itself", "raysgd", "ratio", "target", "met"), lines)


def _ratio(cells: Mapping[str, Any], peer: str) -> str:
    ours, theirs = cells.get("raysgd", {}), cells[peer]
    if "value" not in ours or "value" not in theirs:
        return "-"
    ratio = show_ratio(theirs["ratio"]) if "ratio" in theirs else f"{number(ours['value'] / theirs['value'])}x"
    return f"{ratio} {TITLES[peer]}"


PAGE = Page(
    rows=ROWS,
    stem="backends",
    head=_HEAD,
    method=_METHOD,
    reasons=_WHY_MISSED,
    quick="little, once",
    compare=_comparison,
    intro=lambda document: days_line(document["measures"]),
    packages=PACKAGES,
)
