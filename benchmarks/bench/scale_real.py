"""Real workers without a CPU, streaming to a real TrainerActor: ``python -m bench.scale_real WORKERS SECONDS OUT FOLDER``.

All of it shares the cores of one machine, so the latency holds what the workers themselves cost; the TrainerActor's CPU
time is its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import raysgd
from bench.results import quantile
from bench.systems.base import RaySystem

HZ = 10
#: Reports before the measured ones, while workers still come up one after the other.
_WARM_UP_S = 3.0
_START_TIMEOUT_S = 400.0


def train(config: dict[str, Any]) -> None:
    raysgd.barrier()
    begin = time.monotonic()
    for i in range(config["count"]):
        time.sleep(max(0.0, begin + i / HZ - time.monotonic()))
        raysgd.report({"t": time.time(), "loss": 0.123456789, "accuracy": 0.987654321})


class TrainerActorUse:
    """CPU and memory of the one TrainerActor of this machine that belongs to this process's Ray."""

    def __init__(self) -> None:
        self._process = next(process for process in _descendants() if "TrainerActor" in " ".join(process.cmdline()))

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def memory_mib(self) -> float:
        return float(self._process.memory_info().rss / 2**20)


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
            use = TrainerActorUse()
            cpu_s, begun = use.cpu_s(), now
        elif num_rounds > _WARM_UP_S * HZ:
            latencies.append(now - max(worker["t"] for worker in result.workers))
    took, cpu_s = now - begun, use.cpu_s() - cpu_s
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
        "memory_mib": use.memory_mib(),
        "latency_p50_s": quantile(latencies, 0.5),
        "latency_p99_s": quantile(latencies, 0.99),
    }


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def main(num_workers: str, seconds: str, out: str, folder: str) -> None:
    found = measure(int(num_workers), float(seconds), Path(folder))
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
