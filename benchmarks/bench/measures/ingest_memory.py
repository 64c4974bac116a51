"""A million rows of 64 float32 and an int64 that lie in the object store, in batches of 1,024, two workers."""

from __future__ import annotations

from typing import Any

from bench.feeding import make_table, measure_rates, quiet_ray_data, write_rows
from bench.systems.base import System

NAME = "ingest_memory"
TITLE = "From memory"
SYSTEMS = ("ray_train", "raysgd")
QUICK_SYSTEMS = ("raysgd",)
UNITS = {"rows_per_s": "/s"}
IS_FRESH = True
REPEAT = 3


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 6}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    return measure_rates(system, params, _dataset(system, params))


def _dataset(system: System, params: dict[str, Any]) -> Any:
    if system.name == "raysgd":
        import numpy as np

        return make_table(params["rows"], np.random.default_rng(0))
    import ray.data

    quiet_ray_data()
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    return ray.data.read_parquet(str(folder)).materialize()
