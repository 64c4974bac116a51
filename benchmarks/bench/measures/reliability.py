"""One of five ranks is killed, twenty times, at no particular moment: does training always go on, and how soon?

Five processes share two cores, as logical CPUs; there is no spare. A try that does not go on is a failure, and is told.
"""

from __future__ import annotations

from typing import Any

from bench.blows import strike_often
from bench.systems.fragile import FragileSystem

NAME = "reliability"
TITLE = "A worker of five killed, again and again"
SYSTEMS = QUICK_SYSTEMS = ("raysgd_replace",)
UNITS = {"recovered_percent": "%", "seconds": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 500.0


def params(system: str, quick: bool) -> dict[str, Any]:
    # Each run has half of the kills: what a failure ends is one run.
    blows = 1 if quick else 10
    return {"num_cpus": 8, "size": 5, "num_workers": 5, "limit_s": 60.0, "runs": 2, "blows": blows}


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    took: list[float] = []
    tries = params["runs"] * params["blows"]
    while len(took) + len(system.failures) < tries:
        blows = min(params["blows"], tries - len(took) - len(system.failures))
        took += strike_often(system, {**params, "runs": 1, "blows": blows})
    return {"recovered_percent": [100.0 * len(took) / tries], "seconds": took}
