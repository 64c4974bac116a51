"""Runs the processes that measure, and ends all that they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil

from bench.machine import ROOT

#: Seconds for a process in addition to its measures.
_AROUND_S = 90.0
_MARK = "RAYSGD_BENCHMARK"
_TAIL_LINES = 25


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield a folder on the project's disk, and remove it afterwards."""
    parent = ROOT / "build" / "benchmarks"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="work-", dir=parent))
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def measure(
    system: str,
    measures: Mapping[str, dict[str, Any]],
    folder: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Run measures on a system in one new process.

    Args:
        system: The name of the system.
        measures: The params of the measures, by name.
        folder: An empty folder for this process.
        timeout_s: The seconds for each measure.
        environment: Variables of the process, in addition to those of the system.

    Returns:
        ``{"measure", "series"}`` for each measure that succeeded, and ``{"measure", "error"}`` for each other one.
    """
    spec = {
        "system": system,
        "measures": dict(measures),
        "folder": str(folder),
        "timeout_s": timeout_s,
    }
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    tuned = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"} if system == "ray_train_tuned" else {}
    limit_s = _AROUND_S + timeout_s * len(measures)
    why = run_module("bench.child", [str(folder / "spec.json")], {**tuned, **environment}, folder / "log.txt", limit_s)
    path = folder / "lines.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {line["measure"] for line in lines}
    missing = [{"measure": name, "error": why or "no result"} for name in measures if name not in done]
    if missing or any("error" in line or line.get("errors") for line in lines):
        _show_tail(folder / "log.txt")
    return lines + missing


def run_module(module: str, args: list[str], environment: Mapping[str, str], log: Path, limit_s: float) -> str | None:
    """Run ``python -m module`` to its end; return why the process failed, or None.

    Its descendants, which inherit a mark in their environment, are ended with it.
    """
    mark = uuid.uuid4().hex
    env = {**_environment(), **environment, _MARK: mark}
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", module, *args],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s"
    finally:
        end_marked(mark)
    return f"the process ended with status {done.returncode}" if done.returncode else None


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def end_marked(mark: str) -> None:
    """Kill the processes with this mark that do not end by themselves within five seconds."""
    deadline = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _environment() -> dict[str, str]:
    """Return this process's environment without another Ray's variables, and with the same number of threads for all."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_TRAIN_"))}
    path = [str(ROOT / "benchmarks"), *filter(None, [env.get("PYTHONPATH")])]
    return env | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _show_tail(log: Path) -> None:
    if log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        print("\n".join(f"    | {line}" for line in lines), file=sys.stderr)
