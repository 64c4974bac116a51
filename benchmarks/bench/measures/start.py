"""How long until train_func runs: the first time, and again with the same Trainer.

The clock starts at the call (``run``, ``fit``, the launcher's command) and stops at the first line of train_func on the
last of the two ranks, with the gloo group formed. Ray is up before, and idle.
"""

from __future__ import annotations

import time
from typing import Any

from bench.notes import gather, note
from bench.systems.base import System

NAME = "start"
TITLE = "Start"
SYSTEMS = ("ray_train", "ray_train_tuned", "torchrun", "bare", "raysgd")
QUICK_SYSTEMS = ("ray_train", "torchrun", "bare", "raysgd")
UNITS = {"cold_s": "s", "warm_s": "s", "warm_returned_s": "s"}
IS_FRESH = True
REPEAT = 4

#: Runs after the first one. The others start from nothing each time, which their cold starts tell already.
_WARM_RUNS = {"raysgd": 6, "ray_train": 1, "ray_train_tuned": 1}


def params(system: str, quick: bool) -> dict[str, Any]:
    return {"warm_runs": _WARM_RUNS.get(system, 0)}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    cold, _ = _start(system)
    warm = [_start(system) for _ in range(params["warm_runs"])]
    series = {"cold_s": [cold]}
    if warm:
        series["warm_s"] = [entered for entered, _ in warm]
        series["warm_returned_s"] = [returned for _, returned in warm]
    return series


def _start(system: System) -> tuple[float, float]:
    system.run(train, {})
    returned = time.time()
    return max(gather(system.folder, "entered")) - system.called, returned - system.called


def train(config: dict[str, Any]) -> None:
    entered = time.time()
    import torch.distributed as dist

    note(config, "entered", dist.get_rank(), entered)
