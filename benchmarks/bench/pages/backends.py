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

What a process group of raysgd's backends costs, compared with the same framework without raysgd on the same machine,
by turns: to start it, to all-reduce in it, and to recover when one of its processes is killed. To measure again:

```console
$ python benchmarks/backends.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. `OMP_NUM_THREADS=1` everywhere, and a local Ray without a dashboard, started before and idle,
for the systems that use it. The systems take turns: each repetition runs every system in its own processes, in
another order each time. Values are medians; every sample is in [backends.json](backends.json).

- **By itself** each framework runs as it is shipped: torch under `torchrun --standalone`; Horovod under its
  `RayExecutor` on Ray, and under `horovodrun --gloo`; TensorFlow as two plain processes with `TF_CONFIG` and a
  `MultiWorkerMirroredStrategy`; JAX as two plain processes with `jax.distributed.initialize` and gloo. *Bare actors*
  are two Ray actors with a gloo group of torch.
- **All-reduces** use the same code in each system: `dist.all_reduce`, `hvd.allreduce_`, `all_reduce` of a replica
  context in a `tf.function`, a jitted `psum`. gloo of torch and of Horovod uses the interface of the node's address
  in all of them, which `torchrun`, `horovodrun` and `RayExecutor` would not choose on one machine. TensorFlow's
  servers have that address; JAX's gloo uses what the machine's name resolves to, in both.
- **A start** counts from the call, the launcher's command or the creation of the executor to the sum of one number on
  the last of two ranks. With TensorFlow and JAX that includes the strategy or the compilation. *A second run* uses
  the same Trainer; its median includes a third and a fourth. After four groups raysgd replaces TensorFlow's
  processes, which takes as long as a start.
- **Bandwidth** is the bytes of one float32 array divided by the time of its all-reduce, on the slower of two ranks,
  in blocks of equal numbers of all-reduces in which the sizes take turns. The systems of a framework are started
  together and run each block one after the other, in another order each time, because the machine's speed changes
  from second to second. They begin three seconds after their groups have formed, when Ray has replaced the processes
  that it gave out. The ratio is the median of the ratios of neighbouring blocks, not the ratio of the medians;
  brackets show its 95 % confidence interval. All processes have the same niceness; Ray's workers would have 15
  (`RAY_worker_niceness`).
- **A kill** is SIGKILL to one of three ranks, not the first, in a loop of all-reduces of 256 KiB with 10 ms between
  them. raysgd has an idle spare. The time ends when the slowest rank of the next group has finished its first step.
  `torchrun --max-restarts` restarts all processes; it has `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which its
  second group did not form over gloo. Horovod's `timeout_s` is its default, 10 s. Horovod's elastic mode was not
  measured: it counts failures by machine, and cannot continue on a single one. Plain processes of TensorFlow and JAX
  are not restarted by anything. A Trainer loses three ranks, and the next kills are another Trainer's, because a
  fourth would have TensorFlow's processes replaced.
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED = {
    "allreduce_jax_1_MiB": (
        "No reason is certain. Three groups of plain JAX were measured in the same way, three times: with its loop in"
        " a thread, as in raysgd, a group had 0.93, 0.99 and 1.03 of the bandwidth of one without, and with Ray "
        "imported as well 0.91, 0.96 and 0.98. Groups differ that much by chance, and there are seven of each here. "
        "With arrays a sixteenth or sixteen times as large the ratio is 0.99."
    ),
    "start_horovod": (
        "`RayExecutor` only asks Ray for two workers. raysgd starts the TrainerActor, which starts them, like *bare "
        "actors* in [the comparison with Ray Train](index.md). The process with Horovod's rendezvous server starts at"
        " the same time, on the cores on which the workers import torch."
    ),
    "start_jax": (
        "JAX's import is short: two plain processes have their sum before a worker has begun its import. By then Ray "
        "has started two processes one after the other, the TrainerActor's and the worker's, and each has imported "
        "Ray and raysgd."
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
