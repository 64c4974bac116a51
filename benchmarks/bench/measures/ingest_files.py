"""A million rows of 64 float32 and an int64 from 16 Parquet files, in batches of 1,024, two workers.

Plain pyarrow is one process with two threads: it reads each file and cuts it into slices of 1,024 rows, no more. raysgd reads
files that fit into its workers' memory once for all epochs of a run; what counts here are first epochs, each of a run of its
own in workers that are up, and later ones are told beside them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.feeding import BATCH, measure_rates, quiet_ray_data, rates_of_epochs, write_rows
from bench.systems.base import System

NAME = "ingest_files"
TITLE = "From Parquet files"
SYSTEMS = ("ray_train", "pyarrow", "raysgd")
QUICK_SYSTEMS = ("pyarrow", "raysgd")
UNITS = {"rows_per_s": "/s", "held_rows_per_s": "/s"}
IS_FRESH = True
REPEAT = 3


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 4}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    if system.name == "pyarrow":
        return {"rows_per_s": [_read_plainly(folder, params["rows"]) for _ in range(params["epochs"])][1:]}
    if system.name == "raysgd":
        once = params | {"epochs": 1}
        first = [rates_of_epochs(system, once, folder)[0] for _ in range(params["epochs"])]
        return {"rows_per_s": first[1:], "held_rows_per_s": rates_of_epochs(system, params, folder)[1:]}
    import ray.data

    quiet_ray_data()
    return measure_rates(system, params, ray.data.read_parquet(str(folder)))


def _read_plainly(folder: Path, num_rows: int) -> float:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)
    start, rows = time.perf_counter(), 0
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path)
        for first in range(0, table.num_rows, BATCH):
            rows += table.slice(first, BATCH).num_rows
    assert rows == num_rows
    return rows / (time.perf_counter() - start)
