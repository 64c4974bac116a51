"""How many functions of raysgd one report executes, on its way from train_func to the driver's loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import raysgd
from support.runs import PATIENCE_S

NUM_REPORTS = 30
#: Records the functions of raysgd that each process enters, and when, if the driver has named a folder.
PROFILER = """
import os, sys, threading, time

FOLDER, CALLS = os.environ.get("FUNCTIONS_FOLDER", ""), []

def profile(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(os.environ["FUNCTIONS_PACKAGE"]) and "<" not in code.co_name:
        CALLS.append((time.monotonic(), code.co_filename, code.co_firstlineno, code.co_name))

def write():
    while not os.path.exists(os.path.join(FOLDER, "over")):
        time.sleep(0.1)
    if CALLS:  # no process of Ray's own
        part = os.path.join(FOLDER, f"part_{os.getpid()}")
        with open(part, "w") as file:
            file.writelines(f"{at}|{path}|{line}|{name}\\n" for at, path, line, name in list(CALLS))
        os.replace(part, os.path.join(FOLDER, f"calls_{os.getpid()}"))

if FOLDER:
    threading.setprofile(profile)
    sys.setprofile(profile)
    threading.Thread(target=write, daemon=True).start()
"""
DRIVER = """
import os, sys, time
import ray, raysgd

def train_func():
    import sitecustomize
    from raysgd.session.event_queue import EventQueue
    drain = EventQueue.drain

    def drain_profiled(self, timeout_s):  # Ray has started this thread
        sys.setprofile(sitecustomize.profile)
        return drain(self, timeout_s)

    EventQueue.drain = drain_profiled
    time.sleep(1)
    for _ in range(NUM_REPORTS):
        raysgd.report(loss=1.0, reported_at=time.monotonic())
        time.sleep(0.1)

ray.init(address="local", num_cpus=2, include_dashboard=False)
with raysgd.Trainer(1, backend="none", run_config=raysgd.RunConfig(storage_path=sys.argv[1])) as trainer:
    for result in trainer.run_generator(train_func):
        print("TIMES", result["reported_at"], time.monotonic())
    folder = os.environ["FUNCTIONS_FOLDER"]
    open(os.path.join(folder, "over"), "w").close()
    begun = time.monotonic()
    while time.monotonic() < begun + 60 and len([name for name in os.listdir(folder) if name.startswith("calls_")]) < 3:
        time.sleep(0.1)  # the driver's, the TrainerActor's and the worker's
""".replace("NUM_REPORTS", str(NUM_REPORTS))


def test_report_executes_few_functions(tmp_path: Path) -> None:
    """The display of a terminal and the reading of results included; comprehensions are not counted."""
    site, calls = tmp_path / "site", tmp_path / "calls"
    for folder in (site, calls):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(PROFILER)
    (tmp_path / "driver.py").write_text(DRIVER)
    package = Path(raysgd.__file__).parent
    path = os.pathsep.join([str(site), str(package.parent)])
    given = {"PYTHONPATH": path, "FUNCTIONS_FOLDER": str(calls), "FUNCTIONS_PACKAGE": str(package)}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "runs")]
    ran = subprocess.run(
        command, env=os.environ | given, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    times = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("TIMES")]
    assert len(times) == NUM_REPORTS, ran.stderr
    reports: dict[str, set[int]] = defaultdict(set)
    for file in calls.glob("calls_*"):
        for line in file.read_text().splitlines():
            at, *function = line.split("|")
            for number, (begin, end) in enumerate(times):
                if float(begin) <= float(at) <= float(end):
                    reports["|".join(function).removeprefix(f"{package}/")].add(number)
    # Functions that run for another reason, such as a heartbeat, are in few of them.
    always = sorted(function for function, numbers in reports.items() if len(numbers) >= 0.7 * NUM_REPORTS)
    assert any("event_queue.py" in each for each in always) and any("journal.py" in each for each in always)
    assert len(always) <= 60, "\n".join(always)
