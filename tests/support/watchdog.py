"""Prints the stacks of all processes of a test shortly before its timeout: most hangs are in another process."""

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

#: Seconds before the timeout; the stack of one process takes about one second on a busy machine.
BEFORE_S = 25.0
_FRAMES = 8
_JOURNALS, _LINES, _MAX_LINE = 2, 4, 300
_PY_SPY = Path(sys.executable).with_name("py-spy")


@contextmanager
def watching(timeout_s: float, folder: Path) -> Iterator[None]:
    """Print stacks and the newest runs below the folder if the block does not end in time."""
    timer = threading.Timer(max(timeout_s - BEFORE_S, timeout_s / 2), _print_state, (folder,))
    timer.daemon = True
    timer.name = "watchdog"
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(0.1)


def _print_state(folder: Path) -> None:
    """Print part by part, because time may run out."""
    print("this test is near its timeout; the stacks of its processes:", file=sys.stderr, flush=True)
    parts = chain(
        [f"load {os.getloadavg()}"],
        _journals(folder),
        (stacks(process) for process in leftovers.marked_processes() if _is_of_interest(process)),
    )
    with contextlib.suppress(OSError, psutil.Error):  # a process ended meanwhile
        for part in parts:
            print(part, file=sys.stderr, flush=True)


def _journals(folder: Path) -> Iterator[str]:
    """Yield the last lines of the newest journals."""
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


def stacks(process: psutil.Process) -> str:
    """Return the innermost calls of the threads that are in code of raysgd or of a test."""
    try:
        name, cpu_s, status = process.cmdline()[0], sum(process.cpu_times()[:2]), process.status()
        done = subprocess.run([_PY_SPY, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=10)
    except (psutil.Error, OSError, IndexError, subprocess.TimeoutExpired) as error:
        return f"{process.pid}: {type(error).__name__}"
    threads = re.split(r"\n(?=Thread )", done.stdout)[1:]
    ours = [thread.splitlines()[: _FRAMES + 1] for thread in threads if "raysgd" in thread or "tests/" in thread]
    return "\n".join([f"{process.pid} {name}, {status}, {cpu_s:.1f} s of CPU", *("\n".join(lines) for lines in ours)])
