"""What ``report`` costs the training thread: in a loop that does nothing else, and once a millisecond."""

from __future__ import annotations

import time
from typing import Any

from bench.inside import inside
from bench.measures import ALL
from bench.notes import gather, note
from bench.systems.base import System

NAME = "report_cost"
TITLE = "`report()` in the training thread"
SYSTEMS = QUICK_SYSTEMS = ALL
UNITS = {"call_s": "s", "paced_call_s": "s"}
IS_FRESH = False
REPEAT = 2

#: Calls per block, blocks, calls with a pause before. A system whose call blocks gets few, and no pauses: they would
#: only hide a part of the blocking.
_SIZES = {"raysgd": (100, 200, 1000), "ray_train": (1, 4, 0), "ray_train_tuned": (1, 30, 0)}


def params(system: str, quick: bool) -> dict[str, Any]:
    block, blocks, paced = _SIZES[system]
    if quick:
        blocks, paced = max(2, blocks // 10), paced // 10
    return {"block": block, "blocks": blocks, "paced": paced}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    system.run(train, params)
    costs = gather(system.folder, "costs")
    return {"call_s": [c for cost in costs for c in cost[0]], "paced_call_s": [c for cost in costs for c in cost[1]]}


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = inside(config).report
    for i in range(2):  # the first ones fill queues that are full from then on
        report({"i": i, "loss": 0.5})
    dist.barrier()
    blocks = []
    for _ in range(config["blocks"]):
        start = time.perf_counter()
        for i in range(config["block"]):
            report({"i": i, "loss": 0.5})
        blocks.append((time.perf_counter() - start) / config["block"])
    time.sleep(0.2)
    paced = []
    for i in range(config["paced"]):
        time.sleep(0.001)
        start = time.perf_counter()
        report({"i": i, "loss": 0.5})
        paced.append(time.perf_counter() - start)
    note(config, "costs", dist.get_rank(), [blocks, paced])
