"""The rows and the page of the measures of feeding. Pure."""

from __future__ import annotations

from bench.table import (
    Limit,
    Page,
    Row,
    comparison,
)

_PER_S = ("rows_per_s", "/s")
_TEN, _FIVE, _ONE = Limit(10, "ray_train"), Limit(5, "ray_train"), Limit(1, "ray_train")
ROWS = (
    Row("files", "rows from 16 Parquet files", "ingest_files", *_PER_S, (_TEN, Limit(0.5, "pyarrow")), better="more"),
    Row("held", "the same, in later epochs of a run", "ingest_files", "held_rows_per_s", "/s", (), better="more"),
    Row("memory", "rows from memory", "ingest_memory", *_PER_S, (_FIVE,), better="more"),
    Row("transformed", "rows through Ray Data", "ingest_transformed", *_PER_S, (_ONE,), better="more"),
    Row("images", "images decoded in the worker", "ingest_images", *_PER_S, (), better="more"),
    Row("look", "a look at 10,000 Parquet files", "ingest_planning", "look_s", "s", ()),
    Row("plan", "an epoch of 10,000 files planned by 1,000 workers", "ingest_planning", "plan_s", "s", (Limit(1),)),
    Row("plan_memory", "memory of the look and the plans", "ingest_planning", "plan_mb", "MB", (Limit(200),)),
    Row("ledger", "the ledger, for a batch of 1,024", "ingest_planning", "batch_s", "us", (Limit(20),), scale=1e6),
)

_HEAD = """\
# Data ingest

<!-- Written by benchmarks/ingest.py from ingest.json; changes made here are lost. -->

How fast rows arrive in a training loop that does nothing with them: raysgd and Ray Train's
`get_dataset_shard(...).iter_torch_batches(...)` on the same machine, in one run. To measure again:

```console
$ python benchmarks/ingest.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. Two workers with a gloo group, `OMP_NUM_THREADS=1`, a local Ray with four logical CPUs and
without a dashboard. Rows a second are those of both workers, from the first that begins an epoch to the last that
ends it. The first epoch of a run is left out, except for raysgd's files. Values are medians; every sample is in
[ingest.json](ingest.json). Files were just written, so they come from the system's cache.

- **Parquet, memory, Ray Data**: 2^20 rows of a list of 64 float32 and an int64 (277 MB), in batches of 1,024. Plain
  pyarrow is one process with two threads that reads file after file and cuts each into slices of 1,024 rows. raysgd
  keeps files that fit into its workers' memory (256 MB each) for later epochs; the first row shows first epochs.
- **Images**: 4,096 JPEGs of 224 x 224 in batches of 64, decoded with PIL in `collate_fn` in every epoch.
- **Planning**: no worker is started. A look reads the metadata of 10,000 files of one row, as plain pyarrow does to
  count them. A plan is what a worker does before its first batch of an epoch with `shuffle="window"`, as if for files
  of 65,536 rows, for 1,000 simulated workers one after the other. Memory is Python's peak in both. The cost of a
  batch's rows is that of one of two workers, over 5,000 batches.
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED: dict[str, str] = {}


PAGE = Page(
    rows=ROWS,
    stem="ingest",
    head=_HEAD,
    method=_METHOD,
    reasons=_WHY_MISSED,
    quick="few rows, once",
    compare=comparison,
)
