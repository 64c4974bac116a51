"""Training loops with DistributedDataParallel and with logical workers, in the same worker. Runs in workers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

LOOPS = {"ddp": "DDP", "ddp_again": "DDP, again", "logical": "logical workers"}
_COLUMNS = {"label_column": "y", "feature_columns": ["x"]}


def measure(config: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of a step in each round, by model and loop.

    Config: ``rounds``, ``steps`` of a round, ``rows`` of a worker's batch.
    """
    import raysgd
    from bench.measures.runs import make_models

    found = {}
    for name in make_models():
        run_ddp, run_logical = _make_ddp(make_models()[name], config), _make_logical(make_models()[name], config)
        run = {"ddp": run_ddp, "ddp_again": run_ddp, "logical": run_logical}
        taken: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        for number in range(-1, config["rounds"]):
            for loop in random.Random(number).sample(list(LOOPS), len(LOOPS)):
                raysgd.barrier()
                begin = time.perf_counter()
                count = run[loop]()
                if number >= 0:  # the first round warms up
                    taken[loop].append(1000 * (time.perf_counter() - begin) / count)
        found[name] = taken
    return found


def _make_ddp(model: Any, config: dict[str, Any]) -> Callable[[], int]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import raysgd

    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    split = raysgd.get_dataset().get_split(whole=True)

    def run() -> int:
        for count, (x, y) in enumerate(split.to_torch(config["rows"], **_COLUMNS), 1):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if count == config["steps"]:
                break
        return count

    return run


def _make_logical(model: Any, config: dict[str, Any]) -> Callable[[], int]:
    import torch

    import raysgd

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    split = raysgd.get_dataset().get_split()

    def run() -> int:
        batches = split.to_torch(config["rows"], **_COLUMNS)
        for step in raysgd.torch.logical_steps(batches, model):
            optimizer.zero_grad()
            for x, y in step:
                torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return len(batches)

    return run
