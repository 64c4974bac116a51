"""The rows and the page of the measure of a search. Pure."""

from __future__ import annotations

from bench.table import (
    Limit,
    Page,
    Row,
    comparison,
)

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

How long Ray Tune takes for a search whose trials train for no time: with raysgd's trials and with Ray Train's, on the
same machine, in one run. To measure again:

```console
$ python benchmarks/tune.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. A local Ray with eight logical CPUs and without a dashboard, started before. Twelve trials, two
at a time; each has two workers with torch and a gloo group, which report three times after an all-reduce of one
number. The time is that of `Tuner.fit` and of making the trainable. Ray Train is used as documented: a Tune function
makes a `TorchTrainer` with a `TuneReportCallback`. Its workers are new for each trial, so both rows show the same
value; with `reuse_actors` it took 132 s instead of 161 s in a single run. *Ray Train, 0.05 s* polls reports every
0.05 s instead of every 2 s. Values are medians; every sample is in [tune.json](tune.json).
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED: dict[str, str] = {
    "search": (
        "Two cores only start processes. A trial costs six seconds of a core: 1.8 for each of its workers (1.1 of "
        "them the import of torch), 1.4 for the process of Tune (0.7 the import of Tune), 1.0 for the TrainerActor. "
        "The target needs three; only processes that are not started save that, as with `reuse_actors`."
    ),
    "reused": (
        "The first two trials start their processes as in the row above; the ten others take a tenth of a second each. "
        "The target is close: one earlier run of a single repetition took 7.5 s against 168 s, 0.045x."
    ),
}


PAGE = Page(
    rows=ROWS,
    stem="tune",
    head=_HEAD,
    method=_METHOD,
    reasons=_WHY_MISSED,
    quick="few trials, once",
    compare=comparison,
)
