"""A million rows from Parquet files through a transformation of Ray Data, two workers; it is executed while they read."""

from __future__ import annotations

from typing import Any

from bench.feeding import measure_rates, quiet_ray_data, write_rows
from bench.systems.base import System

NAME = "ingest_transformed"
TITLE = "Through Ray Data"
SYSTEMS = ("ray_train", "raysgd")
QUICK_SYSTEMS = ("raysgd",)
UNITS = {"rows_per_s": "/s"}
IS_FRESH = True
REPEAT = 3


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 4}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    import ray.data

    quiet_ray_data()
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    return measure_rates(system, params, ray.data.read_parquet(str(folder)).map_batches(scale, batch_format="pyarrow"))


def scale(table: Any) -> Any:
    """The labels one up."""
    import pyarrow.compute as pc

    place = table.column_names.index("y")
    return table.set_column(place, "y", pc.add(table.column("y"), 1))
