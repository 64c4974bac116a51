"""JPEG images of 224 x 224 as bytes in Parquet files, decoded with PIL in the workers, in batches of 64, two workers."""

from __future__ import annotations

from typing import Any

from bench.feeding import measure_rates, quiet_ray_data, write_images
from bench.systems.base import System

NAME = "ingest_images"
TITLE = "Images decoded in the worker"
SYSTEMS = ("ray_train", "raysgd")
QUICK_SYSTEMS = ("raysgd",)
UNITS = {"rows_per_s": "/s"}
IS_FRESH = True
REPEAT = 3


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 256 if quick else 4_096, "files": 8, "epochs": 2 if quick else 4, "batch": 64, "decodes": True}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    folder = write_images(system.folder / "images", params["rows"], params["files"])
    if system.name == "raysgd":
        return measure_rates(system, params, folder)
    import ray.data

    quiet_ray_data()
    return measure_rates(system, params, ray.data.read_parquet(str(folder)))
