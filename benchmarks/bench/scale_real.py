"""Real workers without a CPU, streaming to a real TrainerActor: ``python -m bench.scale_real WORKERS SECONDS OUT FOLDER``.

All processes share the cores of one machine, so the latency includes the cost of the workers; the TrainerActor's CPU time
does not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import raysgd
from bench.results import quantile
from bench.systems.base import RaySystem
from bench.systems.fragile import processes_of

HZ = 10
#: The seconds before the measured reports, in which the last workers are still starting.
_WARM_UP_S = 3.0
_START_TIMEOUT_S = 400.0


def train(config: dict[str, Any]) -> None:
    raysgd.barrier()
    begin = time.monotonic()
    for i in range(config["count"]):
        time.sleep(max(0.0, begin + i / HZ - time.monotonic()))
        raysgd.report({"t": time.time(), "loss": 0.123456789, "accuracy": 0.987654321})


def measure(num_workers: int, seconds: float, folder: Path) -> dict[str, Any]:
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
        return _measure(trainer, num_workers, seconds)
    finally:
        trainer.shutdown()
        system.close()


def _measure(trainer: raysgd.Trainer, num_workers: int, seconds: float) -> dict[str, Any]:
    count = round((_WARM_UP_S + seconds) * HZ)
    stream = trainer.run_generator(train, {"count": count}, callbacks=[raysgd.callbacks.ProgressCallback(mode="off")])
    latencies: list[float] = []
    num_rounds = 0
    for result in stream:
        num_rounds += 1
        now = time.time()
        if len(result.workers) != num_workers:
            raise RuntimeError(f"round {num_rounds} has {len(result.workers)} of {num_workers} reports")
        if num_rounds == _WARM_UP_S * HZ:
            controller = processes_of("TrainerActor")[0]
            cpu_s, begun = sum(controller.cpu_times()[:2]), now
        elif num_rounds > _WARM_UP_S * HZ:
            latencies.append(now - max(worker["t"] for worker in result.workers))
    took, cpu_s = now - begun, sum(controller.cpu_times()[:2]) - cpu_s
    if num_rounds != count:
        raise RuntimeError(f"{num_rounds} of {count} rounds arrived")
    num_reports = len(latencies) * num_workers
    return {
        "workers": num_workers,
        "seconds": took,
        "reports_per_s": num_reports / took,
        "cpu_s": cpu_s,
        "cpu_share": cpu_s / took,
        "cpu_per_report_s": cpu_s / num_reports,
        "memory_mib": controller.memory_info().rss / 2**20,
        "latency_p50_s": quantile(latencies, 0.5),
        "latency_p99_s": quantile(latencies, 0.99),
    }


def main(num_workers: str, seconds: str, out: str, folder: str) -> None:
    found = measure(int(num_workers), float(seconds), Path(folder))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
