"""10,000 Parquet files: the look at them before a run, an epoch planned for 1,000 workers, and the ledger's cost per batch.

No worker is started: what the driver does once, and what each worker does at the beginning of an epoch, is called here,
for one simulated worker after the other. Plain pyarrow counts the rows of the same files.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.feeding import BATCH
from bench.systems.base import System

NAME = "ingest_planning"
TITLE = "Planning"
SYSTEMS = ("pyarrow", "raysgd")
QUICK_SYSTEMS = SYSTEMS
UNITS = {"look_s": "s", "plan_s": "s", "plan_mb": "MB", "batch_s": "s"}
IS_FRESH = True
REPEAT = 3
#: Rows of a file as the plan has it; those on the disk are small.
_ROWS_PLANNED = 65_536


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"files": 100 if quick else 10_000, "workers": 10 if quick else 1_000, "batches": 100 if quick else 5_000}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    folder = _write_files(system.folder / "files", params["files"])
    if system.name == "pyarrow":
        import pyarrow.dataset as ds

        start = time.perf_counter()
        assert ds.dataset(folder).count_rows() == params["files"]
        return {"look_s": [time.perf_counter() - start]}
    from raysgd.data.files import source_of_paths

    start = time.perf_counter()
    source = source_of_paths("rows", folder)
    looked = time.perf_counter() - start
    block_rows = (_ROWS_PLANNED,) * len(source.blocks)
    start = time.perf_counter()
    _plan(block_rows, params["workers"])
    planned = time.perf_counter() - start
    tracemalloc.start()
    source_of_paths("rows", folder)
    _plan(block_rows, params["workers"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "look_s": [looked],
        "plan_s": [planned],
        "plan_mb": [peak / 1e6],
        "batch_s": [_cost_of_batch(block_rows, params["batches"])],
    }


def _write_files(folder: Path, count: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(count):
        pq.write_table(pa.table({"x": [number]}), folder / f"{number:05}.parquet")
    return folder


def _plan(block_rows: tuple[int, ...], workers: int) -> None:
    """What each of so many workers does before its first batch: the order, its blocks in turn, its first rows."""
    from raysgd.data.ledger import Deal, EpochOrder

    for rank in range(workers):
        order = EpochOrder(block_rows, seed=0, epoch=1, shuffle="window", lanes=workers)
        deal = Deal(num_rows=order.num_rows, global_batch=BATCH * workers, rank=rank, world_size=workers)
        order.spans(block_rows, deal.lanes_of(order.lanes))
        next(deal.steps(order, 0))


def _cost_of_batch(block_rows: tuple[int, ...], batches: int) -> float:
    """Seconds for one of two workers to know the rows of its next batch."""
    from raysgd.data.ledger import Deal, EpochOrder

    order = EpochOrder(block_rows, seed=0, epoch=1, shuffle="window", lanes=2)
    deal = Deal(num_rows=order.num_rows, global_batch=2 * BATCH, rank=0, world_size=2)
    steps = deal.steps(order, 0)
    start, done = time.perf_counter(), 0
    while done < batches:
        done += len(next(steps))
    return (time.perf_counter() - start) / done
