"""How long until a group has done its first all-reduce, of one number: cold, and again with the same Trainer.

The clock starts at the call (``run``, the launcher's command, the making of the executor, the first of plain processes) and
stops when the last of the two ranks has the sum. Ray is up before, and idle.
"""

from __future__ import annotations

import time
from typing import Any

from bench.notes import gather, note
from bench.systems import FRAMEWORKS, WITH_BACKEND
from bench.systems.base import System

NAME = "backend_start"
TITLE = "Start to first all-reduce"
SYSTEMS = QUICK_SYSTEMS = tuple(FRAMEWORKS)
UNITS = {"cold_s": "s", "warm_s": "s"}
IS_FRESH = True
REPEAT = 3

#: Runs after the first one; with more than three TensorFlow's processes would be replaced by new ones.
_WARM_RUNS = 3


def params(system: str, quick: bool) -> dict[str, Any]:
    is_ours = system in WITH_BACKEND.values()
    return {"framework": FRAMEWORKS[system], "warm_runs": (1 if quick else _WARM_RUNS) if is_ours else 0}


def run(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    cold = _start(system, params)
    return {"cold_s": [cold], "warm_s": [_start(system, params) for _ in range(params["warm_runs"])]}


def _start(system: System, params: dict[str, Any]) -> float:
    system.run(train, params)
    return float(max(gather(system.folder, "added")) - system.called)


def train(config: dict[str, Any]) -> None:
    import numpy as np

    from bench.collectives import make_collective

    collective = make_collective(config["framework"])
    total = collective.get(collective.add_up(collective.put(np.ones(1, np.float32))))
    added = time.time()
    assert total == [collective.size]
    note(config, "added", collective.rank, added)
