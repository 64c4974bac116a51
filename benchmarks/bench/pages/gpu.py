"""The rows and the page of the measure on a GPU. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.systems import TITLES
from bench.table import Limit, Page, Row, make_table, show_cell

_COPY = ("pinned_copy",)
ROWS = (
    Row("report", "`report()` of a CUDA scalar", "gpu_step", "report_s", "us", (Limit(100),), scale=1e6, peers=()),
    Row("cost", "cost in a 10 ms step that reports a CUDA scalar", "gpu_step", "percent", "%", (Limit(1),), peers=()),
    Row("stall", "stall of a checkpoint of 512 MB, second and later", "gpu_step", "stall_s", "s", (Limit(0.1),), peers=_COPY),
    Row("first", "stall of the first", "gpu_step", "first_stall_s", "s", (), peers=()),
)  # fmt: skip

_HEAD = """\
# GPU

<!-- Written by benchmarks/gpu.py from gpu.json; changes made here are lost. -->

What `report` and `save_checkpoint` cost a training loop on a GPU. `make gpu` runs the tests that need one, and measures. It
takes less than eight minutes and installs nothing: torch, NumPy, pyarrow and pytest have to be there. With Ray, runs of a
Trainer are included.

```console
$ make gpu
```
"""

_UNMEASURED = """\
**Nothing has run on a GPU yet.** Until then, code for GPUs is tested on CPUs: with pretended GPUs, and with those tests of
`tests/gpu` that run on any device.
"""

_METHOD = """\
## Method

Measured on {machine}. The loop runs {where}. A step is a series of matrix products that keep the GPU busy for 10 ms; the
host is two steps ahead at most. Values are medians; every sample is in [gpu.json](gpu.json).

- **Reports**: the time of a call in the training thread, one in each step. The cost compares alternating blocks of steps
  with and without reports.
- **Checkpoints**: eight float32 tensors on the GPU, saved when it is idle. A plain copy goes into memory that was
  page-locked before. Files are written while the loop trains on.
"""


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells, unit = row["cells"], row["unit"]
        peers = [f"{TITLES[name]} {show_cell(cells[name], unit)}" for name in _COPY if name in cells]
        met = {True: "yes", False: "**no**", None: "-"}[row["met"]]
        ours = f"**{show_cell(cells.get('raysgd'), unit)}**"
        lines.append((row["title"], ", ".join(peers) or "-", ours, row["target"] or "-", met))
    return make_table(("measure", "by itself", "raysgd", "target", "met"), lines)


def _where(document: Mapping[str, Any]) -> dict[str, Any]:
    entry = document["measures"]["gpu_step"]["systems"]["raysgd"]
    where = (
        "in a worker of a Trainer" if entry["params"]["with_ray"] else "in a worker's session, in a process without Ray"
    )
    return {"where": where}


PAGE = Page(
    rows=ROWS,
    stem="gpu",
    head=_HEAD,
    method=_METHOD,
    reasons={},
    quick="small sizes",
    compare=_comparison,
    fields=_where,
    unmeasured=_UNMEASURED,
    has_picture=False,
)
