"""How many bytes a second two ranks add up, by the size of the array: bytes of one array, by the time of an all-reduce.

Each block is of one size, and so many all-reduces of it; sizes take turns, and in each of them the systems with the same
framework, which are all up (`bench.baton`): what else the machine does meets all of them.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.baton import VARIABLE, Turns
from bench.notes import gather, note
from bench.systems import FRAMEWORKS, framework_of
from bench.systems.base import System

#: Bytes, and all-reduces in a block.
SIZES = {
    "4 KiB": (2**12, 200),
    "64 KiB": (2**16, 150),
    "1 MiB": (2**20, 50),
    "16 MiB": (2**24, 6),
    "64 MiB": (2**26, 2),
}

NAME = "backend_allreduce"
TITLE = "All-reduce"
SYSTEMS = QUICK_SYSTEMS = ("bare", *(system for system in FRAMEWORKS if system != "horovodrun"))
UNITS = dict.fromkeys(SIZES, "bytes/s")
IS_FRESH = True
REPEAT = 8
#: Ray's workers would yield to whatever else the machine does, which other processes do not.
ENVIRONMENT = {"RAY_worker_niceness": "0"}


def at_once(system: str) -> str:
    return framework_of(system)


def params(system: str, quick: bool) -> dict[str, Any]:
    return {
        "framework": framework_of(system),
        "blocks": 1 if quick else 12,
        "share": 0.1 if quick else 1.0,
        "settle_s": 0.0 if quick else 3.0,
    }


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    system.run(train, {**params, "baton": os.environ.get(VARIABLE)})
    by_rank = gather(system.folder, "blocks")
    return {
        name: [SIZES[name][0] / max(took) for took in zip(*(blocks[name] for blocks in by_rank), strict=True)]
        for name in SIZES
    }


def train(config: dict[str, Any]) -> None:
    import numpy as np

    from bench.collectives import make_collective

    collective = make_collective(config["framework"])
    one = collective.put(np.full(1, 0.0, np.float32))
    arrays = {name: collective.put(np.full(size // 4, 0.0, np.float32)) for name, (size, _) in SIZES.items()}

    def block(name: str) -> float:
        count = max(1, round(SIZES[name][1] * config["share"]))
        collective.add_up(one)
        start = time.perf_counter()
        for _ in range(count):
            collective.add_up(arrays[name])
        return (time.perf_counter() - start) / count

    time.sleep(config["settle_s"])  # Ray starts processes in the place of those that were taken
    for name in SIZES:
        block(name)
    with Turns(config["baton"] if collective.rank == 0 else None) as turns:

        def in_turn(name: str) -> float:
            with turns.one():  # of rank 0: the others wait for it in the first all-reduce
                return block(name)

        rounds = [{name: in_turn(name) for name in SIZES} for _ in range(config["blocks"])]
    note(config, "blocks", collective.rank, {name: [each[name] for each in rounds] for name in SIZES})
