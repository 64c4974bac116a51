"""Many Trainers in one cluster at once: ``python -m bench.scale_trainers TRAINERS WORKERS OUT FOLDER``.

Each runs its own short training of workers without a CPU, from its own thread of one driver, with reports and saves. Each must
get exactly its own results and checkpoints, and nothing may be left afterwards.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import raysgd
from bench.systems.base import RaySystem
from bench.systems.fragile import processes_of

REPORTS = 20
SAVE_EVERY = 5
_PAUSE_S = 0.1
_START_TIMEOUT_S = 400.0
#: Seconds for Ray to end processes and to remove placement groups.
_LEAVE_S = 30.0


def train(config: dict[str, Any]) -> int:
    rank = raysgd.world_rank()
    for step in range(REPORTS):
        time.sleep(_PAUSE_S)
        raysgd.report(trainer=config["trainer"], rank=rank, step=step)
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            raysgd.save_checkpoint({"trainer": config["trainer"], "rank": rank, "step": step}, all_ranks=True)
    return int(config["trainer"])


def run_one(number: int, num_workers: int, folder: Path) -> dict[str, float]:
    """Run one Trainer; return its seconds and the CPU seconds of its TrainerActor."""
    begun = time.monotonic()
    with raysgd.Trainer(
        num_workers,
        backend="none",
        cpus_per_worker=0,
        run_config=raysgd.RunConfig(storage_path=folder / f"trainer-{number}"),
        failure_config=raysgd.FailureConfig(start_timeout_s=_START_TIMEOUT_S),
    ) as trainer:
        quiet = [raysgd.callbacks.ProgressCallback(mode="off")]
        stream = trainer.run_generator(train, {"trainer": number}, callbacks=quiet)
        found = [[(each["trainer"], each["rank"], each["step"]) for each in result.workers] for result in stream]
        expected = [[(number, rank, step) for rank in range(num_workers)] for step in range(REPORTS)]
        if found != expected:
            raise RuntimeError(f"Trainer {number} got other results than its own: {found}")
        if (returned := stream.get_returns()) != number:
            raise RuntimeError(f"Trainer {number} got the return value of Trainer {returned}")
        last = trainer.get_last_checkpoint()
        if last is None or last.load() != {"trainer": number, "rank": 0, "step": REPORTS - 1}:
            raise RuntimeError(f"the last checkpoint of Trainer {number} is {last}")
        failures = raysgd.load_run(stream.run_info.run_dir).events
        if num := int((failures.kind == "failure").sum()):
            raise RuntimeError(f"Trainer {number} had {num} failures")
    return {"seconds": time.monotonic() - begun}


def find_leftovers() -> dict[str, Any]:
    """Return what is left in the cluster and in this process: actors, placement groups, processes and threads."""
    import ray
    from ray.util.placement_group import placement_group_table

    actors = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
    ]  # all actors of raysgd have names
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    processes = [process for title in ("WorkerActor", "TrainerActor", "NodeAgent") for process in processes_of(title)]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("raysgd")]
    pids = [each.pid for each in processes]
    found = {"actors": actors, "placement_groups": groups, "processes": pids, "threads": threads}
    return {what: left for what, left in found.items() if left}


def measure(num_trainers: int, num_workers: int, folder: Path) -> dict[str, Any]:
    system = RaySystem("raysgd", folder)
    system.open()
    try:
        return _measure(num_trainers, num_workers, folder)
    finally:
        system.close()


def _measure(num_trainers: int, num_workers: int, folder: Path) -> dict[str, Any]:
    run_one(-1, 1, folder)  # the driver keeps some threads of Ray for later Trainers
    begun = time.monotonic()
    with ThreadPoolExecutor(num_trainers) as pool:
        runs = list(pool.map(lambda number: run_one(number, num_workers, folder), range(num_trainers)))
    took = time.monotonic() - begun
    deadline = time.monotonic() + _LEAVE_S
    while (left := find_leftovers()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if left:
        raise RuntimeError(f"after {_LEAVE_S:g} s there are still {left}")
    return {
        "trainers": num_trainers,
        "workers": num_workers,
        "seconds": took,
        "longest_s": max(run["seconds"] for run in runs),
        "reports": num_trainers * num_workers * REPORTS,
    }


def main(num_trainers: str, num_workers: str, out: str, folder: str) -> None:
    found = measure(int(num_trainers), round(float(num_workers)), Path(folder))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
