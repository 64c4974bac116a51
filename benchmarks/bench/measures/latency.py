"""From ``report`` in a worker to the driver's loop, at a steady rate.

A round is complete when the last rank has reported, so its time counts.
"""

from __future__ import annotations

import time
from typing import Any

from bench.inside import inside
from bench.measures import ALL
from bench.systems.base import System

NAME = "latency"
TITLE = "`report()` to the driver's loop"
SYSTEMS = QUICK_SYSTEMS = ALL
UNITS = {"at_10hz_s": "s", "at_100hz_s": "s"}
IS_FRESH = False
REPEAT = 2

#: Reports at 10 Hz and at 100 Hz. Ray Train keeps neither rate: its report() blocks.
_COUNTS = {"raysgd": (200, 1000), "ray_train": (4, 0), "ray_train_tuned": (60, 100)}


def params(system: str, quick: bool) -> dict[str, Any]:
    counts = [count // 10 if quick and count > 10 else count for count in _COUNTS[system]]
    return {"rates": [(hz, count) for hz, count in zip((10, 100), counts, strict=True) if count]}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    return {f"at_{hz}hz_s": _latencies(system, hz, count) for hz, count in params["rates"]}


def _latencies(system: System, hz: int, count: int) -> list[float]:
    rounds: list[tuple[float, list[dict[str, Any]]]] = []
    system.run(train, {"hz": hz, "count": count}, on_report=lambda *arrived: rounds.append(arrived))
    if len(rounds) != count:
        raise RuntimeError(f"{len(rounds)} of {count} rounds arrived")
    latencies = [arrived - max(worker["t"] for worker in workers) for arrived, workers in rounds]
    return latencies[1:]  # the first comes while the run is still being set up


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = inside(config).report
    dist.barrier()
    begin = time.monotonic()
    for i in range(config["count"]):
        wait_s = begin + i / config["hz"] - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        report({"i": i, "t": time.time()})
