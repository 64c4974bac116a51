"""Reports a second: both workers report as fast as they can, and every round must arrive, in order and complete."""

from __future__ import annotations

from typing import Any

from bench.inside import inside
from bench.measures import ALL
from bench.notes import NUM_WORKERS
from bench.systems.base import System

NAME = "rate"
TITLE = "Reports a second, 2 workers, none lost"
SYSTEMS = QUICK_SYSTEMS = ALL
UNITS = {"reports_per_s": "1/s"}
IS_FRESH = False
REPEAT = 2

#: Reports of each worker; raysgd's are more than its queue in the worker holds, so that backpressure takes part.
_COUNTS = {"raysgd": (300_000, 20_000), "ray_train": (4, 3), "ray_train_tuned": (60, 10)}


def params(system: str, quick: bool) -> dict[str, Any]:
    full, small = _COUNTS[system]
    return {"count": small if quick else full}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    check = Check()
    system.run(train, params, on_report=check)
    if check.num_rounds != params["count"]:
        raise RuntimeError(f"{check.num_rounds} of {params['count']} rounds arrived")
    # The time is that of the rounds after the first, whose arrival starts the clock.
    return {"reports_per_s": [NUM_WORKERS * (check.num_rounds - 1) / (check.last - check.first)]}


class Check:
    """Takes each round as it arrives."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.first = self.last = 0.0

    def __call__(self, arrived: float, workers: list[dict[str, Any]]) -> None:
        if [worker["i"] for worker in workers] != [self.num_rounds] * NUM_WORKERS:
            raise RuntimeError(f"round {self.num_rounds} arrived as {workers}")
        if not self.num_rounds:
            self.first = arrived
        self.num_rounds += 1
        self.last = arrived


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = inside(config).report
    dist.barrier()
    for i in range(config["count"]):
        report({"i": i, "loss": 0.5})
