"""What the service costs a loop of 10 ms steps that reports every 10th step, all of it on the cores that train.

Blocks of steps with and without reports take turns in the same processes; each pair of blocks gives a percentage.
"""

from __future__ import annotations

import time
from typing import Any

from bench.inside import inside
from bench.measures import ALL
from bench.notes import gather, note
from bench.systems.base import System

NAME = "overhead"
TITLE = "Cost of the service in a 10 ms step that reports every 10th"
SYSTEMS = ALL
QUICK_SYSTEMS = ("ray_train_tuned", "raysgd")
UNITS = {"percent": "%", "step_s": "s"}
IS_FRESH = False
REPEAT = 2

_STEP_S = 0.01
_REPORT_EVERY = 10
#: Steps in a block, pairs of blocks.
_SIZES = {"raysgd": (100, 60), "ray_train": (20, 2), "ray_train_tuned": (50, 6)}


def params(system: str, quick: bool) -> dict[str, Any]:
    steps, pairs = _SIZES[system]
    return {"steps": steps, "pairs": 2 if quick else pairs}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    system.run(train, params)
    blocks = [pair for rank in gather(system.folder, "blocks") for pair in rank]
    return {
        "percent": [100 * (reporting / silent - 1) for silent, reporting in blocks],
        "step_s": [silent / params["steps"] for silent, _ in blocks],
    }


def train(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    from bench.busy import BusyStep

    report, step = inside(config).report, BusyStep(_STEP_S)

    def block(reports: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for i in range(config["steps"]):
            step()
            if reports and i % _REPORT_EVERY == 0:
                report({"i": i, "loss": 0.5})
        took = time.perf_counter() - start
        time.sleep(0.03)  # what is still on its way belongs to this block, not to the next
        return took

    block(True)
    pairs = []
    for number in range(config["pairs"]):
        order = (False, True) if number % 2 == 0 else (True, False)
        took = {reports: block(reports) for reports in order}
        pairs.append((took[False], took[True]))
    note(config, "blocks", dist.get_rank(), pairs)
