"""The rows and the page of the measures of backends. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.measures.backend_allreduce import SIZES
from bench.recovery_rows import list_failures
from bench.rows import Limit, Row, fill_rows
from bench.systems import TITLES, WITH_BACKEND
from bench.table import days_line, machine_line, make_table, missed, number, show_cell, show_ratio, spread

#: Whose versions belong to the results.
PACKAGES = ("horovod", "tensorflow", "jax")

#: The framework by itself, as each backend is compared with it; the first one is what the limits are of.
PEERS = {
    "torch": ("torchrun",),
    "horovod": ("horovod_executor", "horovodrun"),
    "tensorflow": ("tensorflow",),
    "jax": ("jax",),
}
#: Beside these in all-reduces: what it takes to be a process of Ray's.
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
            told = (key, f"{title}: all-reduce of {size}", "backend_allreduce", size, "MB/s", at_least)
            yield Row(*told, scale=_MB, better="more", ours=ours, peers=peers, is_paired=True)
    for key, title in _NAMES.items():
        limits = _KILL_LIMITS.get(key, ())
        kill = (f"kill_{key}", f"{title}: rank killed to next step", "backend_kill", "seconds", "s", limits)
        yield Row(*kill, ours=WITH_BACKEND[key], peers=PEERS[key])


ROWS = tuple(_make_rows())

_HEAD = """\
# Backends

<!-- Written by benchmarks/backends.py from backends.json; changes made here are lost. -->

What a group costs that raysgd's backends make, beside the same framework without raysgd, on the same machine, by turns: to
start it, to add up in it, and to go on when one of its processes was killed. Write these figures anew with:

```console
$ python benchmarks/backends.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. `OMP_NUM_THREADS=1` everywhere, a local Ray without a dashboard, up before and idle, for what runs on it.
The systems take turns: each repetition runs every one of them in processes of its own, with another one first each time. What
is told are medians; every sample is in [backends.json](backends.json).

- **By itself** each framework runs as it brings along: torch under `torchrun --standalone`; Horovod under its `RayExecutor`, on
  Ray, and under `horovodrun --gloo`; TensorFlow as two plain processes with a `TF_CONFIG` and a
  `MultiWorkerMirroredStrategy`; JAX as two plain processes with `jax.distributed.initialize` and gloo. *Bare actors* are two of
  Ray's, with a gloo group of torch's and nothing else.
- **All-reduces** are made by the same code whoever has started it: `dist.all_reduce`, `hvd.allreduce_`, `all_reduce` of a replica
  context in a `tf.function`, a jitted `psum`. gloo of torch and of Horovod has the interface of the node's address in all of
  them, which `torchrun`, `horovodrun` and `RayExecutor` would not choose on one machine; TensorFlow's servers have that address;
  JAX's gloo takes what the machine's name is resolved to, in both.
- **A start** counts from the call, the launcher's command or the making of the executor to the sum of one number on the last
  of two ranks. With TensorFlow and JAX that has the strategy or the compiling in it. *A second run* is one with the same
  Trainer, as are a third and a fourth in its median; after four groups raysgd replaces TensorFlow's processes, which
  would take as long as a start.
- **Bandwidth** is the bytes of one array of float32 by the time of its all-reduce, on the slower of two ranks, in blocks of equal
  numbers of them in which the sizes take turns. The systems with the same framework are up at once, and have each block one after
  the other, in another order each time: on a machine that gives and takes its processors' time from second to second, a
  system that is measured a minute later is measured on another machine. They begin three seconds after their groups were
  there: Ray first starts processes in the place of those that it has given away. The ratio is the median of the ratios of such
  neighbouring blocks, and not that of the medians; in brackets is the interval in which it lies with 95 % confidence. All
  processes have the same niceness; Ray's workers would have 15 (`RAY_worker_niceness`), and yield to all else.
- **A kill** is SIGKILL to one of three ranks, not the first, in a loop of all-reduces of 256 KiB with 10 ms between them. raysgd
  has a spare process, up and idle; the time ends when the slowest rank of the next group has done its first step. `torchrun
  --max-restarts` starts all processes anew; it had `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which its second group did
  not form over gloo when it was tried. Horovod's `timeout_s` is its default, 10 s. Horovod's own elastic mode was not
  measured: on a single machine it cannot go on, as it counts failures by machine and uses that one no more. Plain processes of
  TensorFlow and JAX have nothing that would start them again. A Trainer loses three ranks, and the next kills are another one's;
  a fourth would have TensorFlow's processes replaced, as above.
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED = {
    "allreduce_jax_1_MiB": (
        "No reason is certain. Three groups of plain JAX were measured like that beside each other, three times: with its loop "
        "in a thread, as raysgd has it, a group had 0.93, 0.99 and 1.03 of the bandwidth of one without, and with Ray imported "
        "as well 0.91, 0.96 and 0.98. Groups differ by chance as much as that, and there are seven of each here. With arrays a "
        "sixteenth or sixteen times as large the ratio is 0.99."
    ),
    "start_horovod": (
        "`RayExecutor` asks Ray for two workers, and that is all. raysgd asks for the TrainerActor, which asks for them, as "
        "*bare actors* do in [the comparison with Ray Train](index.md); and the process with Horovod's rendezvous server comes "
        "up beside them, on the cores on which they import torch."
    ),
    "start_jax": (
        "JAX's import is short: two plain processes have their sum before a worker has begun with it. That is when Ray has "
        "handed out two processes one after the other, the TrainerActor's and the worker's, and each has imported what Ray and "
        "raysgd are made of."
    ),
}


def render_page(document: Mapping[str, Any]) -> str:
    """The Markdown of the page."""
    rows = fill_rows(document, ROWS)
    parts = [_HEAD]
    if any(measure["quick"] for measure in document["measures"].values()):
        parts.append("**A quick run: little, once. These figures say that it works and no more.**\n")
    if not rows:
        parts.append("Nothing has been measured yet.\n")
    else:
        parts += [
            days_line(document["measures"]),
            _comparison(rows),
            "![The figures of the table](backends.svg)\n",
            missed(rows, _WHY_MISSED),
        ]
    parts.append(_METHOD.format(machine=machine_line(document["machine"])))
    if failed := list_failures(document):
        parts.append("## What failed\n\n" + "\n".join(f"- {line}" for line in failed) + "\n")
    if rows:
        parts.append(spread(rows))
    return "\n".join(parts)


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
