"""Real workers without a CPU: ``python -m bench.scale_real WORKERS SECONDS OUT FOLDER [HZ SAVE_EVERY_S]``.

They stream to a real TrainerActor. All processes share the cores of one machine, so the delays include the cost of the workers;
the TrainerActor's CPU time does not. At the end one worker is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import raysgd
from bench.results import quantile
from bench.systems.base import RaySystem
from bench.systems.fragile import processes_of

#: The seconds before the measured reports, in which the last workers are still starting.
_WARM_UP_S = 3.0
_START_TIMEOUT_S = 400.0
#: The driver kills a worker; the run that is left is cancelled.
_ENDLESS = 1_000_000


def train(config: dict[str, Any]) -> None:
    raysgd.barrier()
    begin, hz, save_every = time.monotonic(), config["hz"], config["save_every"]
    state = {"weights": np.zeros(64)}
    for i in range(_ENDLESS):
        time.sleep(max(0.0, begin + i / hz - time.monotonic()))
        raysgd.report({"t": time.time(), "loss": 0.123456789, "accuracy": 0.987654321, "pid": os.getpid()})
        if save_every and i % save_every == save_every - 1:
            raysgd.save_checkpoint(state, all_ranks=True)


def measure(
    num_workers: int, seconds: float, folder: Path, hz: float = 10.0, save_every_s: float = 0.0
) -> dict[str, Any]:
    system = RaySystem("raysgd", folder)
    system.open()
    trainer = raysgd.Trainer(
        num_workers,
        backend="none",
        cpus_per_worker=0,
        run_config=raysgd.RunConfig(storage_path=folder / "runs"),
        failure_config=raysgd.FailureConfig(start_timeout_s=_START_TIMEOUT_S),
    )
    try:
        return {"hz": hz, "save_every_s": save_every_s, **_measure(trainer, num_workers, seconds, hz, save_every_s)}
    finally:
        trainer.shutdown()
        system.close()


def _measure(
    trainer: raysgd.Trainer, num_workers: int, seconds: float, hz: float, save_every_s: float
) -> dict[str, Any]:
    config = {"hz": hz, "save_every": round(save_every_s * hz)}
    stream = trainer.run_generator(train, config, callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])
    num_warm, num_rounds = max(1, round(_WARM_UP_S * hz)), round((_WARM_UP_S + seconds) * hz)
    latencies: list[float] = []
    for number, result in enumerate(stream, 1):
        now = time.time()
        if result["attempt"] > 1:
            break
        if len(result.workers) != num_workers or result["training_iteration"] != number:
            raise RuntimeError(f"round {number} has {len(result.workers)} of {num_workers} reports")
        if number == num_warm:
            controller = processes_of("TrainerActor")[0]
            cpu_s, begun = cpu_of(controller), now
        elif num_warm < number <= num_rounds:
            latencies.append(now - max(worker["t"] for worker in result.workers))
        if number == num_rounds:
            took, cpu_s, cpu_before_s = now - begun, cpu_of(controller) - cpu_s, cpu_of(controller)
            memory_mib = controller.memory_info().rss / 2**20
            killed_at = time.time()
            os.kill(int(result.workers[-1]["pid"]), signal.SIGKILL)
    resumed_at, resume_s = time.time(), cpu_of(controller) - cpu_before_s
    stream.cancel()
    num_reports = len(latencies) * num_workers
    return {
        "workers": num_workers,
        "seconds": took,
        "reports_per_s": num_reports / took,
        "cpu_s": cpu_s,
        "cpu_share": cpu_s / took,
        "cpu_per_report_s": cpu_s / num_reports,
        "memory_mib": memory_mib,
        "latency_p50_s": quantile(latencies, 0.5),
        "latency_p99_s": quantile(latencies, 0.99),
        "death_to_report_s": resumed_at - killed_at,
        "resume_per_worker_s": resume_s / num_workers,
        **_from_events(stream.run_info.run_dir, killed_at),
    }


def cpu_of(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _from_events(run_dir: str, killed_at: float) -> dict[str, Any]:
    """Return what the run's events say of its checkpoints and of the worker's death."""
    events = raysgd.load_run(run_dir).events
    failure = events[events.kind == "failure"].iloc[0]
    saved = [each["seconds"] for each in events[events.kind == "checkpoint"].data if each["seconds"] is not None]
    commits = {"commits": len(saved), "save_to_commit_s": max(saved)} if saved else {}
    return {"death_to_order_s": float(failure.timestamp) - killed_at, **commits}


def main(num_workers: str, seconds: str, out: str, folder: str, hz: str = "10", save_every_s: str = "0") -> None:
    found = measure(int(num_workers), float(seconds), Path(folder), float(hz), float(save_every_s))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
