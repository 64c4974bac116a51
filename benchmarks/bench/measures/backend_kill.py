"""A rank other than 0 is killed with SIGKILL in a loop of all-reduces: how long until the next group has done a step.

Three ranks and a spare process. torchrun, which is to start all of them anew, is what the launchers here have that compares.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.blows import Training
from bench.steps import ENOUGH, open_marks
from bench.systems import FRAMEWORKS, WITH_BACKEND
from bench.systems.fragile import FragileSystem

NAME = "backend_kill"
TITLE = "Rank killed to next step"
SYSTEMS = QUICK_SYSTEMS = ("torchrun", *WITH_BACKEND.values())
UNITS = {"seconds": "s"}
IS_FRESH = True
REPEAT = 1
TIMEOUT_S = 300.0

#: What all ranks have of rank 0's clock goes by all-reduces of float32, whose whole numbers end at 2**24.
_BASE = 2**20
_NUM_FLOATS = 2**16


def params(system: str, quick: bool) -> dict[str, Any]:
    given = {"framework": FRAMEWORKS[system], "size": 3, "num_workers": 3, "num_cpus": 6, "limit_s": 90.0}
    kept = {"max_restarts": 100} if system == "torchrun" else {"spares": 1}
    # With more than three kills in a run TensorFlow's processes would be replaced by new ones.
    return {**given, **kept, "runs": 1 if quick else 2, "blows": 1 if quick else 3}


def run(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    system.start(params)
    took: list[float] = []
    for _ in range(params["runs"]):
        training = Training(system, limit_s=params["limit_s"], train=train, config={"framework": params["framework"]})
        with system.counting_failures(), training:
            for _ in range(params["blows"]):
                group = training.wait_for_whole(params["size"])
                struck = training.strike(group, first_rank=1)
                took.append(training.wait_after(group).first_step - struck)
        system.reset()
    return {"seconds": took}


def train(config: dict[str, Any]) -> None:
    """All-reduces until the file `ENOUGH` is there; `bench.steps` says what it leaves."""
    import numpy as np

    from bench.collectives import make_collective

    collective, folder = make_collective(config["framework"]), Path(config["steps"])
    rank = collective.rank

    def of_rank_0(*values: float) -> list[int]:
        array = np.zeros(_NUM_FLOATS, np.float32)
        if rank == 0:
            array[: len(values)] = values
        return [int(value) for value in collective.get(collective.add_up(collective.put(array)))[: len(values)]]

    high, low = of_rank_0(*divmod(int(100 * time.time()), _BASE))
    with open_marks(folder, high * _BASE + low, collective.size, rank) as marks:
        is_enough = 0
        while not is_enough:
            (is_enough,) = of_rank_0((folder / ENOUGH).exists())
            marks.write(f"{time.time()!r}\n")
            time.sleep(config["step_s"])
