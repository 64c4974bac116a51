"""Where all processes of a test stand, just before its time is over: what hangs is in another process than the test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import psutil

from support import leftovers

#: Seconds before the end of a test's time; looking at a process takes one or so on a busy machine.
BEFORE_S = 25.0
_FRAMES = 8
_JOURNALS, _LINES, _MAX_LINE = 2, 4, 300
_PY_SPY = Path(sys.executable).with_name("py-spy")


@contextmanager
def watching(timeout_s: float, folder: Path) -> Iterator[None]:
    """Print where the processes stand, and the newest runs below the folder, if this is not left in time."""
    timer = threading.Timer(max(timeout_s - BEFORE_S, timeout_s / 2), _tell, (folder,))
    timer.daemon = True
    timer.name = "watchdog"
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(0.1)


def _tell(folder: Path) -> None:
    """Part by part: there may not be time for all."""
    print("the time of this test is nearly over; its processes stand at:", file=sys.stderr, flush=True)
    parts = chain(
        [f"load {os.getloadavg()}"],
        _journals(folder),
        (_stacks(process) for process in leftovers.marked_processes() if _is_of_interest(process)),
    )
    with contextlib.suppress(OSError, psutil.Error):  # something ended meanwhile
        for part in parts:
            print(part, file=sys.stderr, flush=True)


def _journals(folder: Path) -> Iterator[str]:
    """The ends of those that were last written."""
    newest = sorted(folder.glob("**/run_*/events.jsonl"), key=lambda path: path.stat().st_mtime)[-_JOURNALS:]
    for path in newest:
        lines = [line for line in path.read_text(errors="replace").splitlines() if '"kind":"sample"' not in line]
        age_s = time.time() - path.stat().st_mtime
        yield f"{path.relative_to(folder)}: {len(lines)} lines, the last {age_s:.0f} s ago"
        yield from (line[:_MAX_LINE] for line in lines[-_LINES:])


def _is_of_interest(process: psutil.Process) -> bool:
    try:
        name = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return name.startswith("ray::") and not name.startswith(
        ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    )


def _stacks(process: psutil.Process) -> str:
    """The threads of a process that are in code of ours, or of the test; of each the innermost calls."""
    try:
        name, cpu_s, status = process.cmdline()[0], sum(process.cpu_times()[:2]), process.status()
        done = subprocess.run([_PY_SPY, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=10)
    except (psutil.Error, OSError, IndexError, subprocess.TimeoutExpired) as error:
        return f"{process.pid}: {type(error).__name__}"
    threads = re.split(r"\n(?=Thread )", done.stdout)[1:]
    ours = [thread.splitlines()[: _FRAMES + 1] for thread in threads if "raysgd" in thread or "tests/" in thread]
    return "\n".join([f"{process.pid} {name}, {status}, {cpu_s:.1f} s of CPU", *("\n".join(lines) for lines in ours)])
