"""The rows and the page of the measures of feeding. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.recovery_rows import list_failures
from bench.rows import Limit, Row, fill_rows
from bench.table import comparison, machine_line, missed, spread

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
# Feeding

<!-- Written by benchmarks/ingest.py from ingest.json; changes made here are lost. -->

How fast rows come to a training loop that does nothing with them: raysgd beside Ray Train's
`get_dataset_shard(...).iter_torch_batches(...)` on the same machine, in one run. Write these figures anew with:

```console
$ python benchmarks/ingest.py
```
"""

_METHOD = """\
## Method

Measured on {machine}. Two workers with a gloo group, `OMP_NUM_THREADS=1`, a local Ray with four logical CPUs and without a
dashboard. Rows a second are those of both workers together, from the first that begins an epoch to the last that ends it,
in each epoch but the first, but for raysgd's from files; a barrier is before each. What is told are medians; every sample is in
[ingest.json](ingest.json). Files were written a moment before: they come from the system's cache.

- **Parquet, memory, Ray Data**: 2^20 rows of a list of 64 float32 and an int64 (277 MB), in batches of 1,024. Plain pyarrow is
  one process with two threads, which reads file after file and cuts each into slices of 1,024 rows. raysgd keeps files that
  fit into its workers' memory (256 MB each) for the later epochs of a run: what is told first are first epochs, each of a
  run of its own in workers that are up. What goes through Ray Data is read and transformed by its tasks while the workers read.
- **Images**: 4,096 JPEGs of 224 x 224 in batches of 64, decoded with PIL in `collate_fn`, in every epoch anew.
- **Planning**: no worker is started. A look reads the metadata of 10,000 files of one row, which plain pyarrow does to count
  them. A plan is what a worker does before its first batch of an epoch with `shuffle="window"`, as of files of 65,536 rows:
  the order, which files come when, its first rows; for 1,000 simulated workers one after the other. Memory is the most
  that Python had allocated in both. The ledger's cost is that of one of two workers, over 5,000 batches.
"""

#: Why a target is missed, by the row's key.
_WHY_MISSED: dict[str, str] = {}


def render_page(document: Mapping[str, Any]) -> str:
    """The Markdown of the page."""
    rows = fill_rows(document, ROWS)
    parts = [_HEAD]
    if any(measure["quick"] for measure in document["measures"].values()):
        parts.append("**A quick run: few rows, once. These figures say that it works and no more.**\n")
    parts += [comparison(rows), "![The figures of the table](ingest.svg)\n", missed(rows, _WHY_MISSED)]
    parts.append(_METHOD.format(machine=machine_line(document["machine"])))
    if failed := list_failures(document):
        parts.append("## What failed\n\n" + "\n".join(f"- {line}" for line in failed) + "\n")
    parts.append(spread(rows))
    return "\n".join(parts)


__all__ = ["ROWS", "list_failures", "render_page"]
