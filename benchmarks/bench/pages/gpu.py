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

_BEFORE = """\
Measured before the repairs that followed from these figures, and to be measured again: {titles}.
"""

_ENGINE = """\
## The engine

Steps of a {model}, by hand and by `raysgd.engine`, on the same GPU. Target: at most {limit:g} of the step by hand.

{steps}
{missed}

The compiled step reaches {compiled} of the GPU's measured peak of about {peak:g} TFLOP/s.

What the plan predicted, and the largest memory that was measured:

{memory}
Measured on {day}.
"""
#: Target of the engine: the time of a step, as a part of that by hand.
STEP_LIMIT = 1.02

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


def _intro(document: Mapping[str, Any]) -> str:
    """Return which figures are older than the code, and how many tests passed on the GPU."""
    before = document.get("before_repairs")
    lines = [_BEFORE.format(titles="; ".join(before))] if before else []
    if tests := document.get("tests"):
        lines.append(f"`make gpu` passed with {tests} tests.\n")
    return "\n".join(lines)


def _engine(document: Mapping[str, Any]) -> str:
    """Return the section of the engine, if it was measured with the rest."""
    engine = document.get("engine")
    if engine is None:
        return ""
    steps = make_table(
        ("case", "by hand", "engine", "ratio", "met", "memory by hand", "memory"), map(_step, engine["cases"])
    )
    missed = [case["title"] for case in engine["cases"] if _met(case) is False]
    memory = [
        (title, f"{predicted:g} GB", f"{_range(measured)} GB", f"{_range([predicted / each for each in measured], 2)}x")
        for title, predicted, measured in engine["memory_gb"]
    ]
    return _ENGINE.format(
        model=engine["model"],
        limit=STEP_LIMIT,
        steps=steps,
        missed=f"The target is missed by: {', '.join(missed)}." if missed else "No target is missed.",
        compiled=f"{engine['mfu']['compiled']:.0%}",
        peak=engine["peak_tflops"],
        memory=make_table(("case", "predicted", "measured", "predicted / measured"), memory),
        day=engine["measured"],
    )


def _step(case: Mapping[str, Any]) -> tuple[str, ...]:
    by_hand, engine = case["by_hand_ms"], case["engine_ms"]
    return (
        case["title"],
        "-" if by_hand is None else f"{by_hand:g} ms",
        f"**{engine:g} ms**",
        "-" if by_hand is None else f"{engine / by_hand:.3f}",
        {True: "yes", False: "**no**", None: "-"}[_met(case)],
        "-" if case["by_hand_gb"] is None else f"{case['by_hand_gb']:g} GB",
        "-" if case["engine_gb"] is None else f"{case['engine_gb']:g} GB",
    )


def _met(case: Mapping[str, Any]) -> bool | None:
    by_hand = case["by_hand_ms"]
    return None if by_hand is None else bool(case["engine_ms"] <= STEP_LIMIT * by_hand)


def _range(values: Sequence[float], digits: int = 1) -> str:
    """Return one value, or the smallest and the largest one."""
    return " to ".join(f"{value:.{digits}f}" for value in sorted(values))


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
    reasons={"report": "The event of the copy was a blocking one, which held a loop that runs ahead of the device."},
    quick="small sizes",
    compare=_comparison,
    intro=_intro,
    fields=_where,
    extra=_engine,
    unmeasured=_UNMEASURED,
    has_picture=False,
)
