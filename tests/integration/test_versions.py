"""Workers whose environment has another raysgd than the driver: refused by one sentence, or a warning."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd._version import __version__
from support.pace import slowness
from support.project import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240 * slowness())]


@pytest.fixture
def drive(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs a scenario of `support.version_job`; it returns what the driver printed, by name."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("other_format", "other_python", "other_version", "unusable"):
        shutil.copytree(ROOT / "raysgd", tmp_path / name / "raysgd", ignore=ignored)
    for name in ("other_format", "other_version"):
        _replace(tmp_path / name, __version__, "0.0.9")
    _replace(tmp_path / "other_format", "WorkerTask", "WorkerJob")
    _replace(tmp_path / "other_python", "platform.python_version()", '"3.99.1"')  # no other Python is installed here
    (tmp_path / "unusable/raysgd/workers/process/worker_actor.py").unlink()

    def run(scenario: str) -> dict[str, Any]:
        (empty := tmp_path / "empty").mkdir()  # Ray adds the driver's working directory to the path of workers
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(
            [sys.executable, "-m", "support.version_job", scenario, str(tmp_path)],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=220 * slowness(),
        )
        assert done.returncode == 0, done.stdout + done.stderr[-5000:]
        printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
        return {values.pop("what"): values for values in printed}

    return run


def _replace(folder: Path, old: str, new: str) -> None:
    for path in folder.rglob("*.py"):
        text = path.read_text()
        if old in text:
            path.write_text(text.replace(old, new))


def test_workers_of_another_environment_are_compared_at_the_start(drive: Callable[[str], dict[str, Any]]) -> None:
    printed = drive("start")
    refused = printed["other_format"]
    assert re.fullmatch(
        rf"WorkerError: raysgd 0\.0\.9 of the workers on \S+ \([\d.]+\) cannot work with raysgd {re.escape(__version__)} of the "
        r"driver, because their wire formats differ \(\w{8} and \w{8}\); "
        rf"install raysgd {re.escape(__version__)} there",
        refused["error"],
    ), refused["error"]
    assert refused["num_failures"] == 0, "it is not retried as a death"
    assert re.fullmatch(
        r"WorkerError: Python 3\.99\.1 of the workers on \S+ \([\d.]+\) cannot work with Python (3\.\d+)\.\d+ of the driver; "
        r"install Python \1 there",
        printed["other_python"]["error"],
    ), printed["other_python"]["error"]
    unusable = printed["unusable"]
    assert f"cannot load raysgd {__version__} of the driver (ModuleNotFoundError" in unusable["error"]
    assert f"install raysgd {__version__} there" in unusable["error"]
    assert unusable["num_failures"] == 0
    first, again = printed["other_version"], printed["other_version again"]
    assert "other_version" in first["returned"] and "other_version" in again["returned"]
    (warning,) = first["warnings"]
    assert warning.startswith("raysgd 0.0.9 of the workers on ")
    assert again["warnings"] == [], "it was reported already"


def test_trainer_actor_in_another_environment_than_its_driver_is_refused(
    drive: Callable[[str], dict[str, Any]],
) -> None:
    (refused,) = drive("program").values()
    assert refused["error"].startswith("WorkerError: raysgd 0.0.9 of the TrainerActor on "), refused["error"]
    assert f"install raysgd {__version__} there" in refused["error"]


def test_run_brings_its_raysgd_to_a_node_that_has_none(drive: Callable[[str], dict[str, Any]]) -> None:
    """The agent on that node has the workers' environment too, and is started once."""
    assert drive("brings")["brings"] == {"agents": ["1"], "warnings": [], "num_failures": 0}


@pytest.mark.parametrize(("scenario", "num_failures"), [("grows", 0), ("replaces", 1)])
def test_node_with_another_raysgd_that_joins_a_run_is_not_used(
    drive: Callable[[str], dict[str, Any]], scenario: str, num_failures: int
) -> None:
    """An elastic run grows elsewhere; a run of fixed size whose node was removed replaces its worker elsewhere."""
    printed = drive(scenario)["joins"]
    (refused,) = [line for line in printed["warnings"] if "cannot work with" in line]
    assert "is not used until its Ray is started again: raysgd 0.0.9 of the workers on " in refused
    assert printed["num_failures"] == num_failures
