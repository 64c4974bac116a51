"""The rows and the page of the measure of a search. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.recovery_rows import list_failures
from bench.rows import Limit, Row, fill_rows
from bench.table import comparison, machine_line, missed, spread

ROWS = (
    Row(
        "search",
        "12 trials of 2 torch workers, 2 at a time",
        "tune_search",
        "search_s",
        "s",
        (Limit(0.12, "ray_train"),),
    ),
    Row("reused", "the same with `reuse_actors`", "tune_search", "reused_s", "s", (Limit(0.05, "ray_train"),)),
)

_HEAD = """\
# Searches

<!-- Written by benchmarks/tune.py from tune.json; changes made here are lost. -->

How long Ray Tune takes for a search whose trials train for no time at all: over raysgd's trials, and over Ray Train's on the
same machine, in one run. Write these figures anew with:

```console
$ python benchmarks/tune.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. A local Ray with eight logical CPUs and without a dashboard, up before. Twelve trials, two at a time; each
has two workers with torch and a gloo group, which report three times, after an all-reduce of one number. Measured is
`Tuner.fit` with the making of the trainable. Ray Train is driven as its documentation has it: by a Tune function that makes a
`TorchTrainer` with a `TuneReportCallback`. Its workers are new ones for each trial in any case, and what it takes is told in
both rows; `reuse_actors`, which keeps that function's process, had it take 132 s instead of 161 s in a run of one. *Ray Train,
0.05 s* looks for reports every 0.05 s instead of every 2 s. What is told are medians; every
sample is in [tune.json](tune.json).
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED: dict[str, str] = {
    "search": "Two cores do nothing but start processes. A trial costs six seconds of a core: 1.8 for each of its workers (1.1 "
    "of them the import of torch), 1.4 for the process of Tune's (0.7 the import of Tune), 1.0 for the TrainerActor. Three "
    "would be needed; only processes that are not started can save that, which is what `reuse_actors` does.",
    "reused": "The first two trials start their processes as in the row above, for which both cores are busy for some six "
    "seconds; the ten that follow take a tenth of a second each. It is on the edge: 7.5 s against 168 s, 0.045x, in a run of "
    "one repetition the day before.",
}


def render_page(document: Mapping[str, Any]) -> str:
    """The Markdown of the page."""
    rows = fill_rows(document, ROWS)
    parts = [_HEAD]
    if any(measure["quick"] for measure in document["measures"].values()):
        parts.append("**A quick run: few trials, once. These figures say that it works and no more.**\n")
    parts += [comparison(rows), "![The figures of the table](tune.svg)\n", missed(rows, _WHY_MISSED)]
    parts.append(_METHOD.format(machine=machine_line(document["machine"])))
    if failed := list_failures(document):
        parts.append("## What failed\n\n" + "\n".join(f"- {line}" for line in failed) + "\n")
    parts.append(spread(rows))
    return "\n".join(parts)


__all__ = ["ROWS", "list_failures", "render_page"]
