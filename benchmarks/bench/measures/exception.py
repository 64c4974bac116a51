"""From an exception in train_func on rank 1 to the same exception raised in the driver."""

from __future__ import annotations

import random
import time
from typing import Any

from bench.measures import ALL
from bench.notes import note
from bench.systems.base import System

NAME = "exception"
TITLE = "Exception in train_func to raised in the driver"
SYSTEMS = QUICK_SYSTEMS = ALL
UNITS = {"seconds": "s"}
IS_FRESH = False
REPEAT = 2

_RUNS = {"raysgd": (5, 2), "ray_train": (2, 1), "ray_train_tuned": (2, 1)}


def params(system: str, quick: bool) -> dict[str, Any]:
    full, small = _RUNS[system]
    return {"runs": small if quick else full}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    return {"seconds": [_time_to_driver(system) for _ in range(params["runs"])]}


def _time_to_driver(system: System) -> float:
    try:
        # At no particular moment of anybody's polling.
        system.run(train, {"after_s": random.uniform(0.5, 2.5)})
    except Exception as error:
        caught = time.time()
        if "a mistake of the user's" not in str(error):
            raise
    else:
        raise RuntimeError("the exception did not arrive")
    path = system.folder / "raised-1.json"
    raised = float(path.read_text(encoding="utf-8"))
    path.unlink()
    return caught - raised


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    time.sleep(config["after_s"])
    if rank == 1:
        note(config, "raised", rank, time.time())
        raise ValueError("a mistake of the user's")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)
