"""What a system's own processes hold and use: their memory, the CPU time of a report, and a script from its first line on.

Driver side, except the train functions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from bench.measures.base import ALL, Measure
from bench.systems.base import System
from bench.systems.fragile import FragileSystem, processes_of
from bench.worker import NUM_WORKERS, gather, note, session_of

_LIMIT_S = 60.0
_GO = "go"


def run_memory(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the unique memory of the processes that a system has in addition to its two workers, while these train.

    Ray's own processes, which were there before, and its idle ones do not count. No callbacks run in raysgd's controller: they
    would have a process of their own.
    """
    before = {process.pid for process in _busy_processes()}
    go = system.folder / _GO
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(system.run, train_until_go, {"go": str(go)})
        deadline = time.monotonic() + _LIMIT_S
        while len(list(system.folder.glob("pid-*.json"))) < NUM_WORKERS and not running.done():
            if time.monotonic() > deadline:
                raise TimeoutError("the workers did not start")
            time.sleep(0.1)
        time.sleep(params["settle_s"])
        members = set(gather(system.folder, "pid"))
        own = [process for process in _busy_processes() if process.pid not in before | members]
        megabytes = [process.memory_full_info().uss / 1e6 for process in own]
        go.touch()
        running.result()
    return {"mb": [sum(megabytes)], "count": [float(len(megabytes))]}


def _busy_processes() -> list[psutil.Process]:
    """Return the processes of Ray that are not idle: a system's actors take idle ones."""
    idle = {process.pid for process in processes_of("ray::IDLE")}
    return [process for process in processes_of("ray::") if process.pid not in idle]


def train_until_go(config: dict[str, Any]) -> None:
    import os

    import torch.distributed as dist

    report = session_of(config).report
    for i in range(3):
        report({"i": i})
    note(config, "pid", dist.get_rank(), os.getpid())
    deadline = time.monotonic() + _LIMIT_S
    while not Path(config["go"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


MEMORY = Measure(
    name="memory",
    title="Unique memory of a system's own processes, with two workers",
    systems=("ray_train", "bare", "raysgd"),
    quick_systems=("bare", "raysgd"),
    units={"mb": "MB", "count": ""},
    repeat=3,
    params=lambda system, quick: {"settle_s": 1.0 if quick else 3.0},
    run=run_memory,
)


_HZ = 100


def run_report_cpu(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the CPU time of a report in all processes of the machine: the workers', the system's own and Ray's.

    Periods with and without reports alternate in workers that sleep otherwise. Nothing else may run on the machine.
    """
    system.run(train_report_cpu, params)
    return {"seconds": gather(system.folder, "cpu")[0]}


def train_report_cpu(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    report = session_of(config).report

    def period(reports: bool) -> tuple[float, int]:
        """Return the busy seconds of the machine's cores, and the number of this rank's reports."""
        dist.barrier()
        busy, number, begun = _busy_s(), 0, time.monotonic()
        while (passed := time.monotonic() - begun) < config["seconds"]:
            if reports and number <= passed * _HZ:
                report({"i": number, "loss": 0.5})
                number += 1
            time.sleep(1 / _HZ)
        dist.barrier()
        return _busy_s() - busy, number

    period(True)
    costs = []
    for _ in range(config["pairs"]):
        (silent, _), (reporting, number) = period(False), period(True)
        costs.append((reporting - silent) / (number * dist.get_world_size()))
    note(config, "cpu", dist.get_rank(), costs)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


REPORT_CPU = Measure(
    name="report_cpu",
    title="CPU time of a report in all processes",
    systems=ALL,
    quick_systems=("raysgd",),
    units={"seconds": "s"},
    is_fresh=False,
    repeat=2,
    params=lambda system, quick: {"seconds": 2.0 if quick else 10.0, "pairs": 1 if quick else 3},
    run=run_report_cpu,
)


def run_script(system: FragileSystem, params: dict[str, Any]) -> dict[str, list[float]]:
    """Time ``python script.py`` on a machine where no Ray runs: to its imports, to Ray, and to the first line of train_func."""
    series: dict[str, list[float]] = {"imports_s": [], "ray_s": [], "train_func_s": [], "total_s": []}
    for _ in range(params["runs"]):
        began = time.time()
        command = [sys.executable, "-m", "bench.script_alone", system.name, str(system.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"the script ended with status {done.returncode}: {done.stderr[-500:]}")
        marks = json.loads((system.folder / "marks.json").read_text(encoding="utf-8"))
        entered = max(gather(system.folder, "entered"))
        series["imports_s"].append(marks["imported"] - began)
        series["ray_s"].append(marks["ray_s"])
        series["total_s"].append(entered - began)
        series["train_func_s"].append(entered - marks["imported"] - marks["ray_s"])
    return series


SCRIPT = Measure(
    name="script",
    title="A script to the first line of train_func, without a Ray before",
    systems=("ray_train", "bare", "raysgd"),
    quick_systems=("bare", "raysgd"),
    units={"imports_s": "s", "ray_s": "s", "train_func_s": "s", "total_s": "s"},
    repeat=2,
    params=lambda system, quick: {"runs": 1 if quick else 3},
    run=run_script,
)
