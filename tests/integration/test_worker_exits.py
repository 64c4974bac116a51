"""Workers exit by themselves: Ray reports no unexpected death when they are replaced, or a run or its Trainer ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.project import ROOT

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import ray
import raysgd
from raysgd.errors import RunCancelledError


def import_module(folder):
    sys.path.insert(0, folder)
    import users_module

    return os.getpid()


def train_func(config):
    raysgd.report(x=1)
    if config["end"] == "raise":
        raise ValueError("train_func raised")
    if config["end"] == "block":  # until the process is killed
        time.sleep(600)


def run(end):
    failure = raysgd.FailureConfig(abort_grace_s=0.2)
    storage = raysgd.RunConfig(storage_path="runs")
    with raysgd.Trainer(num_workers=2, backend="none", run_config=storage, failure_config=failure) as trainer:
        stream = trainer.run_generator(train_func, {"end": end})
        try:
            next(stream)  # raises immediately if a rank raised before the other reported
            if end == "block":
                stream.cancel()
            stream.get_returns()
        except (ValueError, RunCancelledError) as error:
            print(f"caught {type(error).__name__}")


def replace_workers():
    module = Path("users_module.py")
    module.write_text("VALUE = 1")
    with raysgd.Trainer(2, "none", run_config=raysgd.RunConfig(storage_path="runs")) as trainer:
        first = trainer.run(lambda config: import_module(config["folder"]), {"folder": os.getcwd()})
        module.write_text("VALUE = 'edited'")
        second = trainer.run(lambda config: import_module(config["folder"]), {"folder": os.getcwd()})
    print("replaced" if first != second else "kept")


ray.init(address="local", num_cpus=2, include_dashboard=False)
for end in ("return", "raise", "block"):
    run(end)
replace_workers()
time.sleep(1.0)  # Ray forwards its messages every half second
"""


def test_ray_reports_no_unexpected_death_of_a_worker(tmp_path: Path) -> None:
    """This holds if train_func returned, raised, or blocked in a cancelled run, and for workers that an edit replaced."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "caught ValueError" in done.stdout and "caught RunCancelledError" in done.stdout
    assert "replaced\n" in done.stdout
    assert "unexpected system error" not in done.stderr + done.stdout, done.stderr
