"""A worker is killed with SIGKILL: how long until the group has finished its next step.

Two ranks. raysgd with a spare process, without one, and as an elastic group that goes on with the one that is left; Ray
Train, which starts the whole group anew; and the bare mechanism, a new process with torch and a new group.
"""

from __future__ import annotations

from typing import Any

from bench.blows import strike_often
from bench.systems.fragile import FragileSystem

NAME = "kill"
TITLE = "Worker killed to next step"
SYSTEMS = ("ray_train", "ray_train_tuned", "bare", "raysgd_spare", "raysgd_replace", "raysgd_elastic")
QUICK_SYSTEMS = ("bare", "raysgd_spare", "raysgd_replace", "raysgd_elastic")
UNITS = {"seconds": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 300.0

#: Runs, and kills in each: an elastic group that has just lost a worker waits before it grows back, in one run.
_BLOWS = {"ray_train": (1, 2), "ray_train_tuned": (1, 2), "raysgd_elastic": (5, 1), "raysgd_spare": (1, 8)}


def params(system: str, quick: bool) -> dict[str, Any]:
    runs, blows = _BLOWS.get(system, (1, 6))
    given = {"num_cpus": 4, "size": 2, "num_workers": 2, "limit_s": 90.0, "runs": runs, "blows": blows}
    if quick:
        given |= {"runs": min(runs, 2), "blows": min(blows, 2)}
    if system == "raysgd_spare":
        given["spares"] = 1
    if system == "raysgd_elastic":
        given |= {"num_workers": [1, 2], "save_every": 10}  # it grows back out of a checkpoint
    return given


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    return {"seconds": strike_often(system, params)}
