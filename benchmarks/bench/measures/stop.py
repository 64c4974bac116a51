"""A worker is stopped with SIGSTOP, which closes no connection: how long until the group has finished its next step.

raysgd with its default, ``heartbeat_timeout_s=10``. Ray Train with ``RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=10``; its
default, 600 s, is not measured.
"""

from __future__ import annotations

import signal
from typing import Any

from bench.blows import strike_often
from bench.systems.fragile import FragileSystem

NAME = "stop"
TITLE = "Worker stopped to next step"
SYSTEMS = ("ray_train", "raysgd_spare", "raysgd_elastic")
QUICK_SYSTEMS = ("raysgd_spare",)
UNITS = {"seconds": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 300.0
ENVIRONMENT = {"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10"}

_BLOWS = {"raysgd_spare": (1, 3), "raysgd_elastic": (2, 1)}


def params(system: str, quick: bool) -> dict[str, Any]:
    runs, blows = (1, 1) if quick else _BLOWS.get(system, (1, 1))
    given = {"num_cpus": 4, "size": 2, "num_workers": 2, "limit_s": 150.0, "runs": runs, "blows": blows}
    if system == "raysgd_spare":
        given["spares"] = 1
    if system == "raysgd_elastic":
        given |= {"num_workers": [1, 2], "save_every": 10}  # it grows back out of a checkpoint
    return given


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    return {"seconds": strike_often(system, params, signal.SIGSTOP)}
